/* Values of parameters: how wholes lie on the ranks along any dimension, however many rows there are; meta parameters
 * and rank 0's values for all; edits of full views written back; single parameters gathered and loaded; casts. */
#include "unit_host.h"

#include <math.h>

TestSuite(fsdp_values, .timeout = RANKS_SECONDS + 30);

static const struct par shapes[] = {
    {.name = "rows", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}},
    {.name = "columns", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}, .dim = 1},
    {.name = "inner", .type = DTYPE_F64, .ndim = 3, .shape = {2, 3, 5}, .dim = 2},
    {.name = "middle", .type = DTYPE_BF16, .ndim = 3, .shape = {2, 3, 4}, .dim = 1},
    {.name = "no rows", .type = DTYPE_F32, .ndim = 2, .shape = {0, 3}},
    {.name = "no rows, by columns", .type = DTYPE_F32, .ndim = 2, .shape = {0, 3}, .dim = 1},
    {.name = "no columns", .type = DTYPE_F64, .ndim = 2, .shape = {3, 0}},
    {.name = "one", .type = DTYPE_F32, .ndim = 1, .shape = {1}},
    {.name = "one column", .type = DTYPE_F16, .ndim = 3, .shape = {4, 1, 3}, .dim = 1},
    {.name = "a line", .type = DTYPE_F8E5M2, .ndim = 3, .shape = {1, 1, 6}, .dim = 2},
    {.name = "frozen", .type = DTYPE_F32, .ndim = 3, .shape = {3, 2, 2}, .dim = 1, .frozen = 1},
    {.name = "two rows", .type = DTYPE_F32, .ndim = 2, .shape = {2, 7}},
};
#define SHAPES 12
#define ALL ((1u << SHAPES) - 1)

/* ---- how wholes lie on the ranks */

static void expect_layout(const struct kit *kit)
{
    for (int i = 0; i < kit->n; i++) {
        const struct par *p = &kit->pars[i];
        fsdp_param_info info = kit_param(kit, i);
        const DLTensor *shard = &kit->shard[i]->dl_tensor, *full = &kit->full[i]->dl_tensor;
        int64_t start, length;
        OK(fsdp_shard_extent(p->shape[p->dim], kit->rank, kit->size, &start, &length));
        CHECK(info.ndim == p->ndim && info.frozen == p->frozen && info.tied_to == -1 && strcmp(info.name, p->name) == 0,
              "'%s' as told", p->name);
        if (kit->size > 1) CHECK(info.shard_dim == p->dim, "'%s' is cut along %d", p->name, info.shard_dim);
        if (info.shard_dim == p->dim)
            CHECK(info.shard_start == start && info.shard_length == length, "'%s': %lld rows from %lld", p->name,
                  (long long)info.shard_length, (long long)info.shard_start);
        CHECK(shard->ndim == p->ndim && full->ndim == p->ndim && shard->byte_offset == 0, "'%s': dimensions", p->name);
        for (int d = 0; d < p->ndim; d++) {
            CHECK(info.shape[d] == p->shape[d] && full->shape[d] == p->shape[d], "'%s': shape", p->name);
            CHECK(shard->shape[d] == (d == p->dim ? length : p->shape[d]), "'%s': shape of the shard", p->name);
            if (kit->grad[i])
                CHECK(kit->grad[i]->dl_tensor.shape[d] == shard->shape[d], "'%s': of its gradient", p->name);
        }
    }
}

/* Each parameter by itself; `seed` is what the shards hold. */
static void expect_gathered(const struct kit *kit, int seed, const char *when)
{
    for (int i = 0; i < kit->n; i++) {
        const struct par *p = &kit->pars[i];
        DLManagedTensorVersioned *whole;
        double got[KIT_ELEMENTS];
        OK(fsdp_unit_gather_param(kit->unit, i, &whole));
        const DLTensor *t = &whole->dl_tensor;
        CHECK(t->dtype.code == dtype_to_dl(p->type).code && t->dtype.bits == dtype_to_dl(p->type).bits,
              "'%s' comes in the shard's dtype", p->name);
        CHECK(elements(t) == par_count(p) && t->ndim == p->ndim, "'%s': shape", p->name);
        get_doubles(t, got);
        for (int64_t k = 0; k < par_count(p); k++)
            CHECK(got[k] == kit_value(kit->pars, i, seed, k), "%s: '%s' gathered: %g at %lld, not %g", when, p->name,
                  got[k], (long long)k, kit_value(kit->pars, i, seed, k));
        if (elements(t)) memset(t->data, 0x55, tensor_bytes(t)); /* it is the caller's */
        whole->deleter(whole);
    }
}

