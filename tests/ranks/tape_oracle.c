/* The oracle (see tape_model.h): one process does what all ranks would, one after the other, on parameters of its own.
 *
 * Plain, it takes the whole batch at once and knows of no units. Otherwise it follows the rules that fsdp.h gives for
 * rounding: full parameters in param_dtype, each rank's gradients rounded to it, accumulated in f32 without sync,
 * rounded to reduce_dtype as they travel, summed in f32 in the order of ranks (first of those that shard, then of
 * replicas), divided, and added to the sharded gradient in its dtype. */
#include "tape_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 8
#define POSTS 64 /* of all units in one backward */

/* What a rank's unit gave to one post_backward. */
struct post {
    int unit, micro;
    float *grads[PARAMS]; /* by parameter of the model; NULL: none */
};

struct oracle {
    const struct plan *plan;
    struct model model;
    struct trainer trainer;
    int size, step, micro;
    double *master[PARAMS], *grad[PARAMS], *first[PARAMS], *second[PARAMS];
    float *full[PARAMS];
    double *waiting[RANKS][PARAMS]; /* without sync */
    double *partial[RANKS][PARAMS]; /* of a replica, not yet all-reduced */
    int accumulates[TAPE_UNITS];
    struct post posts[RANKS][POSTS * MICROS];
    int n_posts[RANKS];
};

/* Where the values and gradients of parameter p are kept. */
static int home(const struct oracle *o, int p)
{
    return o->model.params[p].tied_to >= 0 ? o->model.params[p].tied_to : p;
}

static enum format wide(enum format f)
{
    return f == FORMAT_F64 ? FORMAT_F64 : FORMAT_F32;
}

/* ---- the backend: everything is always there */

static void nothing(struct trainer *tr, int unit) {}

static void begin_backward(struct trainer *tr, int micro)
{
    struct oracle *o = tr->owner;
    o->micro = micro;
}

static void post_backward(struct trainer *tr, struct tape *t, int unit)
{
    struct oracle *o = tr->owner;
    struct post *post = &o->posts[tr->rank][o->n_posts[tr->rank]++];
    *post = (struct post){.unit = unit, .micro = o->micro};
    for (int p = 0; p < o->model.n_params; p++) {
        struct tape_param *param = &tr->params[p];
        if (o->model.params[p].unit != unit || !param->used) continue;
        size_t bytes = (size_t)o->model.params[p].count * sizeof(float);
        post->grads[p] = memcpy(malloc(bytes + 1), param->grad, bytes);
        memset(param->grad, 0, bytes);
        param->used = 0;
    }
}

static void cast(struct trainer *tr, int unit, int kind, float *values, int count)
{
    enum format f = kind ? tr->plan->output_type : tr->plan->param_type;
    for (int i = 0; i < count; i++) values[i] = (float)format_round(f, values[i]);
}

static const struct backend backend = {nothing, nothing, nothing, post_backward, begin_backward, nothing, cast};

/* ---- reductions */

/* What rank r gives for element k of p: `mine` with what waits there. */
static double given(const struct oracle *o, int r, int p, long k, int accumulates, const float *mine)
{
    const struct plan *plan = o->plan;
    enum format full = full_format(plan, p);
    double v = mine ? format_round(full, mine[k]) : 0;
    if (accumulates) v = format_round(wide(full), o->waiting[r][p][k] + v);
    return plan->reduce_type ? format_round(plan->reduce_type, v) : v;
}

static fsdp_strategy strategy_of(const struct plan *plan, int unit)
{
    return unit >= 0 && plan->unit_strategy[unit] ? plan->unit_strategy[unit] : plan->strategy;
}

static int hybrid(const struct plan *plan)
{
    return plan->strategy == FSDP_HYBRID_SHARD || plan->strategy == FSDP_HYBRID_SHARD_GRAD_OP;
}

