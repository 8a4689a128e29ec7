/* Gradients on their way to the shards, and what is refused. */
#include "fsdp_host.h"

#include <math.h>

TestSuite(fsdp_gradient, .timeout = RANKS_SECONDS + 30);

static const fsdp_model_options shared = {0}, in_private = {.private_unshard = 1};
static const fsdp_model_options *const all_options[] = {&shared, &in_private};

/* ---- gradients, against sums made here; all values are whole, so every order of addition is exact */

static const struct spec trained[] = {{"w", DTYPE_F32, 2, {5, 3}, 0},   {"h", DTYPE_BF16, 2, {3, 4}, 0},
                                      {"frozen", DTYPE_F32, 1, {6}, 1}, {"d", DTYPE_F64, 1, {1}, 0},
                                      {"e", DTYPE_F16, 1, {4}, 0},      {"none", DTYPE_F32, 2, {0, 2}, 0},
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

static double gradient(int r, int m, int i, int64_t k)
{
    return (double)((r * 5 + m * 3 + i + k * 2) % 8) - 2;
}

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

Test(fsdp_gradient, gradients_add_up_in_any_schedule)
{
    uint64_t seed = random_seed();
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_gradients, &seed);
}

static void rank_rounding(struct rank *r)
{
    static const struct spec specs[] = {
        {"b", DTYPE_BF16, 1, {4}, 0}, {"h", DTYPE_F16, 1, {4}, 0}, {"f", DTYPE_F32, 1, {3}, 0}};
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
    for (int64_t k = 0; k < elements(&u.grad[0]->dl_tensor); k++)
        CHECK(got[k] == 260, "accumulated %g, not 260", got[k]);
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_gradient, gradients_are_rounded_once_from_f32)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_rounding, NULL);
}

/* zero_grad only marks: what is there is of no meaning from then on, whoever looks first. */

static void fill(const DLManagedTensorVersioned *t, double v)
{
    double values[64];
    for (int k = 0; k < 64; k++) values[k] = v;
    set_doubles(&t->dl_tensor, values);
}

static int filled(const DLManagedTensorVersioned *t, double v)
{
    double values[64];
    get_doubles(&t->dl_tensor, values);
    for (int64_t k = 0; k < elements(&t->dl_tensor); k++)
        if (values[k] != v) return 0;
    return 1;
}

enum look { BY_GRAD, BY_FINISH, BY_NORM, BY_CLIP, BY_UNSCALE, BY_FREEZING, BY_REDUCTION, BY_NO_SYNC, LOOKS };

/* The first look after zero_grad. */
static void look_at(enum look look, fsdp_model *model, fsdp_scaler *scaler, const struct host_unit *u)
{
    double norm = 9;
    float threes[35];
    DLTensor grad = u->full[0]->dl_tensor;
    DLManagedTensorVersioned *again;
    fsdp_scaler_info info = {.struct_size = sizeof info};
    int32_t step = 0;
    switch (look) {
    case BY_GRAD:
        OK(fsdp_unit_param_grad(u->unit, 0, &again));
        CHECK(filled(again, 0), "a new tensor of the gradient holds old values");
        again->deleter(again);
        break;
    case BY_NORM:
        OK(fsdp_model_grad_norm(model, 2, &norm));
        CHECK(norm == 0, "norm %g", norm);
        break;
    case BY_CLIP:
        OK(fsdp_model_clip_grad_norm(model, 1, INFINITY, 1, &norm));
        CHECK(norm == 0, "norm %g", norm);
        break;
    case BY_UNSCALE:
        OK(fsdp_scaler_unscale(scaler, model));
        OK(fsdp_scaler_step(scaler, &step));
        CHECK(step, "an old infinity was found");
        OK(fsdp_scaler_update(scaler));
        break;
    case BY_FREEZING:
        OK(fsdp_unit_set_frozen(u->unit, 1, 1));
        OK(fsdp_unit_set_frozen(u->unit, 1, 0));
        break;
    case BY_NO_SYNC: /* nor by what is only accumulated */
        OK(fsdp_model_set_gradient_sync(model, 0));
        OK(backward_nothing(u));
        OK(fsdp_model_set_gradient_sync(model, 1));
        OK(fsdp_model_finish_backward(model));
        break;
    case BY_REDUCTION: /* of one parameter; the other has no gradient on any rank */
        for (int k = 0; k < 35; k++) threes[k] = 3;
        grad.data = threes;
        OK(fsdp_unit_post_backward(u->unit, (const DLTensor *const[]){&grad, NULL}, 2, NULL));
        break;
    default:
        OK(fsdp_model_finish_backward(model));
        break;
    }
}

