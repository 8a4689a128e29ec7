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

/* ---- a model with all that there is: hybrid on a mesh, low precision, prefetch lists, tied parameters, ones that are
 * cut in their second dimension, one that is frozen. A refusal in the middle of a step is got over by a reset. */

#define BF16 ((DLDataType){kDLBfloat, 16, 1})
#define NEXT(call)                                                                                                     \
    if (got == FSDP_OK) got = (call)

struct whole {
    fsdp_group *group;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_scaler *scaler;
    fsdp_unit *units[2];
    DLManagedTensorVersioned *grads[2][3], *full;
};

enum { A = 6 * 5, B = 7 }; /* elements of a unit's two matrices, and of its vector */

static DLTensor matrix(void *data, DLDataType type)
{
    static int64_t shape[2] = {6, 5};
    return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 2, .dtype = type, .shape = shape};
}

static fsdp_status whole_make(int rank, struct whole *w)
{
    static const int64_t sizes[][2] = {{2, 1}, {1, 2}};
    static const char *const dims[] = {"replicate", "shard"};
    static const char *const names[2][3] = {{"a.m", "a.tied", "a.v"}, {"b.m", "b.cut", "b.frozen"}};
    fsdp_precision precision = {.struct_size = sizeof precision, .param_dtype = BF16, .reduce_dtype = F32};
    fsdp_model_options options = {.struct_size = sizeof options,
                                  .strategy = FSDP_HYBRID_SHARD,
                                  .private_unshard = kind / 2,
                                  .precision = &precision,
                                  .gradient_divisor = 1,
                                  .backward_prefetch = FSDP_BACKWARD_PRE,
                                  .forward_prefetch = 1,
                                  .sync_module_states = 1};
    fsdp_scaler_options scaling = {.struct_size = sizeof scaling};
    fsdp_status got = FSDP_OK;
    float values[3][A];
    NEXT(fsdp_mesh_create(w->group, 2, sizes[kind % 2], dims, &w->mesh));
    NEXT(fsdp_model_create_on_mesh(w->mesh, &options, &w->model));
    NEXT(fsdp_scaler_create(w->group, &scaling, &w->scaler));
    for (int u = 0; u < 2; u++) {
        for (int i = 0; i < 3; i++)
            for (int k = 0; k < A; k++) values[i][k] = (float)(u * 100 + i * 30 + k) * (float)(rank == 0);
        DLTensor m = matrix(values[0], F32), second = matrix(u ? values[1] : values[0], F32),
                 v = *crew_tensor(values[2], F32, B);
        fsdp_param params[3] = {{.struct_size = sizeof *params, .name = names[u][0], .full = &m},
                                {.struct_size = sizeof *params, .name = names[u][1], .full = &second},
                                {.struct_size = sizeof *params, .name = names[u][2], .full = &v, .frozen = u}};
        if (u) params[1].shard_dim = 1;
        NEXT(fsdp_unit_create(w->model, u ? "b" : "a", params, 3, NULL, &w->units[u]));
        for (int i = 0; i < 3; i++)
            if (i < 2 || !u) NEXT(fsdp_unit_param_grad(w->units[u], i, &w->grads[u][i]));
    }
    NEXT(fsdp_unit_param_full(w->units[1], 0, &w->full));
    NEXT(fsdp_unit_set_prefetch(w->units[0], FSDP_FORWARD, &w->units[1], 1));
    NEXT(fsdp_unit_set_prefetch(w->units[1], FSDP_BACKWARD, &w->units[0], 1));
    return got;
}

