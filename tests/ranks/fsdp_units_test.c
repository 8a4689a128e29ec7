/* Units: tied parameters, settings that change between iterations, callbacks, counters, and bad arguments,
 * after each of which the model still trains. */
#include "unit_host.h"

#include <math.h>
#include <pthread.h>

TestSuite(fsdp_units, .timeout = RANKS_SECONDS + 30);

/* ---- tied parameters */

static const struct par tied[] = {
    {.name = "emb.weight", .type = DTYPE_F32, .ndim = 2, .shape = {10, 4}, .id = 7},
    {.name = "emb.bias", .type = DTYPE_F64, .ndim = 1, .shape = {3}},
    {.name = "out.weight", .type = DTYPE_F32, .ndim = 2, .shape = {10, 4}, .tied = 1, .id = 7},
    {.name = "between", .type = DTYPE_BF16, .ndim = 2, .shape = {3, 5}, .dim = 1},
    {.name = "out.again", .type = DTYPE_F32, .ndim = 2, .shape = {10, 4}, .tied = 1},
};
#define TIED 5

static void rank_tied(struct rank *r)
{
    /* First, second, third only; two; all; none; then what other ranks do not give. */
    static const unsigned masks[] = {0x1f, 0x0b, 0x0e, 0x1a, 0x15, 0x02, 0x00};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        const char *when = layout_names[layout];
        struct kit kit;
        kit_make(model, "tied", tied, TIED, 20, NULL, &kit);
        for (int i = 0; i < TIED; i++) {
            int want = i == 2 || i == 4 ? 0 : -1;
            CHECK(kit_param(&kit, i).tied_to == want, "'%s' is tied to %d", tied[i].name, kit_param(&kit, i).tied_to);
            CHECK(strcmp(kit_param(&kit, i).name, tied[i].name) == 0, "each entry keeps its name");
            if (want < 0) continue;
            CHECK(kit.full[i]->dl_tensor.data == kit.full[0]->dl_tensor.data &&
                      kit.shard[i]->dl_tensor.data == kit.shard[0]->dl_tensor.data &&
                      kit.grad[i]->dl_tensor.data == kit.grad[0]->dl_tensor.data,
                  "one shard, one full view, one gradient");
        }
        fsdp_unit_info info = kit_query(&kit);
        CHECK(info.n_params == TIED && info.full_bytes == 160 + 24 + 30, "%lld bytes: the tied one counts once",
              (long long)info.full_bytes);
        CHECK(memory_of(model).total_parameters == 160 + 24 + 30, "so in the model");
        for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
            OK(fsdp_model_zero_grad(model));
            kit_step(model, &kit, r->rank, masks[m]);
            kit_expect_grads(&kit, r->size, masks[m], 1, when);
        }
        /* Without sync first: both micro-batches, each with both entries. */
        OK(fsdp_model_zero_grad(model));
        OK(fsdp_model_set_gradient_sync(model, 0));
        kit_step(model, &kit, r->rank, 0x1f);
        OK(fsdp_model_set_gradient_sync(model, 1));
        kit_step(model, &kit, r->rank, 0x1f);
        kit_expect_grads(&kit, r->size, 0x1f, 2, when);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, tied_parameters_are_one_with_the_sum_of_their_gradients)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_tied, NULL);
}

/* A01: three ranks, a weight of ten rows that two modules share. In one unit every row moves; in two units the
 * second is refused with both names, by name and by id; an address used again is not taken for the parameter that was
 * there. */
