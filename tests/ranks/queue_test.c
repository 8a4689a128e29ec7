/* Operations in company: queued and waited for in any order, several in one call, at random, on groups cut
 * from groups, and from several threads. job.h says what must come of each. */
#include "job.h"

#include <pthread.h>
#include <time.h>

static void setup(void)
{
    job_tables();
}

TestSuite(queue, .init = setup, .timeout = SANITIZED ? 600 : 120);
TestSuite(coalesced, .init = setup, .timeout = SANITIZED ? 600 : 120);
TestSuite(split, .init = setup, .timeout = SANITIZED ? 600 : 120);
TestSuite(anything, .init = setup, .timeout = SANITIZED ? 900 : 240);

static const enum way ways[] = {STAGED, DIRECT};

#define BOTH_WAYS(size, fn)                                                                                            \
    do {                                                                                                               \
        ranks_run(size, fn, &ways[0]);                                                                                 \
        ranks_run(size, fn, &ways[1]);                                                                                 \
    } while (0)

static fsdp_group *make_group(struct rank *r)
{
    return rank_group(r, r->argument ? *(const enum way *)r->argument : ANY_ROUTE, 64 << 10);
}

static void nap(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static DLTensor floats(float *data, int64_t *shape)
{
    return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape};
}

/* ---- callbacks and kept tensors */

struct count {
    atomic_int calls;
    atomic_int status;
};

static void count_call(fsdp_status status, void *user)
{
    struct count *count = user;
    atomic_store(&count->status, status);
    atomic_fetch_add(&count->calls, 1);
}

static void count_delete(DLManagedTensorVersioned *tensor)
{
    atomic_fetch_add(&((struct count *)tensor->manager_ctx)->calls, 1);
    free(tensor);
}

static DLManagedTensorVersioned *kept(struct count *count)
{
    DLManagedTensorVersioned *tensor = calloc(1, sizeof *tensor);
    CHECK(tensor, "no memory");
    tensor->version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    tensor->manager_ctx = count;
    tensor->deleter = count_delete;
    return tensor;
}

static void until(struct count *count, int calls)
{
    for (int i = 0; i < 20000 && atomic_load(&count->calls) < calls; i++) nap(1);
    CHECK(atomic_load(&count->calls) == calls, "%d calls, not %d", atomic_load(&count->calls), calls);
}

/* ---- queue */

#define QUEUED 64

static void in_any_order(struct rank *r)
{
    fsdp_group *group = make_group(r);
    static _Thread_local struct job_run runs[QUEUED];
    static _Thread_local struct count done[QUEUED], deleted[QUEUED];
    fsdp_work *works[QUEUED];
    uint64_t state = 77;
    for (int i = 0; i < QUEUED; i++) {
        struct job job = job_random(&state, r->size);
        job_prepare(&runs[i], &job, r->rank, r->size);
    }
    for (int i = 0; i < QUEUED; i++) {
        OK(job_call(&runs[i], group, &works[i]));
        if (i % 2) OK(fsdp_work_on_done(works[i], count_call, &done[i]));
        if (i % 3) OK(fsdp_work_keep(works[i], kept(&deleted[i])));
        if (i % 8 == 1) { /* nobody waits for this one */
            fsdp_work_release(works[i]);
            works[i] = NULL;
        }
    }
    /* Backwards on one rank, in steps on another. */
    for (int n = 0; n < QUEUED; n++) {
        int i = r->rank % 2 ? QUEUED - 1 - n : n * 29 % QUEUED;
        if (!works[i]) continue;
        int finished = 0;
        if (i % 4 == 0)
            while (!finished) {
                OK(fsdp_work_test(works[i], &finished));
                if (!finished) nap(1);
            }
        else
            OK(fsdp_work_wait(works[i], i % 4 == 2 ? -1 : RANKS_SECONDS * 1000));
        OK(fsdp_work_test(works[i], &finished));
        CHECK(finished, "waited for, and not done");
        if (i % 3)
            CHECK(atomic_load(&deleted[i].calls) == 1, "deleter called %d times", atomic_load(&deleted[i].calls));
    }
    OK(fsdp_barrier(group, NULL));
    for (int i = 0; i < QUEUED; i++) {
        if (i % 2) until(&done[i], 1);
        if (i % 3) until(&deleted[i], 1);
        job_verify(&runs[i]);
        /* Late: called and deleted at once. */
        if (works[i] && i % 2 == 0) {
            OK(fsdp_work_on_done(works[i], count_call, &done[i]));
            CHECK(atomic_load(&done[i].calls) == 1, "a late callback was not called at once");
        }
        if (works[i] && i % 3 == 0) {
            OK(fsdp_work_keep(works[i], kept(&deleted[i])));
            CHECK(atomic_load(&deleted[i].calls) == 1, "a late tensor was not deleted at once");
        }
        if (works[i]) REFUSED(fsdp_work_on_done(works[i], count_call, &done[i]), FSDP_ERR_STATE, "callback");
        fsdp_work_release(works[i]);
    }
    fsdp_group_release(group);
    for (int i = 0; i < QUEUED; i++) {
        int given = works[i] || i % 3;
        CHECK(atomic_load(&done[i].calls) == 1, "callback %d: %d calls", i, atomic_load(&done[i].calls));
        CHECK(atomic_load(&deleted[i].calls) == given, "deleter %d: %d calls", i, atomic_load(&deleted[i].calls));
        CHECK(atomic_load(&done[i].status) == FSDP_OK, "status %d", atomic_load(&done[i].status));
    }
}

