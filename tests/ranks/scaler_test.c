/* Loss scaling: what is found on one rank is found on all, and all go on alike. The expected scale and counters come
 * from a few lines of torch's rules, written out here. */
#include "fsdp_host.h"

#include <float.h>
#include <math.h>

TestSuite(scaler, .timeout = RANKS_SECONDS + 30);

/* A17: with three and four ranks the last owns no elements. */
static const struct spec specs[] = {{"w", DTYPE_F32, 2, {2, 3}, 0},
                                    {"h", DTYPE_F16, 1, {2}, 0},
                                    {"b", DTYPE_BF16, 1, {1}, 0},
                                    {"d", DTYPE_F64, 1, {2}, 0},
                                    {"frozen", DTYPE_F32, 1, {2}, 1}};
#define SPECS (int)(sizeof specs / sizeof *specs)

static fsdp_scaler *scaler_make(fsdp_group *group, const fsdp_scaler_options *given)
{
    fsdp_scaler_options options;
    fsdp_scaler *scaler;
    OK(fsdp_scaler_options_init(&options, sizeof options));
    if (given) options = *given;
    options.struct_size = sizeof options;
    OK(fsdp_scaler_create(group, &options, &scaler));
    return scaler;
}

static fsdp_scaler_info info_of(fsdp_scaler *scaler)
{
    fsdp_scaler_info info = {.struct_size = sizeof info};
    OK(fsdp_scaler_query(scaler, &info));
    return info;
}

static double element(int i, int64_t k)
{
    return rounded(specs[i].type, (double)(i * 5 + k * 3 + 1) * 100 / 3);
}

static void set_grads(const struct host_unit *u)
{
    for (int i = 0; i < SPECS; i++) {
        int64_t begin, count;
        double values[8];
        if (!u->grad[i]) continue;
        spec_part(&specs[i], u->rank, u->size, &begin, &count);
        for (int64_t k = 0; k < count; k++) values[k] = element(i, begin + k);
        set_doubles(&u->grad[i]->dl_tensor, values);
    }
}

/* A value times 1 / scale, in the dtype's accumulator, rounded once. */
static double unscaled(enum dtype type, double x, double scale)
{
    return type == DTYPE_F64 ? x * (1 / scale) : rounded(type, (double)((float)x * (float)(1 / scale)));
}

static void expect_grads(const struct host_unit *u, double scale, const char *when)
{
    for (int i = 0; i < SPECS; i++) {
        int64_t begin, count;
        double got[8];
        if (!u->grad[i]) continue;
        spec_part(&specs[i], u->rank, u->size, &begin, &count);
        get_doubles(&u->grad[i]->dl_tensor, got);
        for (int64_t k = 0; k < count; k++) {
            double want = unscaled(specs[i].type, element(i, begin + k), scale);
            CHECK(got[k] == want, "%s: '%s' at %lld is %.17g, not %.17g", when, specs[i].name, (long long)(begin + k),
                  got[k], want);
        }
    }
}

/* What a scaler should be. */
struct model_scaler {
    double scale, growth, backoff;
    int interval, tracker;
    int64_t steps, skipped;
};

static void model_update(struct model_scaler *m, int found)
{
    if (found)
        m->scale *= m->backoff, m->tracker = 0, m->skipped++;
    else if (m->steps++, ++m->tracker == m->interval)
        m->scale *= m->growth, m->tracker = 0;
    m->scale = (double)(float)m->scale;
}

static void expect_scaler(fsdp_scaler *scaler, const struct model_scaler *m, int found, const char *when)
{
    fsdp_scaler_info info = info_of(scaler);
    CHECK(info.scale == m->scale, "%s: scale %.9g, not %.9g", when, info.scale, m->scale);
    CHECK(info.growth_tracker == m->tracker, "%s: growth tracker %d, not %d", when, info.growth_tracker, m->tracker);
    CHECK(info.found_inf == found, "%s: found_inf %d", when, info.found_inf);
    CHECK(info.steps == m->steps && info.skipped == m->skipped, "%s: %lld steps, %lld skipped", when,
          (long long)info.steps, (long long)info.skipped);
}