static void rank_a01(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct kit kit;
    kit_make(model, "both", tied, 3, 20, NULL, &kit);
    double want[40], got[40];
    for (int k = 0; k < 40; k++) want[k] = kit_value(tied, 0, 20, k);
    for (int step = 0; step < 3; step++) { /* SGD with a rate of a half, on the shards */
        OK(fsdp_model_zero_grad(model));
        kit_step(model, &kit, r->rank, 7);
        float *shard = kit.shard[0]->dl_tensor.data;
        const float *grad = kit.grad[2]->dl_tensor.data;
        for (int64_t j = 0; j < elements(&kit.shard[0]->dl_tensor); j++) shard[j] -= grad[j] / 2;
        for (int k = 0; k < 40; k++) {
            double sum = 0;
            for (int m = 0; m < 3; m++) sum += kit_gradient(m, 0, k) + kit_gradient(m, 2, k);
            want[k] = (double)(float)(want[k] - (double)((float)sum / 3) / 2);
        }
        OK(fsdp_unit_unshard(kit.unit, NULL));
        get_doubles(&kit.full[2]->dl_tensor, got);
        for (int k = 0; k < 40; k++)
            CHECK(fabs(got[k] - want[k]) <= 1e-5, "row %d after step %d: %.9g, not %.9g", k / 4, step, got[k], want[k]);
        OK(fsdp_unit_reshard(kit.unit));
    }
    for (int row = 0; row < 10; row++) {
        double moved = 0;
        for (int k = 4 * row; k < 4 * row + 4; k++) moved += fabs(got[k] - kit_value(tied, 0, 20, k));
        CHECK(moved > 0.1, "row %d moved by %g", row, moved);
    }

    fsdp_unit *other = NULL;
    struct par again[] = {{.name = "head.weight", .type = DTYPE_F32, .ndim = 2, .shape = {10, 4}, .id = 7},
                          {.name = "emb.bias", .type = DTYPE_F64, .ndim = 1, .shape = {3}},
                          {.name = "fine", .type = DTYPE_F32, .ndim = 1, .shape = {3}, .id = 8}};
    REFUSED(kit_try(model, "head", again, 1, 0, NULL, &other), FSDP_ERR_INVALID, "'head.weight'");
    CHECK(strstr(fsdp_last_error(), "'emb.weight'") && strstr(fsdp_last_error(), "'both'") &&
              strstr(fsdp_last_error(), "one unit"),
          "names both, and what to do: %s", fsdp_last_error());
    REFUSED(kit_try(model, "head", again + 1, 1, 0, NULL, &other), FSDP_ERR_INVALID, "'emb.bias'");
    CHECK(strstr(fsdp_last_error(), "'both'"), "names the unit: %s", fsdp_last_error());
    OK(kit_try(model, "head", again + 2, 1, 0, NULL, &other));
    fsdp_unit_release(other);
    kit_drop(&kit);

    /* Names and ids are free again when the unit has gone. */
    OK(kit_try(model, "head", again, 3, 0, NULL, &other));
    fsdp_unit_release(other);

    /* The same address twice, each time another parameter: no id, so nothing is the same. */
    float memory[12];
    int64_t shape[] = {12};
    fsdp_unit *units[2];
    for (int u = 0; u < 2; u++) {
        for (int k = 0; k < 12; k++) memory[k] = (float)(100 * u + k);
        DLTensor full = view(memory, DTYPE_F32, 1, shape);
        fsdp_param param = {.struct_size = sizeof param, .name = u ? "second" : "first", .full = &full};
        OK(fsdp_unit_create(model, NULL, &param, 1, NULL, &units[u]));
    }
    for (int u = 0; u < 2; u++) {
        DLManagedTensorVersioned *full;
        OK(fsdp_unit_unshard(units[u], NULL));
        OK(fsdp_unit_param_full(units[u], 0, &full));
        for (int k = 0; k < 12; k++)
            CHECK(((float *)full->dl_tensor.data)[k] == (float)(100 * u + k), "unit %d has values of its own", u);
        full->deleter(full);
        fsdp_unit_release(units[u]);
    }
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_units, a01_tied_parameters_in_one_unit_train_and_in_two_are_refused)
{
    ranks_run(3, rank_a01, NULL);
}

static void rank_tied_badly(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    static const struct par first = {.name = "one", .type = DTYPE_F32, .ndim = 2, .shape = {6, 4}, .id = 5};
    struct par pair[2] = {first, first};
    fsdp_unit *unit = NULL;
    for (int how = 0; how < 6; how++) {
        pair[1] = first;
        pair[1].name = "two";
        if (how == 0)
            pair[1].shape[0] = 4, pair[1].shape[1] = 6, pair[1].tied = 1; /* the same memory, otherwise seen */
        if (how == 1) pair[1].type = DTYPE_F64;
        if (how == 2) pair[1].dim = 1;
        if (how == 3) pair[1].frozen = 1;
        if (how == 4) pair[1].meta = 1;
        if (how == 5) pair[1].ndim = 1, pair[1].shape[0] = 24;
        REFUSED(kit_try(model, "u", pair, 2, 0, NULL, &unit), FSDP_ERR_INVALID, "'one'");
        CHECK(strstr(fsdp_last_error(), "'two'") && !unit, "names both: %s", fsdp_last_error());
    }
    pair[1] = first;
    REFUSED(kit_try(model, "u", pair, 2, 0, NULL, &unit), FSDP_ERR_INVALID, "both named 'one'");
    /* By id alone, in memory of their own, they are one, with the first one's values. */
    pair[1].name = "two";
    struct kit kit;
    kit_make(model, "u", pair, 2, 9, NULL, &kit);
    CHECK(kit_param(&kit, 1).tied_to == 0, "tied by id");
    OK(fsdp_unit_unshard(kit.unit, NULL));
    double got[24];
    get_doubles(&kit.full[1]->dl_tensor, got);
    for (int k = 0; k < 24; k++) CHECK(got[k] == kit_value(pair, 0, 9, k), "the first one's values");
    kit_drop(&kit);
    /* Ranks that differ in what is tied are told. */
    if (r->size > 1) {
        pair[1].id = r->rank == 1 ? 6 : 5;
        REFUSED(kit_try(model, "u", pair, 2, 0, NULL, &unit), FSDP_ERR_MISMATCH, "'two'");
    }
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_units, entries_that_are_one_parameter_must_agree)
{
    ranks_run(2, rank_tied_badly, NULL);
}

