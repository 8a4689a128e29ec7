/* Ranks as threads of one process, and several threads on one group: for the thread sanitizer, and for what a
 * host does from callbacks. */
#include "crew.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

TestSuite(threads, .init = crew_init, .fini = crew_fini, .timeout = 120);

static int32_t direct;

static fsdp_status sum(fsdp_group *group, float *data, int64_t count, fsdp_work **work)
{
    DLTensor *t = crew_tensor(data, F32, count);
    return fsdp_all_reduce(group, t, t, FSDP_SUM, work);
}

/* ---- Everything at once, through each way that data travels ---- */

static void all_kinds(int rank)
{
    enum { N = 3, MOST = 30000 };
    fsdp_group_options options = crew_options(20000, direct);
    fsdp_group *group = crew_group(rank, N, &options);
    float *in = crew_floats(MOST, 1), *out = crew_floats(MOST, 0), *other = crew_floats(MOST, 0);
    static const int64_t counts[] = {3, 300, MOST};
    for (int i = 0; i < 3; i++) {
        int64_t n = counts[i];
        OK(fsdp_all_reduce(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n), FSDP_SUM, NULL));
        CHECK(out[n - 1] == N, "out is %g", (double)out[n - 1]);
        OK(fsdp_all_gather(group, crew_tensor(in, F32, n / N), crew_tensor(out, F32, n), NULL));
        OK(fsdp_reduce_scatter(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n / N), FSDP_AVG, NULL));
        OK(fsdp_all_to_all(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n), NULL));
        OK(fsdp_broadcast(group, crew_tensor(out, F32, n), i, NULL));
        OK(fsdp_gather(group, crew_tensor(in, F32, n / N), crew_tensor(out, F32, n), i, NULL));
        fsdp_work *sent, *taken;
        OK(fsdp_send(group, crew_tensor(in, F32, n), (rank + 1) % N, 1, &sent));
        OK(fsdp_recv(group, crew_tensor(out, F32, n), FSDP_ANY_RANK, 1, &taken));
        OK(sum(group, other, n, NULL)); /* the lanes don't wait for each other */
        OK(fsdp_work_wait(taken, -1));
        OK(fsdp_work_wait(sent, -1));
        fsdp_work_release(sent);
        fsdp_work_release(taken);
    }
    OK(fsdp_barrier(group, NULL));
    fsdp_group_release(group);
}

Test(threads, ranks_as_threads)
{
    for (direct = 1; direct <= 2; direct++) {
        crew_fini();
        crew_init();
        crew_threads(3, all_kinds);
    }
}

/* ---- One work, many waiters; one group, two threads ---- */

struct waiter {
    fsdp_work *work;
    int64_t timeout_ms;
    fsdp_status got;
};

static void *wait_for(void *argument)
{
    struct waiter *w = argument;
    do w->got = fsdp_work_wait(w->work, w->timeout_ms);
    while (w->got == FSDP_ERR_PENDING);
    int32_t done = 0;
    OK(fsdp_work_test(w->work, &done));
    CHECK(done == 1, "not done");
    fsdp_work_release(w->work);
    return NULL;
}