static void reduce(struct oracle *o, int p, int accumulates, float *const *grads, int all_reduce)
{
    const struct plan *plan = o->plan;
    enum format partial_format = wide(full_format(plan, p));
    enum format sum_format = grad_format(plan, p) == FORMAT_F64 ? FORMAT_F64 : partial_format;
    int replicas = hybrid(plan) ? plan->replicas : 1, part = o->size / replicas;
    double divisor = plan->divisor != 0 ? plan->divisor : o->size;
    if (!hybrid(plan)) partial_format = sum_format;
    for (long k = 0; k < o->model.params[p].count; k++) {
        double sum = 0;
        for (int j = 0; j < replicas; j++) {
            double sharded = 0, *partial = &o->partial[j][p][k];
            for (int i = 0; i < part; i++) {
                int r = j * part + i;
                sharded = format_round(partial_format, sharded + given(o, r, p, k, accumulates, grads[r]));
            }
            *partial = format_round(partial_format, *partial + sharded);
            sum = format_round(sum_format, sum + *partial);
            if (all_reduce) *partial = 0;
        }
        double *grad = &o->grad[p][k];
        if (all_reduce) *grad = format_round(grad_format(plan, p), *grad + format_round(sum_format, sum / divisor));
        for (int r = 0; r < o->size; r++) o->waiting[r][p][k] = 0;
    }
}

static void accumulate(struct oracle *o, int p, float *const *grads)
{
    enum format full = full_format(o->plan, p);
    for (int r = 0; r < o->size; r++)
        for (long k = 0; grads[r] && k < o->model.params[p].count; k++)
            o->waiting[r][p][k] = format_round(wide(full), o->waiting[r][p][k] + format_round(full, grads[r][k]));
}

/* Gradients of tied parameters become one. */
static void tie(const struct oracle *o, struct post *post)
{
    for (int p = 0; p < o->model.n_params; p++) {
        int to = home(o, p);
        enum format f = full_format(o->plan, to);
        if (to == p || !post->grads[p]) continue;
        for (long k = 0; post->grads[to] && k < o->model.params[p].count; k++)
            post->grads[p][k] =
                (float)format_round(f, format_round(f, post->grads[p][k]) + format_round(f, post->grads[to][k]));
        free(post->grads[to]);
        post->grads[to] = post->grads[p];
        post->grads[p] = NULL;
    }
}

/* The nth post_backward of all ranks. */
static void deliver(struct oracle *o, int nth)
{
    const struct post *first = &o->posts[0][nth];
    char letter = o->plan->schedule[first->micro];
    int unit = first->unit, no_shard = strategy_of(o->plan, unit) == FSDP_NO_SHARD;
    int whole = o->model.n_units == 0;
    int sync = whole || letter == 'S' || (letter == 'R' && !no_shard);
    int all_reduce = whole || letter == 'S' || !hybrid(o->plan);
    for (int r = 0; r < o->size; r++) tie(o, &o->posts[r][nth]);
    for (int p = 0; p < o->model.n_params; p++) {
        float *grads[RANKS];
        if (o->model.params[p].unit != unit || home(o, p) != p || frozen_at(o->plan, p, o->step)) continue;
        for (int r = 0; r < o->size; r++) grads[r] = o->posts[r][nth].grads[p];
        if (sync)
            reduce(o, p, !whole && o->accumulates[unit], grads, all_reduce);
        else
            accumulate(o, p, grads);
    }
    if (!whole) o->accumulates[unit] = !sync;
    for (int r = 0; r < o->size; r++)
        for (int p = 0; p < o->model.n_params; p++) free(o->posts[r][nth].grads[p]);
}

/* ---- training */

static void refresh(struct oracle *o)
{
    for (int p = 0; p < o->model.n_params; p++) {
        int from = home(o, p);
        for (long k = 0; k < o->model.params[p].count; k++)
            o->full[p][k] = (float)format_round(full_format(o->plan, from), o->master[from][k]);
        o->trainer.params[p].value = o->full[p];
        o->trainer.params[p].frozen = frozen_at(o->plan, from, o->step);
    }
}

static void backwards(struct oracle *o)
{
    memset(o->n_posts, 0, sizeof o->n_posts);
    for (int r = 0; r < o->size; r++) {
        o->trainer.rank = r;
        trainer_micros(&o->trainer, o->step);
        if (!o->model.n_units) post_backward(&o->trainer, NULL, -1);
        trainer_forget(&o->trainer);
    }
    for (int i = 0; i < o->n_posts[0]; i++) {
        for (int r = 1; r < o->size; r++) /* else the plan asks ranks for different calls */
            if (o->n_posts[r] != o->n_posts[0] || o->posts[r][i].unit != o->posts[0][i].unit) abort();
        deliver(o, i);
    }
}