static void rank_shapes(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        const char *when = layout_names[layout];
        struct kit kit, empty;
        kit_make(model, "shapes", shapes, SHAPES, 11, NULL, &kit);
        expect_layout(&kit);
        kit_expect_shards(&kit, 11, when);
        expect_gathered(&kit, 11, when);
        OK(fsdp_unit_unshard(kit.unit, NULL));
        kit_expect_full(&kit, 11, when);
        expect_gathered(&kit, 11, when); /* also while it is full */
        OK(fsdp_unit_reshard(kit.unit));
        for (int step = 0; step < 3; step++) {
            OK(fsdp_model_zero_grad(model));
            kit_step(model, &kit, r->rank, step == 1 ? ALL & ~0x155u : ALL);
            kit_expect_grads(&kit, r->size, step == 1 ? ALL & ~0x155u : ALL, 1, when);
        }
        kit_set_shards(&kit, 40);
        OK(fsdp_unit_pre_forward(kit.unit));
        kit_expect_full(&kit, 40, when);
        OK(fsdp_unit_post_forward(kit.unit));
        expect_gathered(&kit, 40, when);
        OK(fsdp_model_finish_backward(model));
        kit_drop(&kit);

        /* A unit that is wholly empty takes part all the same. */
        kit_make(model, "empty", shapes + 4, 3, 0, NULL, &empty);
        expect_gathered(&empty, 0, when);
        kit_step(model, &empty, r->rank, 7);
        OK(fsdp_unit_unshard(empty.unit, NULL));
        OK(fsdp_unit_write_back(empty.unit));
        CHECK(kit_state(&empty) == FSDP_UNIT_UNSHARDED && kit_query(&empty).full_bytes == 0, "empty, and full");
        kit_drop(&empty);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, uneven_and_empty_shards_along_any_dimension)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_shapes, NULL);
}

/* ---- gather and load */

/* Memory that holds `values` as a tensor of the dtype, dense or with gaps that are not to be read. */
static DLTensor whole_tensor(const struct par *p, enum dtype type, int gaps, const double *values, char *memory,
                             int64_t *strides)
{
    DLTensor t = view(memory, type, p->ndim, p->shape);
    int64_t step = gaps ? 3 : 1;
    for (int d = p->ndim - 1; d >= 0; step *= p->shape[d], d--) strides[d] = step;
    memset(memory, 0x7f, (size_t)par_count(p) * 24 + 24);
    t.strides = strides;
    if (gaps) t.byte_offset = 8;
    set_doubles(&t, values);
    return t;
}