static void rank_zeroed(struct rank *r)
{
    static const struct spec specs[2][2] = {{{"a", DTYPE_F32, 2, {7, 5}, 0}, {"b", DTYPE_BF16, 1, {9}, 0}},
                                            {{"c", DTYPE_F64, 1, {6}, 0}, {"d", DTYPE_F32, 1, {5}, 0}}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_scaler *scaler;
    fsdp_scaler_options scaling = {.struct_size = sizeof scaling};
    OK(fsdp_scaler_create(group, &scaling, &scaler));
    fsdp_model *model = model_make(group, &(fsdp_model_options){.gradient_divisor = 1});
    struct host_unit u[2];
    for (int i = 0; i < 2; i++) host_unit_make(r, model, NULL, specs[i], 2, 0, &u[i]);
    for (int look = 0; look < LOOKS; look++) {
        for (int i = 0; i < 4; i++) fill(u[i / 2].grad[i % 2], INFINITY);
        OK(fsdp_model_zero_grad(model));
        for (int i = 0; i < 4; i++) {
            CHECK(filled(u[i / 2].grad[i % 2], INFINITY), "cleared at once");
            fill(u[i / 2].grad[i % 2], i % 2 ? NAN : INFINITY); /* what is written now is lost */
        }
        look_at(look, model, scaler, &u[0]);
        CHECK(filled(u[0].grad[0], look == BY_REDUCTION ? 3.0 * r->size : 0), "way %d: the first gradient", look);
        CHECK(filled(u[0].grad[1], 0), "way %d: the second gradient", look);
        OK(fsdp_model_finish_backward(model));
        for (int i = 0; i < 2; i++) CHECK(filled(u[1].grad[i], 0), "way %d: another unit's gradient", look);
        CHECK(filled(u[0].grad[0], look == BY_REDUCTION ? 3.0 * r->size : 0), "way %d: at the end", look);
        look_at(BY_REDUCTION, model, scaler, &u[0]); /* cleared once: this adds */
        look_at(BY_REDUCTION, model, scaler, &u[0]);
        double sum = (look == BY_REDUCTION ? 9.0 : 6.0) * r->size;
        CHECK(filled(u[0].grad[0], sum) && filled(u[0].grad[1], 0), "way %d: later gradients are not added", look);
    }
    for (int i = 0; i < 2; i++) host_unit_drop(&u[i]);
    fsdp_model_release(model);
    fsdp_scaler_release(scaler);
    fsdp_group_release(group);
}

Test(fsdp_gradient, after_zero_grad_nobody_sees_what_was_there)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_zeroed, NULL);
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