/* Two micro-batches, the first without sync; all gradients are 2 in bf16. */
static fsdp_status whole_step(struct whole *w)
{
    fsdp_status got = FSDP_OK;
    uint16_t twos[2][A], spaced[2 * A];
    int64_t strides[] = {10, 2};
    DLManagedTensorVersioned *made = NULL;
    fsdp_work *work[2] = {NULL, NULL};
    double norm;
    int32_t step;
    float buffer[3] = {1, 2, 3};
    const DLTensor *buffers[] = {crew_tensor(buffer, F32, 3)};
    for (int k = 0; k < 2 * A; k++) spaced[k] = twos[k / A][k % A] = 0x4000;
    NEXT(fsdp_model_zero_grad(w->model));
    NEXT(fsdp_model_broadcast(w->model, buffers, 1));
    for (int micro = 0; micro < 2; micro++) {
        NEXT(fsdp_model_set_gradient_sync(w->model, micro));
        for (int u = 0; u < 2; u++) {
            NEXT(fsdp_unit_pre_forward(w->units[u]));
            NEXT(fsdp_unit_cast(w->units[u], FSDP_CAST_INPUT, buffers[0], &made));
            if (made) made->deleter(made);
            made = NULL;
            if (u && got == FSDP_OK) {
                DLTensor wide = matrix(NULL, F32);
                float seen[A];
                wide.data = seen;
                OK(fsdp_copy(&w->full->dl_tensor, &wide));
                for (int k = 0; k < A; k++) /* bf16 has 8 bits */
                    CHECK(seen[k] == (float)(100 + k), "element %d is %g", k, (double)seen[k]);
            }
            NEXT(fsdp_unit_post_forward(w->units[u]));
        }
        for (int u = 1; u >= 0; u--) {
            DLTensor m = matrix(twos[0], BF16), second = matrix(twos[1], BF16), v = *crew_tensor(twos[0], BF16, B);
            if (micro) second.data = spaced;
            if (micro) second.strides = strides;
            const DLTensor *grads[] = {&m, &second, u ? NULL : &v};
            NEXT(fsdp_unit_pre_backward(w->units[u]));
            NEXT(fsdp_unit_post_backward(w->units[u], grads, 3, &work[u]));
            if (got == FSDP_OK && micro == 0) {
                fsdp_work_release(work[u]);
                work[u] = NULL;
            }
        }
        NEXT(fsdp_model_finish_backward(w->model));
    }
    for (int u = 0; u < 2; u++) {
        if (work[u]) fsdp_work_wait(work[u], -1); /* it may use the gradients */
        fsdp_work_release(work[u]);
    }
    NEXT(fsdp_scaler_unscale(w->scaler, w->model)); /* by 65536, on purpose not the loss's */
    NEXT(fsdp_model_clip_grad_norm(w->model, 1e9, 2, 1, &norm));
    NEXT(fsdp_scaler_step(w->scaler, &step));
    NEXT(fsdp_scaler_update(w->scaler));
    NEXT(fsdp_unit_gather_param(w->units[1], 1, &made));
    if (made) made->deleter(made);
    return got;
}

static void whole_check(const struct whole *w)
{
    for (int u = 0; u < 2; u++)
        for (int i = 0; i < 3; i++) {
            if (!w->grads[u][i]) continue;
            const DLTensor *t = &w->grads[u][i]->dl_tensor;
            int64_t n = 1;
            for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
            float want = (float)(!u && i < 2 ? 16 : 8) / 65536; /* of two ranks, twice; tied: by both names */
            for (int64_t k = 0; k < n; k++)
                CHECK(((const float *)t->data)[k] == want, "gradient %d of unit %d is %g, not %g", i, u,
                      (double)((const float *)t->data)[k], (double)want);
        }
}

/* What this rank had, for the other one; what the other had. */
static void tell(int stage, int rank, fsdp_status got)
{
    atomic_store(&crew->numbers[10 + 2 * stage + rank], got);
    crew_raise(2 + 2 * stage + rank);
}

static fsdp_status other_had(int stage, int rank)
{
    crew_await(2 + 2 * stage + !rank, 1);
    return (fsdp_status)atomic_load(&crew->numbers[10 + 2 * stage + !rank]);
}

static void whole(int rank)
{
    struct whole w = {.group = make(rank)};
    arm(rank);
    fsdp_status got = whole_make(rank, &w);
    judge(rank, got);
    tell(0, rank, got);
    if (got == FSDP_OK && other_had(0, rank) == FSDP_OK) {
        got = whole_step(&w);
        int refused = disarm();
        if (got == FSDP_OK && !refused) whole_check(&w);
        judge(rank, got);
        tell(1, rank, got);
        if (got != FSDP_OK || other_had(1, rank) != FSDP_OK) {
            OK(fsdp_model_reset(w.model));
            fsdp_scaler_release(w.scaler); /* between whose calls it may be */
            OK(fsdp_scaler_create(w.group, &(fsdp_scaler_options){.struct_size = sizeof(fsdp_scaler_options)},
                                  &w.scaler));
            OK(whole_step(&w));
        }
        whole_check(&w);
    }
    disarm();
    for (int u = 0; u < 2; u++) {
        for (int i = 0; i < 3; i++)
            if (w.grads[u][i]) w.grads[u][i]->deleter(w.grads[u][i]);
        if (u && w.full) w.full->deleter(w.full);
        fsdp_unit_release(w.units[u]);
    }
    fsdp_scaler_release(w.scaler);
    fsdp_model_release(w.model);
    fsdp_mesh_release(w.mesh);
    fsdp_group_release(w.group);
}