static void rank_load(struct rank *r)
{
    static const enum dtype types[] = {DTYPE_F64, DTYPE_F32, DTYPE_F16};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        struct kit kit;
        kit_make(model, "load", shapes, SHAPES, 1, NULL, &kit);
        for (int turn = 0; turn < 6; turn++) {
            enum dtype type = types[turn / 2];
            int seed = 2 + turn;
            for (int i = 0; i < SHAPES; i++) {
                double values[KIT_ELEMENTS];
                char memory[KIT_ELEMENTS * 24 + 24];
                int64_t strides[3];
                for (int64_t k = 0; k < par_count(&shapes[i]); k++) values[k] = kit_value(shapes, i, seed, k);
                DLTensor whole = whole_tensor(&shapes[i], type, turn % 2, values, memory, strides);
                OK(fsdp_unit_load_param(kit.unit, i, &whole));
            }
            kit_expect_shards(&kit, seed, "loaded");
            OK(fsdp_unit_pre_forward(kit.unit));
            kit_expect_full(&kit, seed, "loaded and unsharded");
            OK(fsdp_unit_post_forward(kit.unit));
            expect_gathered(&kit, seed, "loaded");
            OK(fsdp_model_finish_backward(model));
        }
        /* Between forward and backward it is seen too, since every rank called. */
        OK(fsdp_unit_pre_forward(kit.unit));
        OK(fsdp_unit_reshard(kit.unit));
        double value = 3.0000001;
        int64_t one = 1;
        DLTensor whole = view(&value, DTYPE_F64, 1, &one);
        OK(fsdp_unit_load_param(kit.unit, 7, &whole));
        OK(fsdp_unit_pre_backward(kit.unit));
        CHECK(((float *)kit.full[7]->dl_tensor.data)[0] == 3.0000001f, "rounded once from float64");
        OK(fsdp_model_finish_backward(model));

        /* What is refused, by name. */
        uint64_t before = operations_of(group);
        char memory[256] = {0};
        DLManagedTensorVersioned *none = NULL;
        DLTensor turned = view(memory, DTYPE_F32, 2, (const int64_t[]){3, 5}),
                 flat = view(memory, DTYPE_F32, 1, &(const int64_t){15}),
                 whole_numbers = view(memory, DTYPE_I32, 2, shapes[0].shape),
                 nowhere = view(NULL, DTYPE_F32, 2, shapes[0].shape);
        REFUSED(fsdp_unit_load_param(kit.unit, 0, &turned), FSDP_ERR_INVALID, "'rows'");
        REFUSED(fsdp_unit_load_param(kit.unit, 0, &flat), FSDP_ERR_INVALID, "'rows'");
        REFUSED(fsdp_unit_load_param(kit.unit, 0, &whole_numbers), FSDP_ERR_INVALID, "'rows'");
        REFUSED(fsdp_unit_load_param(kit.unit, 0, &nowhere), FSDP_ERR_INVALID, "full");
        REFUSED(fsdp_unit_load_param(kit.unit, 0, NULL), FSDP_ERR_INVALID, "full");
        REFUSED(fsdp_unit_load_param(kit.unit, SHAPES, &turned), FSDP_ERR_INVALID, "index is 12");
        REFUSED(fsdp_unit_gather_param(kit.unit, -1, &none), FSDP_ERR_INVALID, "index is -1");
        REFUSED(fsdp_unit_gather_param(kit.unit, 0, NULL), FSDP_ERR_INVALID, "full is NULL");
        CHECK(operations_of(group) == before && !none, "refused without asking the others");
        if (layout != LAYOUT_NO_SHARD) {
            OK(fsdp_unit_unshard(kit.unit, NULL));
            REFUSED(fsdp_unit_load_param(kit.unit, 7, &whole), FSDP_ERR_STATE, "'one'");
            OK(fsdp_unit_reshard(kit.unit));
        }
        /* Ranks that ask for different parameters are told, and go on. */
        if (r->size > 1 && layout <= LAYOUT_PRIVATE) {
            REFUSED(fsdp_unit_gather_param(kit.unit, r->rank == 1 ? 0 : 1, &none), FSDP_ERR_MISMATCH, "rank 1");
            CHECK(!none, "nothing is written on failure");
        }
        OK(fsdp_unit_gather_param(kit.unit, 0, &none));
        none->deleter(none);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, single_parameters_are_gathered_and_loaded)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_load, NULL);
}

/* ---- meta */

/* An initialiser that knows of a parameter what fsdp_unit_param_query says. */
static void fill(const struct kit *kit, int i, int seed)
{
    fsdp_param_info info = kit_param(kit, i);
    int64_t shape[3] = {1, 1, 1}, from[3] = {0}, to[3] = {1, 1, 1}, n = 0;
    double values[KIT_ELEMENTS];
    for (int d = 0; d < info.ndim; d++) shape[d] = to[d] = info.shape[d];
    from[info.shard_dim] = info.shard_start;
    to[info.shard_dim] = info.shard_start + info.shard_length;
    for (int64_t a = from[0]; a < to[0]; a++)
        for (int64_t b = from[1]; b < to[1]; b++)
            for (int64_t c = from[2]; c < to[2]; c++)
                values[n++] = kit_value(kit->pars, i, seed, (a * shape[1] + b) * shape[2] + c);
    set_doubles(&kit->shard[i]->dl_tensor, values);
}