/* ---- callbacks */

static const struct par called[] = {{.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}},
                                    {.name = "h", .type = DTYPE_BF16, .ndim = 1, .shape = {4}}};
static const struct par called_too[] = {{.name = "x", .type = DTYPE_F32, .ndim = 2, .shape = {3, 4}, .dim = 1}};

struct witness {
    fsdp_model *model;
    fsdp_group *group;
    struct kit kit;
    int seed;
    char *events; /* of all units, in order: "A+" valid, "A-" invalid */
    char letter;
};

static void *look(void *argument)
{
    const struct witness *w = argument;
    (void)memory_of(w->model);
    (void)kit_query(&w->kit);
    (void)kit_param(&w->kit, 0);
    return NULL;
}

static void note(const struct witness *w, char what)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    size_t length = strlen(w->events);
    CHECK(length < 200, "too many events");
    w->events[length] = w->letter;
    w->events[length + 1] = what;
    /* The parameters are valid in both, and any question may be asked: also by another thread, so no lock is held. */
    CHECK(kit_state(&w->kit) == FSDP_UNIT_UNSHARDED, "%c: state %d", what, kit_state(&w->kit));
    kit_expect_full(&w->kit, w->seed, "in a callback");
    OK(fsdp_group_query(w->group, &info));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, look, (void *)(uintptr_t)w) == 0, "a thread");
    pthread_join(thread, NULL);
    DLManagedTensorVersioned *again;
    OK(fsdp_unit_param_full(w->kit.unit, 0, &again));
    again->deleter(again);
}

static void on_valid(fsdp_unit *unit, void *user)
{
    const struct witness *w = user;
    CHECK(unit == w->kit.unit, "the unit it is about");
    note(w, '+');
}

static void on_invalid(fsdp_unit *unit, void *user)
{
    const struct witness *w = user;
    CHECK(unit == w->kit.unit, "the unit it is about");
    note(w, '-');
}

/* These events and no others since the last time. */
#define EVENTS(want)                                                                                                   \
    do {                                                                                                               \
        CHECK(strcmp(events, want) == 0, "%s: \"%s\", not \"%s\"", when, events, want);                                \
        memset(events, 0, sizeof events);                                                                              \
    } while (0)

