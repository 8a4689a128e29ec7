/* Timeouts that change: a group's, for operations issued afterwards; and a thread's own, for the calls it makes. When
 * ranks differ the shortest counts, and who did not come is named on every rank. */
#include "crew.h"

#include <pthread.h>

TestSuite(timeout, .init = crew_init, .fini = crew_fini, .timeout = 120);

#define LONG 30000 /* no test waits so long */

static fsdp_group *make(int rank, int n, int64_t timeout_ms)
{
    fsdp_group_options options = crew_options(timeout_ms, 0);
    fsdp_group *group = crew_group(rank, n, &options);
    OK(fsdp_barrier(group, NULL));
    return group;
}

static int64_t timeout_of(fsdp_group *group)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    return info.timeout_ms;
}

static int32_t culprit(void)
{
    fsdp_error_info info = {.struct_size = sizeof info};
    OK(fsdp_last_error_info(&info));
    return info.rank_a;
}

/* A call that began at `begin` ended after about `want` ms, and not after the group's long time. */
static void took(int64_t begin, int64_t want)
{
    int64_t ms = crew_now_ms() - begin;
    CHECK(ms >= want - 10 && ms < want + 3000, "it took %lld ms, not %lld", (long long)ms, (long long)want);
}

/* ---- the group's */

static void values(int rank)
{
    fsdp_group *group = make(rank, 2, 7000), *before = NULL, *after = NULL, *other = NULL;
    CHECK(timeout_of(group) == 7000, "%lld", (long long)timeout_of(group));
    OK(fsdp_group_split(group, 0, 0, NULL, &before));
    OK(fsdp_group_set_timeout(group, 9000 + rank));
    EXPECT(fsdp_group_set_timeout(group, -1), FSDP_ERR_INVALID, "timeout_ms is -1");
    EXPECT(fsdp_group_set_timeout(NULL, 1), FSDP_ERR_INVALID, "group is NULL");
    CHECK(timeout_of(group) == 9000 + rank, "%lld", (long long)timeout_of(group));
    CHECK(timeout_of(before) == 7000, "a part has %lld", (long long)timeout_of(before));
    fsdp_group_options options = {.struct_size = sizeof options, .timeout_ms = 1234};
    OK(fsdp_group_split(group, 0, 0, NULL, &after));
    OK(fsdp_group_split(group, 0, 0, &options, &other));
    CHECK(timeout_of(after) == 9000 + rank, "a later part has %lld", (long long)timeout_of(after));
    CHECK(timeout_of(other) == 1234, "a part with its own has %lld", (long long)timeout_of(other));
    OK(fsdp_group_set_timeout(group, 0));
    CHECK(timeout_of(group) == 600000, "the default is %lld", (long long)timeout_of(group));
    OK(fsdp_group_set_timeout(group, INT64_MAX));
    CHECK(timeout_of(group) == 1000000000000, "the longest is %lld", (long long)timeout_of(group));
    crew_group_works(group, rank, 2);
    crew_group_works(before, rank, 2);
    fsdp_group_release(other);
    fsdp_group_release(after);
    fsdp_group_release(before);
    fsdp_group_release(group);
}

Test(timeout, of_a_group_and_its_parts)
{
    crew_run(2, 8000, values);
}

/* Rank 1 does not call. Rank 0 gives it 250 ms, rank 2 has all the time: both learn who did not come. */
static void shorter(int rank)
{
    fsdp_group *group = make(rank, 3, LONG);
    if (rank == 0) OK(fsdp_group_set_timeout(group, 250));
    if (rank == 1) crew_await(0, 2);
    int64_t begin = crew_now_ms();
    float *data = crew_floats(4, 1);
    EXPECT(fsdp_all_reduce(group, crew_tensor(data, F32, 4), crew_tensor(data, F32, 4), FSDP_SUM, NULL),
           FSDP_ERR_TIMEOUT, "250 ms", "all_reduce", "rank 1");
    CHECK(culprit() == 1, "rank_a is %d: %s", culprit(), fsdp_last_error());
    if (rank != 1) took(begin, 250);
    crew_raise(0);
    EXPECT(fsdp_group_set_timeout(group, LONG), FSDP_ERR_TIMEOUT, "rank 1"); /* it has ended */
    fsdp_group_release(group);
}

Test(timeout, the_shortest_ends_the_group_and_names_who_did_not_come)
{
    crew_run(3, 8000, shorter);
}