/* 16 rounds of a made-up training, with infinities here and there: each on one rank, in one parameter. */
static void rank_rounds(struct rank *r)
{
    uint64_t seed = *(const uint64_t *)r->argument;
    OK(fsdp_set_log(NULL, NULL, FSDP_LOG_ERROR)); /* skipped steps are what this is about */
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct host_unit u;
    host_unit_make(r, model, "u", specs, SPECS, 0, &u);
    static const fsdp_scaler_options options[] = {
        {0},
        {.init_scale = 1024, .growth_interval = 1},
        {.init_scale = 3, .growth_factor = 1.5, .backoff_factor = 0.3, .growth_interval = 2}};
    for (int o = 0; o < 3; o++) {
        fsdp_scaler *scaler = scaler_make(group, &options[o]);
        struct model_scaler want = {o ? options[o].init_scale : 65536, o == 2 ? 1.5 : 2, o == 2 ? (double)0.3 : 0.5,
                                    o ? options[o].growth_interval : 2000, .tracker = 0};
        for (int round = 0; round < 16; round++) {
            char when[96];
            snprintf(when, sizeof when, "options %d, round %d, FSDP_TEST_SEED=%llu", o, round,
                     (unsigned long long)seed);
            expect_scaler(scaler, &want, round ? info_of(scaler).found_inf : 0, when);
            set_grads(&u);
            /* The same draw on all ranks; the owner of the element makes it bad. */
            int bad = random_below(&seed, 3) == 0, i = random_below(&seed, 4), kind = random_below(&seed, 3);
            int64_t at = random_below(&seed, (int)spec_count(&specs[i])), begin, count;
            spec_part(&specs[i], r->rank, r->size, &begin, &count);
            if (bad && at >= begin && at < begin + count) {
                double values[8];
                get_doubles(&u.grad[i]->dl_tensor, values);
                values[at - begin] = kind == 0 ? (double)INFINITY : kind == 1 ? -(double)INFINITY : (double)NAN;
                set_doubles(&u.grad[i]->dl_tensor, values);
            }
            OK(fsdp_scaler_unscale(scaler, model));
            if (!bad) expect_grads(&u, want.scale, when);
            CHECK(info_of(scaler).found_inf == bad, "%s: found_inf is not %d", when, bad);
            int32_t step = -1;
            OK(fsdp_scaler_step(scaler, &step));
            CHECK(step == !bad, "%s: should_step is %d", when, step);
            OK(fsdp_scaler_update(scaler));
            model_update(&want, bad);
            expect_scaler(scaler, &want, bad, when);
        }
        fsdp_scaler_release(scaler);
    }
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(scaler, an_infinity_on_one_rank_makes_all_skip_and_back_off)
{
    uint64_t seed = random_seed();
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_rounds, &seed);
}

/* The host's own gradients: dtypes, strides, none at all on some ranks. */
static void rank_tensors(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_scaler *scaler = scaler_make(group, &(fsdp_scaler_options){.init_scale = 12, .growth_interval = 1});
    static const enum dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F64, DTYPE_F8E5M2, DTYPE_C64};
    enum { TYPES = sizeof types / sizeof *types };
    for (int bad = -1; bad < r->size; bad++) {
        if (bad == 1) continue; /* rank 1 gives nothing */
        char memory[TYPES][256];
        DLTensor tensors[TYPES];
        const DLTensor *grads[TYPES + 1];
        int64_t shape[] = {3, 2}, strides[] = {1, 3}, gaps[] = {8, 2};
        double scale = info_of(scaler).scale, values[6];
        memset(memory, 0x55, sizeof memory);
        for (int i = 0; i < TYPES; i++) {
            tensors[i] = view(memory[i], types[i], 2, shape);
            if (i % 3) tensors[i].strides = i % 3 == 1 ? strides : gaps;
            for (int k = 0; k < 6; k++) values[k] = k * 7 + i + 1;
            if (r->rank == bad && i == bad) values[3] = INFINITY;
            set_doubles(&tensors[i], values);
            grads[i] = &tensors[i];
        }
        grads[TYPES] = NULL;
        if (r->rank == 1)
            OK(fsdp_scaler_unscale_tensors(scaler, NULL, 0));
        else
            OK(fsdp_scaler_unscale_tensors(scaler, grads, TYPES + 1));
        CHECK(info_of(scaler).found_inf == (bad >= 0), "found_inf with an infinity on rank %d", bad);
        for (int i = 0; i < TYPES && r->rank != 1; i++) {
            if (r->rank == bad && i == bad) continue;
            get_doubles(&tensors[i], values);
            for (int k = 0; k < 6; k++) {
                double x = rounded(types[i] == DTYPE_C64 ? DTYPE_F32 : types[i], k * 7 + i + 1);
                double want = unscaled(types[i] == DTYPE_C64 ? DTYPE_F32 : types[i], x, scale);
                CHECK(values[k] == want, "gradient %d at %d is %g, not %g", i, k, values[k], want);
            }
            if (i % 3 == 2) /* the gaps are not written */
                CHECK(memory[i][dtype_size(types[i])] == 0x55, "gradient %d: a byte in a gap was written", i);
        }
        OK(fsdp_scaler_update(scaler));
    }
    /* Refused before anyone waits. */
    float f[4] = {1, 2, 3, 4};
    int32_t whole[2] = {1, 2};
    DLTensor a = view(f, DTYPE_F32, 1, (int64_t[]){3}), b = view(f + 2, DTYPE_F32, 1, (int64_t[]){2}),
             c = view(whole, DTYPE_I32, 1, (int64_t[]){2});
    const DLTensor *shared[] = {&b, NULL, &a}, *integer[] = {&a, &c};
    uint64_t before = operations_of(group);
    REFUSED(fsdp_scaler_unscale_tensors(scaler, shared, 3), FSDP_ERR_INVALID, "grads[0] and grads[2] overlap");
    REFUSED(fsdp_scaler_unscale_tensors(scaler, integer, 2), FSDP_ERR_UNSUPPORTED, "grads[1] is int32");
    REFUSED(fsdp_scaler_unscale_tensors(scaler, NULL, 2), FSDP_ERR_INVALID, "grads is NULL");
    REFUSED(fsdp_scaler_unscale_tensors(scaler, shared, -1), FSDP_ERR_INVALID, "n is -1");
    CHECK(operations_of(group) == before && f[0] == 1 && f[2] == 3, "a refused call did something");
    fsdp_scaler_release(scaler);
    fsdp_group_release(group);
}