static void rank_called(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model_options options = {.forward_prefetch = 1, .backward_prefetch = FSDP_BACKWARD_PRE};
        fsdp_model *model = layout_model(group, (enum layout)layout, &options);
        if (!model) continue;
        const char *when = layout_names[layout];
        char events[256] = "";
        struct witness a = {.model = model, .group = group, .seed = 3, .events = events, .letter = 'A'}, b = a;
        b.letter = 'B';
        kit_make(model, "a", called, 2, 3, NULL, &a.kit);
        kit_make(model, "b", called_too, 1, 3, NULL, &b.kit);
        OK(fsdp_unit_set_callbacks(a.kit.unit, on_valid, on_invalid, &a));
        OK(fsdp_unit_set_callbacks(b.kit.unit, on_valid, on_invalid, &b));
        EVENTS("");
        /* By hand: once for each change. */
        fsdp_unit *u = a.kit.unit;
        OK(fsdp_unit_reshard(u));
        OK(fsdp_unit_unshard(u, NULL));
        OK(fsdp_unit_unshard(u, NULL));
        EVENTS("A+");
        OK(fsdp_unit_reshard(u));
        OK(fsdp_unit_reshard(u));
        EVENTS("A-");
        /* Asynchronously: at the call in which it is found done. */
        fsdp_work *work = NULL, *more = NULL;
        OK(fsdp_unit_unshard(u, &work));
        OK(fsdp_unit_unshard(u, &more));
        OK(fsdp_work_wait(work, -1));
        OK(fsdp_work_wait(more, -1));
        fsdp_work_release(work);
        fsdp_work_release(more);
        OK(fsdp_unit_unshard(u, NULL));
        EVENTS("A+");
        OK(fsdp_unit_reshard(u));
        EVENTS("A-");
        OK(fsdp_unit_unshard(u, &work)); /* sharded again at once */
        fsdp_work_release(work);
        OK(fsdp_unit_reshard(u));
        EVENTS("A+A-");
        /* Shards that changed are published anew: what was there is no longer valid. */
        OK(fsdp_unit_unshard(u, NULL));
        OK(fsdp_unit_shard_changed(u));
        OK(fsdp_unit_unshard(u, NULL));
        if (layout == LAYOUT_NO_SHARD)
            EVENTS("A+"); /* the full parameters are the shards */
        else
            EVENTS("A+A-A+");
        OK(fsdp_model_finish_backward(model));
        EVENTS("A-");
        /* Three iterations; from the second on, units are fetched ahead, and valid when they are asked for. Backward
         * finds b where forward left it. */
        for (int step = 0; step < 3; step++) {
            int whole = layout == LAYOUT_NO_SHARD;
            OK(fsdp_unit_pre_forward(a.kit.unit));
            if (whole && step > 0)
                EVENTS("A+B+"); /* nothing to wait for */
            else
                EVENTS("A+");
            OK(fsdp_unit_post_forward(a.kit.unit));
            EVENTS(whole ? "" : "A-");
            OK(fsdp_unit_pre_forward(b.kit.unit));
            EVENTS(whole && step > 0 ? "" : "B+");
            OK(fsdp_unit_post_forward(b.kit.unit));
            EVENTS(whole ? "" : "B-");
            OK(fsdp_unit_pre_backward(b.kit.unit));
            if (!whole) {
                CHECK(strncmp(events, "B+", 2) == 0, "%s: %s", when, events);
                CHECK(events[2] == 0 || strcmp(events, "B+A+") == 0, "%s: %s", when, events);
            }
            int early = events[2] != 0;
            memset(events, 0, sizeof events);
            OK(kit_give(&b.kit, r->rank, 1, NULL));
            EVENTS("B-");
            OK(fsdp_unit_pre_backward(a.kit.unit));
            EVENTS(whole || early ? "" : "A+");
            OK(kit_give(&a.kit, r->rank, 3, NULL));
            EVENTS("A-");
            OK(fsdp_model_finish_backward(model));
            EVENTS("");
        }
        /* Fetched in vain: what had become valid does not stay so. */
        OK(fsdp_unit_pre_forward(a.kit.unit));
        OK(fsdp_unit_post_forward(a.kit.unit));
        OK(fsdp_model_finish_backward(model));
        int balance[2] = {0};
        for (const char *e = events; *e; e += 2) balance[*e - 'A'] += e[1] == '+' ? 1 : -1;
        CHECK(!balance[0] && !balance[1], "%s: %s", when, events);
        CHECK(kit_state(&b.kit) == FSDP_UNIT_SHARDED, "sharded");
        memset(events, 0, sizeof events);
        /* Kept full after backward, and reset. */
        OK(fsdp_unit_set_reshard_after_backward(u, 0));
        OK(fsdp_unit_pre_backward(u));
        OK(kit_give(&a.kit, r->rank, 3, NULL));
        EVENTS("A+");
        OK(fsdp_model_finish_backward(model));
        EVENTS("A-");
        OK(fsdp_unit_set_reshard_after_backward(u, 1));
        OK(fsdp_unit_unshard(u, NULL));
        OK(fsdp_model_reset(model));
        EVENTS("A+A-");
        /* An unshard that fails makes nothing valid. */
        if (r->size > 1 && layout <= LAYOUT_PRIVATE) {
            fsdp_unit *mine = r->rank == 1 ? b.kit.unit : u;
            REFUSED(fsdp_unit_unshard(mine, NULL), FSDP_ERR_MISMATCH, "rank 1");
            OK(fsdp_model_reset(model));
            EVENTS("");
        }
        /* Only one of them, or none. */
        OK(fsdp_unit_set_callbacks(u, NULL, on_invalid, &a));
        OK(fsdp_unit_unshard(u, NULL));
        EVENTS("");
        OK(fsdp_unit_reshard(u));
        EVENTS("A-");
        OK(fsdp_unit_set_callbacks(u, NULL, NULL, NULL));
        OK(fsdp_unit_unshard(u, NULL));
        OK(fsdp_unit_reshard(u));
        EVENTS("");
        kit_drop(&a.kit);
        kit_drop(&b.kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, callbacks_come_once_for_each_change_and_without_a_lock)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_called, NULL);
}

/* What a callback does with the only reference, in every call in which it may come. */
static void let_go(fsdp_unit *unit, void *user)
{
    fsdp_unit_release(unit);
}

static void rank_let_go(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    static const struct spec one[] = {{"w", DTYPE_F32, 2, {5, 3}, 0}};
    for (int call = 0; call < 6; call++) {
        fsdp_model *model = model_make(group, NULL);
        fsdp_unit *unit;
        OK(unit_try(model, "u", one, 1, call, &unit));
        if (call >= 3) OK(fsdp_unit_pre_forward(unit));
        OK(fsdp_unit_set_callbacks(unit, call < 3 ? let_go : NULL, call < 3 ? NULL : let_go, NULL));
        const DLTensor *none[] = {NULL};
        if (call == 0) OK(fsdp_unit_pre_forward(unit));
        if (call == 1) OK(fsdp_unit_pre_backward(unit));
        if (call == 2) OK(fsdp_unit_unshard(unit, NULL));
        if (call == 3) OK(fsdp_unit_post_forward(unit));
        if (call == 4) OK(fsdp_unit_post_backward(unit, none, 1, NULL));
        if (call == 5) OK(fsdp_model_finish_backward(model));
        CHECK(memory_of(model).total_parameters == 0, "the unit is still there after call %d", call);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, a_callback_may_let_go_of_its_unit)
{
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_let_go, NULL);
}

