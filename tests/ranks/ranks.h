/* Ranks for the suites: a function run by N ranks at once, each a forked process or a thread.
 *
 * Every rank is reaped by its pid, and killed first if it is not done in time, also when another rank or the
 * test fails. What a rank finds wrong ends it, and its words become the failure of the test. With
 * FSDP_TEST_THREADS=1 the ranks are threads of one forked process, for the thread sanitizer.
 *
 * Inside a rank use CHECK and OK, not Criterion's assertions, which belong to the test's own process. */
#ifndef FSDP_TEST_RANKS_H
#define FSDP_TEST_RANKS_H

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#define RANKS_MAX 8
#define RANKS_SECONDS (SANITIZED ? 240 : 60) /* for one run of all ranks */

struct rank {
    int32_t rank, size;
    fsdp_store *store;
    const void *argument; /* the test's, read only */
    char *shared;         /* RANKS_SHARED bytes, zero at first, that all ranks and the test see */
};

#define RANKS_SHARED 65536

typedef void (*rank_fn)(struct rank *r);

/* Run fn on `size` ranks that have met; fails the test if any rank fails, dies or is late. Gives what they
 * left in `shared`, until the next run. */
char *ranks_run(int size, rank_fn fn, const void *argument);

/* End this rank, and with it the test. */
_Noreturn void rank_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) rank_fail(__FILE__, __LINE__, __VA_ARGS__);                                                  \
    } while (0)
#define OK(call) CHECK((call) == FSDP_OK, "%s: %s", #call, fsdp_last_error())
/* The call is refused with this status, and its message holds this word. */
#define REFUSED(call, status, word)                                                                                    \
    do {                                                                                                               \
        fsdp_status got_ = (call);                                                                                     \
        CHECK(got_ == (status), "%s: %s, not %s: %s", #call, fsdp_status_name(got_), fsdp_status_name(status),         \
              fsdp_last_error());                                                                                      \
        CHECK(strstr(fsdp_last_error(), word), "%s: no \"%s\" in \"%s\"", #call, word, fsdp_last_error());             \
    } while (0)

/* How a group moves data: the same results are expected of each. */
enum way { ANY_ROUTE, STAGED, DIRECT };
extern const char *const way_names[];

/* A group of all ranks. staging 0: the default. */
fsdp_group *rank_group(struct rank *r, enum way route, int64_t staging);

#endif
