/* Every allocation of the library fails once. Rank 1 runs with an allocator that refuses the n-th block, for
 * n = 1, 2, ... until nothing was refused; rank 0 has all it needs. Rank 1 says NOMEM or succeeds in spite of
 * it; rank 0 succeeds or gets an error soon; neither crashes, hangs or keeps a block or a descriptor. */
#include "crew.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

TestSuite(alloc_fail, .init = crew_init, .fini = crew_fini, .timeout = 180);

#define TIMEOUT_MS 400

static atomic_int armed, blocks;

static void *counted_alloc(size_t bytes, void *user)
{
    if (atomic_load(&armed) && atomic_fetch_sub(&armed, 1) == 1) {
        atomic_store(&crew->numbers[1], 1);
        return NULL;
    }
    void *p = malloc(bytes);
    if (p) {
        memset(p, 0xa5, bytes); /* nobody may count on zeros */
        atomic_fetch_add(&blocks, 1);
    }
    return p;
}

static void counted_free(void *p, void *user)
{
    atomic_fetch_sub(&blocks, 1);
    free(p);
}

static void arm(int rank)
{
    if (rank == 1) atomic_store(&armed, (int)atomic_load(&crew->numbers[0]));
}

static int disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&crew->numbers[1]) != 0;
}

/* A result under the rules above; of several calls, the first failure. */
static void judge(int rank, fsdp_status got)
{
    int refused = atomic_load(&crew->numbers[1]) != 0;
    if (got == FSDP_OK) return;
    CHECK(refused, "%s, but nothing was refused: %s", fsdp_status_name(got), fsdp_last_error());
    CHECK(rank == 0 || got == FSDP_ERR_NOMEM, "%s: %s", fsdp_status_name(got), fsdp_last_error());
    CHECK(strlen(fsdp_last_error()) > 10, "no message: '%s'", fsdp_last_error());
}

static void (*scenario)(int rank);

static void in_rank(int rank)
{
    OK(fsdp_set_allocator(counted_alloc, counted_free, NULL));
    int fds = crew_entries("/proc/self/fd");
    int64_t begin = crew_now_ms();
    crew_raise(14);
    crew_await(14, 2);
    scenario(rank);
    disarm();
    int64_t ms = crew_now_ms() - begin;
    CHECK(ms < 4000, "it took %lld ms", (long long)ms);
    /* An operation that is still under way keeps what it needs, and lets go of it on its own thread. */
    for (int i = 0; i < 2000 && (atomic_load(&blocks) || crew_entries("/proc/self/fd") != fds); i++) crew_sleep_ms(1);
    CHECK(atomic_load(&blocks) == 0, "%d blocks are left after refusal %lld: %s", atomic_load(&blocks),
          (long long)atomic_load(&crew->numbers[0]), fsdp_last_error());
    CHECK(crew_entries("/proc/self/fd") == fds, "descriptors %d -> %d", fds, crew_entries("/proc/self/fd"));
    OK(fsdp_set_allocator(NULL, NULL, NULL));
}

static void try_all(void (*fn)(int rank))
{
    int n = 1;
    scenario = fn;
    for (;; n++) {
        crew_fini();
        crew_init();
        atomic_store(&crew->numbers[0], n);
        crew_run(2, 10000, in_rank);
        if (!atomic_load(&crew->numbers[1])) break;
        cr_assert(n < 300);
    }
    cr_assert(n > 1, "nothing was allocated");
    fprintf(stderr, "ALLOC %d allocations failed in turn\n", n - 1);
}

static fsdp_group *make(int rank)
{
    fsdp_group_options options = crew_options(TIMEOUT_MS, (int32_t)atomic_load(&crew->numbers[5]));
    options.timeout_ms = 1500;
    return crew_group(rank, 2, &options);
}

static fsdp_group *make_quick(int rank)
{
    fsdp_group_options options = crew_options(TIMEOUT_MS, 0);
    return crew_group(rank, 2, &options);
}

/* ---- */