Test(fsdp_gradient, reductions_of_several_units_in_flight)
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

    /* Units. What a unit is to be made of is judged together: one rank's refusal is everyone's. */
    static const struct spec repeated[] = {{"new", DTYPE_F32, 1, {3}, 0}, {"new", DTYPE_F32, 1, {4}, 0}};
    static const struct spec taken[] = {{"new", DTYPE_F32, 1, {3}, 0}, {"h", DTYPE_F32, 1, {4}, 0}};
    static const struct spec whole[] = {{"new", DTYPE_I32, 1, {3}, 0}}, scalar[] = {{"new", DTYPE_F32, 0, {0}, 0}};
    static const struct spec nameless[] = {{"", DTYPE_F32, 1, {3}, 0}}, complex[] = {{"new", DTYPE_C64, 1, {3}, 0}};
    fsdp_unit *unit = NULL;
    uint64_t before = operations_of(group);
    fsdp_memory_info refused_from = memory_of(model);
    REFUSED(unit_try(model, "v", repeated, 2, 0, &unit), FSDP_ERR_INVALID, "both named 'new'");
    REFUSED(unit_try(model, "v", taken, 2, 0, &unit), FSDP_ERR_INVALID, "'h' is managed by unit 'u'");
    REFUSED(unit_try(model, "v", whole, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "'new' is int32");
    REFUSED(unit_try(model, "v", complex, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "'new' is complex64");
    REFUSED(unit_try(model, "v", scalar, 1, 0, &unit), FSDP_ERR_INVALID, "'new' is 0-dim");
    REFUSED(unit_try(model, "v", nameless, 1, 0, &unit), FSDP_ERR_INVALID, "params[0].name");
    REFUSED(fsdp_unit_create(model, "v", NULL, 1, NULL, &unit), FSDP_ERR_INVALID, "params");
    fsdp_param one = {.struct_size = sizeof one, .name = "x"};
    REFUSED(fsdp_unit_create(model, "v", &one, 1, NULL, &unit), FSDP_ERR_INVALID, "params[0].full");
    one.full = &u.shard[0]->dl_tensor;
    REFUSED(fsdp_unit_create(model, "v", &one, 0, NULL, &unit), FSDP_ERR_INVALID, "n is 0");
    one.reserved = 1;
    REFUSED(fsdp_unit_create(model, "v", &one, 1, NULL, &unit), FSDP_ERR_INVALID, "reserved");
    static const struct spec fine[] = {{"new", DTYPE_F32, 1, {3}, 0}};
    REFUSED(unit_try(model, "v", r->rank == r->size - 1 ? whole : fine, 1, 0, &unit), FSDP_ERR_UNSUPPORTED, "int32");
    CHECK(!unit && operations_of(group) == before + 8, "%llu operations",
          (unsigned long long)(operations_of(group) - before));
    CHECK(memory_of(model).shards == refused_from.shards, "a refused call left something");

    /* Gradients. */
    struct sums sums = {0};
    char *memory = calloc(TRAINED, MOST * 16);
    OK(give_gradients(&u, 0, 0, 0, NULL, memory));
    add_microbatch(&sums, 0, r->size, 0, 1, 1);
    before = operations_of(group);
    DLTensor wrong_shape = view(memory, DTYPE_BF16, 2, (int64_t[]){4, 3}), wrong_type = u.full[0]->dl_tensor,
             good = u.full[0]->dl_tensor, device = u.full[1]->dl_tensor,
             fewer = view(memory, DTYPE_BF16, 1, (int64_t[]){12});
    device.device.device_type = kDLCUDA;
    wrong_type.dtype = dtype_to_dl(DTYPE_F64);
    const DLTensor *grads[TRAINED] = {&good};
    const struct {
        const DLTensor *grad;
        fsdp_status status;
        const char *word;
    } refused[] = {{&wrong_shape, FSDP_ERR_INVALID,
                    "grads[1] (of 'h') is (4, 3) bfloat16: it must be as the full parameter, (3, 4) bfloat16"},
                   {&fewer, FSDP_ERR_INVALID, "(of 'h')"},
                   {&wrong_type, FSDP_ERR_INVALID, "(of 'h')"},
                   {&device, FSDP_ERR_UNSUPPORTED, "(of 'h')"}};
    for (int sync = 0; sync < 2; sync++) {
        OK(fsdp_model_set_gradient_sync(model, sync));
        fsdp_work *work = NULL;
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
            grads[1] = refused[i].grad;
            REFUSED(fsdp_unit_post_backward(u.unit, grads, TRAINED, i % 2 ? &work : NULL), refused[i].status,
                    refused[i].word);
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

Test(fsdp_gradient, bad_arguments_are_refused_by_name_and_change_nothing)
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
    static const int which[N] = {0, 0, 0, 1, 0, 0}; /* the first parameter that differs */
    int odd = r->rank == r->size - 1;
    fsdp_group *group = group_make(r, 0, 0);
    for (int o = 0; o < 2; o++) {
        fsdp_model *model = model_make(group, all_options[o]);
        fsdp_unit *unit = NULL;
        for (int v = 0; v < N; v++) {
            const struct spec *mine = odd ? variations[v] : usual;
            char word[64];
            snprintf(word, sizeof word, "parameter %d (here '%s') differs in", which[v], mine[which[v]].name);
            REFUSED(unit_try(model, NULL, mine, 2, 0, &unit), FSDP_ERR_MISMATCH, word);
            CHECK(strstr(fsdp_last_error(), "create_unit of unit 'unit0'"), "%s", fsdp_last_error());
        }
        REFUSED(unit_try(model, odd ? "other" : NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "'other'");
        REFUSED(unit_try(model, NULL, usual, odd ? 1 : 2, 0, &unit), FSDP_ERR_MISMATCH, "they have 2 and 1 parameters");
        for (int v = 0; v < 3; v++) { /* what is no part of a shape: the second of three square matrices */
            float values[3][9] = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};
            DLTensor t[3];
            fsdp_param params[3];
            static const char *const names[] = {"x", "y", "z"};
            static const int64_t square[] = {3, 3};
            for (int i = 0; i < 3; i++) {
                t[i] = view(values[i], DTYPE_F32, 2, square);
                params[i] = (fsdp_param){.struct_size = sizeof *params, .name = names[i], .full = &t[i]};
            }
            if (odd && v == 0) params[1].shard_dim = 1;
            if (odd && v == 1) params[1].meta = 1;
            if (odd && v == 2) t[1].data = values[0]; /* tied */
            REFUSED(fsdp_unit_create(model, NULL, params, 3, NULL, &unit), FSDP_ERR_MISMATCH,
                    "parameter 1 (here 'y') differs in");
        }
        REFUSED(odd ? fsdp_barrier(group, NULL) : unit_try(model, NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH,
                "barrier");
        CHECK(!unit, "an output was written");

        /* Options that differ are seen, too. */
        const fsdp_model_options others[] = {{.gradient_divisor = 3.5},
                                             {.private_unshard = !all_options[o]->private_unshard}};
        for (int i = 0; i < 2; i++) {
            fsdp_model *strange = model_make(group, odd ? &others[i] : all_options[o]);
            REFUSED(unit_try(strange, NULL, usual, 2, 0, &unit), FSDP_ERR_MISMATCH, "they differ in options");
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

Test(fsdp_gradient, units_that_differ_between_ranks_are_refused_everywhere)
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

Test(fsdp_gradient, hooks_that_differ_between_ranks_are_told_to_all)
{
    for (int n = 2; n <= 3; n++) ranks_run(n, rank_hooks_differ, NULL);
}