/* The norm of all gradients, each parameter's once; and clipping by it. */
static double clip(struct oracle *o)
{
    double p = o->plan->norm, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        double norm = isinf(p) ? sum : pow(sum, 1 / p), by = o->plan->clip / (norm + 1e-6);
        for (int i = 0; i < o->model.n_params; i++) {
            enum format f = grad_format(o->plan, i);
            if (home(o, i) != i || frozen_at(o->plan, i, o->step)) continue;
            for (long k = 0; k < o->model.params[i].count; k++) {
                double *g = &o->grad[i][k];
                if (pass == 0)
                    sum = isinf(p) ? fmax(sum, fabs(*g)) : sum + pow(fabs(*g), p);
                else if (by < 1)
                    *g = format_round(f, *g * format_round(wide(f), by));
            }
        }
        if (pass) return norm;
    }
    return 0;
}

static void update(struct oracle *o)
{
    for (int p = 0; p < o->model.n_params; p++) {
        long n = o->model.params[p].count;
        if (home(o, p) != p || frozen_at(o->plan, p, o->step)) continue;
        optimizer_step(o->plan, o->step, FORMAT_F64, o->master[p], o->grad[p], o->first[p], o->second[p], n);
        for (long k = 0; k < n; k++) o->master[p][k] = format_round(master_format(o->plan, p), o->master[p][k]);
    }
}

static double *numbers(long n)
{
    double *v = calloc((size_t)n + 1, sizeof *v);
    if (!v) abort();
    return v;
}

/* What the whole batch at once needs no plan for. */
static struct plan plain_plan(const struct plan *plan)
{
    struct plan plain = *plan;
    strcpy(plain.schedule, "S");
    plain.divisor = 1;
    plain.replicas = plain.paired = plain.cast = plain.post_each = plain.keep_low_precision_grads = 0;
    plain.strategy = FSDP_FULL_SHARD;
    plain.param_type = plain.reduce_type = plain.output_type = FORMAT_NONE;
    memset(plain.checkpoint, 0, sizeof plain.checkpoint);
    return plain;
}

void oracle_train(const struct plan *given_plan, int size, struct result *out)
{
    struct oracle *o = calloc(1, sizeof *o);
    if (!o) abort();
    struct plan plan = size ? *given_plan : plain_plan(given_plan);
    o->plan = &plan;
    o->size = size ? size : 1;
    model_build(&o->model, &plan, size != 0);
    trainer_init(&o->trainer, &o->model, &backend, o, 0, o->size);
    *out = (struct result){.losses = numbers(2 * plan.steps), .norms = numbers(plan.steps)};
    for (int p = 0; p < o->model.n_params; p++) {
        long n = o->model.params[p].count;
        o->master[p] = out->values[p] = numbers(n);
        o->grad[p] = numbers(n);
        o->first[p] = numbers(n);
        o->second[p] = numbers(n);
        o->full[p] = calloc((size_t)n + 1, sizeof(float));
        for (int r = 0; r < o->size; r++) {
            o->waiting[r][p] = numbers(n);
            o->partial[r][p] = numbers(n);
        }
        model_initial(&o->model, p, o->master[p]);
    }
    for (o->step = 0; o->step < plan.steps; o->step++) {
        for (int p = 0; p < o->model.n_params; p++)
            memset(o->grad[p], 0, (size_t)o->model.params[p].count * sizeof(double));
        refresh(o);
        backwards(o);
        if (plan.clip > 0) out->norms[o->step] = clip(o);
        if (plan.evaluate) out->losses[2 * o->step] = trainer_evaluate(&o->trainer, o->step);
        update(o);
        refresh(o);
        if (plan.evaluate) out->losses[2 * o->step + 1] = trainer_evaluate(&o->trainer, o->step);
    }
    for (int p = 0; p < o->model.n_params; p++) {
        if (home(o, p) != p)
            memcpy(o->master[p], o->master[home(o, p)], (size_t)o->model.params[p].count * sizeof(double));
        free(o->grad[p]);
        free(o->first[p]);
        free(o->second[p]);
        free(o->full[p]);
        for (int r = 0; r < o->size; r++) {
            free(o->waiting[r][p]);
            free(o->partial[r][p]);
        }
    }
    trainer_drop(&o->trainer);
    free(o);
}

void result_drop(struct result *r)
{
    for (int p = 0; p < PARAMS; p++) free(r->values[p]);
    free(r->losses);
    free(r->norms);
}
