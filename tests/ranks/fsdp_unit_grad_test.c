/* Gradients unit by unit: zeroing one parameter's, settings of one unit, and which parameters any rank used.
 *
 * The oracle holds whole parameters as doubles and follows the header's rules on the sums over all ranks; all values
 * are whole or a few halvings of whole ones, so every order of addition is exact. A zeroed gradient's memory is filled
 * with NaN, which nobody may see. */
#include "unit_host.h"

#include <math.h>

TestSuite(fsdp_unit_grad, .timeout = RANKS_SECONDS + 30);

#define UNITS 2
#define PARS 6
#define MOST 3000 /* elements of the largest */
#define RANKS 4
#define STEPS 14

/* Cut along both dimensions, tied, frozen, empty; and one that does not fit into an exchange. */
static const struct par first[PARS] = {{"a.tall", DTYPE_F32, 2, {7, 3}, 0, 0, 0, 0, 0},
                                       {"a.wide", DTYPE_F64, 2, {2, 5}, 1, 0, 0, 0, 0},
                                       {"a.frozen", DTYPE_F32, 1, {6}, 0, 1, 0, 0, 0},
                                       {"a.none", DTYPE_F32, 2, {0, 2}, 0, 0, 0, 0, 0},
                                       {"a.head", DTYPE_F32, 2, {7, 3}, 0, 0, 0, 1, 0},
                                       {"a.half", DTYPE_BF16, 1, {9}, 0, 0, 0, 0, 0}},
                        second[3] = {{"b.big", DTYPE_F32, 2, {1500, 2}, 0, 0, 0, 0, 0},
                                     {"b.one", DTYPE_F32, 1, {1}, 0, 0, 0, 0, 0},
                                     {"b.small", DTYPE_F32, 2, {3, 4}, 1, 0, 0, 0, 0}};
static const struct par *const units[UNITS] = {first, second};
static const int n_pars[UNITS] = {PARS, 3};

static int first_of(int u, int i)
{
    return units[u][i].tied ? units[u][i].tied - 1 : i;
}

/* ---- the oracle of one unit */

struct sums {
    double local[RANKS][PARS][MOST], partial[PARS][MOST], held[PARS][MOST];
    int local_used[RANKS][PARS], partial_used[PARS], used[PARS];
};

struct setting {
    int sync, all_reduce;
    double divisor;
};

struct run {
    struct rank *r;
    enum layout layout;
    fsdp_model *model;
    struct kit kit[UNITS];
    struct setting set[UNITS];
    struct sums *sums; /* of each unit */
    uint64_t seed, random;
    int step, pending; /* reductions may be under way */
    void *held[STEPS * UNITS * PARS];
    int n_held;
};

static int hybrid(const struct run *run)
{
    return run->layout >= LAYOUT_HYBRID;
}

/* Whether rank uses a parameter in this step, and its gradient. */
static int uses(const struct run *run, int u, int i, int rank)
{
    uint64_t s = run->seed + (uint64_t)(((run->step * UNITS + u) * PARS + i) * RANKS + rank) * 0x9e37u;
    return random_below(&s, 3) == 0;
}

static double gradient(const struct run *run, int u, int i, int rank, int64_t k)
{
    return (double)((rank * 5 + run->step * 3 + u + i * 2 + k % 50 * 3) % 11) - 4;
}

