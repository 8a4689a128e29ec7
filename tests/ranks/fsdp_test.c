/* A unit's tensors and states, publication, gradients, and what is refused. Training is in fsdp_train_test.c, memory in
 * fsdp_memory_test.c. */
#include "fsdp_host.h"

#include <math.h>
#include <pthread.h>

TestSuite(fsdp, .timeout = RANKS_SECONDS + 30);

static const enum dtype float_types[] = {DTYPE_F64,  DTYPE_F32,      DTYPE_F16,
                                         DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_F8E5M2};
#define FLOAT_TYPES (int)(sizeof float_types / sizeof *float_types)

static const fsdp_model_options shared_kept = {.no_reshard_after_forward = 1}, in_private = {.private_unshard = 1},
                                private_kept = {.private_unshard = 1, .no_reshard_after_forward = 1}, shared = {0};
static const fsdp_model_options *const all_options[] = {&shared, &in_private, &shared_kept, &private_kept};

/* ---- tensors */

static const struct spec mixture[] = {
    {"even", DTYPE_F32, 2, {8, 3}, 0},  {"uneven", DTYPE_F64, 2, {7, 2}, 0}, {"short", DTYPE_BF16, 1, {2}, 0},
    {"none", DTYPE_F32, 1, {0}, 0},     {"flat", DTYPE_F32, 2, {3, 0}, 0},   {"one", DTYPE_F16, 1, {1}, 0},
    {"frozen", DTYPE_F8E5M2, 3, {5, 1, 3}, 1}, {"tail", DTYPE_F8E4M3FN, 1, {5}, 0},
};
#define MIXTURE (int)(sizeof mixture / sizeof *mixture)

static void check_tensor(const DLManagedTensorVersioned *managed, const struct spec *spec, int64_t rows)
{
    const DLTensor *t = &managed->dl_tensor;
    DLDataType type = dtype_to_dl(spec->type);
    CHECK(t->ndim == spec->ndim && t->shape[0] == rows, "'%s' has %lld rows", spec->name, (long long)t->shape[0]);
    for (int d = 1; d < t->ndim; d++) CHECK(t->shape[d] == spec->shape[d], "'%s' dimension %d", spec->name, d);
    CHECK(memcmp(&t->dtype, &type, sizeof type) == 0, "'%s' has another dtype", spec->name);
    CHECK(t->strides && t->byte_offset == 0 && !(managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY), "'%s'", spec->name);
    CHECK((elements(t) == 0) == (t->data == NULL), "'%s' data %p", spec->name, t->data);
    CHECK((uintptr_t)t->data % 64 == 0, "'%s' is not aligned", spec->name);
}

static void rank_tensors(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        struct host_unit u;
        host_unit_make(r, model, "mixture", mixture, MIXTURE, 3, &u);
        for (int i = 0; i < MIXTURE; i++) {
            int64_t begin, count, row = 1;
            spec_part(&mixture[i], r->rank, r->size, &begin, &count);
            for (int d = 1; d < mixture[i].ndim; d++) row *= mixture[i].shape[d];
            int64_t start, rows;
            OK(fsdp_shard_extent(mixture[i].shape[0], r->rank, r->size, &start, &rows));
            check_tensor(u.full[i], &mixture[i], mixture[i].shape[0]);
            check_tensor(u.shard[i], &mixture[i], rows);
            CHECK(start * row == begin, "extent");
            double values[32];
            get_doubles(&u.shard[i]->dl_tensor, values);
            for (int64_t k = 0; k < count; k++)
                CHECK(values[k] == value_of(mixture[i].type, 3 + i, begin + k), "shard of '%s' at %lld is %g",
                      mixture[i].name, (long long)k, values[k]);
            DLManagedTensorVersioned *grad = NULL;
            if (mixture[i].frozen) {
                REFUSED(fsdp_unit_param_grad(u.unit, i, &grad), FSDP_ERR_STATE, mixture[i].name);
                CHECK(!grad, "an output was written");
                continue;
            }
            check_tensor(u.grad[i], &mixture[i], rows);
            get_doubles(&u.grad[i]->dl_tensor, values);
            for (int64_t k = 0; k < count; k++) CHECK(values[k] == 0, "gradient of '%s' is not zero", mixture[i].name);
        }
        DLManagedTensorVersioned *no = NULL;
        REFUSED(fsdp_unit_param_full(u.unit, MIXTURE, &no), FSDP_ERR_INVALID, "index");
        REFUSED(fsdp_unit_param_shard(u.unit, -1, &no), FSDP_ERR_INVALID, "index");
        for (int round = 0; round < 3; round++) {
            OK(fsdp_unit_pre_forward(u.unit));
            expect_full(&u, 3 + round, "in forward");
            OK(fsdp_unit_post_forward(u.unit));
            OK(fsdp_unit_pre_backward(u.unit));
            expect_full(&u, 3 + round, "in backward");
            OK(backward_nothing(&u));
            OK(fsdp_model_finish_backward(model));
            set_shards(&u, 4 + round);
            for (int i = 0; i < MIXTURE; i++) {
                DLManagedTensorVersioned *again;
                OK(fsdp_unit_param_full(u.unit, i, &again));
                CHECK(again->dl_tensor.data == u.full[i]->dl_tensor.data, "'%s' has moved", mixture[i].name);
                again->deleter(again);
                OK(fsdp_unit_param_shard(u.unit, i, &again));
                CHECK(again->dl_tensor.data == u.shard[i]->dl_tensor.data, "'%s' has moved", mixture[i].name);
                again->deleter(again);
            }
        }
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, tensors_have_their_shapes_values_and_places)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_tensors, NULL);
}