Test(queue, waited_for_in_any_order_with_callbacks_and_kept_tensors)
{
    BOTH_WAYS(2, in_any_order);
    BOTH_WAYS(3, in_any_order);
    ranks_run(1, in_any_order, NULL);
}

/* x doubles with two ranks each time, whether the call waits or not. */
static void mixed_order(struct rank *r)
{
    fsdp_group *group = make_group(r);
    float x[300], y[300];
    int64_t shape[] = {300};
    DLTensor a = floats(x, shape), b = floats(y, shape);
    for (int round = 0; round < 200; round++) {
        fsdp_work *works[4];
        for (int i = 0; i < 300; i++) x[i] = (float)(i + 1);
        for (int i = 0; i < 4; i++) OK(fsdp_all_reduce(group, &a, &a, FSDP_SUM, &works[i]));
        OK(fsdp_all_reduce(group, &a, &b, FSDP_SUM, NULL)); /* after the four */
        for (int i = 0; i < 300; i++) CHECK(y[i] == 32 * (float)(i + 1), "round %d: %g", round, (double)y[i]);
        for (int i = 0; i < 4; i++) {
            int finished = 0;
            OK(fsdp_work_test(works[i], &finished));
            CHECK(finished, "a later call was complete before an earlier one");
            fsdp_work_release(works[i]);
        }
    }
    fsdp_group_release(group);
}

Test(queue, synchronous_calls_take_their_turn_after_queued_ones)
{
    BOTH_WAYS(2, mixed_order);
}

static void pending(struct rank *r)
{
    fsdp_group *group = make_group(r);
    struct job job = {.kind = FSDP_OP_ALL_REDUCE, .type = DTYPE_F32, .count = 9000, .seed = 5};
    struct job_run run;
    job_prepare(&run, &job, r->rank, r->size);
    fsdp_work *work;
    if (r->rank) nap(150);
    OK(job_call(&run, group, &work));
    if (r->rank == 0) {
        int finished = 1;
        OK(fsdp_work_test(work, &finished));
        CHECK(!finished, "done without the other rank");
        REFUSED(fsdp_work_wait(work, 10), FSDP_ERR_PENDING, "10 ms");
        REFUSED(fsdp_work_wait(work, 0), FSDP_ERR_PENDING, "goes on");
        fsdp_error_info info = {.struct_size = sizeof info};
        OK(fsdp_work_error(work, &info));
        CHECK(info.status == FSDP_OK, "a pending work has failed");
    }
    fsdp_work *again = work;
    OK(fsdp_work_retain(again));
    fsdp_work_release(work);
    fsdp_group_release(group); /* the handle outlives it, and the release waits for the work */
    int finished = 0;
    OK(fsdp_work_test(again, &finished));
    CHECK(finished, "the group was released before its work was done");
    OK(fsdp_work_wait(again, -1));
    fsdp_work_release(again);
    job_verify(&run);
}