/* What a host writes in `valid` is there for forward. */
static void write_first(fsdp_unit *unit, void *user)
{
    (void)unit;
    ((float *)((DLManagedTensorVersioned *)user)->dl_tensor.data)[0] = 77;
}

static void rank_writes(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUT_NO_SHARD; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        struct kit kit;
        kit_make(model, "w", called_too, 1, 3, NULL, &kit);
        OK(fsdp_unit_set_callbacks(kit.unit, write_first, NULL, kit.full[0]));
        for (int step = 0; step < 3; step++) {
            OK(fsdp_unit_pre_forward(kit.unit));
            CHECK(((float *)kit.full[0]->dl_tensor.data)[0] == 77, "written");
            OK(fsdp_unit_post_forward(kit.unit));
            OK(fsdp_unit_set_callbacks(kit.unit, NULL, NULL, NULL));
            OK(fsdp_unit_pre_backward(kit.unit));
            kit_expect_full(&kit, 3, "what was written is dropped");
            OK(kit_give(&kit, r->rank, 1, NULL));
            OK(fsdp_model_finish_backward(model));
            OK(fsdp_unit_set_callbacks(kit.unit, write_first, NULL, kit.full[0]));
        }
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, a_callback_may_write_the_full_parameters)
{
    ranks_run(2, rank_writes, NULL);
}

/* ---- settings and counters */

static void rank_settings(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        if (!model) continue;
        const char *when = layout_names[layout];
        struct kit kit;
        kit_make(model, "settings", called, 2, 3, NULL, &kit);
        REFUSED(fsdp_unit_set_reshard_after_forward(kit.unit, -2), FSDP_ERR_INVALID, "reshard_after_forward is -2");
        REFUSED(fsdp_unit_set_reshard_after_forward(kit.unit, 5), FSDP_ERR_INVALID, "reshard_after_forward is 5");
        REFUSED(fsdp_unit_set_reshard_after_backward(kit.unit, 2), FSDP_ERR_INVALID, "reshard is 2");
        if (layout == LAYOUT_NO_SHARD) REFUSED(fsdp_unit_set_reshard_after_forward(kit.unit, 2), FSDP_ERR_INVALID, "2");
        int can_two = kit.size % 2 == 0,
            by_default = layout == LAYOUT_NO_SHARD ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
        const int32_t values[] = {
            0, FSDP_RESHARD_NEVER, FSDP_RESHARD_ALWAYS, can_two ? 2 : 0, FSDP_RESHARD_NEVER, can_two ? 2 : 1, 0};
        for (int step = 0; step < 7; step++) {
            OK(fsdp_unit_set_reshard_after_forward(kit.unit, values[step]));
            int32_t want = values[step] == 0 ? by_default : values[step];
            if (want > 1 && want == kit.size) want = FSDP_RESHARD_ALWAYS;
            CHECK(kit_query(&kit).reshard_after_forward == want, "%s: in force is %d, not %d", when,
                  kit_query(&kit).reshard_after_forward, want);
            kit_set_shards(&kit, step);
            OK(fsdp_unit_pre_forward(kit.unit));
            kit_expect_full(&kit, step, when);
            OK(fsdp_unit_post_forward(kit.unit));
            CHECK((kit_state(&kit) == FSDP_UNIT_UNSHARDED) == (want == FSDP_RESHARD_NEVER),
                  "%s: state %d after forward", when, kit_state(&kit));
            OK(fsdp_unit_pre_backward(kit.unit));
            kit_expect_full(&kit, step, when);
            OK(fsdp_model_zero_grad(model));
            OK(fsdp_unit_set_reshard_after_backward(kit.unit, step % 2));
            OK(kit_give(&kit, r->rank, 3, NULL));
            CHECK((kit_state(&kit) == FSDP_UNIT_UNSHARDED) == (step % 2 == 0), "%s: state %d after backward", when,
                  kit_state(&kit));
            OK(fsdp_model_finish_backward(model));
            CHECK(kit_state(&kit) == FSDP_UNIT_SHARDED, "sharded at the end");
            kit_expect_grads(&kit, r->size, 3, 1, when);
        }
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, resharding_after_forward_and_backward_may_be_set_between_iterations)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_settings, NULL);
}