/* Operations under way, and one that is still queued, keep the long time that they were issued with. */
static void under_way(int rank)
{
    fsdp_group *group = make(rank, 2, LONG);
    float *data = crew_floats(4, 1);
    if (rank == 0) {
        fsdp_work *works[3];
        OK(fsdp_barrier(group, &works[0]));
        OK(fsdp_barrier(group, &works[1]));
        OK(fsdp_recv(group, crew_tensor(data, F32, 4), 1, 5, &works[2]));
        OK(fsdp_group_set_timeout(group, 100));
        crew_sleep_ms(400);
        crew_raise(0);
        for (int i = 0; i < 3; i++) OK(fsdp_work_wait(works[i], -1));
        int64_t begin = crew_now_ms(); /* one issued from now on does not */
        EXPECT(fsdp_recv(group, crew_tensor(data, F32, 4), 1, 6, NULL), FSDP_ERR_TIMEOUT, "100 ms", "rank 1", "tag 6");
        took(begin, 100);
        for (int i = 0; i < 3; i++) fsdp_work_release(works[i]);
    } else {
        crew_await(0, 1);
        OK(fsdp_barrier(group, NULL));
        crew_sleep_ms(300);
        OK(fsdp_barrier(group, NULL));
        OK(fsdp_send(group, crew_tensor(data, F32, 4), 0, 5, NULL));
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "tag 6");
    }
    fsdp_group_release(group);
}

Test(timeout, operations_under_way_keep_theirs)
{
    crew_run(2, 8000, under_way);
}

/* And the other way round: a longer one saves nothing that was issued before. */
static void too_late(int rank)
{
    fsdp_group *group = make(rank, 2, 300);
    if (rank == 0) {
        fsdp_work *work;
        int64_t begin = crew_now_ms();
        OK(fsdp_barrier(group, &work));
        OK(fsdp_group_set_timeout(group, LONG));
        EXPECT(fsdp_work_wait(work, -1), FSDP_ERR_TIMEOUT, "300 ms", "barrier", "rank 1");
        took(begin, 300);
        fsdp_work_release(work);
        crew_raise(0);
    } else {
        crew_await(0, 1);
    }
    fsdp_group_release(group);
}

Test(timeout, a_longer_one_comes_too_late_for_what_was_issued)
{
    crew_run(2, 8000, too_late);
}

/* ---- a thread's */

/* Each kind of call: synchronous and with a handle, collective and message, in a group that has all the time. */
static int which;

static void own(int rank)
{
    fsdp_group *group = make(rank, 2, LONG);
    float *data = crew_floats(4, 1);
    DLTensor *t = crew_tensor(data, F32, 4);
    fsdp_work *work = NULL;
    EXPECT(fsdp_set_thread_timeout(-1), FSDP_ERR_INVALID, "timeout_ms is -1");
    if (rank == 0) {
        int64_t begin = crew_now_ms();
        OK(fsdp_set_thread_timeout(300));
        fsdp_status status = which < 2 ? fsdp_all_reduce(group, t, t, FSDP_SUM, which & 1 ? &work : NULL)
                                       : fsdp_recv(group, t, 1, 5, which & 1 ? &work : NULL);
        if (work) OK(status);
        OK(fsdp_set_thread_timeout(0)); /* after the call: what was issued has it */
        if (work) status = fsdp_work_wait(work, -1);
        CHECK(status == FSDP_ERR_TIMEOUT, "%s: %s", fsdp_status_name(status), fsdp_last_error());
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "300 ms", which < 2 ? "all_reduce" : "recv", "rank 1");
        took(begin, 300);
        CHECK(timeout_of(group) == LONG, "the group's is %lld", (long long)timeout_of(group));
        fsdp_work_release(work);
        crew_raise(0);
    } else {
        crew_await(0, 1);
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "300 ms"); /* though it has all the time */
    }
    fsdp_group_release(group);
}

Test(timeout, of_one_call)
{
    for (which = 0; which < 4; which++) {
        crew_fini();
        crew_init();
        crew_run(2, 8000, own);
    }
}

/* Back at 0 the group's counts; and it may be longer than the group's. */
static void longer(int rank)
{
    fsdp_group *group = make(rank, 2, 200);
    if (rank == 0) {
        OK(fsdp_set_thread_timeout(LONG));
        OK(fsdp_barrier(group, NULL));
        OK(fsdp_set_thread_timeout(0));
        int64_t begin = crew_now_ms();
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "200 ms");
        took(begin, 200);
        crew_raise(0);
    } else {
        crew_sleep_ms(600);
        OK(fsdp_barrier(group, NULL));
        crew_await(0, 1);
    }
    fsdp_group_release(group);
}

Test(timeout, of_one_call_longer_than_the_groups)
{
    crew_run(2, 8000, longer);
}

/* One thread's is no other's, on the same group. */
static fsdp_group *both;

static void *hasty(void *unused)
{
    OK(fsdp_set_thread_timeout(100));
    crew_raise(1);
    crew_await(2, 1); /* until the other has issued, and some more */
    return unused;
}

