/* The rank processes of a benchmark, in C: tests/bench/bench.py starts them and gives them their turns.
 *
 * A worker connects to the driver's unix socket (BENCH_SOCKET), says which rank it is, and sleeps in read()
 * until it is told what to do, so that it takes nothing from the contender whose turn it is. worker.py is the
 * same in Python.
 *
 *   check TASK BYTES               do it once and compare the result        -> ok
 *   turn TASK BYTES REPETITIONS    meet the contender's other ranks, then   -> span BEGIN END
 * (CLOCK_MONOTONIC, ns), or do it that often                            took NS where only parts of it count
 *   pin CPU                        run there only; -1: anywhere again       -> ok
 *
 * Anything that goes wrong is answered by `bad` and a sentence. The worker ends when the socket closes.
 */
#ifndef FSDP_BENCH_WORKER_H
#define FSDP_BENCH_WORKER_H

#include <stddef.h>
#include <stdint.h>

struct worker_time {
    int64_t begin, end; /* of the repetitions, in worker_now() time */
    int64_t took;       /* not 0: this instead */
};

/* Both return NULL, or what went wrong. */
struct worker_tasks {
    const char *(*check)(const char *task, size_t bytes);
    const char *(*turn)(const char *task, size_t bytes, long repetitions, struct worker_time *time);
};

int64_t worker_now(void);

/* Private memory, touched. Ends the process where there is none. */
void *worker_memory(size_t bytes);

/* What ranks put in and expect: small whole numbers, so that sums are exact in any order. */
float worker_input(int rank, size_t i);
float worker_sum(int size, size_t i);

/* Serve until the driver hangs up: the process's exit status. */
int worker_serve(int rank, const struct worker_tasks *tasks);

#endif