Test(alloc_fail, a_training_step_with_all_there_is)
{
    for (kind = 0; kind < 4; kind++) try_all(whole);
}

/* ---- state dicts: a model's parts, gathered whole, and loaded from rank 0. A call is not made at all, and rank 0
 * waits in vain; or both ranks end it, with the same failure. */

static fsdp_status states_make(fsdp_group *group, fsdp_model **model, fsdp_unit **unit)
{
    float values[3][A];
    fsdp_model_options options = {.struct_size = sizeof options, .strategy = kind ? FSDP_NO_SHARD : FSDP_FULL_SHARD};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < A; k++) values[i][k] = (float)(i * 30 + k);
    DLTensor rows = matrix(values[0], F32), columns = matrix(values[1], F32), v = *crew_tensor(values[2], F32, B);
    fsdp_param params[3] = {{.struct_size = sizeof *params, .name = "rows", .full = &rows},
                            {.struct_size = sizeof *params, .name = "columns", .full = &columns, .shard_dim = 1},
                            {.struct_size = sizeof *params, .name = "v", .full = &v}};
    fsdp_status got = FSDP_OK;
    NEXT(fsdp_model_create(group, &options, model));
    NEXT(fsdp_unit_create(*model, "u", params, 3, NULL, unit));
    return got;
}

static void states_check(fsdp_state_dict *dict)
{
    for (int i = 0; i < 3; i++) {
        DLManagedTensorVersioned *t;
        OK(fsdp_state_dict_tensor(dict, i, &t));
        for (int k = 0; k < (i == 2 ? B : A); k++)
            CHECK(((const float *)t->dl_tensor.data)[k] == (float)(i * 30 + k), "tensor %d at %d", i, k);
        t->deleter(t);
    }
}

static void states(int rank)
{
    fsdp_group *group = make_quick(rank);
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    fsdp_state_dict *parts = NULL, *full = NULL, *first = NULL;
    fsdp_state_dict_options options = {.struct_size = sizeof options, .kind = FSDP_STATE_FULL, .prefix = "p."};
    fsdp_state_dict_options rank0 = {.struct_size = sizeof rank0, .kind = FSDP_STATE_FULL, .rank0_only = 1};
    fsdp_load_options load = {.struct_size = sizeof load, .from_rank0 = 1};
    fsdp_status got = FSDP_OK;
    OK(states_make(group, &model, &unit));
    arm(rank);
    NEXT(fsdp_model_state_dict(model, NULL, &parts));
    NEXT(fsdp_state_dict_set_json(parts, "j", "[1]"));
    NEXT(fsdp_state_dict_gather(parts, group, &options, &full));
    NEXT(fsdp_model_state_dict(model, &rank0, &first));
    NEXT(fsdp_model_load_state_dict(model, rank == 0 ? first : NULL, &load));
    NEXT(fsdp_barrier(group, NULL));
    disarm();
    if (full) states_check(full);
    judge(rank, got);
    tell(0, rank, got);
    if (rank == 0 && got == FSDP_ERR_NOMEM)
        CHECK(strstr(fsdp_last_error(), "rank 1 reported: no memory"), "%s", fsdp_last_error());
    if (rank == 0 && got != FSDP_OK)
        fprintf(stderr, "ALLOC state dicts, refusal %lld: %s\n", (long long)atomic_load(&crew->numbers[0]),
                fsdp_status_name(got));
    if (other_had(0, rank) == got) crew_group_works(group, rank, 2); /* told, or nothing went wrong */
    fsdp_state_dict_release(parts);
    fsdp_state_dict_release(full);
    fsdp_state_dict_release(first);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(alloc_fail, state_dicts)
{
    for (kind = 0; kind < 2; kind++) try_all(states);
}