Test(queue, a_wait_that_is_too_short_leaves_the_operation_going)
{
    BOTH_WAYS(2, pending);
}

struct chain {
    fsdp_group *group;
    DLTensor tensor;
    atomic_int links, released;
};

static void next_link(fsdp_status status, void *user)
{
    struct chain *chain = user;
    CHECK(status == FSDP_OK, "link failed");
    if (atomic_fetch_add(&chain->links, 1) == 9) {
        fsdp_group_release(chain->group); /* the last reference */
        atomic_store(&chain->released, 1);
        return;
    }
    fsdp_work *work;
    OK(fsdp_all_reduce(chain->group, &chain->tensor, &chain->tensor, FSDP_SUM, &work));
    OK(fsdp_work_on_done(work, next_link, chain));
    fsdp_work_release(work);
}

static void callback_chain(struct rank *r)
{
    float x[2000];
    int64_t shape[] = {2000};
    struct chain chain = {.group = make_group(r), .tensor = floats(x, shape)};
    for (int i = 0; i < 2000; i++) x[i] = 1;
    fsdp_work *work;
    OK(fsdp_all_reduce(chain.group, &chain.tensor, &chain.tensor, FSDP_SUM, &work));
    OK(fsdp_work_on_done(work, next_link, &chain));
    if (r->rank) OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
    for (int i = 0; i < 20000 && !atomic_load(&chain.released); i++) nap(1);
    CHECK(atomic_load(&chain.released), "after %d links", atomic_load(&chain.links));
    CHECK(x[0] == 1024 && x[1999] == 1024, "%g", (double)x[0]);
    nap(20); /* what goes on elsewhere ends, for the leak check */
}

Test(queue, callbacks_may_queue_more_and_release_the_group)
{
    BOTH_WAYS(2, callback_chain);
}

/* The callback runs on the thread that waits, since that thread runs the operation; it drops the last
 * reference. */
static void drop_group(fsdp_status status, void *user)
{
    fsdp_group_release(user);
}

static void release_while_waiting(struct rank *r)
{
    for (int round = 0; round < 50; round++) {
        fsdp_group *group = make_group(r);
        fsdp_work *works[2];
        OK(fsdp_barrier(group, &works[0]));
        OK(fsdp_barrier(group, &works[1]));
        OK(fsdp_work_on_done(works[1], drop_group, group));
        OK(fsdp_work_wait(works[1], -1));
        fsdp_work_release(works[0]);
        fsdp_work_release(works[1]);
    }
    nap(20);
}

Test(queue, the_last_reference_may_be_dropped_in_a_callback_on_a_waiting_thread)
{
    ranks_run(1, release_while_waiting, NULL);
    ranks_run(2, release_while_waiting, NULL);
}

/* ---- coalesced */

#define MANY 48

static void many_in_one(struct rank *r)
{
    fsdp_group *group = make_group(r);
    static _Thread_local struct job_run runs[MANY];
    static _Thread_local fsdp_collective calls[MANY];
    uint64_t state = 1234;
    for (int round = 0; round < (SANITIZED ? 20 : 60); round++) {
        int n = (int)(job_bits(&state) % (MANY + 1)), alike = (int)(job_bits(&state) % 2);
        struct job job = job_random(&state, r->size);
        for (int i = 0; i < n; i++) {
            struct job next = job_random(&state, r->size);
            if (alike) { /* long runs: one exchange for all */
                next.kind = job.kind, next.root = job.root, next.op = FSDP_SUM;
                next.uneven = next.uneven && job_can_be_uneven(next.kind) && next.kind != FSDP_OP_ALL_TO_ALL;
                if (!job_can_be_in_place(next.kind)) next.in_place = 0;
                if (!job_can_be_uneven(next.kind)) next.uneven = 0;
            }
            job_prepare(&runs[i], &next, r->rank, r->size);
            calls[i] = job_collective(&runs[i]);
        }
        if (round % 2) {
            OK(fsdp_coalesced(group, calls, n, NULL));
        } else {
            fsdp_work *work;
            OK(fsdp_coalesced(group, calls, n, &work));
            memset(calls, 0, sizeof calls); /* borrowed for the call only */
            OK(fsdp_work_wait(work, -1));
            fsdp_work_release(work);
        }
        for (int i = 0; i < n; i++) job_verify(&runs[i]);
    }
    fsdp_group_release(group);
}