Test(scaler, gradients_of_the_host_are_unscaled_in_place)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_tensors, NULL);
}

/* ---- order of calls */

static _Thread_local int lines;

static void count_line(fsdp_log_level level, const char *message, void *user)
{
    if (level == FSDP_LOG_WARN && strstr(message, "skipped")) lines++;
}

static void rank_order(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_scaler *scaler = scaler_make(group, NULL);
    int32_t step = 7;
    float bad = INFINITY, value = 65536;
    DLTensor t = view(&value, DTYPE_F32, 0, NULL), worse = view(&bad, DTYPE_F32, 0, NULL);
    const DLTensor *good[] = {&t}, *infinite[] = {&worse};
    fsdp_scaler_state state = {.struct_size = sizeof state};

    REFUSED(fsdp_scaler_step(scaler, &step), FSDP_ERR_STATE, "fsdp_scaler_unscale before");
    REFUSED(fsdp_scaler_update(scaler), FSDP_ERR_STATE, "no inf checks were recorded prior to update");
    OK(fsdp_scaler_unscale_tensors(scaler, good, 1));
    REFUSED(fsdp_scaler_unscale_tensors(scaler, good, 1), FSDP_ERR_STATE,
            "unscale has already been called on this scaler since the last update");
    CHECK(value == 1, "unscaled to %g", (double)value);
    REFUSED(fsdp_scaler_save(scaler, &state), FSDP_ERR_STATE, "saved");
    OK(fsdp_scaler_step(scaler, &step));
    CHECK(step == 1, "should_step is %d", step);
    step = 7;
    REFUSED(fsdp_scaler_step(scaler, &step), FSDP_ERR_STATE, "step has already been called");
    CHECK(step == 7, "an output was written");
    REFUSED(fsdp_scaler_unscale_tensors(scaler, good, 1), FSDP_ERR_STATE, "after step");
    OK(fsdp_scaler_update(scaler));
    REFUSED(fsdp_scaler_update(scaler), FSDP_ERR_STATE, "no inf checks");

    /* A skipped step is told once, by rank 0. */
    OK(fsdp_set_log(count_line, NULL, FSDP_LOG_WARN));
    OK(fsdp_scaler_unscale_tensors(scaler, r->rank == r->size - 1 ? infinite : good, 1));
    OK(fsdp_scaler_step(scaler, &step));
    REFUSED(fsdp_scaler_step(scaler, &step), FSDP_ERR_STATE, "already");
    OK(fsdp_scaler_update(scaler));
    CHECK(step == 0 && lines == (r->rank == 0), "%d lines in the log", lines);
    OK(fsdp_barrier(group, NULL));
    OK(fsdp_set_log(NULL, NULL, 0));
    CHECK(info_of(scaler).scale == 32768 && info_of(scaler).skipped == 1, "back-off");

    /* Update without a step, as torch allows. */
    OK(fsdp_scaler_unscale_tensors(scaler, NULL, 0));
    OK(fsdp_scaler_update(scaler));
    CHECK(info_of(scaler).growth_tracker == 1 && info_of(scaler).steps == 1, "update without a step");
    fsdp_scaler_release(scaler);

    /* Disabled: nothing happens, nothing is sent. */
    scaler = scaler_make(group, &(fsdp_scaler_options){.disabled = 1, .init_scale = 8});
    uint64_t before = operations_of(group);
    value = 3;
    for (int i = 0; i < 2; i++) {
        OK(fsdp_scaler_unscale_tensors(scaler, infinite, 1));
        OK(fsdp_scaler_unscale_tensors(scaler, good, 1));
        OK(fsdp_scaler_step(scaler, &step));
        CHECK(step == 1, "a disabled scaler says no");
        OK(fsdp_scaler_update(scaler));
    }
    CHECK(info_of(scaler).scale == 1 && value == 3 && operations_of(group) == before,
          "a disabled scaler did something");
    OK(fsdp_scaler_save(scaler, &state));
    CHECK(state.scale == 8, "the saved scale is %g", state.scale);
    fsdp_scaler_release(scaler);
    fsdp_group_release(group);
}