static void threads(int rank)
{
    both = make(rank, 2, LONG);
    if (rank == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, hasty, NULL) == 0, "no thread");
        crew_await(1, 1);
        OK(fsdp_barrier(both, NULL));
        crew_raise(2);
        pthread_join(thread, NULL);
    } else {
        crew_await(1, 1);
        crew_sleep_ms(400);
        OK(fsdp_barrier(both, NULL));
    }
    fsdp_group_release(both);
}

Test(timeout, of_one_thread_is_no_others)
{
    crew_run(2, 8000, threads);
}

/* While one thread sets the group's, others issue: every call has the one or the other. For the thread sanitizer. */
static atomic_int over;

static void *sets(void *group)
{
    for (int64_t ms = LONG; !atomic_load(&over); ms++) OK(fsdp_group_set_timeout(group, ms));
    return NULL;
}

static void busy(int rank)
{
    fsdp_group *group = make(rank, 2, LONG);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sets, group) == 0, "no thread");
    for (int i = 0; i < 200; i++) {
        fsdp_work *work;
        OK(fsdp_barrier(group, &work));
        OK(fsdp_barrier(group, NULL));
        OK(fsdp_work_wait(work, -1));
        fsdp_work_release(work);
        CHECK(timeout_of(group) >= LONG, "%lld", (long long)timeout_of(group));
    }
    atomic_store(&over, 1);
    pthread_join(thread, NULL);
    fsdp_group_release(group);
}

Test(timeout, may_be_set_while_others_call)
{
    crew_run(2, 20000, busy);
}

/* ---- behind earlier operations */

/* A synchronous call with its own time waits behind one that has all the time: it ends when its own is up, on every
 * rank. `which`: whether the earlier one is already being run when it comes. */
static void behind(int rank)
{
    fsdp_group *group = make(rank, 2, LONG);
    if (rank == 0) {
        fsdp_work *first;
        OK(fsdp_barrier(group, &first));
        if (which) crew_sleep_ms(100);
        float *data = crew_floats(4, 1);
        int64_t begin = crew_now_ms();
        OK(fsdp_set_thread_timeout(300));
        EXPECT(fsdp_broadcast(group, crew_tensor(data, F32, 4), 0, NULL), FSDP_ERR_TIMEOUT, "300 ms", "broadcast",
               "rank 0", "earlier barrier");
        took(begin, 300);
        EXPECT(fsdp_work_wait(first, -1), FSDP_ERR_TIMEOUT, "broadcast");
        OK(fsdp_set_thread_timeout(0));
        fsdp_work_release(first);
        crew_raise(0);
    } else {
        crew_await(0, 1);
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "300 ms", "broadcast");
    }
    fsdp_group_release(group);
}

Test(timeout, counts_behind_earlier_operations)
{
    for (which = 0; which < 2; which++) {
        crew_fini();
        crew_init();
        crew_run(2, 8000, behind);
    }
}

/* The earlier ones are done with in time: the call runs, and what is left of its time counts for it. */
static void in_time(int rank)
{
    fsdp_group *group = make(rank, 2, LONG);
    float *data = crew_floats(4, (float)rank + 1);
    if (rank == 0) {
        fsdp_work *first, *second;
        OK(fsdp_barrier(group, &first));
        OK(fsdp_barrier(group, &second));
        OK(fsdp_set_thread_timeout(1500));
        OK(fsdp_all_reduce(group, crew_tensor(data, F32, 4), crew_tensor(data, F32, 4), FSDP_SUM, NULL));
        CHECK(data[3] == 3, "data is %g", (double)data[3]);
        OK(fsdp_work_wait(first, -1));
        OK(fsdp_work_wait(second, -1));
        fsdp_work_release(second);
        OK(fsdp_barrier(group, &second)); /* rank 1 comes to it after 700 ms, and to the next not at all */
        int64_t begin = crew_now_ms();
        EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "1500 ms", "barrier");
        int64_t ms = crew_now_ms() - begin;
        CHECK(ms >= 1490 && ms < 2150, "it took %lld ms: the time counts from the call", (long long)ms);
        fsdp_work_release(first);
        fsdp_work_release(second);
        crew_raise(0);
    } else {
        crew_sleep_ms(200);
        OK(fsdp_barrier(group, NULL));
        OK(fsdp_barrier(group, NULL));
        OK(fsdp_all_reduce(group, crew_tensor(data, F32, 4), crew_tensor(data, F32, 4), FSDP_SUM, NULL));
        crew_sleep_ms(700);
        OK(fsdp_barrier(group, NULL));
        crew_await(0, 1);
    }
    fsdp_group_release(group);
}

Test(timeout, what_is_left_counts_when_its_turn_comes)
{
    crew_run(2, 12000, in_time);
}