Test(coalesced, many_tensors_of_mixed_kinds_dtypes_and_sizes)
{
    ranks_run(1, many_in_one, NULL);
    BOTH_WAYS(2, many_in_one);
    BOTH_WAYS(4, many_in_one);
}

/* A run of one kind is one operation. */
static void one_exchange(struct rank *r)
{
    fsdp_group *group = make_group(r);
    float x[8][10];
    int64_t shape[] = {10};
    DLTensor t[8];
    fsdp_collective calls[8];
    for (int i = 0; i < 8; i++) {
        t[i] = floats(x[i], shape);
        for (int k = 0; k < 10; k++) x[i][k] = (float)(i + k);
        calls[i] = (fsdp_collective){
            .struct_size = sizeof *calls, .kind = FSDP_OP_ALL_REDUCE, .input = &t[i], .output = &t[i]};
        if (i >= 6) calls[i].op = FSDP_MAX;
    }
    OK(fsdp_coalesced(group, calls, 8, NULL));
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 10; k++) CHECK(x[i][k] == (float)((i < 6 ? r->size : 1) * (i + k)), "%g", (double)x[i][k]);
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    CHECK(info.operations == 2, "%llu operations", (unsigned long long)info.operations);
    fsdp_group_release(group);
}

Test(coalesced, a_run_of_one_kind_is_one_exchange)
{
    ranks_run(2, one_exchange, NULL);
}

static void refused_together(struct rank *r)
{
    fsdp_group *group = make_group(r);
    float data[100];
    for (int i = 0; i < 100; i++) data[i] = (float)i;
    int64_t ten[] = {10}, back[] = {-4};
    DLTensor t[10];
    for (int i = 0; i < 10; i++) t[i] = floats(data + 10 * i, ten);
    DLTensor between = floats(data + 5, ten), reaching = floats(data + 95, ten);
    reaching.strides = back; /* 95, 91, ... 59 */
    fsdp_collective reduce = {.struct_size = sizeof reduce, .kind = FSDP_OP_ALL_REDUCE}, a = reduce, b = reduce,
                    c = reduce;
    a.input = &t[0], a.output = &t[2];
    b.input = &t[3], b.output = &t[4];
#define TRIO ((const fsdp_collective[]){a, b, c})
    c.input = &t[2], c.output = &t[5];
    REFUSED(fsdp_coalesced(group, TRIO, 3, NULL), FSDP_ERR_INVALID, "operations[2].input");
    c.input = &t[5], c.output = &between;
    REFUSED(fsdp_coalesced(group, TRIO, 3, NULL), FSDP_ERR_INVALID, "overlap");
    /* An input that reaches back over an output, with another tensor in between. */
    a.output = &t[6], b.input = &t[8], b.output = &t[3];
    c.input = &reaching, c.output = &t[4];
    REFUSED(fsdp_coalesced(group, TRIO, 3, NULL), FSDP_ERR_INVALID, "overlap");
    c.input = &t[0]; /* two inputs may be the same */
    fsdp_collective send = {.struct_size = sizeof send, .kind = FSDP_OP_SEND, .input = &t[0]}, recv = send;
    REFUSED(fsdp_coalesced(group, ((const fsdp_collective[]){a, send}), 2, NULL), FSDP_ERR_INVALID, "point-to-point");
    recv.kind = FSDP_OP_RECV, recv.input = NULL, recv.output = &between;
    REFUSED(fsdp_coalesced(group, ((const fsdp_collective[]){send, recv}), 2, NULL), FSDP_ERR_INVALID, "overlap");
    recv.kind = FSDP_OP_BARRIER;
    REFUSED(fsdp_coalesced(group, &recv, 1, NULL), FSDP_ERR_INVALID, "kind");
    REFUSED(fsdp_coalesced(group, NULL, 1, NULL), FSDP_ERR_INVALID, "operations");
    REFUSED(fsdp_coalesced(group, &a, -1, NULL), FSDP_ERR_INVALID, "n is -1");
    for (int i = 0; i < 100; i++) CHECK(data[i] == (float)i, "a refused call wrote element %d", i);
    OK(fsdp_coalesced(group, NULL, 0, NULL));
    fsdp_work *work;
    OK(fsdp_coalesced(group, NULL, 0, &work));
    OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
    OK(fsdp_coalesced(group, TRIO, 3, NULL));
    CHECK(data[60] == 0 && data[61] == (float)r->size && data[69] == 9 * (float)r->size, "%g", (double)data[61]);
    fsdp_group_release(group);
}