static void rank_each_dtype(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++)
        for (int t = 0; t < FLOAT_TYPES; t++) {
            struct spec specs[] = {{"matrix", float_types[t], 2, {13, 9}, 0}, {"vector", float_types[t], 1, {7}, 0}};
            fsdp_model *model = model_make(group, all_options[o]);
            struct host_unit u;
            host_unit_make(r, model, NULL, specs, 2, t, &u);
            OK(fsdp_unit_unshard(u.unit, NULL));
            expect_full(&u, t, dtype_name(float_types[t]));
            OK(fsdp_unit_reshard(u.unit));
            host_unit_drop(&u);
            fsdp_model_release(model);
        }
    fsdp_group_release(group);
}

Test(fsdp, every_float_dtype_is_gathered)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_each_dtype, NULL);
}

/* Values come from any strides; negative and zero ones too. */
static void rank_strided_source(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    float base[6 * 5];
    for (int i = 0; i < 30; i++) base[i] = (float)i;
    int64_t shape[] = {5, 6}, transposed[] = {1, 5}, expanded[] = {0, 1}, backwards[] = {-6, 1};
    const int64_t *strides[] = {transposed, expanded, backwards};
    static const char *const names[] = {"transposed", "expanded", "backwards"};
    fsdp_param params[3];
    DLTensor tensors[3];
    for (int i = 0; i < 3; i++) {
        tensors[i] = view(i == 2 ? base + 24 : base, DTYPE_F32, 2, shape);
        tensors[i].strides = (int64_t *)(uintptr_t)strides[i];
        params[i] = (fsdp_param){.struct_size = sizeof *params, .name = names[i], .full = &tensors[i]};
    }
    fsdp_unit *unit;
    OK(fsdp_unit_create(model, "strided", params, 3, &unit));
    OK(fsdp_unit_unshard(unit, NULL));
    for (int i = 0; i < 3; i++) {
        DLManagedTensorVersioned *full;
        OK(fsdp_unit_param_full(unit, i, &full));
        double got[30], want[30];
        get_doubles(&full->dl_tensor, got);
        get_doubles(&tensors[i], want);
        CHECK(memcmp(got, want, sizeof got) == 0, "%s", names[i]);
        full->deleter(full);
    }
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp, initial_values_may_be_strided) { ranks_run(3, rank_strided_source, NULL); }

static void rank_empty_unit(struct rank *r)
{
    static const struct spec specs[] = {{"a", DTYPE_F32, 1, {0}, 0}, {"b", DTYPE_F64, 2, {3, 0}, 0}};
    static const struct spec some[] = {{"c", DTYPE_F32, 1, {3}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        struct host_unit empty, u;
        host_unit_make(r, model, "empty", specs, 2, 0, &empty);
        host_unit_make(r, model, "some", some, 1, 0, &u);
        for (int round = 0; round < 3; round++) {
            OK(fsdp_model_set_gradient_sync(model, round % 2 == 0));
            OK(fsdp_unit_pre_forward(empty.unit));
            OK(fsdp_unit_post_forward(empty.unit));
            OK(fsdp_unit_pre_backward(empty.unit));
            const DLTensor *grads[] = {&empty.full[0]->dl_tensor, &empty.full[1]->dl_tensor};
            fsdp_work *work;
            OK(fsdp_unit_post_backward(empty.unit, grads, 2, &work));
            OK(fsdp_work_wait(work, -1));
            fsdp_work_release(work);
            OK(fsdp_model_finish_backward(model));
            CHECK(state_of(&empty) == FSDP_UNIT_SHARDED, "state");
        }
        OK(fsdp_unit_unshard(u.unit, NULL));
        expect_full(&u, 0, "beside an empty unit");
        fsdp_memory_info memory = memory_of(model);
        CHECK(memory.total_parameters == 12, "%lld bytes", (long long)memory.total_parameters);
        host_unit_drop(&empty);
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, a_unit_without_any_element_works)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_empty_unit, NULL);
}

static void *drop_tensor(void *tensor)
{
    DLManagedTensorVersioned *t = tensor;
    t->deleter(t);
    return NULL;
}

static void rank_outlive(struct rank *r)
{
    for (int o = 0; o < 2; o++) {
        fsdp_group *group = group_make(r, 0, 0);
        fsdp_model *model = model_make(group, all_options[o]);
        struct host_unit u;
        host_unit_make(r, model, "gone", mixture, MIXTURE, 5, &u);
        OK(fsdp_unit_unshard(u.unit, NULL));
        fsdp_unit_release(u.unit);
        fsdp_model_release(model);
        fsdp_group_release(group);
        if (r->rank == 1) nap(2000); /* peers may be gone by then */
        expect_full(&u, 5, "after the unit's release");
        uint64_t random = 1;
        scribble(&u, &random);
        set_shards(&u, 6);
        for (int i = 0; i < MIXTURE; i++) {
            u.shard[i]->deleter(u.shard[i]);
            if (u.grad[i]) u.grad[i]->deleter(u.grad[i]);
        }
        pthread_t threads[MIXTURE]; /* the last one anywhere takes the unit, the model and the group along */
        for (int i = 0; i < MIXTURE; i++) CHECK(!pthread_create(&threads[i], NULL, drop_tensor, u.full[i]), "thread");
        for (int i = 0; i < MIXTURE; i++) pthread_join(threads[i], NULL);
    }
}

Test(fsdp, tensors_outlive_unit_model_and_group) { ranks_run(2, rank_outlive, NULL); }

/* ---- states: any order of calls, checked against a model of the states */

struct expected {
    fsdp_unit_state state;
    int current, shown, held; /* versions of the values: in the full views, in the shards */
    fsdp_work *work;
};

struct trial {
    struct rank *r;
    fsdp_group *group;
    fsdp_model *model;
    const fsdp_model_options *options;
    uint64_t operations;
    struct host_unit units[2];
    struct expected expected[2];
    char log[4096]; /* the calls so far */
    size_t logged;
};