static void rank_meta(struct rank *r)
{
    struct par metas[SHAPES];
    for (int i = 0; i < SHAPES; i++) {
        metas[i] = shapes[i];
        metas[i].meta = 1;
    }
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        struct kit kit;
        kit_make(model, "meta", metas, SHAPES, 0, NULL, &kit);
        expect_layout(&kit);
        double got[KIT_ELEMENTS];
        OK(fsdp_unit_unshard(kit.unit, NULL));
        for (int i = 0; i < SHAPES; i++) {
            get_doubles(&kit.full[i]->dl_tensor, got);
            for (int64_t k = 0; k < par_count(&metas[i]); k++)
                CHECK(got[k] == 0, "'%s' begins as zeros", metas[i].name);
        }
        OK(fsdp_unit_reshard(kit.unit));
        for (int i = 0; i < SHAPES; i++) fill(&kit, i, 21);
        OK(fsdp_unit_unshard(kit.unit, NULL));
        kit_expect_full(&kit, 21, layout_names[layout]);
        OK(fsdp_unit_reshard(kit.unit));
        kit_step(model, &kit, r->rank, ALL);
        kit_expect_grads(&kit, r->size, ALL, 1, layout_names[layout]);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, meta_parameters_are_filled_shard_by_shard)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_meta, NULL);
}

/* ---- rank 0's values for all */

/* Rank 0 has seed 5; odd ranks have meta, even ones other values. */
static void check_synced(struct rank *r, fsdp_model *model, int root, const fsdp_unit_options *options,
                         const char *when)
{
    struct par pars[SHAPES];
    for (int i = 0; i < SHAPES; i++) {
        pars[i] = shapes[i];
        pars[i].id = (uint64_t)i + 1;
        pars[i].meta = !root && r->rank % 2;
    }
    pars[1].ndim = 2; /* "columns" is "rows" in other words: one parameter, by its id */
    pars[1].dim = 0;
    pars[1].id = 1;
    pars[1].tied = 1;
    struct kit kit;
    kit_make(model, "synced", pars, SHAPES, root ? 5 : 100 + r->rank, options, &kit);
    kit_expect_shards(&kit, 5, when);
    OK(fsdp_unit_unshard(kit.unit, NULL));
    kit_expect_full(&kit, 5, when);
    OK(fsdp_unit_reshard(kit.unit));
    kit_step(model, &kit, r->rank, ALL);
    kit_expect_grads(&kit, r->size, ALL, 1, when);
    kit_drop(&kit);
}

static void rank_synced(struct rank *r)
{
    static const char *const names[] = {"a", "b"};
    fsdp_model_options options = {.struct_size = sizeof options, .sync_module_states = 1};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, &options);
        if (!model) continue;
        check_synced(r, model, r->rank == 0, NULL, layout_names[layout]);
        for (int other = 1; other <= 3; other++) { /* units of another strategy than their model's */
            fsdp_unit_options own = {.struct_size = sizeof own, .strategy = other};
            check_synced(r, model, r->rank == 0, &own, "a strategy of its own");
        }
        /* Meta on rank 0: nothing to give. All are told, and the model goes on. */
        struct par meta = {.name = "nobody's", .type = DTYPE_F32, .ndim = 1, .shape = {3}, .meta = 1};
        fsdp_unit *unit = NULL;
        REFUSED(kit_try(model, "u", &meta, 1, 0, NULL, &unit), FSDP_ERR_INVALID, "'nobody's'");
        CHECK(!unit, "nothing was made");
        check_synced(r, model, r->rank == 0, NULL, "after a refusal");
        fsdp_model_release(model);
    }
    if (r->size == 4) { /* a model of two ranks, twice: its own rank 0 counts */
        fsdp_mesh *mesh;
        fsdp_model *model;
        int64_t sizes[] = {2, 2};
        options.shard_dim = "a";
        OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
        OK(fsdp_model_create_on_mesh(mesh, &options, &model));
        struct par one = {.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {3, 3}, .dim = 1};
        struct kit kit;
        kit_make(model, "pair", &one, 1, 10 * r->rank, NULL, &kit);
        OK(fsdp_unit_unshard(kit.unit, NULL));
        kit_expect_full(&kit, 10 * (r->rank % 2), "along the first dimension");
        kit_drop(&kit);
        fsdp_model_release(model);
        fsdp_mesh_release(mesh);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, sync_module_states_gives_rank_0s_values_to_all)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_synced, NULL);
}