static void rank_counts(struct rank *r)
{
    static const struct par pars[] = {{.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {6, 4}},
                                      {.name = "d", .type = DTYPE_F64, .ndim = 1, .shape = {8}},
                                      {.name = "z", .type = DTYPE_F32, .ndim = 2, .shape = {0, 4}}};
    fsdp_precision precision = {.struct_size = sizeof precision, .param_dtype = dtype_to_dl(DTYPE_BF16)};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int cast = 0; cast < 2; cast++) {
            fsdp_model_options options = {.precision = cast ? &precision : NULL};
            fsdp_model *model = layout_model(group, (enum layout)layout, &options);
            if (!model) continue;
            struct kit kit;
            char long_name[100];
            memset(long_name, 'n', sizeof long_name - 1);
            long_name[99] = 0;
            kit_make(model, long_name, pars, 3, 3, NULL, &kit);
            static const fsdp_strategy strategies[] = {FSDP_FULL_SHARD, FSDP_FULL_SHARD, FSDP_NO_SHARD,
                                                       FSDP_HYBRID_SHARD, FSDP_HYBRID_SHARD};
            int64_t full = cast ? 32 * 2 : 24 * 4 + 8 * 8, shard = 0, published = 0, places[KIT_ELEMENTS],
                    waited = layout == LAYOUT_NO_SHARD && !cast ? 0 : 1;
            for (int i = 0; i < 3; i++) {
                int64_t n = par_places(&pars[i], kit.rank, kit.size, places);
                shard += n * (int64_t)dtype_size(pars[i].type);
                published += n * (cast ? 2 : (int64_t)dtype_size(pars[i].type));
            }
            for (int step = 0; step < 2; step++) {
                fsdp_unit_info info = kit_query(&kit);
#define COUNT(field, want)                                                                                             \
    CHECK(info.field == (want), "%s: " #field " is %lld, not %lld", layout_names[layout], (long long)info.field,       \
          (long long)(want))
                COUNT(n_params, 3);
                COUNT(strategy, strategies[layout]);
                COUNT(shard_size, layout == LAYOUT_NO_SHARD ? 1 : layout >= LAYOUT_HYBRID ? r->size / 2 : r->size);
                COUNT(replicate_size, r->size / kit.size);
                COUNT(full_bytes, full);
                COUNT(shard_bytes, shard);
                COUNT(publications, step * waited);
                COUNT(published_bytes, step * waited * published);
                COUNT(reduced_bytes, layout == LAYOUT_NO_SHARD ? 0 : step * full);
                /* Sums that go over the replicas are of this rank's part, in float32. */
                int64_t partial = 0;
                for (int i = 0; i < 3; i++)
                    partial += par_places(&pars[i], kit.rank, kit.size, places) * (i == 1 && !cast ? 8 : 4);
                COUNT(replicated_bytes, layout == LAYOUT_NO_SHARD ? step * full
                                        : layout >= LAYOUT_HYBRID ? step * partial
                                                                  : 0);
                CHECK(strlen(info.name) == 63 && strncmp(info.name, long_name, 63) == 0,
                      "its name, as far as it counts");
                if (step == 0) kit_step(model, &kit, r->rank, 3);
            }
            CHECK(memory_of(model).published_bytes == kit_query(&kit).published_bytes &&
                      memory_of(model).reduced_bytes == kit_query(&kit).reduced_bytes &&
                      memory_of(model).replicated_bytes == kit_query(&kit).replicated_bytes,
                  "the model's are sums over units");
            kit_drop(&kit);
            fsdp_model_release(model);
        }
    fsdp_group_release(group);
}

Test(fsdp_units, counters_are_what_the_layout_says)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_counts, NULL);
}

/* ---- bad arguments */

static const struct par good[] = {{.name = "layers.0.weight", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}},
                                  {.name = "layers.0.bias", .type = DTYPE_BF16, .ndim = 1, .shape = {4}}};