static void oracle(struct run *run, int u)
{
    const struct setting *set = &run->set[u];
    struct sums *s = &run->sums[u];
    int sends = set->sync && (run->layout != LAYOUT_NO_SHARD || set->all_reduce),
        ends = sends && (!hybrid(run) || set->all_reduce), size = run->r->size;
    for (int i = 0; i < n_pars[u]; i++) {
        const struct par *p = &units[u][i];
        int to = first_of(u, i);
        for (int rank = 0; rank < size && !p->frozen; rank++) {
            if (!uses(run, u, i, rank)) continue;
            s->local_used[rank][to] = 1;
            for (int64_t k = 0; k < par_count(p); k++) s->local[rank][to][k] += gradient(run, u, i, rank, k);
        }
    }
    for (int i = 0; i < n_pars[u] && sends; i++) {
        for (int rank = 0; rank < size; rank++) {
            s->partial_used[i] |= s->local_used[rank][i];
            s->local_used[rank][i] = 0;
            for (int64_t k = 0; k < par_count(&units[u][i]); k++) {
                s->partial[i][k] += s->local[rank][i][k];
                s->local[rank][i][k] = 0;
            }
        }
        if (!ends) continue;
        s->used[i] |= s->partial_used[i];
        s->partial_used[i] = 0;
        for (int64_t k = 0; k < par_count(&units[u][i]); k++) {
            double sum = s->held[i][k] + s->partial[i][k] / (set->divisor != 0 ? set->divisor : size);
            s->held[i][k] = rounded(units[u][i].type, sum);
            s->partial[i][k] = 0;
        }
    }
}

/* ---- what is done */

/* From now on NaN lies there, which counts as zeros. */
static void zero(struct run *run, int u, int i)
{
    double nans[MOST];
    OK(fsdp_unit_zero_grad(run->kit[u].unit, i));
    for (int k = 0; k < MOST; k++) nans[k] = NAN;
    for (int j = 0; j < n_pars[u]; j++) {
        if (i >= 0 && first_of(u, j) != first_of(u, i)) continue;
        memset(run->sums[u].held[first_of(u, j)], 0, sizeof run->sums[u].held[0]);
        run->sums[u].used[first_of(u, j)] = 0;
        if (run->kit[u].grad[j]) set_doubles(&run->kit[u].grad[j]->dl_tensor, nans);
    }
}

/* Ranks zero differently, but those that hold the same part alike; while reductions are under way, all alike. */
static void zero_some(struct run *run)
{
    uint64_t choice = random_next(&run->random);
    if (!run->pending) choice += (uint64_t)run->kit[0].rank * 0x51ed2701u;
    for (int u = 0; u < UNITS; u++) {
        if (random_below(&choice, 6) == 0) zero(run, u, -1);
        for (int i = 0; i < n_pars[u]; i++)
            if (random_below(&choice, 3) == 0) zero(run, u, i);
    }
}

static void zero_all(struct run *run)
{
    OK(fsdp_model_zero_grad(run->model));
    memset(run->sums, 0, UNITS * sizeof *run->sums);
}

static void choose(struct run *run)
{
    static const double divisors[] = {0, 1, 2, 4};
    for (int u = 0; u < UNITS; u++) {
        struct setting *set = &run->set[u];
        fsdp_unit *unit = run->kit[u].unit;
        set->sync = random_below(&run->random, 4) > 0;
        set->all_reduce = random_below(&run->random, 3) > 0;
        if (random_below(&run->random, 3) == 0) {
            set->divisor = divisors[random_below(&run->random, run->r->size == 3 ? 1 : 4)];
            if (run->r->size == 3) set->divisor = 2; /* a third is not exact */
            OK(fsdp_unit_set_gradient_divisor(unit, set->divisor));
        }
        OK(fsdp_unit_set_gradient_sync(unit, set->sync));
        OK(fsdp_unit_set_all_reduce(unit, set->all_reduce));
        fsdp_unit_info info = kit_query(&run->kit[u]);
        double divisor = set->divisor != 0 ? set->divisor : run->r->size;
        CHECK(info.gradient_sync == set->sync && info.all_reduce == set->all_reduce && info.gradient_divisor == divisor,
              "settings are %d, %d, %g", info.gradient_sync, info.all_reduce, info.gradient_divisor);
    }
}

static void backward(struct run *run, int u, int async)
{
    DLTensor tensors[PARS];
    const DLTensor *grads[PARS] = {0};
    fsdp_work *work = NULL;
    for (int i = 0; i < n_pars[u]; i++) {
        const struct par *p = &units[u][i];
        double values[MOST];
        if (!uses(run, u, i, run->r->rank)) continue;
        for (int64_t k = 0; k < par_count(p); k++) values[k] = gradient(run, u, i, run->r->rank, k);
        void *memory = run->held[run->n_held++] = malloc((size_t)par_count(p) * 8 + 8);
        tensors[i] = view(memory, p->type, p->ndim, p->shape);
        set_doubles(&tensors[i], values);
        grads[i] = &tensors[i];
    }
    OK(fsdp_unit_post_backward(run->kit[u].unit, grads, n_pars[u], async ? &work : NULL));
    fsdp_work_release(work);
    oracle(run, u);
}