static void rank_buffers(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        double running[12];
        int64_t counter[2] = {7 + 1000 * r->rank, -9 + 1000 * r->rank}, shape[] = {2, 3}, strides[] = {6, 2}, two = 2,
                zero = 0;
        for (int k = 0; k < 12; k++) running[k] = k + 1000 * r->rank;
        DLTensor mean = view(running, DTYPE_F64, 2, shape), steps = view(counter, DTYPE_I64, 1, &two),
                 none = view(NULL, DTYPE_BOOL, 1, &zero);
        mean.strides = strides;
        const DLTensor *buffers[] = {&mean, &steps, &none};
        OK(fsdp_model_broadcast(model, buffers, 3));
        for (int k = 0; k < 12; k++)
            CHECK(running[k] == (k % 2 ? k + 1000 * r->rank : k), "element %d is %g: gaps stay", k, running[k]);
        CHECK(counter[0] == 7 && counter[1] == -9, "%lld, %lld", (long long)counter[0], (long long)counter[1]);
        OK(fsdp_model_broadcast(model, NULL, 0));
        const DLTensor *hole[] = {&mean, NULL};
        CHECK(fsdp_model_broadcast(model, hole, 2) == FSDP_ERR_INVALID, "a NULL entry");
        REFUSED(fsdp_model_broadcast(model, NULL, 1), FSDP_ERR_INVALID, "tensors is NULL");
        REFUSED(fsdp_model_broadcast(model, buffers, -1), FSDP_ERR_INVALID, "n is -1");
        if (r->size > 1) {
            steps.dtype = dtype_to_dl(r->rank == 1 ? DTYPE_F64 : DTYPE_I64);
            CHECK(fsdp_model_broadcast(model, buffers, 3) == FSDP_ERR_MISMATCH, "dtypes differ");
        }
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, buffers_are_broadcast)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_buffers, NULL);
}

/* ---- write_back */

#define LONG 2600 /* elements: more than are looked at in one go */

static const struct par edited[] = {{.name = "long", .type = DTYPE_F32, .ndim = 2, .shape = {65, 40}},
                                    {.name = "across", .type = DTYPE_F32, .ndim = 2, .shape = {20, 130}, .dim = 1},
                                    {.name = "deep", .type = DTYPE_F64, .ndim = 3, .shape = {3, 2, 5}, .dim = 2},
                                    {.name = "low", .type = DTYPE_BF16, .ndim = 1, .shape = {7}},
                                    {.name = "nothing", .type = DTYPE_F32, .ndim = 2, .shape = {0, 2}}};
#define EDITED 5

/* Values that low precision can't hold; in the parameter's dtype, and as the dtype of full parameters has them. */
static _Thread_local double fine[EDITED][LONG], seen[EDITED][LONG];

static void fine_fill(enum dtype param)
{
    char memory[LONG * 8];
    for (int i = 0; i < EDITED; i++) {
        uint64_t state = (uint64_t)i;
        int64_t n = par_count(&edited[i]);
        DLTensor held = view(memory, edited[i].type, 1, &n), full;
        for (int64_t k = 0; k < n; k++) fine[i][k] = random_real(&state) * 8;
        set_doubles(&held, fine[i]);
        get_doubles(&held, fine[i]);
        memcpy(seen[i], fine[i], sizeof seen[i]);
        if (param == DTYPE_COUNT) continue;
        full = view(memory, param, 1, &n);
        set_doubles(&full, fine[i]);
        get_doubles(&full, seen[i]);
    }
}

/* What a rank makes of an element, or leaves alone. The value is exact in bf16. */
static int edits(int by, int r, int i, int64_t k)
{
    return by == 0 ? 0 : by == 1 ? r == 1 && k % 3 == 0 : (k + i) % 2 == 0;
}

static double edit(int r, int i, int64_t k)
{
    return -(double)(r * 48 + (k + i) % 47) - 16;
}

/* The bits of the shards, as doubles hold them; of an element that its owner edited, the edit. */
static void expect_written(struct rank *r, const struct kit *kit, int by, const char *when)
{
    for (int i = 0; i < EDITED; i++) {
        static _Thread_local int64_t places[LONG];
        static _Thread_local double got[LONG];
        int64_t n = par_places(&edited[i], kit->rank, kit->size, places);
        get_doubles(&kit->shard[i]->dl_tensor, got);
        for (int64_t j = 0; j < n; j++) {
            double want = edits(by, r->rank, i, places[j]) ? edit(r->rank, i, places[j]) : fine[i][places[j]];
            CHECK(memcmp(&got[j], &want, sizeof want) == 0, "%s, edits %d: '%s' at %lld is %a, not %a", when, by,
                  edited[i].name, (long long)places[j], got[j], want);
        }
    }
}

