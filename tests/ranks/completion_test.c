/* What holds when an operation completes: inside its callback, for a callback that comes late, for calls that had
 * nothing to do, and for groups whose other ranks took another way. */
#include "ranks.h"

#include <time.h>

TestSuite(completion, .timeout = SANITIZED ? 300 : 60);

static void nap(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

static DLTensor floats(float *data, int64_t *shape)
{
    return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape};
}

/* ---- inside a callback */

struct seen {
    fsdp_group *group;
    fsdp_work *pending;
    atomic_int called, call_status, wait_status;
    char message[256];
};

static void try_to_wait(fsdp_status status, void *user)
{
    struct seen *seen = user;
    atomic_store(&seen->call_status, fsdp_barrier(seen->group, NULL));
    atomic_store(&seen->wait_status, fsdp_work_wait(seen->pending, -1));
    atomic_store(&seen->called, 1 + status);
}

static void rank_waits_in_callback(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct seen seen = {.group = group};
    fsdp_work *first;
    OK(fsdp_barrier(group, &first));
    OK(fsdp_barrier(group, &seen.pending));
    OK(fsdp_work_on_done(first, try_to_wait, &seen));
    OK(fsdp_work_wait(seen.pending, -1));
    while (!atomic_load(&seen.called)) nap(1);
    CHECK(atomic_load(&seen.called) == 1, "the barrier failed");
    int call = atomic_load(&seen.call_status), wait = atomic_load(&seen.wait_status);
    /* A callback that runs late, on this thread, is in nobody's way. */
    CHECK(call == FSDP_ERR_STATE || call == FSDP_OK, "the call gave %s", fsdp_status_name(call));
    CHECK(wait == FSDP_ERR_STATE || wait == FSDP_OK, "the wait gave %s", fsdp_status_name(wait));
    atomic_int *refused = (atomic_int *)(void *)r->shared + r->rank;
    atomic_store(refused, call == FSDP_ERR_STATE && wait == FSDP_ERR_STATE);
    fsdp_work_release(first);
    fsdp_work_release(seen.pending);
    fsdp_group_release(group);
}

Test(completion, waiting_inside_a_callback_is_refused_not_a_hang)
{
    /* One rank: whether its callback comes before or after the first barrier is complete can differ between ranks. */
    int refused = 0;
    for (int i = 0; i < 50 && !refused; i++) refused = *(int *)(void *)ranks_run(1, rank_waits_in_callback, NULL);
    cr_assert(refused, "no callback ran inside the lane in 50 tries");
}

/* ---- late callbacks */

static void note_message(fsdp_status status, void *user)
{
    struct seen *seen = user;
    snprintf(seen->message, sizeof seen->message, "%s", fsdp_last_error());
    atomic_store(&seen->called, status);
}

static void rank_late_callback(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    float x[3] = {1, 2, 3};
    int64_t n = r->rank ? 3 : 2;
    DLTensor t = floats(x, &n);
    fsdp_work *work;
    struct seen seen = {0};
    OK(fsdp_all_reduce(group, &t, &t, FSDP_SUM, &work));
    CHECK(fsdp_work_wait(work, -1) == FSDP_ERR_MISMATCH, "no mismatch");
    REFUSED(fsdp_set_log(NULL, NULL, 99), FSDP_ERR_INVALID, "level");
    OK(fsdp_work_on_done(work, note_message, &seen));
    CHECK(atomic_load(&seen.called) == FSDP_ERR_MISMATCH, "status %d", atomic_load(&seen.called));
    CHECK(strstr(seen.message, "all_reduce"), "the callback saw \"%s\"", seen.message);
    fsdp_work_release(work);
    fsdp_group_release(group);
}

Test(completion, a_late_callback_sees_its_operations_error)
{
    ranks_run(2, rank_late_callback, NULL);
}

/* ---- nothing to do */

static void rank_nothing(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    fsdp_work *work;
    int32_t done = 0;
    OK(fsdp_coalesced(group, NULL, 0, &work));
    OK(fsdp_work_test(work, &done));
    CHECK(done, "an empty call is not done at once");
    fsdp_work_release(work);
    fsdp_group_release(group);
}

Test(completion, an_empty_coalesced_call_is_done_at_once)
{
    ranks_run(2, rank_nothing, NULL);
}

/* ---- other ranks' ways */

static void rank_learns_of_abort(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    OK(fsdp_barrier(group, NULL));
    if (r->rank == 1) OK(fsdp_group_abort(group, "enough"));
    fsdp_group_info info = {.struct_size = sizeof info};
    for (int i = 0; i < 1000 && info.status == FSDP_OK; i++, nap(2)) OK(fsdp_group_query(group, &info));
    CHECK(info.status == FSDP_ERR_ABORTED, "status is %s", fsdp_status_name(info.status));
    fsdp_group_release(group);
}

Test(completion, a_query_tells_what_a_peer_has_done)
{
    ranks_run(3, rank_learns_of_abort, NULL);
}

static void rank_split_refused(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    for (int round = 0; round < 3; round++) { /* also after an earlier split has left its bytes behind */
        fsdp_group_options self = {.struct_size = sizeof self, .transport = "self"};
        fsdp_group *part = NULL;
        fsdp_status status = fsdp_group_split(group, 0, 0, r->rank == 1 ? &self : NULL, &part);
        CHECK(status != FSDP_OK && !part, "a split that one rank refused succeeded");
        if (r->rank == 1) CHECK(status == FSDP_ERR_UNSUPPORTED, "%s", fsdp_last_error());
        OK(fsdp_barrier(group, NULL)); /* the parent goes on */
        OK(fsdp_group_split(group, 0, -r->rank, NULL, &part));
        OK(fsdp_barrier(part, NULL));
        fsdp_group_release(part);
    }
    fsdp_group_release(group);
}

Test(completion, a_split_that_one_rank_refuses_fails_for_all_and_the_parent_goes_on)
{
    ranks_run(3, rank_split_refused, NULL);
}
