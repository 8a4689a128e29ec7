/* The tests' own autograd (tape.h) and models: gradients against differences of the loss, the places where modules'
 * hooks are called, and number formats. What the FSDP suites take for granted. */
#include "tape_model.h"

#include "ranks.h"

#include <math.h>

TestSuite(tape, .timeout = 60);

/* ---- gradients */

#define N 4 /* parameters of a trial */

struct trial {
    struct tape_param p[N];
    float value[N][64], grad[N][64];
};

static void trial_shape(struct trial *a, int i, int rows, int cols)
{
    a->p[i] = (struct tape_param){"p", rows, cols, a->value[i], a->grad[i], 0, 0};
    for (int k = 0; k < rows * cols; k++) a->value[i][k] = (float)sin(1.3 * k + 2.1 * i + 0.4);
}

typedef struct mat *(*trial_fn)(struct tape *t, struct mat **p);

static double trial_run(struct trial *a, trial_fn fn, int backward)
{
    static const float targets[64];
    struct tape *t = tape_new(backward);
    struct mat *p[N];
    for (int i = 0; i < N; i++) p[i] = tape_use(t, &a->p[i]);
    struct mat *y = fn(t, p), *loss = tape_squared_error(t, y, targets);
    double v = 0;
    for (int k = 0; k < y->rows * y->cols; k++) v += (double)y->v[k] * y->v[k] / 2;
    if (backward) tape_backward(t, loss, 1);
    tape_free(t);
    return v;
}

#define STEP 0.01

/* Each element moved up and down, twice as far too, so that the error is of fourth order. */
static double slope(float *at, double (*loss)(void *), void *user)
{
    float old = *at;
    double v[4], moves[] = {STEP, -STEP, 2 * STEP, -2 * STEP};
    for (int i = 0; i < 4; i++) {
        *at = (float)(old + moves[i]);
        v[i] = loss(user);
    }
    *at = old;
    return (8 * (v[0] - v[1]) - (v[2] - v[3])) / (12 * STEP);
}

struct trial_loss {
    struct trial *a;
    trial_fn fn;
};

static double loss_of_trial(void *user)
{
    struct trial_loss *l = user;
    return trial_run(l->a, l->fn, 0);
}

static void check_trial(struct trial *a, trial_fn fn, const char *what)
{
    struct trial_loss l = {a, fn};
    trial_run(a, fn, 1);
    for (int i = 0; i < N; i++)
        for (int k = 0; k < a->p[i].rows * a->p[i].cols; k++) {
            double s = slope(&a->value[i][k], loss_of_trial, &l), g = a->grad[i][k];
            cr_assert(fabs(s - g) <= 1e-3 * (1 + fabs(s)), "%s: gradient %d of parameter %d is %g, not %g", what, k, i,
                      g, s);
        }
}

static struct mat *linear(struct tape *t, struct mat **p)
{
    return tape_add_row(t, tape_matmul_nt(t, tape_tanh(t, tape_matmul(t, p[0], p[1])), p[2]), p[3]);
}

static struct mat *elementwise(struct tape *t, struct mat **p)
{
    struct mat *y = tape_mul(t, tape_add(t, p[0], p[1]), tape_gelu(t, tape_scale(t, p[2], 1.7)));
    return tape_mul_row(t, y, p[3]);
}

static struct mat *rows(struct tape *t, struct mat **p)
{
    struct mat *y = tape_softmax(t, p[0], 0);
    y = tape_mul(t, y, tape_softmax(t, p[1], 1));
    return tape_layer_norm(t, tape_add(t, y, p[0]), p[2], p[3]);
}

static struct mat *places(struct tape *t, struct mat **p)
{
    static const int ids[] = {2, 0, 2, 3}, at[] = {0, 0, 0, 2, 2, 0};
    struct mat *parts[] = {tape_slice(t, p[0], 1, 2, 1, 2), tape_slice(t, p[1], 0, 4, 0, 2),
                           tape_slice(t, p[0], 2, 2, 0, 2)};
    return tape_mul(t, tape_join(t, 4, 4, 3, parts, at), tape_embed(t, p[2], 4, ids));
}