static void note(struct trial *t, const char *what, int unit)
{
    if (t->logged > sizeof t->log - 64) t->logged = 0;
    t->logged += (size_t)snprintf(t->log + t->logged, 64, " %s%d", what, unit);
}

static void will_finish(struct trial *t, int i)
{
    struct expected *e = &t->expected[i];
    if (e->state != FSDP_UNIT_UNSHARDING) return;
    e->state = FSDP_UNIT_UNSHARDED;
    if (e->work) fsdp_work_release(e->work);
    e->work = NULL;
}

static void will_unshard(struct trial *t, int i, int asynchronous)
{
    struct expected *e = &t->expected[i];
    will_finish(t, i);
    if (!e->current) {
        t->operations++;
        e->shown = e->held;
        e->current = 1;
        e->state = asynchronous ? FSDP_UNIT_UNSHARDING : FSDP_UNIT_UNSHARDED;
    } else {
        e->state = FSDP_UNIT_UNSHARDED;
    }
}

static void will_reshard(struct trial *t, int i)
{
    struct expected *e = &t->expected[i];
    will_finish(t, i);
    if (e->state == FSDP_UNIT_UNSHARDED && t->options->private_unshard) e->current = 0;
    e->state = FSDP_UNIT_SHARDED;
}

static void check_units(struct trial *t)
{
    int pending = 0;
    for (int i = 0; i < 2; i++) {
        struct expected *e = &t->expected[i];
        fsdp_unit_state state = state_of(&t->units[i]);
        if (e->state == FSDP_UNIT_UNSHARDING) {
            pending = 1;
            CHECK(state == FSDP_UNIT_UNSHARDING || state == FSDP_UNIT_UNSHARDED, "unit %d is sharded after%s", i, t->log);
            continue;
        }
        CHECK(state == e->state, "unit %d is in state %d, not %d, after%s", i, state, e->state, t->log);
        if (state == FSDP_UNIT_UNSHARDED) expect_full(&t->units[i], e->shown * 7 + i, t->log);
    }
    if (!pending)
        CHECK(operations_of(t->group) == t->operations, "%llu operations, not %llu, after%s",
              (unsigned long long)operations_of(t->group), (unsigned long long)t->operations, t->log);
}

static void random_call(struct trial *t, uint64_t *common, uint64_t *own)
{
    int i = random_below(common, 2), call = random_below(common, 12);
    struct host_unit *u = &t->units[i];
    struct expected *e = &t->expected[i];
    switch (call) {
    case 0:
    case 1:
        note(t, call ? "pre_backward" : "pre_forward", i);
        will_unshard(t, i, 0);
        OK(call ? fsdp_unit_pre_backward(u->unit) : fsdp_unit_pre_forward(u->unit));
        break;
    case 2:
        note(t, "post_forward", i);
        if (!t->options->no_reshard_after_forward) will_reshard(t, i);
        OK(fsdp_unit_post_forward(u->unit));
        break;
    case 3:
        note(t, "post_backward", i);
        t->operations++;
        will_reshard(t, i);
        OK(backward_nothing(u));
        break;
    case 4:
    case 5:
        note(t, "unshard", i);
        will_unshard(t, i, 0);
        OK(fsdp_unit_unshard(u->unit, NULL));
        break;
    case 6:
    case 7: {
        note(t, "begin_unshard", i);
        fsdp_work *work;
        OK(fsdp_unit_unshard(u->unit, &work));
        if (e->state == FSDP_UNIT_UNSHARDING) { /* the same one */
            fsdp_work_release(work);
            break;
        }
        will_unshard(t, i, 1);
        if (e->state == FSDP_UNIT_UNSHARDING && random_below(common, 2))
            e->work = work;
        else
            fsdp_work_release(work); /* early */
        break;
    }
    case 8:
        if (!e->work) break;
        note(t, "wait", i);
        OK(fsdp_work_wait(e->work, -1));
        CHECK(state_of(u) == FSDP_UNIT_UNSHARDED, "waited, but the state is %d", state_of(u));
        expect_full(u, e->shown * 7 + i, "after waiting");
        break;
    case 9:
        if (e->work) /* until then the shard is read */
            OK(fsdp_work_wait(e->work, -1));
        else if (e->state == FSDP_UNIT_UNSHARDING)
            OK(fsdp_unit_pre_forward(u->unit));
        will_finish(t, i);
        note(t, "shard_changed", i);
        e->held++;
        set_shards(u, e->held * 7 + i);
        OK(fsdp_unit_shard_changed(u->unit));
        e->current = 0;
        break;
    case 10:
        note(t, "finish_backward", 0);
        for (int k = 0; k < 2; k++) {
            will_reshard(t, k);
            t->expected[k].current = 0;
        }
        OK(fsdp_model_finish_backward(t->model));
        break;
    case 11:
        note(t, "reshard", i);
        will_reshard(t, i);
        OK(fsdp_unit_reshard(u->unit));
        break;
    }
    if (random_below(own, 8) == 0) nap(random_below(own, 400));
    check_units(t);
    /* Edits are this rank's own, and gone with the next reshard; which must come before the next look. */
    if (e->state == FSDP_UNIT_UNSHARDED && random_below(common, 3) == 0) {
        scribble(u, own);
        note(t, "edit+reshard", i);
        will_reshard(t, i);
        OK(fsdp_unit_reshard(u->unit));
    }
}

