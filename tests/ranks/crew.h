/* A crew: ranks that are meant to get into trouble. Each is a forked process (or, in crew_threads, a thread)
 * that runs one function, checks what it sees with CHECK, and leaves its verdict in shared memory. The test's
 * process waits for all of them up to a deadline, kills by pid what is left, and reports the first verdict
 * that is not good. They meet through a small table in the same shared memory, so that nothing but the group
 * itself is under test. */
#ifndef FSDP_TESTS_CREW_H
#define FSDP_TESTS_CREW_H

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "fsdp.h"

#define CREW_MAX 8

/* What all processes of a test share. */
struct crew_shared {
    atomic_int flags[16];        /* meeting points: crew_raise, crew_await */
    _Atomic int64_t event_ns;    /* when the trouble began, on the monotonic clock */
    _Atomic int64_t numbers[64]; /* for the test */
};
extern struct crew_shared *crew;

/* In a rank. Failing ends the rank's process; in crew_threads, the whole test process. */
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) crew_fail(__FILE__, __LINE__, #cond, __VA_ARGS__);                                                \
    } while (0)
void crew_fail(const char *file, int line, const char *cond, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 4, 5)));

/* The call returned `status`, and what it said holds every one of the texts (NULL ends). */
#define EXPECT(call, status, ...)                                                                                      \
    crew_expect(__FILE__, __LINE__, #call, (call), (status), (const char *[]){__VA_ARGS__, NULL})
#define OK(call) crew_expect(__FILE__, __LINE__, #call, (call), FSDP_OK, (const char *[]){NULL})
void crew_expect(const char *file, int line, const char *call, fsdp_status got, fsdp_status want,
                 const char *const *texts);

typedef void (*crew_fn)(int rank);

void crew_init(void); /* .init and .fini of every suite */
void crew_fini(void);
void crew_start(int n, crew_fn fn);
void crew_start_one(int rank, crew_fn fn);
void crew_leaky(void);      /* in a rank: it ends without giving back what it has, on purpose */
void crew_mortal(int rank); /* this one is meant to be killed */
pid_t crew_pid(int rank);
void crew_kill(int rank);        /* SIGKILL from the test's process; marks event_ns */
void crew_join(int patience_ms); /* all done and content, else the test fails */
void crew_run(int n, int patience_ms, crew_fn fn);
void crew_threads(int n, crew_fn fn); /* the ranks as threads of this process, to their end */

void crew_die(void) __attribute__((noreturn)); /* in a rank: mark event_ns and SIGKILL oneself */
int64_t crew_ms_since_event(void);
int64_t crew_now_ms(void);
void crew_raise(int flag);
void crew_await(int flag, int count); /* until `count` have raised it */
void crew_sleep_ms(int ms);

/* A store over the table, and a group made from a new one; `name` keeps several stores apart. */
fsdp_store *crew_store(const char *name, int rank, int n, int64_t timeout_ms);
int crew_told(const char *name, const char *key); /* whether anyone has set it there */
fsdp_group *crew_group(int rank, int n, const fsdp_group_options *options);
fsdp_group_options crew_options(int64_t timeout_ms, int32_t direct_read);

/* A contiguous tensor over memory of the caller. Several can be alive at once (16, then they are reused). */
DLTensor *crew_tensor(void *data, DLDataType dtype, int64_t count);
#define F32 ((DLDataType){kDLFloat, 32, 1})
#define F64 ((DLDataType){kDLFloat, 64, 1})
#define I32 ((DLDataType){kDLInt, 32, 1})
float *crew_floats(int64_t count, float value); /* never freed */

/* An all_reduce of this group that must give the right sum. */
void crew_group_works(fsdp_group *group, int rank, int n);

int crew_entries(const char *folder);

#endif