static struct mat *twice_inside(struct tape *t, void *user, struct mat *x)
{
    struct mat **p = user;
    return tape_tanh(t, tape_matmul(t, tape_tanh(t, tape_matmul(t, x, p[1])), p[1]));
}

static struct mat *inner(struct tape *t, void *user, struct mat *x)
{
    return tape_mul(t, tape_checkpoint(t, twice_inside, user, x), x);
}

static struct mat *run_again(struct tape *t, struct mat **p)
{
    return tape_add(t, tape_checkpoint(t, inner, p, p[0]), tape_checkpoint(t, twice_inside, p, p[2]));
}

Test(tape, gradients_of_operations_are_slopes_of_the_loss)
{
    static const struct {
        const char *name;
        trial_fn fn;
        int shape[N][2];
    } all[] = {
        {"linear", linear, {{3, 4}, {4, 5}, {2, 5}, {1, 2}}},
        {"elementwise", elementwise, {{3, 4}, {3, 4}, {3, 4}, {1, 4}}},
        {"rows", rows, {{4, 4}, {4, 4}, {1, 4}, {1, 4}}},
        {"places", places, {{4, 4}, {4, 4}, {5, 4}, {1, 1}}},
        {"run again", run_again, {{3, 4}, {4, 4}, {3, 4}, {1, 1}}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct trial a = {0};
        for (int p = 0; p < N; p++) trial_shape(&a, p, all[i].shape[p][0], all[i].shape[p][1]);
        check_trial(&a, all[i].fn, all[i].name);
    }
}

Test(tape, frozen_parameters_get_no_gradient_and_let_it_through)
{
    struct trial a = {0};
    static const int shape[N][2] = {{3, 4}, {4, 5}, {2, 5}, {1, 2}};
    for (int p = 0; p < N; p++) trial_shape(&a, p, shape[p][0], shape[p][1]);
    a.p[2].frozen = 1;
    a.p[2].grad = NULL; /* not even memory for it */
    struct trial_loss l = {&a, linear};
    trial_run(&a, linear, 1);
    cr_assert(!a.p[2].used && a.p[0].used);
    double s = slope(&a.value[0][1], loss_of_trial, &l);
    cr_assert(fabs(s - a.grad[0][1]) <= 1e-3 * (1 + fabs(s)));
}

/* ---- the models */

struct model_trial {
    struct model model;
    struct trainer trainer;
    float *values[PARAMS], *grads[PARAMS];
    char hooks[512];
};

static void note(struct trainer *tr, const char *what, int unit)
{
    struct model_trial *m = tr->owner;
    size_t used = strlen(m->hooks);
    snprintf(m->hooks + used, sizeof m->hooks - used, "%s%d ", what, unit);
}

static void note_pre_forward(struct trainer *tr, int unit)
{
    note(tr, "(", unit);
}

static void note_post_forward(struct trainer *tr, int unit)
{
    note(tr, ")", unit);
}

static void note_pre_backward(struct trainer *tr, int unit)
{
    note(tr, "<", unit);
}

static void note_post_backward(struct trainer *tr, struct tape *t, int unit)
{
    struct model_trial *m = tr->owner;
    note(tr, ">", unit);
    for (int p = 0; p < m->model.n_params; p++) {
        struct tape_param *param = &tr->params[p];
        if (m->model.params[p].unit != unit) continue;
        for (long k = 0; k < m->model.params[p].count; k++) m->grads[p][k] += param->grad[k];
        memset(param->grad, 0, (size_t)m->model.params[p].count * sizeof(float));
    }
}

static void no_matter(struct trainer *tr, int which) {}

static void no_cast(struct trainer *tr, int unit, int kind, float *values, int count) {}

static const struct backend noting = {
    note_pre_forward, note_post_forward, note_pre_backward, note_post_backward, no_matter, no_matter, no_cast};

static struct model_trial *model_trial(const struct plan *plan)
{
    struct model_trial *m = calloc(1, sizeof *m);
    model_build(&m->model, plan, 1);
    trainer_init(&m->trainer, &m->model, &noting, m, 0, 1);
    for (int p = 0; p < m->model.n_params; p++) {
        size_t n = (size_t)m->model.params[p].count + 1;
        double *initial = calloc(n, sizeof *initial);
        model_initial(&m->model, p, initial);
        m->values[p] = calloc(n, sizeof(float));
        m->grads[p] = calloc(n, sizeof(float));
        for (size_t k = 0; k + 1 < n; k++) m->values[p][k] = (float)initial[k];
        free(initial);
        m->trainer.params[p].value = m->values[p];
    }
    trainer_micros(&m->trainer, 0);
    trainer_forget(&m->trainer);
    return m;
}

static void model_trial_drop(struct model_trial *m)
{
    for (int p = 0; p < m->model.n_params; p++) {
        free(m->values[p]);
        free(m->grads[p]);
    }
    trainer_drop(&m->trainer);
    free(m);
}

static double loss_of_model(void *user)
{
    struct model_trial *m = user;
    return trainer_evaluate(&m->trainer, 0) * loss_factor(m->trainer.plan, 1);
}

static const struct plan mlp = {
    .seed = 3,
    .shape = {.kind = MLP, .layers = 4, .width = {3, 4, 3, 4, 3}, .aux = 1, .lora = 2},
    .rows = 3,
    .schedule = "S",
};

static const struct plan attention = {
    .seed = 4,
    .shape = {.kind = ATTENTION, .vocabulary = 5, .sequence = 3, .dim = 4, .heads = 2, .hidden = 5},
    .rows = 2,
    .schedule = "S",
};

Test(tape, gradients_of_models_are_slopes_of_the_loss)
{
    for (int i = 0; i < 4; i++) {
        struct plan plan = i & 1 ? attention : mlp;
        plan.twice[1] = i >> 1;
        for (int b = 0; i >> 1 && b < 2; b++) plan.checkpoint[block_module(&plan.shape, b)] = RUN_AGAIN_IN_UNIT;
        struct model_trial *m = model_trial(&plan);
        for (int p = 0; p < m->model.n_params; p++)
            for (long k = 0; k < m->model.params[p].count; k++) {
                double s = slope(&m->values[p][k], loss_of_model, m), g = m->grads[p][k];
                cr_assert(fabs(s - g) <= 2e-3 * (1 + fabs(s)), "element %ld of %s: %g, not %g", k,
                          m->model.params[p].name, g, s);
            }
        model_trial_drop(m);
    }
}

/* Units: 0 the model, 1 block 0 with its layers, 2 block 1, 3 its first layer, 4 the auxiliary output. */
static void expect_hooks(struct plan plan, const char *expected)
{
    plan.unit[block_module(&plan.shape, 0)] = 1;
    plan.unit[block_module(&plan.shape, 1)] = 2;
    plan.unit[layer_module(&plan.shape, 2)] = 3;
    plan.unit[module_count(&plan.shape) - 1] = 4;
    struct model_trial *m = model_trial(&plan);
    cr_assert(strcmp(m->hooks, expected) == 0, "hooks are\n%s, not\n%s", m->hooks, expected);
    model_trial_drop(m);
}

Test(tape, hooks_come_where_modules_begin_and_end)
{
    struct plan plan = mlp;
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (4 )4 )0 <0 <4 >4 <2 <3 >3 >2 <1 >1 >0 ");
    plan.aux_every = 2; /* the output of unit 4 does not count */
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (4 )4 )0 <0 <2 <3 >3 >2 <1 >1 >0 ");
    plan.aux_every = 0;
    plan.twice[1] = plan.post_each = 1;
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (2 (3 )3 )2 (4 )4 )0 <0 <4 >4 <2 <3 >3 >2 <2 <3 >3 >2 <1 >1 >0 ");
    plan.post_each = 0;
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (2 (3 )3 )2 (4 )4 )0 <0 <4 >4 <2 <3 <2 <3 >3 >2 <1 >1 >0 ");
    plan.twice[1] = 0;
    plan.checkpoint[block_module(&plan.shape, 1)] = RUN_AGAIN_AROUND_UNIT;
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (4 )4 )0 <0 <4 >4 (2 (3 )3 )2 <2 <3 >3 >2 <1 >1 >0 ");
    plan.checkpoint[block_module(&plan.shape, 1)] = RUN_AGAIN_IN_UNIT;
    expect_hooks(plan, "(0 (1 )1 (2 (3 )3 )2 (4 )4 )0 <0 <4 >4 <2 (3 )3 <3 >3 >2 <1 >1 >0 ");
}