Test(coalesced, overlap_and_mixtures_are_refused_before_anything_is_written)
{
    ranks_run(1, refused_together, NULL);
    ranks_run(2, refused_together, NULL);
}

/* ---- split */

static struct rank seat(fsdp_group *group)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    return (struct rank){.rank = info.rank, .size = info.size};
}

static void some_jobs(fsdp_group *group, uint64_t seed, int n)
{
    struct rank here = seat(group);
    uint64_t state = seed;
    for (int i = 0; i < n; i++) {
        struct job job = job_random(&state, here.size);
        job_do(&job, &here, group);
    }
}

static void colors(struct rank *r)
{
    fsdp_group *all = make_group(r), *half, *reversed, *odd, *pair, *none = (void *)1, *quarter, *alone;
    OK(fsdp_group_split(all, r->rank % 2, 0, NULL, &half));
    CHECK(seat(half).size == r->size / 2 && seat(half).rank == r->rank / 2, "half: rank %d", seat(half).rank);
    OK(fsdp_group_split(all, 0, -r->rank, NULL, &reversed));
    CHECK(seat(reversed).size == r->size && seat(reversed).rank == r->size - 1 - r->rank, "reversed: rank %d",
          seat(reversed).rank);
    /* Some take part in none; others end up alone. */
    OK(fsdp_group_split(all, r->rank == 0 ? -1 : 7, 0, NULL, r->rank == 0 ? &none : &odd));
    CHECK(r->rank || !none, "a group for color -1");
    OK(fsdp_group_split(all, r->rank / 2, 5, NULL, &pair));
    OK(fsdp_group_split(half, seat(half).rank / 2, 0, NULL, &quarter));
    OK(fsdp_group_split(all, r->rank, 0, NULL, &alone));
    CHECK(seat(alone).size == 1 && seat(alone).rank == 0, "alone");
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(alone, &info));
    CHECK(strcmp(info.transport, "self") == 0, "%s", info.transport);

    /* Parents, children and groups that share ranks, in turn. */
    for (int round = 0; round < 6; round++) {
        some_jobs(all, 10 + (uint64_t)round, 2);
        some_jobs(half, 20 + (uint64_t)round, 2);
        some_jobs(pair, 30 + (uint64_t)round, 2);
        some_jobs(reversed, 40 + (uint64_t)round, 2);
        if (r->rank) some_jobs(odd, 50 + (uint64_t)round, 2);
        some_jobs(quarter, 60 + (uint64_t)round, 2);
        some_jobs(alone, 70 + (uint64_t)round, 2);
    }
    /* Queued on all at once; waited for in the opposite order. */
    fsdp_group *groups[] = {all, half, pair, reversed, quarter, alone};
    static _Thread_local struct job_run runs[6][4];
    fsdp_work *works[6][4];
    for (int i = 0; i < 4; i++)
        for (int g = 0; g < 6; g++) {
            struct rank here = seat(groups[g]);
            uint64_t state = (uint64_t)(100 + 10 * g + i);
            struct job job = job_random(&state, here.size);
            job_prepare(&runs[g][i], &job, here.rank, here.size);
            OK(job_call(&runs[g][i], groups[g], &works[g][i]));
        }
    for (int g = 5; g >= 0; g--)
        for (int i = 3; i >= 0; i--) {
            OK(fsdp_work_wait(works[g][i], -1));
            fsdp_work_release(works[g][i]);
            job_verify(&runs[g][i]);
        }
    /* The parent may go first. */
    fsdp_group_release(all);
    some_jobs(half, 90, 3);
    REFUSED(fsdp_group_split(half, -2, 0, NULL, &none), FSDP_ERR_INVALID, "color");
    fsdp_group_release(half);
    some_jobs(quarter, 91, 3);
    fsdp_group_release(quarter);
    fsdp_group_release(reversed);
    if (r->rank) fsdp_group_release(odd);
    fsdp_group_release(pair);
    fsdp_group_release(alone);
}