static void many_waiters(int rank)
{
    fsdp_group_options options = crew_options(20000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    for (int round = 0; round < 20; round++) {
        float data[4] = {1, 1, 1, 1};
        pthread_t threads[6];
        struct waiter waiters[6];
        fsdp_work *work;
        OK(sum(group, data, 4, &work));
        for (int i = 0; i < 6; i++) {
            OK(fsdp_work_retain(work));
            waiters[i] = (struct waiter){work, i % 2 ? -1 : 1, 0};
            CHECK(pthread_create(&threads[i], NULL, wait_for, &waiters[i]) == 0, "no thread");
        }
        fsdp_work_release(work);
        for (int i = 0; i < 6; i++) {
            pthread_join(threads[i], NULL);
            CHECK(waiters[i].got == FSDP_OK, "waiter %d: %d", i, waiters[i].got);
        }
        CHECK(data[3] == 2, "data is %g", (double)data[3]);
    }
    fsdp_group_release(group);
}

Test(threads, many_wait_for_one_work)
{
    crew_threads(2, many_waiters);
}

struct user {
    fsdp_group *group;
    int rank, messages;
};

static void *use_group(void *argument)
{
    struct user *u = argument;
    float data[64], taken[64];
    for (int i = 0; i < 60; i++) {
        fsdp_work *works[4];
        for (int k = 0; k < 64; k++) data[k] = 1;
        if (u->messages) {
            for (int k = 0; k < 4; k++) {
                DLTensor *t = crew_tensor(k % 2 ? taken + 16 * k : data + 16 * k, F32, 16);
                OK(k % 2 ? fsdp_recv(u->group, t, 1 - u->rank, k / 2, &works[k])
                         : fsdp_send(u->group, t, 1 - u->rank, k / 2, &works[k]));
            }
        } else {
            for (int k = 0; k < 4; k++) OK(sum(u->group, data + 16 * k, 16, &works[k]));
        }
        for (int k = 0; k < 4; k++) {
            OK(fsdp_work_wait(works[k], k % 2 ? -1 : 5000));
            fsdp_work_release(works[k]);
        }
        CHECK(u->messages ? taken[63] == 1 : data[63] == 2, "wrong data");
        if (i % 10 == 0) {
            fsdp_group_info info = {.struct_size = sizeof info};
            OK(fsdp_group_query(u->group, &info));
        }
    }
    return NULL;
}

static void two_users(int rank)
{
    fsdp_group_options options = crew_options(20000, direct);
    fsdp_group *group = crew_group(rank, 2, &options);
    struct user users[2] = {{group, rank, 0}, {group, rank, 1}};
    pthread_t other;
    CHECK(pthread_create(&other, NULL, use_group, &users[1]) == 0, "no thread");
    use_group(&users[0]);
    pthread_join(other, NULL);
    fsdp_group_release(group);
}

Test(threads, two_threads_on_one_group)
{
    crew_threads(2, two_users);
}

/* ---- Callbacks ---- */

struct chain {
    fsdp_group *group;
    float data[4];
    int left;
    atomic_int done, failed;
    int release;
};

static void next_link(fsdp_status status, void *user)
{
    struct chain *c = user;
    if (status != FSDP_OK) atomic_store(&c->failed, status);
    if (status != FSDP_OK || --c->left == 0) {
        if (c->release) fsdp_group_release(c->group); /* the last reference, from the lane's own thread */
        atomic_store(&c->done, 1);
        return;
    }
    fsdp_work *work;
    OK(sum(c->group, c->data, 4, &work));
    OK(fsdp_work_on_done(work, next_link, c));
    fsdp_work_release(work);
}

static int waits;

static void chain(int rank)
{
    for (int release = 0; release < 2; release++) {
        char name[16];
        snprintf(name, sizeof name, "chain%d", release);
        fsdp_store *store = crew_store(name, rank, 2, 20000);
        fsdp_group_options options = crew_options(20000, 0);
        struct chain c = {.left = 100, .release = release};
        OK(fsdp_group_create(store, &options, &c.group));
        fsdp_store_release(store);
        fsdp_work *work;
        OK(sum(c.group, c.data, 4, &work));
        OK(fsdp_work_on_done(work, next_link, &c));
        if (waits) OK(fsdp_work_wait(work, -1)); /* this thread may then run callbacks itself */
        EXPECT(fsdp_work_on_done(work, next_link, &c), FSDP_ERR_STATE, "callback");
        fsdp_work_release(work);
        for (int64_t until = crew_now_ms() + 15000; !atomic_load(&c.done);) {
            CHECK(crew_now_ms() < until, "the chain hangs with %d left", c.left);
            crew_sleep_ms(1);
        }
        CHECK(atomic_load(&c.failed) == FSDP_OK, "failed: %d", atomic_load(&c.failed));
        if (!release) fsdp_group_release(c.group);
    }
    crew_sleep_ms(50); /* the group that was released in a callback leaves on a thread of its own */
}

Test(threads, callbacks_that_go_on)
{
    for (waits = 0; waits < 2; waits++) {
        crew_fini();
        crew_init();
        crew_threads(2, chain);
    }
}

/* What would wait for itself is refused. */
static void barrier_now(fsdp_status status, void *user)
{
    OK(status);
    EXPECT(fsdp_barrier(user, NULL), FSDP_ERR_STATE, "callback");
    crew_raise(6);
}

static void wait_in_callback(int rank)
{
    fsdp_group_options options = crew_options(20000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float data[4] = {1, 1, 1, 1};
    if (rank == 0) {
        fsdp_work *work;
        OK(sum(group, data, 4, &work));
        OK(fsdp_work_on_done(work, barrier_now, group));
        crew_raise(5);
        OK(fsdp_work_wait(work, -1));
        crew_await(6, 1);
        fsdp_work_release(work);
    } else {
        crew_await(5, 1);
        OK(sum(group, data, 4, NULL));
    }
    OK(fsdp_barrier(group, NULL));
    fsdp_group_release(group);
}

Test(threads, a_callback_that_waits_for_itself)
{
    crew_threads(2, wait_in_callback);
}

/* A callback that releases the last reference on whatever thread completes the work. */
static void release_now(fsdp_status status, void *user)
{
    fsdp_group_release(user);
}

static void release_in_callback(int rank)
{
    for (int i = 0; i < 12; i++) {
        char name[16];
        snprintf(name, sizeof name, "last%d", i);
        fsdp_store *store = crew_store(name, rank, 2, 20000);
        fsdp_group_options options = crew_options(20000, 0);
        fsdp_group *group = NULL;
        float data[4] = {1, 1, 1, 1};
        fsdp_work *work;
        OK(fsdp_group_create(store, &options, &group));
        fsdp_store_release(store);
        OK(i % 3 == 2 ? fsdp_send(group, crew_tensor(data, F32, 1), rank, 0, &work) : sum(group, data, 4, &work));
        OK(fsdp_work_on_done(work, release_now, group));
        if (i % 3 == 2) {
            fsdp_work *taken;
            float to;
            OK(fsdp_recv(group, crew_tensor(&to, F32, 1), rank, 0, &taken));
            (void)fsdp_work_wait(taken, -1);
            fsdp_work_release(taken);
        }
        OK(fsdp_work_wait(work, i % 2 ? -1 : 10000));
        fsdp_work_release(work);
    }
    crew_sleep_ms(100);
}

Test(threads, the_last_reference_in_a_callback)
{
    crew_threads(2, release_in_callback);
}

/* ---- Releasing with works queued: they come to their end ---- */

static atomic_int completions, deletions;

static void count_done(fsdp_status status, void *user)
{
    CHECK(status == FSDP_OK, "status %d", status);
    atomic_fetch_add(&completions, 1);
}

static void count_deleted(DLManagedTensorVersioned *self)
{
    atomic_fetch_add(&deletions, 1);
    free(self);
}

static void drain(int rank)
{
    fsdp_group_options options = crew_options(20000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float *data = crew_floats(40 * 1000, 1);
    for (int i = 0; i < 40; i++) {
        fsdp_work *work;
        OK(sum(group, data + i * 1000, 1000, &work));
        OK(fsdp_work_on_done(work, count_done, NULL));
        DLManagedTensorVersioned *kept = calloc(1, sizeof *kept);
        kept->version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
        kept->deleter = count_deleted;
        kept->dl_tensor = *crew_tensor(data + i * 1000, F32, 1000);
        OK(fsdp_work_keep(work, kept));
        fsdp_work_release(work);
    }
    fsdp_group_release(group);
    for (int i = 0; i < 40 * 1000; i++) CHECK(data[i] == 2, "data[%d] is %g", i, (double)data[i]);
}

Test(threads, release_drains_the_queue)
{
    crew_threads(2, drain);
    cr_assert(completions == 80 && deletions == 80, "%d callbacks, %d deleters", completions, deletions);
}

/* ---- Aborting while everything is under way ---- */

static fsdp_group *groups[2];

static void *abort_both(void *argument)
{
    crew_sleep_ms(30);
    OK(fsdp_group_abort(groups[*(int *)argument], "stop"));
    return NULL;
}

static void abort_busy(int rank)
{
    fsdp_group_options options = crew_options(20000, direct);
    fsdp_group *group = groups[rank] = crew_group(rank, 2, &options);
    float *data = crew_floats(100000, 1), *sent = crew_floats(5000, 1), *taken = crew_floats(5000, 1);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, abort_both, &rank) == 0, "no thread");
    fsdp_status got = FSDP_OK;
    while (got == FSDP_OK) {
        fsdp_work *works[3];
        int n = 0;
        got = sum(group, data, 100000, &works[n]);
        if (got == FSDP_OK) n++;
        if (got == FSDP_OK) got = fsdp_send(group, crew_tensor(sent, F32, 5000), 1 - rank, 0, &works[n]);
        if (got == FSDP_OK) n++;
        if (got == FSDP_OK) got = fsdp_recv(group, crew_tensor(taken, F32, 5000), 1 - rank, 0, &works[n]);
        if (got == FSDP_OK) n++;
        for (int i = 0; i < n; i++) {
            fsdp_status one = fsdp_work_wait(works[i], -1);
            if (got == FSDP_OK) got = one;
            fsdp_work_release(works[i]);
        }
    }
    EXPECT(got, FSDP_ERR_ABORTED, "stop");
    pthread_join(thread, NULL);
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_ABORTED, "stop");
    fsdp_group_release(group);
}

Test(threads, abort_while_busy)
{
    for (int i = 0; i < 6; i++) {
        direct = 1 + i % 2;
        crew_fini();
        crew_init();
        crew_threads(2, abort_busy);
    }
}

/* Criterion needs an address that the thread sanitizer has taken: there the tests run one after the other,
 * here. */
#if defined(__SANITIZE_THREAD__)
int main(void)
{
    static void (*const tests[])(void) = {threads_ranks_as_threads_impl,
                                          threads_many_wait_for_one_work_impl,
                                          threads_two_threads_on_one_group_impl,
                                          threads_callbacks_that_go_on_impl,
                                          threads_the_last_reference_in_a_callback_impl,
                                          threads_a_callback_that_waits_for_itself_impl,
                                          threads_release_drains_the_queue_impl,
                                          threads_abort_while_busy_impl};
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        crew_init();
        direct = 0;
        tests[i]();
        crew_fini();
    }
    return 0;
}
#endif