/* ---- the oracle: what many ranks come to is what one does, in f32 */

Test(tape, oracle_of_many_ranks_is_the_plain_one_in_f32)
{
    static const char *const schedules[] = {"S", "SNS", "RNRS", "NS"};
    double most = 0;
    for (int trial = 0; trial < 48; trial++) {
        struct plan plan = trial & 1 ? attention : mlp;
        struct result exact, plain;
        struct model m;
        plan.unit[1] = plan.unit[module_count(&plan.shape) - 1] = 1;
        plan.unit[2] = 2;
        plan.shape.tied = trial % 3 == 0;
        plan.rows = 7;
        plan.steps = 4;
        plan.optimizer = trial >> 1 & 1 ? ADAM : SGD;
        plan.strategy = 1 + trial % 5;
        plan.replicas = plan.strategy >= FSDP_HYBRID_SHARD ? 2 : 0;
        plan.twice[1] = trial % 4 == 3;
        plan.paired = trial % 3;
        plan.post_each = trial >> 2 & 1;
        plan.frozen[3] = plan.toggled[2] = plan.toggle_step = 1;
        plan.aux_every = 2;
        plan.evaluate = 1;
        for (int i = 0; i < MODULES; i++) plan.checkpoint[i] = (trial + i) % 3;
        strcpy(plan.schedule, schedules[trial / 3 % 4]);
        oracle_train(&plan, plan.replicas ? 4 : 1 + trial % 4, &exact);
        oracle_train(&plan, 0, &plain);
        model_build(&m, &plan, 0);
        for (int p = 0; p < m.n_params; p++)
            for (long k = 0; k < m.params[p].count; k++) {
                double d = fabs(exact.values[p][k] - plain.values[p][k]);
                cr_assert(d <= 1e-6, "trial %d: %s is off by %g", trial, m.params[p].name, d);
                most = d > most ? d : most;
            }
        for (int i = 0; i < 2 * plan.steps; i++)
            cr_assert(fabs(exact.losses[i] - plain.losses[i]) < 1e-5 * (1 + plain.losses[i]));
        result_drop(&exact);
        result_drop(&plain);
    }
    printf("off by at most %g\n", most);
}