Test(scaler, calls_out_of_order_are_told_which_comes_first)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_order, NULL);
}

/* ---- state */

static void round_of(fsdp_scaler *scaler, int bad)
{
    float value = bad ? NAN : 1;
    int32_t step;
    DLTensor t = view(&value, DTYPE_F32, 0, NULL);
    const DLTensor *grads[] = {&t};
    OK(fsdp_scaler_unscale_tensors(scaler, grads, 1));
    OK(fsdp_scaler_step(scaler, &step));
    OK(fsdp_scaler_update(scaler));
}

static void rank_state(struct rank *r)
{
    OK(fsdp_set_log(NULL, NULL, FSDP_LOG_ERROR));
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_scaler_options options = {.init_scale = 48, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3};
    fsdp_scaler *scaler = scaler_make(group, &options), *other = scaler_make(group, NULL);
    const struct model_scaler want = {12, 4, 0.25, 3, 2, 2, 1};
    round_of(scaler, r->rank == 0);
    round_of(scaler, 0);
    round_of(scaler, 0);
    fsdp_scaler_state state = {.struct_size = sizeof state};
    OK(fsdp_scaler_save(scaler, &state));
    CHECK(state.scale == 12 && state.growth_factor == 4 && state.backoff_factor == 0.25 && state.growth_interval == 3 &&
              state.growth_tracker == 2 && state.steps == 2 && state.skipped == 1,
          "what was saved");
    OK(fsdp_scaler_load(other, &state));
    expect_scaler(other, &want, 0, "loaded");
    for (int i = 0; i < 4; i++) { /* both go on alike */
        round_of(scaler, i == 2);
        round_of(other, i == 2);
        CHECK(info_of(scaler).scale == info_of(other).scale &&
                  info_of(scaler).growth_tracker == info_of(other).growth_tracker,
              "they part in round %d", i);
    }
    CHECK(info_of(other).scale == 12 && info_of(other).growth_tracker == 1, "growth and back-off");

    static const struct {
        fsdp_scaler_state state;
        const char *word;
    } bad[] = {
        {{0, 0, 2, 0.5, 9, 0, 0, 0}, "state.scale"},           {{0, INFINITY, 2, 0.5, 9, 0, 0, 0}, "state.scale"},
        {{0, 1, 1, 0.5, 9, 0, 0, 0}, "state.growth_factor"},   {{0, 1, 2, 1, 9, 0, 0, 0}, "state.backoff_factor"},
        {{0, 1, 2, 0.5, 0, 0, 0, 0}, "state.growth_interval"}, {{0, 1, 2, 0.5, 9, 9, 0, 0}, "state.growth_tracker"},
        {{0, 1, 2, 0.5, 9, -1, 0, 0}, "state.growth_tracker"}, {{0, 1, 2, 0.5, 9, 0, -1, 0}, "state.steps"},
        {{0, 1, 2, 0.5, 9, 0, 0, -1}, "state.skipped"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fsdp_scaler_state strange = bad[i].state;
        strange.struct_size = sizeof strange;
        REFUSED(fsdp_scaler_load(other, &strange), FSDP_ERR_INVALID, bad[i].word);
    }
    CHECK(info_of(other).scale == 12, "a refused state was loaded");

    /* The scale keeps to float32's normal range. */
    fsdp_scaler_state edge = {sizeof edge, (double)FLT_MAX, 2, 0.5, 1, 0, 0, 0};
    OK(fsdp_scaler_load(other, &edge));
    round_of(other, 0);
    CHECK(info_of(other).scale == (double)FLT_MAX && info_of(other).growth_tracker == 0, "grown beyond float32");
    edge.scale = (double)FLT_MIN;
    OK(fsdp_scaler_load(other, &edge));
    round_of(other, 1);
    CHECK(info_of(other).scale == (double)FLT_MIN, "fallen below float32");

    if (r->size >
        1) { /* one rank loads another state: all are told, nothing is changed, and loading alike makes good */
        float value = 6;
        DLTensor t = view(&value, DTYPE_F32, 0, NULL);
        const DLTensor *grads[] = {&t};
        fsdp_scaler_state mine = state;
        for (int field = 0; field < 3; field++) {
            mine = state;
            if (r->rank == r->size - 1) {
                if (field == 0) mine.scale = 24;
                if (field == 1) mine.growth_tracker = 1;
                if (field == 2) mine.growth_interval = 4;
            }
            OK(fsdp_scaler_load(other, &mine));
            REFUSED(fsdp_scaler_unscale_tensors(other, grads, 1), FSDP_ERR_MISMATCH, "scalers differ");
        }
        CHECK(value == 6, "a gradient was changed");
        OK(fsdp_scaler_load(other, &state));
        OK(fsdp_scaler_unscale_tensors(other, grads, 1));
        CHECK(value == 0.5f, "unscaled to %g", (double)value);
    }
    fsdp_scaler_release(other);
    fsdp_scaler_release(scaler);
    fsdp_group_release(group);
}

Test(scaler, state_is_saved_and_loaded_and_must_be_the_same_on_all_ranks)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_state, NULL);
}