static void check_write_back(struct rank *r, fsdp_group *group, enum layout layout, enum dtype param, int by)
{
    fsdp_precision precision = {.struct_size = sizeof precision};
    if (param != DTYPE_COUNT) precision.param_dtype = dtype_to_dl(param);
    fsdp_model_options options = {.precision = &precision};
    fsdp_model *model = layout_model(group, layout, &options);
    if (!model) return;
    struct kit kit;
    char when[64];
    snprintf(when, sizeof when, "%s, %s", layout_names[layout], param == DTYPE_COUNT ? "as it is" : dtype_name(param));
    kit_make(model, "edited", edited, EDITED, 0, NULL, &kit);
    fine_fill(param);
    static _Thread_local int64_t places[LONG];
    static _Thread_local double values[LONG];
    for (int i = 0; i < EDITED; i++) {
        int64_t n = par_places(&edited[i], kit.rank, kit.size, places);
        for (int64_t j = 0; j < n; j++) values[j] = fine[i][places[j]];
        set_doubles(&kit.shard[i]->dl_tensor, values);
    }
    fsdp_work *work = NULL;
    OK(fsdp_unit_unshard(kit.unit, &work)); /* write_back waits for it */
    if (by == 0) OK(fsdp_unit_write_back(kit.unit));
    OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
    for (int i = 0; i < EDITED; i++) {
        get_doubles(&kit.full[i]->dl_tensor, values);
        for (int64_t k = 0; k < par_count(&edited[i]); k++)
            if (edits(by, r->rank, i, k)) values[k] = edit(r->rank, i, k);
        set_doubles(&kit.full[i]->dl_tensor, values);
    }
    OK(fsdp_unit_write_back(kit.unit));
    OK(fsdp_unit_write_back(kit.unit)); /* nothing is left to write */
    expect_written(r, &kit, by, when);
    OK(fsdp_unit_reshard(kit.unit));
    REFUSED(fsdp_unit_write_back(kit.unit), FSDP_ERR_STATE, "'edited'");

    /* All see what owners wrote; which rank an element's owner is follows from who holds it. */
    OK(fsdp_unit_pre_forward(kit.unit));
    int64_t *owners = calloc(LONG, sizeof *owners);
    for (int i = 0; i < EDITED; i++) {
        for (int o = 0; o < kit.size; o++) {
            int64_t n = par_places(&edited[i], o, kit.size, places);
            for (int64_t j = 0; j < n; j++) owners[places[j]] = o;
        }
        get_doubles(&kit.full[i]->dl_tensor, values);
        for (int64_t k = 0; k < par_count(&edited[i]); k++) {
            int owner = (int)owners[k] + r->rank - kit.rank; /* of this replica */
            double want = edits(by, owner, i, k) ? edit(owner, i, k) : seen[i][k];
            CHECK(values[k] == want, "%s: '%s' at %lld is %a, not %a", when, edited[i].name, (long long)k, values[k],
                  want);
        }
    }
    free(owners);
    OK(fsdp_unit_post_forward(kit.unit));
    OK(fsdp_model_finish_backward(model));
    expect_written(r, &kit, by, when);
    kit_drop(&kit);
    fsdp_model_release(model);
}

static void rank_write_back(struct rank *r)
{
    static const enum dtype params[] = {DTYPE_BF16, DTYPE_COUNT, DTYPE_F32, DTYPE_F64};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int p = 0; p < 4; p++)
            for (int by = 0; by < 3; by++) check_write_back(r, group, (enum layout)layout, params[p], by);
    fsdp_group_release(group);
}

Test(fsdp_values, edits_are_written_back_and_the_rest_keeps_its_precision)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_write_back, NULL);
}

/* summon_full_params(writeback=True): all ranks double every weight; training goes on from there. Signs of zeros and
 * what is not a number come through as well. */