Test(split, groups_by_color_and_key_used_in_turn)
{
    BOTH_WAYS(4, colors);
    ranks_run(8, colors, &ways[0]);
}

/* ---- threads */

struct pair {
    fsdp_group *group;
    struct rank *rank;
    uint64_t seed;
};

static void *jobs_of_one_thread(void *argument)
{
    struct pair *p = argument;
    some_jobs(p->group, p->seed, SANITIZED ? 60 : 300);
    return NULL;
}

static void two_groups(struct rank *r)
{
    struct pair pairs[2] = {{make_group(r), r, 1}, {make_group(r), r, 2}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, jobs_of_one_thread, &pairs[i]) == 0, "thread");
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) fsdp_group_release(pairs[i].group);
}

Test(anything, two_groups_of_the_same_ranks_from_two_threads_each)
{
    BOTH_WAYS(2, two_groups);
    ranks_run(3, two_groups, &ways[0]);
}

/* ---- at random */

struct choice {
    uint64_t seed;
    enum way way;
    int64_t staging;
};

/* Any operations, some queued, some several in one call. */
static void at_random(struct rank *r)
{
    const struct choice *c = r->argument;
    fsdp_group *group = rank_group(r, c->way, c->staging);
    static _Thread_local struct job_run runs[16];
    uint64_t state = c->seed;
    for (int left = SANITIZED ? 150 : 700; left > 0;) {
        int n = 1 + (int)(job_bits(&state) % 8), how = (int)(job_bits(&state) % 4);
        fsdp_work *works[16] = {0};
        fsdp_collective calls[16];
        for (int i = 0; i < n; i++) {
            struct job job = job_random(&state, r->size);
            job_prepare(&runs[i], &job, r->rank, r->size);
            if (how == 1) calls[i] = job_collective(&runs[i]);
            if (how == 2) OK(job_call(&runs[i], group, &works[i]));
            if (how == 3) OK(job_call(&runs[i], group, i % 3 ? &works[i] : NULL));
            if (how == 0) OK(job_call(&runs[i], group, NULL));
        }
        if (how == 1) OK(fsdp_coalesced(group, calls, n, NULL));
        for (int i = n - 1; i >= 0; i--) {
            if (works[i]) OK(fsdp_work_wait(works[i], -1));
            fsdp_work_release(works[i]);
            job_verify(&runs[i]);
        }
        left -= n;
    }
    fsdp_group_release(group);
}

Test(anything, operations_at_random)
{
    const char *given = getenv("FSDP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    fprintf(stderr, "FSDP_TEST_SEED=%llu repeats this\n", (unsigned long long)seed);
    for (int size = 1; size <= 4; size++)
        for (int way = STAGED; way <= DIRECT; way++) {
            struct choice choice = {seed + (uint64_t)(10 * size + way), (enum way)way, size % 2 ? 64 << 10 : 200000};
            ranks_run(size, at_random, &choice);
        }
}