static void expect(const struct run *run)
{
    for (int u = 0; u < UNITS; u++) {
        const struct kit *kit = &run->kit[u];
        int32_t used[PARS];
        OK(fsdp_unit_used(kit->unit, used, n_pars[u]));
        for (int i = 0; i < n_pars[u]; i++) {
            const struct par *p = &units[u][i];
            const struct sums *s = &run->sums[u];
            int to = first_of(u, i), want = s->used[to];
            CHECK(used[i] == want && kit_param(kit, i).used == want,
                  "%s, step %d, FSDP_TEST_SEED=%llu: '%s' is used %d (%d), not %d", layout_names[run->layout],
                  run->step, (unsigned long long)run->seed, p->name, used[i], kit_param(kit, i).used, want);
            if (!kit->grad[i]) continue;
            int64_t places[MOST], n = par_places(p, kit->rank, kit->size, places);
            double got[MOST];
            get_doubles(&kit->grad[i]->dl_tensor, got);
            for (int64_t j = 0; j < n; j++)
                CHECK(got[j] == s->held[to][places[j]],
                      "%s, step %d, FSDP_TEST_SEED=%llu: gradient of '%s' at %lld is %g, not %g",
                      layout_names[run->layout], run->step, (unsigned long long)run->seed, p->name,
                      (long long)places[j], got[j], s->held[to][places[j]]);
        }
    }
}

struct plan {
    uint64_t seed;
    int direct_read;
};

static void rank_random(struct rank *r)
{
    const struct plan *plan = r->argument;
    fsdp_group *group = group_make(r, plan->direct_read, 0);
    struct run *run = malloc(sizeof *run);
    for (enum layout layout = 0; layout < LAYOUTS; layout++) {
        double divisor = r->size == 3 ? 2 : 0;
        *run = (struct run){.r = r, .layout = layout, .seed = plan->seed, .random = plan->seed + layout};
        run->model = layout_model(group, layout, &(fsdp_model_options){.gradient_divisor = divisor});
        if (!run->model) continue;
        run->sums = calloc(UNITS, sizeof *run->sums);
        for (int u = 0; u < UNITS; u++) {
            run->set[u].divisor = divisor;
            kit_make(run->model, NULL, units[u], n_pars[u], 0, NULL, &run->kit[u]);
        }
        for (; run->step < STEPS; run->step++) {
            int async = random_below(&run->random, 2);
            choose(run);
            if (random_below(&run->random, 2)) zero_some(run);
            if (random_below(&run->random, 8) == 0) zero_all(run);
            for (int u = UNITS - 1; u >= 0; u--) backward(run, u, async);
            run->pending = async;
            if (random_below(&run->random, 3) == 0 && run->step < STEPS - 1) continue;
            OK(fsdp_model_finish_backward(run->model));
            run->pending = 0;
            expect(run);
        }
        for (int u = 0; u < UNITS; u++) kit_drop(&run->kit[u]);
        fsdp_model_release(run->model);
        for (int i = 0; i < run->n_held; i++) free(run->held[i]);
        free(run->sums);
    }
    free(run);
    fsdp_group_release(group);
}

Test(fsdp_unit_grad, zeroing_settings_and_use_in_any_order)
{
    uint64_t seed = random_seed();
    for (int n = 1; n <= 4; n++)
        for (int times = 0; times < 3; times++)
            ranks_run(n, rank_random, &(struct plan){seed + (uint64_t)(n * 10 + times), n > 1 ? times : 0});
}

/* ---- a mixture of experts: each rank uses its own, nobody the last */

