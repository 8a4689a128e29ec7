/* How long a word takes from one processor to another and back, in ns: `cores A B`.
 *
 * The ratios of collectives depend on it (data goes from cache to cache), and on a virtual machine it may
 * change from one minute to the next, with the host moving the processors about.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define TRIPS 2000
#define ROUNDS 9

static _Alignas(128) atomic_int ball, back;

static void pin(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) exit(1);
}

static void *answer(void *cpu)
{
    pin(*(int *)cpu);
    for (int i = 1; i <= TRIPS * ROUNDS; i++) {
        while (atomic_load_explicit(&ball, memory_order_acquire) < i) {
        }
        atomic_store_explicit(&back, i, memory_order_release);
    }
    return NULL;
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 3) return 1;
    int cpus[2] = {atoi(argv[1]), atoi(argv[2])}, ball_at = 0;
    int64_t best = INT64_MAX;
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, &cpus[1]) != 0) return 1;
    pin(cpus[0]);
    for (int round = 0; round < ROUNDS; round++) {
        int64_t begin = now();
        for (int i = 0; i < TRIPS; i++) {
            atomic_store_explicit(&ball, ++ball_at, memory_order_release);
            while (atomic_load_explicit(&back, memory_order_acquire) < ball_at) {
            }
        }
        int64_t took = now() - begin;
        if (took < best) best = took;
    }
    pthread_join(thread, NULL);
    printf("%lld\n", (long long)(best / TRIPS));
    return 0;
}