static void rank_summon(struct rank *r)
{
    fsdp_precision precision = {.struct_size = sizeof precision, .param_dtype = dtype_to_dl(DTYPE_BF16)};
    fsdp_model_options options = {.precision = &precision};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, &options);
        if (!model) continue;
        struct par pars[] = {{.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}, .dim = 1},
                             {.name = "special", .type = DTYPE_F32, .ndim = 1, .shape = {6}}};
        struct kit kit;
        kit_make(model, "summoned", pars, 2, 0, NULL, &kit);
        OK(fsdp_unit_pre_forward(kit.unit));
        OK(fsdp_unit_post_forward(kit.unit));
        OK(fsdp_unit_unshard(kit.unit, NULL));
        double w[15], special[] = {-0.0, 0.0, (double)INFINITY, (double)NAN, 1, 1e-40}, got[15];
        get_doubles(&kit.full[0]->dl_tensor, w);
        for (int k = 0; k < 15; k++) w[k] *= 2;
        set_doubles(&kit.full[0]->dl_tensor, w);
        set_doubles(&kit.full[1]->dl_tensor, special);
        get_doubles(&kit.full[1]->dl_tensor, special); /* as bf16 holds them */
        OK(fsdp_unit_write_back(kit.unit));
        OK(fsdp_unit_reshard(kit.unit));
        for (int i = 0; i < 2; i++) {
            DLManagedTensorVersioned *whole;
            OK(fsdp_unit_gather_param(kit.unit, i, &whole));
            get_doubles(&whole->dl_tensor, got);
            const double *want = i ? special : w;
            for (int64_t k = 0; k < par_count(&pars[i]); k++)
                CHECK((isnan(got[k]) && isnan(want[k])) || (got[k] == want[k] && signbit(got[k]) == signbit(want[k])),
                      "%s: '%s' at %lld is %a, not %a", layout_names[layout], pars[i].name, (long long)k, got[k],
                      want[k]);
            whole->deleter(whole);
        }
        /* Backward computes with what was written: it was said by write_back. */
        OK(fsdp_unit_pre_backward(kit.unit));
        get_doubles(&kit.full[0]->dl_tensor, got);
        for (int k = 0; k < 15; k++) CHECK(got[k] == w[k], "backward sees %g, not %g", got[k], w[k]);
        OK(kit_give(&kit, r->rank, 1, NULL));
        OK(fsdp_model_finish_backward(model));
        kit_expect_grads(&kit, r->size, 1, 1, layout_names[layout]);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_values, full_parameters_are_summoned_edited_and_written_back)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_summon, NULL);
}

/* ---- casts */

static void expect_cast(fsdp_unit *unit, fsdp_cast_kind kind, const DLTensor *input, enum dtype want)
{
    DLManagedTensorVersioned *out = (DLManagedTensorVersioned *)(uintptr_t)1;
    OK(fsdp_unit_cast(unit, kind, input, &out));
    if (want == DTYPE_COUNT) {
        CHECK(!out, "cast %d: nothing to do", kind);
        return;
    }
    CHECK(out, "cast %d gives a tensor", kind);
    const DLTensor *t = &out->dl_tensor;
    CHECK(t->dtype.code == dtype_to_dl(want).code && t->dtype.bits == dtype_to_dl(want).bits && t->ndim == input->ndim,
          "cast %d: dtype", kind);
    double from[12], to[12];
    get_doubles(input, from);
    get_doubles(t, to);
    CHECK(elements(t) == elements(input) && (t->data != input->data || !elements(t)), "memory of its own");
    for (int64_t k = 0; k < elements(t); k++) CHECK(to[k] == rounded(want, from[k]), "cast %d: %a", kind, to[k]);
    out->deleter(out);
}