static void rank_experts(struct rank *r)
{
    static const struct par experts[] = {{"0", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0},
                                         {"1", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0},
                                         {"2", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0},
                                         {"3", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0},
                                         {"4", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    for (enum layout layout = 0; layout < LAYOUTS; layout++) {
        fsdp_model *model = layout_model(group, layout, NULL);
        struct kit kit;
        int32_t used[5];
        if (!model) continue;
        kit_make(model, "experts", experts, 5, 0, NULL, &kit);
        for (int step = 0; step < 2; step++) {
            OK(fsdp_unit_used(kit.unit, used, 5));
            for (int i = 0; i < 5; i++) CHECK(used[i] == 0, "expert %d is used before anyone did", i);
            OK(fsdp_unit_set_gradient_sync(kit.unit, 0));
            OK(kit_give(&kit, r->rank, 1u << r->rank, NULL));
            OK(fsdp_model_finish_backward(model));
            OK(fsdp_unit_used(kit.unit, used, 5));
            for (int i = 0; i < 5; i++) CHECK(used[i] == 0, "expert %d is used by what was not sent", i);
            OK(fsdp_unit_set_gradient_sync(kit.unit, 1));
            if (step) OK(fsdp_unit_zero_grad(kit.unit, -1)); /* what waits to be sent stays */
            OK(kit_give(&kit, r->rank, 0, NULL));
            OK(fsdp_model_finish_backward(model));
            OK(fsdp_unit_used(kit.unit, used, 5));
            for (int i = 0; i < 5; i++) CHECK(used[i] == (i < r->size), "expert %d is used %d", i, used[i]);
            OK(fsdp_unit_zero_grad(kit.unit, 0));
            OK(fsdp_unit_used(kit.unit, used, 5));
            for (int i = 0; i < 5; i++) CHECK(used[i] == (i > 0 && i < r->size), "zeroed: %d is used %d", i, used[i]);
            OK(fsdp_model_zero_grad(model));
        }
        OK(fsdp_unit_set_frozen(kit.unit, 0, 1));
        OK(kit_give(&kit, r->rank, 31, NULL));
        OK(fsdp_model_finish_backward(model));
        OK(fsdp_unit_used(kit.unit, used, 5));
        for (int i = 0; i < 5; i++) CHECK(used[i] == (i > 0), "with the first frozen: %d is used %d", i, used[i]);
        OK(fsdp_unit_set_frozen(kit.unit, 1, 1)); /* and so is what was used before */
        OK(fsdp_unit_set_frozen(kit.unit, 1, 0));
        OK(fsdp_unit_used(kit.unit, used, 5));
        for (int i = 0; i < 5; i++) CHECK(used[i] == (i > 1), "frozen and thawed: %d is used %d", i, used[i]);
        OK(kit_give(&kit, r->rank, 31, NULL));
        OK(fsdp_model_reset(model));
        OK(fsdp_unit_used(kit.unit, used, 5));
        for (int i = 0; i < 5; i++) CHECK(used[i] == 0, "after reset %d is used", i);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_unit_grad, a_parameter_is_used_where_any_rank_used_it)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_experts, NULL);
}

/* ---- more parameters than an exchange has bits for */

#define MANY 15875

static void rank_many(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    fsdp_param *params = calloc(MANY, sizeof *params);
    DLTensor *tensors = calloc(MANY, sizeof *tensors);
    const DLTensor **grads = calloc(MANY, sizeof(DLTensor *));
    float *values = calloc(MANY, sizeof *values);
    char(*names)[8] = calloc(MANY, sizeof *names);
    int32_t *used = calloc(MANY, sizeof *used);
    fsdp_unit *unit;
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "%d", i);
        tensors[i] = view(&values[i], DTYPE_F32, 1, (const int64_t[]){1});
        params[i] = (fsdp_param){.struct_size = sizeof *params, .name = names[i], .full = &tensors[i]};
    }
    static const int64_t one[] = {1};
    for (int i = 0; i < MANY; i++) tensors[i].shape = (int64_t *)(uintptr_t)one;
    OK(fsdp_unit_create(model, "many", params, MANY, NULL, &unit));
    grads[0] = grads[15870] = &tensors[0];
    OK(fsdp_unit_post_backward(unit, grads, MANY, NULL));
    OK(fsdp_model_finish_backward(model));
    OK(fsdp_unit_used(unit, used, MANY));
    for (int i = 0; i < MANY; i++)
        CHECK(used[i] == (i == 0 || i == 15870 || i > 15871), "parameter %d is used %d", i, used[i]);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);
    free(params), free(tensors), free(grads), free(values), free(names), free(used);
}