/* ---- number formats */

Test(tape, formats_round_as_the_library_does)
{
    static const DLDataType types[FORMATS] = {[FORMAT_F32] = {kDLFloat, 32, 1},
                                              [FORMAT_F64] = {kDLFloat, 64, 1},
                                              [FORMAT_BF16] = {kDLBfloat, 16, 1},
                                              [FORMAT_F16] = {kDLFloat, 16, 1}};
    static const double special[] = {0,     -0.0,  1,       65504,  65519.9, 65520,    1e-7,         6.2e-8,
                                     3e-8,  1e-41, 3.39e38, 3.4e38, -3.4e38, INFINITY, 1 + 1 / 256., 1 + 3 / 256.,
                                     1e300, 5e-5,  6.1e-5,  1 / 3., -2 / 3.};
    enum { SPECIAL = sizeof special / sizeof *special, ALL = 4000 };
    for (enum format f = FORMAT_F32; f < FORMATS; f++)
        for (int i = 0; i < ALL; i++) {
            double v = i < SPECIAL ? special[i] : ldexp(sin(i * 1.7), i % 60 - 40), got;
            char mine[8] = {0}, theirs[8] = {0};
            DLTensor from = {.data = &v, .device = {kDLCPU, 0}, .dtype = types[FORMAT_F64]}, to = from;
            to.data = theirs;
            to.dtype = types[f];
            cr_assert(fsdp_copy(&from, &to) == FSDP_OK);
            format_set(f, mine, 0, v);
            cr_assert(memcmp(mine, theirs, format_size(f)) == 0, "%s of %.17g: %g, the library has %g", format_names[f],
                      v, format_get(f, mine, 0), format_get(f, theirs, 0));
            got = format_get(f, mine, 0);
            cr_assert(got == format_round(f, v), "%s of %.17g: %g and %g", format_names[f], v, got, format_round(f, v));
        }
}