static void create(int rank)
{
    fsdp_group_options options = crew_options(TIMEOUT_MS, 0);
    fsdp_group *group = NULL;
    fsdp_store *store = crew_store("create", rank, 2, 2000);
    arm(rank);
    fsdp_status got = fsdp_group_create(store, &options, &group);
    disarm();
    judge(rank, got);
    if (got == FSDP_OK && !atomic_load(&crew->numbers[1])) crew_group_works(group, rank, 2);
    fsdp_group_release(group);
    fsdp_store_release(store);
}

Test(alloc_fail, group_create)
{
    try_all(create);
}

static void open_store(int rank)
{
    fsdp_store *store = NULL;
    fsdp_store_options options = {.struct_size = sizeof options, .rank = rank, .world_size = 2, .timeout_ms = 400};
    char url[96];
    snprintf(url, sizeof url, "file:///tmp/fsdp-alloc-%d-%lld", (int)getppid(),
             (long long)atomic_load(&crew->numbers[0]));
    arm(rank);
    fsdp_status got = fsdp_store_open(url, &options, &store);
    fsdp_status set = got == FSDP_OK ? fsdp_store_set(store, "k", "v", 1) : FSDP_OK;
    disarm();
    judge(rank, got);
    judge(rank, set);
    crew_raise(0);
    crew_await(0, 2);
    fsdp_store_release(store);
    crew_raise(1);
    crew_await(1, 2);
    unlink(url + strlen("file://"));
}

Test(alloc_fail, store_open)
{
    try_all(open_store);
}

static int kind;
static float in[3000], out[6000];

static fsdp_status call(fsdp_group *group, int rank, int64_t n, fsdp_work **work)
{
    static const int64_t uneven[2] = {1, 2};
    static int64_t shape[2] = {2, 2}, strides[2] = {1, 2};
    DLTensor turned = {.data = in, .device = {kDLCPU, 0}, .ndim = 2, .dtype = F32, .shape = shape, .strides = strides};
    DLTensor turned_out = turned;
    turned_out.data = out;
    int64_t there[2] = {1, 1 + rank}, back[2] = {1, 1};
    back[0] = rank == 0 ? 1 : 2;
    back[1] = rank == 0 ? 1 : 2;
    fsdp_collective list[6];
    switch (kind) {
    case 0:
        return fsdp_all_reduce(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n), FSDP_SUM, work);
    case 1:
        return fsdp_all_gather(group, crew_tensor(in, F32, n), crew_tensor(out, F32, 2 * n), work);
    case 2:
        return fsdp_reduce_scatter(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n / 2), FSDP_SUM, work);
    case 3:
        return fsdp_broadcast(group, crew_tensor(out, F32, n), 0, work);
    case 4:
        return fsdp_all_to_all(group, crew_tensor(in, F32, n), crew_tensor(out, F32, n), work);
    case 5:
        return fsdp_all_gather_v(group, crew_tensor(in, F32, uneven[rank]), crew_tensor(out, F32, 3), uneven, work);
    case 6:
        there[0] = 1;
        there[1] = 2;
        return fsdp_all_to_all_v(group, crew_tensor(in, F32, 3), crew_tensor(out, F32, back[0] + back[1]), there, back,
                                 work);
    case 7:
        return fsdp_all_reduce(group, &turned, &turned_out, FSDP_SUM, work);
    case 8:
        memset(list, 0, sizeof list);
        for (int i = 0; i < 6; i++)
            list[i] = (fsdp_collective){.struct_size = sizeof *list,
                                        .kind = i < 3 ? FSDP_OP_ALL_REDUCE : FSDP_OP_ALL_GATHER,
                                        .input = crew_tensor(in + 400 * i, F32, 400),
                                        .output = crew_tensor(out + 800 * i, F32, i < 3 ? 400 : 800)};
        return fsdp_coalesced(group, list, 6, work);
    case 9:
        return fsdp_barrier(group, work);
    default: {
        DLTensor *t = crew_tensor(rank ? out : in, F32, n);
        return rank ? fsdp_recv(group, t, 0, 0, work) : fsdp_send(group, t, 1, 0, work);
    }
    }
}

