/* A unit's tensors, its states, and publication. Gradients are in fsdp_gradient_test.c, training in
 * fsdp_train_test.c, memory in fsdp_memory_test.c. */
#include "fsdp_host.h"

#include <pthread.h>
#include <unistd.h>

TestSuite(fsdp, .timeout = RANKS_SECONDS + 30);

static const enum dtype float_types[] = {DTYPE_F64, DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_F8E5M2};
#define FLOAT_TYPES (int)(sizeof float_types / sizeof *float_types)

static const fsdp_model_options shared_kept = {.reshard_after_forward = FSDP_RESHARD_NEVER},
                                in_private = {.private_unshard = 1},
                                private_kept = {.private_unshard = 1, .reshard_after_forward = FSDP_RESHARD_NEVER},
                                shared = {0};
static const fsdp_model_options *const all_options[] = {&shared, &in_private, &shared_kept, &private_kept};

/* ---- tensors */

static const struct spec mixture[] = {
    {"even", DTYPE_F32, 2, {8, 3}, 0},         {"uneven", DTYPE_F64, 2, {7, 2}, 0},
    {"short", DTYPE_BF16, 1, {2}, 0},          {"none", DTYPE_F32, 1, {0}, 0},
    {"flat", DTYPE_F32, 2, {3, 0}, 0},         {"one", DTYPE_F16, 1, {1}, 0},
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
    OK(fsdp_unit_create(model, "strided", params, 3, NULL, &unit));
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

Test(fsdp, initial_values_may_be_strided)
{
    ranks_run(3, rank_strided_source, NULL);
}

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

Test(fsdp, tensors_outlive_unit_model_and_group)
{
    ranks_run(2, rank_outlive, NULL);
}

/* ---- states: any order of calls, checked against a model of the states */

struct expected {
    fsdp_unit_state state;
    int current, shown, held; /* versions of the values: in the full views, in the shards */
    int in_backward;
    int forward_over; /* what is written to the view from here to its backward is seen there: it is not to be written */
    struct host_content content;
    fsdp_work *work;
};

enum { TRIED = 4 };

struct trial {
    struct rank *r;
    fsdp_group *group;
    fsdp_model *model;
    const fsdp_model_options *options;
    int most;            /* units that are full at once, so that the others have to take their slots */
    uint64_t operations; /* but for those that slots take */
    struct host_slots slots;
    struct host_unit units[TRIED];
    struct expected expected[TRIED];
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

/* reuse: before backward, what forward published will do, if it still is where it was. */
static void will_unshard(struct trial *t, int i, int asynchronous, int reuse)
{
    struct expected *e = &t->expected[i];
    will_finish(t, i);
    if (e->state == FSDP_UNIT_UNSHARDED && e->current) return;
    e->state = FSDP_UNIT_UNSHARDED;
    e->forward_over = 0;
    if (reuse && e->current && slots_reuse(&t->slots, &e->content)) return;
    slots_publish(&t->slots, &e->content);
    e->shown = e->held;
    e->current = 1;
    if (asynchronous) e->state = FSDP_UNIT_UNSHARDING;
}

static void will_reshard(struct trial *t, int i)
{
    struct expected *e = &t->expected[i];
    will_finish(t, i);
    slots_leave(&t->slots, &e->content);
    e->state = FSDP_UNIT_SHARDED;
}

static void check_units(struct trial *t)
{
    int pending = 0;
    for (int i = 0; i < TRIED; i++) {
        struct expected *e = &t->expected[i];
        fsdp_unit_state state = state_of(&t->units[i]);
        if (e->state == FSDP_UNIT_UNSHARDING) {
            pending = 1;
            CHECK(state == FSDP_UNIT_UNSHARDING || state == FSDP_UNIT_UNSHARDED, "unit %d is sharded after%s", i,
                  t->log);
            continue;
        }
        CHECK(state == e->state, "unit %d is in state %d, not %d, after%s", i, state, e->state, t->log);
        if (state == FSDP_UNIT_UNSHARDED) expect_full(&t->units[i], e->shown * 7 + i, t->log);
    }
    slots_expect(&t->slots, t->model, t->log);
    if (!pending)
        CHECK(operations_of(t->group) == t->operations + t->slots.operations, "%llu operations, not %llu, after%s",
              (unsigned long long)operations_of(t->group), (unsigned long long)(t->operations + t->slots.operations),
              t->log);
}

static void make_room(struct trial *t, int i, uint64_t *common)
{
    int full[TRIED], n = 0;
    for (int k = 0; k < TRIED; k++)
        if (k != i && t->expected[k].state != FSDP_UNIT_SHARDED) full[n++] = k;
    while (n >= t->most) {
        int at = random_below(common, n), k = full[at];
        full[at] = full[--n];
        note(t, "room", k);
        will_reshard(t, k);
        OK(fsdp_unit_reshard(t->units[k].unit));
    }
}

static void random_call(struct trial *t, uint64_t *common, uint64_t *own)
{
    int i = random_below(common, TRIED), call = random_below(common, 13);
    struct host_unit *u = &t->units[i];
    struct expected *e = &t->expected[i];
    if (call < 2 || (call >= 4 && call < 8)) make_room(t, i, common);
    switch (call) {
    case 0:
    case 1:
        note(t, call ? "pre_backward" : "pre_forward", i);
        will_unshard(t, i, 0, call || e->in_backward);
        if (call) e->in_backward = 1;
        OK(call ? fsdp_unit_pre_backward(u->unit) : fsdp_unit_pre_forward(u->unit));
        break;
    case 2:
        note(t, "post_forward", i);
        if (t->options->reshard_after_forward >= 0 && !e->in_backward) {
            will_reshard(t, i);
            e->forward_over = 1;
        }
        OK(fsdp_unit_post_forward(u->unit));
        break;
    case 3:
        note(t, "post_backward", i);
        t->operations++;
        will_reshard(t, i);
        e->in_backward = 0;
        OK(backward_nothing(u));
        break;
    case 4:
    case 5:
        note(t, "unshard", i);
        will_unshard(t, i, 0, 0);
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
        will_unshard(t, i, 1, 0);
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
            OK(fsdp_unit_unshard(u->unit, NULL));
        will_finish(t, i);
        note(t, "shard_changed", i);
        e->held++;
        set_shards(u, e->held * 7 + i);
        OK(fsdp_unit_shard_changed(u->unit));
        e->current = 0;
        break;
    case 10:
        note(t, "finish_backward", 0);
        for (int k = 0; k < TRIED; k++) {
            will_reshard(t, k);
            t->expected[k].current = t->expected[k].in_backward = 0;
        }
        slots_end(&t->slots);
        OK(fsdp_model_finish_backward(t->model));
        break;
    case 12:
        if (random_below(common, 4)) break;
        note(t, "reset", 0);
        for (int k = 0; k < TRIED; k++) {
            will_reshard(t, k);
            t->expected[k].current = t->expected[k].in_backward = t->expected[k].content.slot = 0;
        }
        slots_reset(&t->slots);
        t->operations++;
        OK(fsdp_model_reset(t->model));
        break;
    case 11:
        note(t, "reshard", i);
        will_reshard(t, i);
        OK(fsdp_unit_reshard(u->unit));
        break;
    }
    if (random_below(own, 8) == 0) nap(random_below(own, 400));
    check_units(t);
    /* Edits are this rank's own, and gone when the unit is unsharded again; which must come before the next look. */
    if (e->state == FSDP_UNIT_UNSHARDED && random_below(common, 3) == 0) {
        scribble(u, own);
        note(t, "edit+reshard", i);
        will_reshard(t, i);
        OK(fsdp_unit_reshard(u->unit));
    } else if (e->state == FSDP_UNIT_SHARDED && !e->forward_over && random_below(common, 4) == 0) {
        scribble(u, own); /* of no meaning, also where the view's slot is another unit's by now */
        note(t, "edit", i);
    }
}

static void rank_states(struct rank *r)
{
    static const struct spec first[] = {{"a", DTYPE_F32, 2, {70, 40}, 0}, {"b", DTYPE_F64, 1, {5}, 0}},
                             second[] = {{"c", DTYPE_BF16, 2, {9, 300}, 0}, {"d", DTYPE_F32, 1, {3}, 1}},
                             third[] = {{"e", DTYPE_F32, 2, {33, 150}, 0}}, fourth[] = {{"f", DTYPE_F16, 1, {5000}, 0}};
    static const struct {
        const char *name;
        const struct spec *specs;
        int n;
    } tried[TRIED] = {{"first", first, 2}, {"second", second, 2}, {"third", third, 1}, {"fourth", fourth, 1}};
    /* slots of 3, 2, 5 and 3 pages */
    uint64_t seed = *(const uint64_t *)r->argument, common = seed, own = seed ^ (uint64_t)(r->rank + 1) << 40;
    fsdp_group *group = group_make(r, 0, 0);
    for (int round = 0; round < 12; round++) {
        struct trial *t = calloc(1, sizeof *t);
        int o = round % 4;
        t->r = r;
        t->group = group;
        t->options = all_options[o];
        t->most = 1 + round / 4;
        t->model = model_make(group, t->options);
        t->logged = (size_t)snprintf(t->log, 64, " (FSDP_TEST_SEED=%llu, options %d)", (unsigned long long)seed, o);
        t->slots.private = t->options->private_unshard;
        for (int i = 0; i < TRIED; i++) {
            host_unit_make(r, t->model, tried[i].name, tried[i].specs, tried[i].n, i, &t->units[i]);
            t->expected[i].content =
                (struct host_content){.unit = i + 1, .bytes = specs_slot_bytes(tried[i].specs, tried[i].n)};
        }
        t->operations = operations_of(group);
        for (int i = 0; i < 60; i++) random_call(t, &common, &own);
        OK(fsdp_model_finish_backward(t->model));
        for (int i = 0; i < TRIED; i++) {
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

Test(fsdp, a_rank_ahead_changes_nothing_that_others_read)
{
    ranks_run(3, rank_ahead, NULL);
}

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
            OK(fsdp_unit_pre_backward(u.unit)); /* without publishing anew */
            CHECK(operations_of(group) == before, "operations");
            expect_full(&u, 0, "after an edit was dropped");
            OK(fsdp_unit_reshard(u.unit));
            if (r->rank == 1) memset(data + edits[e].at, 0x66, edits[e].bytes); /* sharded: of no meaning */
            if (e % 2) continue;
            OK(fsdp_unit_pre_backward(u.unit)); /* nor when nothing is published in between */
            CHECK(operations_of(group) == before, "operations");
            expect_full(&u, 0, "after an edit while sharded");
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
        CHECK(memory.shards == 0, "%lld bytes are left", (long long)memory.shards);
        /* No more than two were full at once, each of a page; whenever those that are gone went. */
        CHECK(memory.slots == 2 && memory.unsharded == 2 * sysconf(_SC_PAGESIZE), "%lld slots of %lld bytes",
              (long long)memory.slots, (long long)memory.unsharded);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp, units_may_end_on_any_thread)
{
    ranks_run(2, rank_dropped_elsewhere, NULL);
}