static void refuse_params(fsdp_model *model)
{
    float value[6] = {1, 2, 3, 4, 5, 6};
    int64_t shape[] = {2, 3}, negative[] = {-2, 3};
    int32_t integer[6] = {0};
    DLTensor full = view(value, DTYPE_F32, 2, shape), scalar = view(value, DTYPE_F32, 0, NULL),
             whole = view(integer, DTYPE_I32, 2, shape), less = view(value, DTYPE_F32, 2, negative), none = full;
    none.data = NULL;
    fsdp_param two[2];
    fsdp_unit *unit = NULL;
    float others[6] = {0};
    DLTensor apart = view(others, DTYPE_F32, 2, shape);
#define RESET                                                                                                          \
    for (int i = 0; i < 2; i++)                                                                                        \
    two[i] =                                                                                                           \
        (fsdp_param){.struct_size = sizeof *two, .name = i ? "layers.1.weight" : "fine", .full = i ? &apart : &full}
#define BAD(status, word, change)                                                                                      \
    do {                                                                                                               \
        RESET;                                                                                                         \
        two[1].change;                                                                                                 \
        REFUSED(fsdp_unit_create(model, "bad", two, 2, NULL, &unit), status, word);                                    \
    } while (0)
    BAD(FSDP_ERR_INVALID, "'layers.1.weight': shard_dim is 2", shard_dim = 2);
    BAD(FSDP_ERR_INVALID, "'layers.1.weight': shard_dim is -1", shard_dim = -1);
    BAD(FSDP_ERR_INVALID, "'layers.1.weight': meta is 2", meta = 2);
    BAD(FSDP_ERR_INVALID, "reserved", reserved = 1);
    BAD(FSDP_ERR_INVALID, "'layers.1.weight' is 0-dim", full = &scalar);
    BAD(FSDP_ERR_UNSUPPORTED, "'layers.1.weight' is int32", full = &whole);
    BAD(FSDP_ERR_INVALID, "params[1].full", full = &less);
    BAD(FSDP_ERR_INVALID, "params[1].full", full = &none);
    BAD(FSDP_ERR_INVALID, "params[1].full", full = NULL);
    BAD(FSDP_ERR_INVALID, "params[1].name", name = NULL);
    BAD(FSDP_ERR_INVALID, "params[1].name", name = "");
    BAD(FSDP_ERR_INVALID, "both named 'fine'", name = "fine");
    BAD(FSDP_ERR_INVALID, "'layers.0.bias'", name = "layers.0.bias");
    BAD(FSDP_ERR_STRUCT_SIZE, "struct_size is 8", struct_size = 8);
    RESET;
    REFUSED(fsdp_unit_create(model, "bad", two, 0, NULL, &unit), FSDP_ERR_INVALID, "n is 0");
    REFUSED(fsdp_unit_create(model, "bad", NULL, 2, NULL, &unit), FSDP_ERR_INVALID, "params is NULL");
    REFUSED(fsdp_unit_create(model, "bad", two, 2, NULL, NULL), FSDP_ERR_INVALID, "unit is NULL");
    fsdp_unit_options options = {.struct_size = sizeof options, .strategy = 9};
    REFUSED(fsdp_unit_create(model, "bad", two, 2, &options, &unit), FSDP_ERR_INVALID, "strategy is 9");
    options = (fsdp_unit_options){.struct_size = sizeof options, .reshard_after_forward = -5};
    REFUSED(fsdp_unit_create(model, "bad", two, 2, &options, &unit), FSDP_ERR_INVALID, "reshard_after_forward is -5");
    options = (fsdp_unit_options){
        .struct_size = sizeof options, .strategy = FSDP_SHARD_GRAD_OP, .reshard_after_forward = FSDP_RESHARD_ALWAYS};
    REFUSED(fsdp_unit_create(model, "bad", two, 2, &options, &unit), FSDP_ERR_INVALID, "contradict");
    options = (fsdp_unit_options){.struct_size = sizeof options, .strategy = FSDP_NO_SHARD, .reshard_after_forward = 2};
    CHECK(fsdp_unit_create(model, "bad", two, 2, &options, &unit) == FSDP_ERR_INVALID, "nothing to reshard");
    CHECK(!unit, "nothing was made");
}

static void refuse_calls(fsdp_model *model, fsdp_model *other, struct kit *kit)
{
    fsdp_unit *unit = kit->unit;
    DLManagedTensorVersioned *t = NULL;
    float memory[32] = {0};
    int64_t five[] = {5, 3}, wrong[] = {3, 5}, four[] = {4};
    DLTensor right = view(memory, DTYPE_F32, 2, five), shape = view(memory, DTYPE_F32, 2, wrong),
             dtype = view(memory, DTYPE_F32, 1, four), device = right;
    device.device = (DLDevice){kDLCUDA, 0};
    const DLTensor *grads[2] = {&shape, NULL};
    REFUSED(fsdp_unit_post_backward(unit, grads, 2, NULL), FSDP_ERR_INVALID, "'layers.0.weight'");
    grads[0] = &right;
    grads[1] = &dtype;
    REFUSED(fsdp_unit_post_backward(unit, grads, 2, NULL), FSDP_ERR_INVALID, "'layers.0.bias'");
    grads[0] = &device;
    grads[1] = NULL;
    REFUSED(fsdp_unit_post_backward(unit, grads, 2, NULL), FSDP_ERR_UNSUPPORTED, "'layers.0.weight'");
    REFUSED(fsdp_unit_post_backward(unit, grads, 1, NULL), FSDP_ERR_INVALID, "n is 1");
    REFUSED(fsdp_unit_post_backward(unit, NULL, 2, NULL), FSDP_ERR_INVALID, "grads is NULL");
    REFUSED(fsdp_unit_param_full(unit, 2, &t), FSDP_ERR_INVALID, "index is 2");
    REFUSED(fsdp_unit_param_shard(unit, -1, &t), FSDP_ERR_INVALID, "index is -1");
    REFUSED(fsdp_unit_param_grad(unit, 7, &t), FSDP_ERR_INVALID, "index is 7");
    fsdp_param_info info = {.struct_size = sizeof info};
    REFUSED(fsdp_unit_param_query(unit, 2, &info), FSDP_ERR_INVALID, "index is 2");
    REFUSED(fsdp_unit_write_back(unit), FSDP_ERR_STATE, "not unsharded");
    fsdp_unit *foreign;
    struct par elsewhere = {.name = "elsewhere", .type = DTYPE_F32, .ndim = 1, .shape = {3}};
    OK(kit_try(other, "foreign", &elsewhere, 1, 0, NULL, &foreign));
    fsdp_unit *units[] = {unit, foreign}, *holes[] = {unit, NULL};
    REFUSED(fsdp_unit_set_prefetch(unit, FSDP_FORWARD, units, 2), FSDP_ERR_INVALID, "'foreign'");
    REFUSED(fsdp_unit_set_prefetch(unit, FSDP_FORWARD, holes, 2), FSDP_ERR_INVALID, "units[1]");
    REFUSED(fsdp_unit_set_prefetch(unit, 2, units, 1), FSDP_ERR_INVALID, "phase is 2");
    REFUSED(fsdp_unit_set_prefetch(unit, FSDP_FORWARD, units, -1), FSDP_ERR_INVALID, "n is -1");
    REFUSED(fsdp_unit_set_prefetch(unit, FSDP_FORWARD, NULL, 1), FSDP_ERR_INVALID, "units is NULL");
    fsdp_unit_release(foreign);
    REFUSED(fsdp_unit_query((fsdp_unit *)(void *)model, NULL), FSDP_ERR_INVALID, "not a live unit");
    REFUSED(fsdp_model_set_gradient_divisor(model, -1), FSDP_ERR_INVALID, "divisor");
    REFUSED(fsdp_model_set_gradient_divisor(model, (double)NAN), FSDP_ERR_INVALID, "divisor");
    REFUSED(fsdp_model_set_gradient_sync(model, 2), FSDP_ERR_INVALID, "sync");
    REFUSED(fsdp_model_set_all_reduce(model, -1), FSDP_ERR_INVALID, "all_reduce");
    CHECK(!t, "nothing is written on failure");
}