static void rank_states(struct rank *r)
{
    static const struct spec first[] = {{"a", DTYPE_F32, 2, {70, 40}, 0}, {"b", DTYPE_F64, 1, {5}, 0}},
                             second[] = {{"c", DTYPE_BF16, 2, {9, 300}, 0}, {"d", DTYPE_F32, 1, {3}, 1}};
    uint64_t seed = *(const uint64_t *)r->argument, common = seed, own = seed ^ (uint64_t)(r->rank + 1) << 40;
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 4; o++) {
        struct trial *t = calloc(1, sizeof *t);
        t->r = r;
        t->group = group;
        t->options = all_options[o];
        t->model = model_make(group, t->options);
        t->logged = (size_t)snprintf(t->log, 64, " (FSDP_TEST_SEED=%llu, options %d)", (unsigned long long)seed, o);
        host_unit_make(r, t->model, "first", first, 2, 0, &t->units[0]);
        host_unit_make(r, t->model, "second", second, 2, 1, &t->units[1]);
        t->operations = operations_of(group);
        for (int i = 0; i < 120; i++) random_call(t, &common, &own);
        OK(fsdp_model_finish_backward(t->model));
        for (int i = 0; i < 2; i++) {
            will_finish(t, i);
            host_unit_drop(&t->units[i]);
        }
        fsdp_model_release(t->model);
        free(t);
    }
    fsdp_group_release(group);
}

Test(fsdp, hooks_in_any_order_keep_states_values_and_traffic)
{
    uint64_t seed = random_seed();
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_states, &seed);
}

/* ---- publication */