/* ---- what is refused, and reductions that are under way or failed */

static void rank_refused(struct rank *r)
{
    static const struct {
        fsdp_scaler_options options;
        const char *word;
    } bad[] = {
        {{.init_scale = -1}, "options.init_scale"},           {{.init_scale = NAN}, "options.init_scale"},
        {{.init_scale = 1e39}, "options.init_scale"},         {{.init_scale = 1e-39}, "options.init_scale"},
        {{.growth_factor = 1}, "options.growth_factor"},      {{.growth_factor = INFINITY}, "options.growth_factor"},
        {{.backoff_factor = 1}, "options.backoff_factor"},    {{.backoff_factor = -0.5}, "options.backoff_factor"},
        {{.growth_interval = -1}, "options.growth_interval"}, {{.disabled = 2}, "options.disabled"}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_scaler *none = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fsdp_scaler_options options = bad[i].options;
        options.struct_size = sizeof options;
        REFUSED(fsdp_scaler_create(group, &options, &none), FSDP_ERR_INVALID, bad[i].word);
    }
    CHECK(!none, "an output was written");

    fsdp_scaler *scaler = scaler_make(group, NULL);
    fsdp_model *model = model_make(group, NULL);
    struct host_unit a, b;
    static const struct spec one[] = {{"one", DTYPE_F32, 1, {5}, 0}};
    host_unit_make(r, model, "a", specs, SPECS, 0, &a);
    host_unit_make(r, model, "b", one, 1, 0, &b);
    float values[5] = {65536, 65536, 65536, 65536, 65536};
    DLTensor t = view(values, DTYPE_F32, 1, one[0].shape);
    const DLTensor *grads[] = {&t}, *nothing[SPECS] = {0};
    fsdp_work *work;
    if (r->size > 1) { /* a reduction that failed: MISMATCH */
        if (r->rank)
            OK(fsdp_unit_post_backward(a.unit, nothing, SPECS, &work));
        else
            OK(fsdp_unit_post_backward(b.unit, grads, 1, &work));
        fsdp_work_release(work);
        REFUSED(fsdp_scaler_unscale(scaler, model), FSDP_ERR_STATE, "not to be used");
        OK(fsdp_model_reset(model));
    }
    /* One under way. The scaler still is as before the refusal. */
    OK(fsdp_unit_post_backward(b.unit, grads, 1, &work));
    fsdp_work_release(work);
    OK(fsdp_scaler_unscale(scaler, model));
    for (int64_t k = 0; k < elements(&b.grad[0]->dl_tensor); k++)
        CHECK(((float *)b.grad[0]->dl_tensor.data)[k] == 1, "a gradient under way was not unscaled");
    OK(fsdp_scaler_update(scaler));

    /* The scaler keeps its group. */
    host_unit_drop(&a);
    host_unit_drop(&b);
    fsdp_model_release(model);
    fsdp_group_release(group);
    OK(fsdp_scaler_retain(scaler));
    fsdp_scaler_release(scaler);
    OK(fsdp_scaler_unscale_tensors(scaler, NULL, 0));
    fsdp_scaler_release(scaler);
}

Test(scaler, bad_options_and_lost_gradients_are_refused)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_refused, NULL);
}