static void collective(int rank)
{
    int async = (int)atomic_load(&crew->numbers[4]);
    fsdp_group *group = make_quick(rank);
    fsdp_work *work = NULL;
    arm(rank);
    fsdp_status got = call(group, rank, atomic_load(&crew->numbers[6]), async ? &work : NULL);
    if (got == FSDP_OK && async) got = fsdp_work_wait(work, -1);
    disarm();
    judge(rank, got);
    fsdp_work_release(work);
    fsdp_group_release(group);
}

static int want_async;
static int64_t want_count;

static void collective_in(int rank)
{
    atomic_store(&crew->numbers[4], want_async);
    atomic_store(&crew->numbers[6], want_count);
    collective(rank);
}

Test(alloc_fail, collectives)
{
    for (kind = 0; kind < 11; kind++)
        for (want_async = 0; want_async < 2; want_async++) {
            want_count = want_async ? 3000 : 4;
            try_all(collective_in);
        }
}

static void direct_collective(int rank)
{
    fsdp_group_options options = crew_options(TIMEOUT_MS, 1);
    fsdp_group *group = crew_group(rank, 2, &options);
    arm(rank);
    fsdp_status got = call(group, rank, 3000, NULL);
    disarm();
    judge(rank, got);
    fsdp_group_release(group);
}

Test(alloc_fail, direct_reads)
{
    static const int kinds[] = {0, 1, 8};
    for (int i = 0; i < 3; i++) {
        kind = kinds[i];
        try_all(direct_collective);
    }
}

static void split(int rank)
{
    fsdp_group *group = make(rank), *part = NULL;
    arm(rank);
    fsdp_status got = fsdp_group_split(group, 0, 0, NULL, &part);
    disarm();
    judge(rank, got);
    if (got == FSDP_OK && !atomic_load(&crew->numbers[1])) crew_group_works(part, rank, 2);
    fsdp_group_release(part);
    fsdp_group_release(group);
}

Test(alloc_fail, group_split)
{
    try_all(split);
}

static void train(int rank)
{
    fsdp_group *group = make_quick(rank);
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    float values[48] = {1}, grads[48] = {2};
    fsdp_model_options options = {.struct_size = sizeof options, .private_unshard = kind};
    fsdp_param params[2] = {
        {.struct_size = sizeof *params, .name = "w", .full = crew_tensor(values, F32, 40)},
        {.struct_size = sizeof *params, .name = "b", .full = crew_tensor(values + 40, F32, 8), .frozen = 1}};
    const DLTensor *given[2] = {crew_tensor(grads, F32, 40), NULL};
    DLManagedTensorVersioned *full = NULL, *grad = NULL;
    fsdp_work *work = NULL;
    arm(rank);
    fsdp_status got = fsdp_model_create(group, &options, &model);
    if (got == FSDP_OK) got = fsdp_unit_create(model, "u", params, 2, NULL, &unit);
    if (got == FSDP_OK) got = fsdp_unit_pre_forward(unit);
    if (got == FSDP_OK) got = fsdp_unit_param_full(unit, 0, &full);
    if (got == FSDP_OK) got = fsdp_unit_param_grad(unit, 0, &grad);
    if (got == FSDP_OK) got = fsdp_unit_post_forward(unit);
    if (got == FSDP_OK) got = fsdp_model_set_gradient_sync(model, 0);
    if (got == FSDP_OK) got = fsdp_unit_post_backward(unit, given, 2, NULL);
    if (got == FSDP_OK) got = fsdp_model_set_gradient_sync(model, 1);
    if (got == FSDP_OK) got = fsdp_unit_unshard(unit, &work);
    fsdp_work_release(work);
    work = NULL;
    if (got == FSDP_OK) got = fsdp_unit_post_backward(unit, given, 2, &work);
    fsdp_work_release(work);
    if (got == FSDP_OK) got = fsdp_model_finish_backward(model);
    if (got == FSDP_OK) got = fsdp_model_zero_grad(model);
    if (got == FSDP_OK) got = fsdp_model_reset(model);
    disarm();
    judge(rank, got);
    if (full) full->deleter(full);
    if (grad) grad->deleter(grad);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(alloc_fail, models_and_units)
{
    for (kind = 0; kind < 2; kind++) try_all(train);
}