static void rank_ahead(struct rank *r)
{
    static const struct spec specs[] = {{"w", DTYPE_F32, 2, {64, 64}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct host_unit u;
    host_unit_make(r, model, "u", specs, 1, 0, &u);
    for (int round = 0; round < 6; round++) {
        OK(fsdp_unit_pre_forward(u.unit));
        if (round % r->size != r->rank) /* all but one linger while that one goes on to the next publication */
            for (int i = 0; i < 10; i++) {
                expect_full(&u, round, "while a peer is ahead");
                nap(300);
            }
        OK(fsdp_model_finish_backward(model));
        set_shards(&u, round + 1);
    }
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp, a_rank_ahead_changes_nothing_that_others_read) { ranks_run(3, rank_ahead, NULL); }

/* Bytes that are edited: the first page in part, the last byte, a page in the middle, all. */
static void rank_edits(struct rank *r)
{
    static const struct spec specs[] = {{"w", DTYPE_F32, 2, {50, 100}, 0}, {"v", DTYPE_F32, 1, {1000}, 0}};
    static const struct {
        size_t at, bytes;
    } edits[] = {{4, 8}, {19999, 1}, {4096, 4096}, {0, 20000}, {4095, 2}, {0, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        struct host_unit u;
        host_unit_make(r, model, "u", specs, 2, 0, &u);
        char *data = u.full[0]->dl_tensor.data;
        for (size_t e = 0; e < sizeof edits / sizeof *edits; e++) {
            OK(fsdp_unit_unshard(u.unit, NULL));
            if (r->rank == 1) memset(data + edits[e].at, 0x77, edits[e].bytes);
            OK(fsdp_barrier(group, NULL));
            if (r->rank != 1) expect_full(&u, 0, "while a peer edits");
            if (r->rank == 1 && edits[e].bytes) CHECK(data[edits[e].at] == 0x77, "an edit did not hold");
            OK(fsdp_barrier(group, NULL));
            OK(fsdp_unit_reshard(u.unit));
            uint64_t before = operations_of(group);
            OK(fsdp_unit_unshard(u.unit, NULL)); /* without publishing anew, where it is shared */
            CHECK(operations_of(group) == before + (o == 1), "operations");
            expect_full(&u, 0, "after an edit was dropped");
            OK(fsdp_unit_reshard(u.unit));
        }
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, edits_of_the_full_view_are_private_and_dropped)
{
    for (int n = 2; n <= 3; n++) ranks_run(n, rank_edits, NULL);
}

/* ---- gradients, against sums made here; all values are whole, so every order of addition is exact */

static const struct spec trained[] = {{"w", DTYPE_F32, 2, {5, 3}, 0},     {"h", DTYPE_BF16, 2, {3, 4}, 0},
                                      {"frozen", DTYPE_F32, 1, {6}, 1},   {"d", DTYPE_F64, 1, {1}, 0},
                                      {"e", DTYPE_F16, 1, {4}, 0},        {"none", DTYPE_F32, 2, {0, 2}, 0},
                                      {"q", DTYPE_F8E5M2, 1, {2}, 0}};
#define TRAINED (int)(sizeof trained / sizeof *trained)
#define MOST 16 /* elements of the largest of them */

struct sums {
    double pending[4][TRAINED][MOST]; /* each rank's unsynced gradients */
    double held[TRAINED][MOST];       /* the sharded ones, of all ranks */
};

/* Rank r's gradient in micro-batch m: none for some parameters. */
static int has_gradient(uint64_t seed, int r, int m, int i)
{
    uint64_t s = seed + (uint64_t)(r * 1000 + m * 100 + i);
    return random_below(&s, 4) != 0 && !trained[i].frozen;
}

static double gradient(int r, int m, int i, int64_t k) { return (double)((r * 5 + m * 3 + i + k * 2) % 8) - 2; }

static void add_microbatch(struct sums *s, uint64_t seed, int size, int m, int sync, double divisor)
{
    for (int i = 0; i < TRAINED; i++)
        for (int64_t k = 0; k < spec_count(&trained[i]) && !trained[i].frozen; k++) {
            double sum = 0;
            for (int r = 0; r < size; r++) {
                if (has_gradient(seed, r, m, i)) s->pending[r][i][k] += gradient(r, m, i, k);
                sum += s->pending[r][i][k];
                if (sync) s->pending[r][i][k] = 0;
            }
            if (sync) s->held[i][k] = rounded(trained[i].type, s->held[i][k] + sum / divisor);
        }
}

/* Give this rank's gradients; strided where `strided`: every other element of a larger array. */
static fsdp_status give_gradients(const struct host_unit *u, uint64_t seed, int m, int strided, fsdp_work **work,
                                  char *memory)
{
    DLTensor tensors[TRAINED];
    int64_t strides[TRAINED][4];
    const DLTensor *grads[TRAINED] = {0};
    for (int i = 0; i < TRAINED; i++) {
        if (!has_gradient(seed, u->rank, m, i)) continue;
        tensors[i] = view(memory + i * MOST * 16, trained[i].type, trained[i].ndim, trained[i].shape);
        for (int64_t d = trained[i].ndim - 1, step = 2; d >= 0; step *= trained[i].shape[d], d--) strides[i][d] = step;
        if (strided) tensors[i].strides = strides[i];
        double values[MOST];
        for (int64_t k = 0; k < spec_count(&trained[i]); k++) values[k] = gradient(u->rank, m, i, k);
        set_doubles(&tensors[i], values);
        grads[i] = &tensors[i];
    }
    return fsdp_unit_post_backward(u->unit, grads, TRAINED, work);
}

static void expect_sums(const struct host_unit *u, const struct sums *s, const char *when)
{
    for (int i = 0; i < TRAINED; i++) {
        if (trained[i].frozen) continue;
        int64_t begin, count;
        spec_part(&trained[i], u->rank, u->size, &begin, &count);
        double got[MOST];
        get_doubles(&u->grad[i]->dl_tensor, got);
        for (int64_t k = 0; k < count; k++)
            CHECK(got[k] == s->held[i][begin + k], "%s: gradient of '%s' at %lld is %g, not %g", when, trained[i].name,
                  (long long)(begin + k), got[k], s->held[i][begin + k]);
    }
}

static void rank_gradients(struct rank *r)
{
    static const char *const schedules[] = {"S", "SS", "NS", "NNS", "SNS", "SNNSNS", "NSNS", "SNSN"};
    uint64_t seed = *(const uint64_t *)r->argument;
    fsdp_group *group = group_make(r, 0, 0);
    for (int how = 0; how < 4; how++) { /* strided or not, synchronous or not */
        fsdp_model_options options = {.gradient_divisor = how == 3 ? 8 : 1, .private_unshard = how == 2};
        fsdp_model *model = model_make(group, &options);
        struct host_unit u;
        host_unit_make(r, model, "u", trained, TRAINED, 0, &u);
        for (size_t c = 0; c < sizeof schedules / sizeof *schedules; c++) {
            struct sums sums = {0};
            OK(fsdp_model_zero_grad(model));
            char when[96];
            snprintf(when, sizeof when, "%s, way %d, FSDP_TEST_SEED=%llu", schedules[c], how, (unsigned long long)seed);
            int length = (int)strlen(schedules[c]);
            char *memory = calloc(MOST * 16 * TRAINED, (size_t)length);
            for (int m = 0; m < length; m++) {
                int sync = schedules[c][m] == 'S';
                OK(fsdp_model_set_gradient_sync(model, sync));
                OK(fsdp_unit_pre_forward(u.unit));
                OK(fsdp_unit_post_forward(u.unit));
                OK(fsdp_unit_pre_backward(u.unit));
                fsdp_work *work = NULL;
                OK(give_gradients(&u, seed, m, how == 1, how >= 2 ? &work : NULL, memory + MOST * 16 * TRAINED * m));
                fsdp_work_release(work);
                CHECK(state_of(&u) == FSDP_UNIT_SHARDED, "unsharded after backward");
                if (m % 2) OK(fsdp_model_finish_backward(model)); /* not needed between micro-batches */
                add_microbatch(&sums, seed, r->size, m, sync, options.gradient_divisor);
            }
            OK(fsdp_model_finish_backward(model));
            expect_sums(&u, &sums, when);
            free(memory);
        }
        OK(fsdp_model_set_gradient_sync(model, 1));
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, gradients_add_up_in_any_schedule)
{
    uint64_t seed = random_seed();
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_gradients, &seed);
}

static void rank_rounding(struct rank *r)
{
    static const struct spec specs[] = {{"b", DTYPE_BF16, 1, {4}, 0}, {"h", DTYPE_F16, 1, {4}, 0}, {"f", DTYPE_F32, 1, {3}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL); /* the default divisor: the mean */
    struct host_unit u;
    host_unit_make(r, model, "u", specs, 3, 0, &u);
    for (int large = 0; large < r->size; large++) { /* A12: whichever rank holds the large one */
        OK(fsdp_model_zero_grad(model));
        char memory[3][16];
        double bf16[4], f16[4], f32[3];
        for (int k = 0; k < 4; k++) bf16[k] = r->rank == large ? 1024 : 3, f16[k] = 40000;
        for (int k = 0; k < 3; k++) f32[k] = (double)r->rank + 0.5;
        DLTensor t[] = {view(memory[0], DTYPE_BF16, 1, specs[0].shape), view(memory[1], DTYPE_F16, 1, specs[1].shape),
                        view(memory[2], DTYPE_F32, 1, specs[2].shape)};
        set_doubles(&t[0], bf16);
        set_doubles(&t[1], f16);
        set_doubles(&t[2], f32);
        const DLTensor *grads[] = {&t[0], &t[1], &t[2]};
        OK(fsdp_unit_post_backward(u.unit, grads, 3, NULL));
        double got[4], want[] = {rounded(DTYPE_BF16, (double)(float)((1024.0 + 3 * (r->size - 1)) / r->size)),
                                 rounded(DTYPE_F16, 40000), (double)(float)r->size / 2};
        for (int i = 0; i < 3; i++) {
            get_doubles(&u.grad[i]->dl_tensor, got);
            for (int64_t k = 0; k < elements(&u.grad[i]->dl_tensor); k++)
                CHECK(got[k] == want[i], "mean of '%s' is %.9g, not %.9g", specs[i].name, got[k], want[i]);
        }
    }
    /* Without sync, small bf16 gradients accumulate in f32 and are rounded once: 256 and eight times 0.5. */
    OK(fsdp_model_zero_grad(model));
    for (int m = 0; m < 9; m++) {
        OK(fsdp_model_set_gradient_sync(model, m == 8));
        char memory[8];
        double values[4];
        for (int k = 0; k < 4; k++) values[k] = m == 0 ? 256 : 0.5;
        DLTensor t = view(memory, DTYPE_BF16, 1, specs[0].shape);
        set_doubles(&t, values);
        const DLTensor *grads[] = {&t, NULL, NULL};
        OK(fsdp_unit_post_backward(u.unit, grads, 3, NULL));
    }
    double got[4];
    get_doubles(&u.grad[0]->dl_tensor, got);
    for (int64_t k = 0; k < elements(&u.grad[0]->dl_tensor); k++) CHECK(got[k] == 260, "accumulated %g, not 260", got[k]);
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp, gradients_are_rounded_once_from_f32)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_rounding, NULL);
}

/* Reductions of several units go on while others begin. Large enough for staging and direct reads. */
static void rank_in_flight(struct rank *r)
{
    const int *direct_read = r->argument;
    fsdp_group *group = group_make(r, *direct_read, 64 << 10);
    fsdp_model *model = model_make(group, NULL);
    enum { UNITS = 4 };
    struct host_unit units[UNITS];
    struct spec specs[UNITS] = {0};
    char names[UNITS][8];
    float *memory[2][UNITS];
    int64_t rows = 301, row = 257;
    for (int i = 0; i < UNITS; i++) {
        snprintf(names[i], 8, "w%d", i);
        specs[i] = (struct spec){names[i], DTYPE_F32, 2, {rows, row}, 0};
        host_unit_make(r, model, NULL, &specs[i], 1, i, &units[i]);
        for (int micro = 0; micro < 2; micro++) memory[micro][i] = malloc((size_t)(rows * row) * sizeof(float));
    }
    for (int round = 0; round < 3; round++) {
        OK(fsdp_model_zero_grad(model));
        for (int micro = 0; micro < 2; micro++) {
            for (int i = UNITS - 1; i >= 0; i--) {
                fsdp_work *work;
                OK(fsdp_unit_unshard(units[i].unit, &work));
                fsdp_work_release(work);
                for (int64_t k = 0; k < rows * row; k++) memory[micro][i][k] = (float)((k + i + r->rank) % 1000);
                DLTensor t = view(memory[micro][i], DTYPE_F32, 2, specs[i].shape);
                const DLTensor *grads[] = {&t};
                OK(fsdp_unit_post_backward(units[i].unit, grads, 1, &work));
                if (i % 2) OK(fsdp_work_wait(work, -1));
                fsdp_work_release(work);
            }
        }
        OK(fsdp_model_finish_backward(model));
        for (int i = 0; i < UNITS; i++) {
            int64_t begin, count;
            spec_part(&specs[i], r->rank, r->size, &begin, &count);
            const float *grad = units[i].grad[0]->dl_tensor.data;
            for (int64_t k = 0; k < count; k++) {
                float sum = 0;
                for (int s = 0; s < r->size; s++) sum += (float)((begin + k + i + s) % 1000);
                float want = sum / (float)r->size;
                want += sum / (float)r->size;
                CHECK(grad[k] == want, "unit %d at %lld: %g, not %g", i, (long long)k, (double)grad[k], (double)want);
            }
        }
    }
    for (int i = 0; i < UNITS; i++) {
        host_unit_drop(&units[i]);
        for (int micro = 0; micro < 2; micro++) free(memory[micro][i]);
    }
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp, reductions_of_several_units_in_flight)
{
    for (int direct_read = 0; direct_read <= 2; direct_read++)
        for (int n = 1; n <= 3; n++)
            if (n > 1 || direct_read == 0) ranks_run(n, rank_in_flight, &direct_read);
}

/* ---- refusals */

static void rank_refused(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model_options bad = {.struct_size = sizeof bad};
    fsdp_model *none = NULL;
    static const double divisors[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        bad.gradient_divisor = divisors[i];
        REFUSED(fsdp_model_create(group, &bad, &none), FSDP_ERR_INVALID, "gradient_divisor");
    }
    fsdp_model *model = model_make(group, &(fsdp_model_options){.gradient_divisor = 1});
    struct host_unit u;
    host_unit_make(r, model, "u", trained, TRAINED, 0, &u);

    /* Units. Each rank is refused by itself: nobody waits for it. */
    static const struct spec repeated[] = {{"new", DTYPE_F32, 1, {3}, 0}, {"new", DTYPE_F32, 1, {4}, 0}};
    static const struct spec taken[] = {{"new", DTYPE_F32, 1, {3}, 0}, {"h", DTYPE_F32, 1, {4}, 0}};
    static const struct spec whole[] = {{"new", DTYPE_I32, 1, {3}, 0}}, scalar[] = {{"new", DTYPE_F32, 0, {0}, 0}};
    static const struct spec nameless[] = {{"", DTYPE_F32, 1, {3}, 0}}, complex[] = {{"new", DTYPE_C64, 1, {3}, 0}};
    fsdp_unit *unit = NULL;
    uint64_t before = operations_of(group);
    REFUSED(unit_try(model, "v", repeated, 2, 0, &unit), FSDP_ERR_INVALID, "both named 'new'");
    REFUSED(unit_try(model, "v", taken, 2, 0, &unit), FSDP_ERR_INVALID, "'h' is managed by unit 'u'");
    REFUSED(unit_try(model, "v", whole, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "'new' is int32");
    REFUSED(unit_try(model, "v", complex, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "'new' is complex64");
    REFUSED(unit_try(model, "v", scalar, 1, 0, &unit), FSDP_ERR_INVALID, "'new' is 0-dim");
    REFUSED(unit_try(model, "v", nameless, 1, 0, &unit), FSDP_ERR_INVALID, "params[0].name");
    REFUSED(fsdp_unit_create(model, "v", NULL, 1, &unit), FSDP_ERR_INVALID, "params");
    fsdp_param one = {.struct_size = sizeof one, .name = "x"};
    REFUSED(fsdp_unit_create(model, "v", &one, 1, &unit), FSDP_ERR_INVALID, "params[0].full");
    one.full = &u.shard[0]->dl_tensor;
    REFUSED(fsdp_unit_create(model, "v", &one, 0, &unit), FSDP_ERR_INVALID, "n is 0");
    one.reserved = 1;
    REFUSED(fsdp_unit_create(model, "v", &one, 1, &unit), FSDP_ERR_INVALID, "reserved");
    CHECK(!unit && operations_of(group) == before, "a refused call left something");
    if (r->rank == r->size - 1) REFUSED(unit_try(model, "v", whole, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "int32");

    /* Gradients. */
    struct sums sums = {0};
    char *memory = calloc(TRAINED, MOST * 16);
    OK(give_gradients(&u, 0, 0, 0, NULL, memory));
    add_microbatch(&sums, 0, r->size, 0, 1, 1);
    before = operations_of(group);
    DLTensor wrong_shape = view(memory, DTYPE_BF16, 2, (int64_t[]){4, 3}), wrong_type = u.full[0]->dl_tensor,
             good = u.full[0]->dl_tensor, device = u.full[1]->dl_tensor, fewer = view(memory, DTYPE_BF16, 1, (int64_t[]){12});
    device.device.device_type = kDLCUDA;
    wrong_type.dtype = dtype_to_dl(DTYPE_F64);
    const DLTensor *grads[TRAINED] = {&good};
    const struct {
        const DLTensor *grad;
        fsdp_status status;
        const char *word;
    } refused[] = {{&wrong_shape, FSDP_ERR_INVALID, "grads[1] (of 'h') is (4, 3) bfloat16: it must be as the parameter, (3, 4)"},
                   {&fewer, FSDP_ERR_INVALID, "(of 'h')"},
                   {&wrong_type, FSDP_ERR_INVALID, "(of 'h')"},
                   {&device, FSDP_ERR_UNSUPPORTED, "(of 'h')"}};
    for (int sync = 0; sync < 2; sync++) {
        OK(fsdp_model_set_gradient_sync(model, sync));
        fsdp_work *work = NULL;
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
            grads[1] = refused[i].grad;
            REFUSED(fsdp_unit_post_backward(u.unit, grads, TRAINED, i % 2 ? &work : NULL), refused[i].status, refused[i].word);
        }
        grads[1] = NULL;
        REFUSED(fsdp_unit_post_backward(u.unit, grads, TRAINED - 1, NULL), FSDP_ERR_INVALID, "n is 6");
        REFUSED(fsdp_unit_post_backward(u.unit, NULL, TRAINED, NULL), FSDP_ERR_INVALID, "grads");
        CHECK(!work, "an output was written");
    }
    REFUSED(fsdp_model_set_gradient_sync(model, 2), FSDP_ERR_INVALID, "sync");
    CHECK(operations_of(group) == before, "operations");
    OK(give_gradients(&u, 0, 1, 0, NULL, memory)); /* had a refused one been accumulated, it would show here */
    add_microbatch(&sums, 0, r->size, 1, 1, 1);
    expect_sums(&u, &sums, "after refusals");
    free(memory);

    host_unit_drop(&u);
    /* The names are free again once the unit and its tensors are gone. */
    host_unit_make(r, model, "again", trained, TRAINED, 1, &u);
    OK(fsdp_unit_unshard(u.unit, NULL));
    expect_full(&u, 1, "made again");
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp, bad_arguments_are_refused_by_name_and_change_nothing)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_refused, NULL);
}

/* Ranks that make different units: each variation on the last rank only. */
static void rank_differ(struct rank *r)
{
    static const struct spec usual[] = {{"a", DTYPE_F32, 2, {4, 6}, 0}, {"b", DTYPE_F32, 1, {5}, 0}};
    static const struct spec variations[][2] = {
        {{"A", DTYPE_F32, 2, {4, 6}, 0}, {"b", DTYPE_F32, 1, {5}, 0}},
        {{"a", DTYPE_F32, 2, {6, 4}, 0}, {"b", DTYPE_F32, 1, {5}, 0}},
        {{"a", DTYPE_F32, 1, {24}, 0}, {"b", DTYPE_F32, 1, {5}, 0}},
        {{"a", DTYPE_F32, 2, {4, 6}, 0}, {"b", DTYPE_BF16, 1, {5}, 0}},
        {{"a", DTYPE_F32, 2, {4, 6}, 1}, {"b", DTYPE_F32, 1, {5}, 0}},
        {{"b", DTYPE_F32, 1, {5}, 0}, {"a", DTYPE_F32, 2, {4, 6}, 0}},
    };
    enum { N = sizeof variations / sizeof *variations };
    int odd = r->rank == r->size - 1;
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        fsdp_unit *unit = NULL;
        for (int v = 0; v < N; v++)
            REFUSED(unit_try(model, NULL, odd ? variations[v] : usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "create_unit of unit 'unit0'");
        REFUSED(unit_try(model, odd ? "other" : NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "'other'");
        REFUSED(unit_try(model, NULL, usual, odd ? 1 : 2, 0, &unit), FSDP_ERR_MISMATCH, "unit0");
        REFUSED(odd ? fsdp_barrier(group, NULL) : unit_try(model, NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "barrier");
        CHECK(!unit, "an output was written");

        /* Options that differ are seen, too. */
        const fsdp_model_options others[] = {{.gradient_divisor = 3.5}, {.private_unshard = !all_options[o]->private_unshard}};
        for (int i = 0; i < 2; i++) {
            fsdp_model *strange = model_make(group, odd ? &others[i] : all_options[o]);
            REFUSED(unit_try(strange, NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "unit0");
            fsdp_model_release(strange);
        }

        fsdp_memory_info memory = memory_of(model);
        CHECK(memory.shards == 0 && memory.unsharded == 0 && memory.total_parameters == 0, "something is left of them");
        struct host_unit u;
        host_unit_make(r, model, NULL, usual, 2, 4, &u);
        OK(fsdp_unit_pre_forward(u.unit));
        expect_full(&u, 4, "after refusals");
        OK(backward_nothing(&u));
        OK(fsdp_model_finish_backward(model));
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, units_that_differ_between_ranks_are_refused_everywhere)
{
    for (int n = 2; n <= 4; n++) ranks_run(n, rank_differ, NULL);
}

/* Calls that differ in the middle of an iteration: every rank hears of it, and reset makes good. */
static void rank_hooks_differ(struct rank *r)
{
    static const struct spec first[] = {{"a", DTYPE_F32, 2, {9, 6}, 0}}, second[] = {{"b", DTYPE_F32, 1, {5}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        struct host_unit a, b;
        host_unit_make(r, model, "alpha", first, 1, 0, &a);
        host_unit_make(r, model, "beta", second, 1, 1, &b);
        fsdp_unit *mine = r->rank ? a.unit : b.unit;
        for (int asynchronous = 0; asynchronous < 2; asynchronous++) {
            fsdp_memory_info before = memory_of(model);
            fsdp_work *work = NULL;
            if (asynchronous) {
                OK(fsdp_unit_unshard(mine, &work));
                REFUSED(fsdp_work_wait(work, -1), FSDP_ERR_MISMATCH, "unshard of unit 'alpha'");
                fsdp_work_release(work);
                REFUSED(fsdp_unit_pre_forward(mine), FSDP_ERR_MISMATCH, "'beta'");
            } else {
                REFUSED(fsdp_unit_pre_forward(mine), FSDP_ERR_MISMATCH, "'beta'");
            }
            CHECK(state_of(&a) == FSDP_UNIT_SHARDED && state_of(&b) == FSDP_UNIT_SHARDED, "state");
            fsdp_memory_info after = memory_of(model);
            CHECK(after.unsharded == before.unsharded && after.published_bytes == before.published_bytes, "counters");
            /* A reduction that differs, still under way at the end of backward. */
            const DLTensor *none[1] = {NULL};
            OK(fsdp_unit_post_backward(mine, none, 1, &work));
            fsdp_work_release(work);
            REFUSED(fsdp_model_finish_backward(model), FSDP_ERR_MISMATCH, "reduce_grads of unit 'alpha'");
            OK(fsdp_model_reset(model));
            OK(fsdp_unit_pre_forward(a.unit));
            OK(fsdp_unit_pre_forward(b.unit));
            expect_full(&a, 0, "after reset");
            expect_full(&b, 1, "after reset");
            OK(fsdp_model_finish_backward(model));
        }
        host_unit_drop(&a);
        host_unit_drop(&b);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, hooks_that_differ_between_ranks_are_told_to_all)
{
    for (int n = 2; n <= 3; n++) ranks_run(n, rank_hooks_differ, NULL);
}

/* ---- threads: units end on another thread while the model works */

struct dropper {
    pthread_mutex_t lock;
    struct host_unit queue[64];
    int n, stop;
};

static void *drop_units(void *argument)
{
    struct dropper *d = argument;
    for (;;) {
        struct host_unit u;
        pthread_mutex_lock(&d->lock);
        int have = d->n > 0, stop = d->stop;
        if (have) u = d->queue[--d->n];
        pthread_mutex_unlock(&d->lock);
        if (have)
            host_unit_drop(&u);
        else if (stop)
            return NULL;
    }
}

static void rank_dropped_elsewhere(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        struct dropper d = {.lock = PTHREAD_MUTEX_INITIALIZER};
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, drop_units, &d), "thread");
        struct host_unit kept;
        static const struct spec always[] = {{"kept", DTYPE_F32, 1, {100}, 0}};
        host_unit_make(r, model, "kept", always, 1, 0, &kept);
        for (int i = 0; i < 60; i++) {
            char name[16];
            snprintf(name, sizeof name, "w%d", i);
            struct spec specs[] = {{name, DTYPE_F32, 2, {i % 7 + 1, 100}, 0}};
            struct host_unit u;
            host_unit_make(r, model, NULL, specs, 1, i, &u);
            OK(fsdp_unit_pre_forward(kept.unit));
            fsdp_work *work = NULL;
            OK(fsdp_unit_unshard(u.unit, i % 2 ? &work : NULL));
            fsdp_work_release(work);
            pthread_mutex_lock(&d.lock);
            d.queue[d.n++] = u; /* perhaps while it is being unsharded */
            pthread_mutex_unlock(&d.lock);
            (void)memory_of(model);
            OK(fsdp_model_zero_grad(model));
            OK(fsdp_model_finish_backward(model));
        }
        pthread_mutex_lock(&d.lock);
        d.stop = 1;
        pthread_mutex_unlock(&d.lock);
        pthread_join(thread, NULL);
        OK(fsdp_barrier(group, NULL)); /* all asynchronous works are complete */
        host_unit_drop(&kept);
        fsdp_memory_info memory = memory_of(model);
        CHECK(memory.unsharded == 0 && memory.shards == 0, "%lld bytes are left", (long long)memory.unsharded);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, units_may_end_on_any_thread) { ranks_run(2, rank_dropped_elsewhere, NULL); }