static void rank_casts(struct rank *r)
{
    fsdp_precision precision = {.struct_size = sizeof precision,
                                .param_dtype = dtype_to_dl(DTYPE_BF16),
                                .output_dtype = dtype_to_dl(DTYPE_F32),
                                .buffer_dtype = dtype_to_dl(DTYPE_F16)};
    fsdp_model_options options = {.precision = &precision};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = layout_model(group, LAYOUT_SHARED, &options);
    struct par pars[] = {{.name = "w", .type = DTYPE_F32, .ndim = 1, .shape = {4}}};
    fsdp_unit *unit;
    OK(kit_try(model, "u", pars, 1, 0, NULL, &unit));
    float values[24];
    int64_t shape[] = {3, 4}, strides[] = {1, 3}, gaps[] = {8, 2}, integers[] = {3, 4}, nothing[] = {0, 4};
    char low[64], flags[12] = {1, 0, 1};
    for (int k = 0; k < 24; k++) values[k] = (float)k * 1.003f - 9;
    DLTensor x = view(values, DTYPE_F32, 2, shape), turned = x, loose = x, h = view(low, DTYPE_BF16, 2, shape),
             mask = view(flags, DTYPE_BOOL, 2, shape), ids = view(integers, DTYPE_I64, 1, &shape[0]),
             scalar = view(values + 2, DTYPE_F32, 0, NULL), empty = view(NULL, DTYPE_F32, 2, nothing);
    ids.shape = &(int64_t){2};
    turned.strides = strides;
    loose.strides = gaps;
    OK(fsdp_copy(&x, &h));
    uint64_t before = operations_of(group);
    expect_cast(unit, FSDP_CAST_INPUT, &x, DTYPE_BF16);
    expect_cast(unit, FSDP_CAST_INPUT, &turned, DTYPE_BF16);
    expect_cast(unit, FSDP_CAST_INPUT, &loose, DTYPE_BF16);
    expect_cast(unit, FSDP_CAST_INPUT, &scalar, DTYPE_BF16);
    expect_cast(unit, FSDP_CAST_INPUT, &empty, DTYPE_BF16);
    expect_cast(unit, FSDP_CAST_INPUT, &h, DTYPE_COUNT);
    expect_cast(unit, FSDP_CAST_INPUT, &mask, DTYPE_COUNT);
    expect_cast(unit, FSDP_CAST_INPUT, &ids, DTYPE_COUNT);
    expect_cast(unit, FSDP_CAST_OUTPUT, &h, DTYPE_F32);
    expect_cast(unit, FSDP_CAST_OUTPUT, &x, DTYPE_COUNT);
    expect_cast(unit, FSDP_CAST_BUFFER, &x, DTYPE_F16);
    expect_cast(unit, FSDP_CAST_BUFFER, &ids, DTYPE_COUNT);
    DLManagedTensorVersioned *out = NULL, *kept;
    REFUSED(fsdp_unit_cast(unit, 3, &x, &out), FSDP_ERR_INVALID, "kind is 3");
    REFUSED(fsdp_unit_cast(unit, -1, &x, &out), FSDP_ERR_INVALID, "kind is -1");
    REFUSED(fsdp_unit_cast(unit, FSDP_CAST_INPUT, NULL, &out), FSDP_ERR_INVALID, "input");
    REFUSED(fsdp_unit_cast(unit, FSDP_CAST_INPUT, &x, NULL), FSDP_ERR_INVALID, "out is NULL");
    CHECK(!out && operations_of(group) == before, "casts are this rank's own affair");
    OK(fsdp_unit_cast(unit, FSDP_CAST_INPUT, &x, &kept)); /* outlives the unit */
    fsdp_unit_release(unit);

    precision.keep_inputs = 1;
    fsdp_unit_options own = {.struct_size = sizeof own, .precision = &precision};
    OK(kit_try(model, "u", pars, 1, 0, &own, &unit));
    expect_cast(unit, FSDP_CAST_INPUT, &x, DTYPE_COUNT);
    expect_cast(unit, FSDP_CAST_OUTPUT, &h, DTYPE_F32);
    fsdp_unit_release(unit);
    precision = (fsdp_precision){.struct_size = sizeof precision}; /* none at all */
    OK(kit_try(model, "u", pars, 1, 0, &own, &unit));
    for (fsdp_cast_kind kind = FSDP_CAST_INPUT; kind <= FSDP_CAST_BUFFER; kind++)
        expect_cast(unit, kind, &x, DTYPE_COUNT);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);
    double got[12];
    get_doubles(&kept->dl_tensor, got);
    CHECK(got[5] == rounded(DTYPE_BF16, (double)values[5]), "still there");
    kept->deleter(kept);
}

Test(fsdp_values, tensors_are_cast_as_the_precision_says)
{
    ranks_run(1, rank_casts, NULL);
    ranks_run(2, rank_casts, NULL);
}