Test(fsdp_unit_grad, parameters_beyond_those_that_are_told_count_as_used)
{
    if (!SANITIZED) ranks_run(1, rank_many, NULL); /* names are compared each with each */
}

/* ---- refusals and failures */

static void rank_refused(struct rank *r)
{
    static const struct par other[] = {{"late", DTYPE_F32, 1, {5}, 0, 0, 0, 0, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct kit kit, late;
    int32_t used[PARS];
    kit_make(model, "unit", first, PARS, 0, NULL, &kit);
    REFUSED(fsdp_unit_zero_grad(kit.unit, PARS), FSDP_ERR_INVALID, "index is 6");
    REFUSED(fsdp_unit_zero_grad(kit.unit, -2), FSDP_ERR_INVALID, "index is -2");
    REFUSED(fsdp_unit_used(kit.unit, used, PARS - 1), FSDP_ERR_INVALID, "n is 5");
    REFUSED(fsdp_unit_used(kit.unit, NULL, PARS), FSDP_ERR_INVALID, "used");
    REFUSED(fsdp_unit_set_gradient_sync(kit.unit, 2), FSDP_ERR_INVALID, "sync is 2");
    REFUSED(fsdp_unit_set_all_reduce(kit.unit, -1), FSDP_ERR_INVALID, "all_reduce is -1");
    REFUSED(fsdp_unit_set_gradient_divisor(kit.unit, -1), FSDP_ERR_INVALID, "divisor is -1");
    REFUSED(fsdp_unit_set_gradient_divisor(kit.unit, NAN), FSDP_ERR_INVALID, "divisor");
    OK(fsdp_unit_zero_grad(kit.unit, 2)); /* a frozen one */
    /* The model's settings are for all again; a unit's own are not for units made later. */
    OK(fsdp_unit_set_gradient_sync(kit.unit, 0));
    OK(fsdp_unit_set_all_reduce(kit.unit, 0));
    OK(fsdp_unit_set_gradient_divisor(kit.unit, 5));
    kit_make(model, "late", other, 1, 0, NULL, &late);
    fsdp_unit_info info = kit_query(&late);
    CHECK(info.gradient_sync == 1 && info.all_reduce == 1 && info.gradient_divisor == r->size, "a later unit's");
    OK(fsdp_model_set_gradient_sync(model, 1));
    OK(fsdp_model_set_all_reduce(model, 1));
    OK(fsdp_model_set_gradient_divisor(model, 3));
    info = kit_query(&kit);
    CHECK(info.gradient_sync == 1 && info.all_reduce == 1 && info.gradient_divisor == 3, "the model's");
    if (r->size > 1) {
        /* What differs between ranks is found; zeroing does not make a failed reduction good, dropping all does. */
        OK(fsdp_unit_set_gradient_divisor(kit.unit, r->rank + 1));
        REFUSED(kit_give(&kit, r->rank, 1, NULL), FSDP_ERR_MISMATCH, "divisor");
        OK(fsdp_unit_zero_grad(kit.unit, -1));
        REFUSED(fsdp_model_finish_backward(model), FSDP_ERR_MISMATCH, "divisor");
        OK(fsdp_model_zero_grad(model));
        OK(fsdp_unit_set_gradient_divisor(kit.unit, 0));
    } else {
        OK(fsdp_unit_set_gradient_divisor(kit.unit, 0));
    }
    OK(kit_give(&kit, r->rank, 3, NULL));
    OK(fsdp_model_finish_backward(model));
    kit_expect_grads(&kit, r->size, 3, 1, "after refusals");
    kit_drop(&kit);
    kit_drop(&late);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_unit_grad, what_is_refused_changes_nothing)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_refused, NULL);
}