/* Ranks that differ in one parameter are all told its name. */
static void refuse_differing(struct rank *r, fsdp_model *model)
{
    for (int how = 0; how < 7; how++) {
        struct par pars[] = {{.name = "same", .type = DTYPE_F32, .ndim = 1, .shape = {3}},
                             {.name = "differs", .type = DTYPE_F32, .ndim = 2, .shape = {4, 4}}};
        fsdp_unit *unit = NULL;
        if (r->rank == 1 && how == 0) pars[1].dim = 1;
        if (r->rank == 1 && how == 1) pars[1].frozen = 1;
        if (r->rank == 1 && how == 2) pars[1].meta = 1;
        if (r->rank == 1 && how == 3) pars[1].type = DTYPE_F64;
        if (r->rank == 1 && how == 4) pars[1].shape[1] = 5;
        if (r->rank == 1 && how == 5) pars[1].ndim = 3, pars[1].shape[2] = 1;
        fsdp_unit_options options = {.struct_size = sizeof options, .reshard_after_forward = r->rank == 1 ? -1 : 1};
        REFUSED(kit_try(model, "u", pars, 2, 0, how == 6 ? &options : NULL, &unit), FSDP_ERR_MISMATCH,
                how == 6 ? "options" : "'differs'");
        CHECK(!unit, "nothing was made");
    }
}

static void rank_bad(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL), *other;
        if (!model) continue;
        other = layout_model(group, LAYOUT_SHARED, NULL);
        struct kit kit;
        kit_make(model, "good", good, 2, 6, NULL, &kit);
        kit_step(model, &kit, r->rank, 3);
        refuse_params(model);
        refuse_calls(model, other, &kit);
        if (r->size > 1) refuse_differing(r, model);
        if (r->size > 1 && layout <= LAYOUT_NO_SHARD) { /* a divisor that differs is found by the reduction */
            OK(fsdp_model_set_gradient_divisor(model, r->rank == 1 ? 3 : 2));
            REFUSED(kit_give(&kit, r->rank, 3, NULL), FSDP_ERR_MISMATCH, "divisor");
            OK(fsdp_model_set_gradient_divisor(model, 0));
            OK(fsdp_model_reset(model));
            kit_step(model, &kit, r->rank, 3);
        }
        /* The model trains as if nothing had been. */
        kit_expect_grads(&kit, r->size, 3, 1, "gradients are untouched");
        kit_expect_shards(&kit, 6, "and shards");
        OK(fsdp_model_zero_grad(model));
        kit_step(model, &kit, r->rank, 3);
        kit_expect_grads(&kit, r->size, 3, 1, "after refusals");
        OK(fsdp_unit_unshard(kit.unit, NULL));
        kit_expect_full(&kit, 6, "after refusals");
        kit_drop(&kit);
        fsdp_model_release(model);
        fsdp_model_release(other);
    }
    fsdp_group_release(group);
}

Test(fsdp_units, bad_arguments_name_the_parameter_and_the_model_still_trains)
{
    ranks_run(1, rank_bad, NULL);
    ranks_run(2, rank_bad, NULL);
    ranks_run(4, rank_bad, NULL);
}
