/* Training parity: a small network trained over several ranks equals the same network trained by one process
 * on the whole batch. The host here is written by hand: layers y = tanh(x W^T + b) (the last without tanh),
 * half the mean squared error, computed in double from parameters of any dtype. */
#include "fsdp_host.h"

#include <math.h>

TestSuite(fsdp_train, .timeout = RANKS_SECONDS + 30);

#define LAYERS 5
#define WIDE 24
#define ROWS 24 /* of a batch, at most */
enum { WEIGHT, BIAS, KINDS };
enum optimizer { SGD, ADAM };

/* What is trained, and how: the same on all ranks. */
struct plan {
    uint64_t seed;
    enum dtype type;
    int layers, width[LAYERS + 1], unit_of[LAYERS], units;
    int frozen[LAYERS][KINDS];
    enum optimizer optimizer;
    int steps, rows;
    char schedule[8]; /* a letter for each micro-batch of a step: S or N */
    fsdp_model_options options;
    int asynchronous, prefetch, edits, naps, unused; /* what the ranks do along the way */
};

/* ---- the network, on doubles */

struct layer {
    double w[WIDE * WIDE], b[WIDE];
};

static int64_t count_of(const struct plan *plan, int layer, int kind)
{
    return kind == BIAS ? plan->width[layer + 1] : (int64_t)plan->width[layer] * plan->width[layer + 1];
}

static double *values_of(struct layer *l, int kind)
{
    return kind == BIAS ? l->b : l->w;
}

static void forward_layer(const struct plan *plan, int i, const struct layer *l, const double *x, double *y, int rows)
{
    int in = plan->width[i], out = plan->width[i + 1];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            double sum = l->b[o];
            for (int k = 0; k < in; k++) sum += x[r * WIDE + k] * l->w[o * in + k];
            y[r * WIDE + o] = i + 1 < plan->layers ? tanh(sum) : sum;
        }
}

/* dy, the gradient of y, becomes that of x. */
static void backward_layer(const struct plan *plan, int i, const struct layer *l, struct layer *grad, const double *x,
                           const double *y, double *dy, int rows)
{
    int in = plan->width[i], out = plan->width[i + 1];
    memset(grad, 0, sizeof *grad);
    for (int r = 0; r < rows; r++) {
        double dx[WIDE] = {0};
        for (int o = 0; o < out; o++) {
            double d = dy[r * WIDE + o];
            if (i + 1 < plan->layers) d *= 1 - y[r * WIDE + o] * y[r * WIDE + o];
            grad->b[o] += d;
            for (int k = 0; k < in; k++) {
                grad->w[o * in + k] += d * x[r * WIDE + k];
                dx[k] += d * l->w[o * in + k];
            }
        }
        memcpy(dy + r * WIDE, dx, sizeof dx);
    }
}

/* Row `row` of the data: inputs, then targets. */
static void data_row(const struct plan *plan, int step, int row, double *x, double *t)
{
    uint64_t random = plan->seed + (uint64_t)(step * 1000 + row) * 77;
    for (int k = 0; k < plan->width[0]; k++) x[k] = random_real(&random);
    for (int k = 0; k < plan->width[plan->layers]; k++) t[k] = random_real(&random);
}

static void initial(const struct plan *plan, int i, int kind, double *values)
{
    uint64_t random = plan->seed + (uint64_t)(i * KINDS + kind);
    for (int64_t k = 0; k < count_of(plan, i, kind); k++)
        values[k] = rounded(plan->type, random_real(&random) * (kind == BIAS ? 0.1 : 0.8));
}

/* ---- the optimizer, on `count` values; moments in double on both sides */

struct moments {
    double first[WIDE * WIDE], second[WIDE * WIDE];
};

static void update(const struct plan *plan, int step, double *values, const double *grad, struct moments *m, int64_t at,
                   int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        double *first = &m->first[at + k], *second = &m->second[at + k], g = grad[k];
        if (plan->optimizer == SGD) {
            *first = 0.9 * *first + g;
            values[k] -= 0.05 * *first;
        } else {
            *first = 0.9 * *first + 0.1 * g;
            *second = 0.999 * *second + 0.001 * g * g;
            double a = *first / (1 - pow(0.9, step + 1)), b = *second / (1 - pow(0.999, step + 1));
            values[k] -= 0.01 * a / (sqrt(b) + 1e-4);
        }
    }
}

/* ---- the oracle: one process, the whole batch, parameters and gradients rounded to the dtype */

struct activations {
    double at[LAYERS + 1][ROWS * WIDE];
};

static void loss_gradient(const struct plan *plan, const struct activations *a, const double *targets, double *dy,
                          int rows)
{
    int out = plan->width[plan->layers];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < out; k++)
            dy[r * WIDE + k] = (a->at[plan->layers][r * WIDE + k] - targets[r * WIDE + k]) / (plan->rows * out);
}

/* Rows of micro-batch m: cut as rows are cut over ranks. */
static void microbatch(const struct plan *plan, int m, int64_t *begin, int64_t *rows)
{
    OK(fsdp_shard_extent(plan->rows, m, (int)strlen(plan->schedule), begin, rows));
}

static void oracle(const struct plan *plan, enum dtype type, struct layer *layers)
{
    struct moments *moments = calloc(LAYERS * KINDS, sizeof *moments);
    struct activations *a = calloc(1, sizeof *a);
    struct layer *grad = calloc(1, sizeof *grad), *sum = calloc(LAYERS, sizeof *sum);
    double targets[ROWS * WIDE], dy[ROWS * WIDE];
    for (int i = 0; i < plan->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) initial(plan, i, kind, values_of(&layers[i], kind));
    for (int step = 0; step < plan->steps; step++) {
        for (int r = 0; r < plan->rows; r++) data_row(plan, step, r, a->at[0] + r * WIDE, targets + r * WIDE);
        for (int i = 0; i < plan->layers; i++) forward_layer(plan, i, &layers[i], a->at[i], a->at[i + 1], plan->rows);
        loss_gradient(plan, a, targets, dy, plan->rows);
        for (int i = plan->layers - 1; i >= 0; i--) {
            backward_layer(plan, i, &layers[i], grad, a->at[i], a->at[i + 1], dy, plan->rows);
            sum[i] = *grad;
        }
        for (int i = 0; i < plan->layers; i++)
            for (int kind = 0; kind < KINDS; kind++) {
                int64_t count = count_of(plan, i, kind);
                double *values = values_of(&layers[i], kind), *g = values_of(&sum[i], kind);
                if (plan->frozen[i][kind]) continue;
                for (int64_t k = 0; k < count; k++) g[k] = rounded(type, g[k]);
                update(plan, step, values, g, &moments[i * KINDS + kind], 0, count);
                for (int64_t k = 0; k < count; k++) values[k] = rounded(type, values[k]);
            }
    }
    free(moments);
    free(a);
    free(grad);
    free(sum);
}

/* ---- the host */

struct host {
    struct rank *r;
    const struct plan *plan;
    uint64_t own; /* this rank's random numbers */
    fsdp_group *group;
    fsdp_model *model;
    struct host_unit units[LAYERS];
    struct spec specs[LAYERS][LAYERS * KINDS + 1];
    char names[LAYERS * KINDS][32], extra_names[LAYERS][32];
    int at[LAYERS][KINDS]; /* the parameter's index in its unit */
    struct moments *moments;
    struct activations a;
    struct layer layer, grad;
    char *grads[ROWS]; /* of each micro-batch, by layer and kind: kept until the end of backward */
};

#define GRAD_BYTES (WIDE * WIDE * sizeof(double))

static void host_make(struct host *h)
{
    const struct plan *plan = h->plan;
    h->group = group_make(h->r, 0, 0);
    h->model = model_make(h->group, &plan->options);
    h->moments = calloc(LAYERS * KINDS, sizeof *h->moments);
    for (size_t m = 0; m < strlen(plan->schedule); m++) h->grads[m] = calloc(LAYERS * KINDS, GRAD_BYTES);
    for (int u = 0; u < plan->units; u++) {
        int n = 0;
        for (int i = 0; i < plan->layers; i++) {
            if (plan->unit_of[i] != u) continue;
            for (int kind = 0; kind < KINDS; kind++) {
                char *name = h->names[i * KINDS + kind];
                snprintf(name, sizeof *h->names, "layers.%d.%s", i, kind == BIAS ? "bias" : "weight");
                h->at[i][kind] = n;
                h->specs[u][n++] = (struct spec){name,
                                                 plan->type,
                                                 kind == BIAS ? 1 : 2,
                                                 {plan->width[i + 1], plan->width[i]},
                                                 plan->frozen[i][kind]};
            }
        }
        if (plan->unused) { /* a parameter of each unit that never gets a gradient */
            snprintf(h->extra_names[u], sizeof *h->extra_names, "extra.%d", u);
            h->specs[u][n++] = (struct spec){h->extra_names[u], DTYPE_F32, 1, {u * 3}, 0};
        }
        host_unit_make(h->r, h->model, NULL, h->specs[u], n, 0, &h->units[u]);
    }
    /* host_unit_make gave whole numbers; set what this network begins with in the shards. */
    for (int i = 0; i < plan->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            struct host_unit *u = &h->units[plan->unit_of[i]];
            int64_t begin, count;
            double values[WIDE * WIDE];
            initial(plan, i, kind, values);
            spec_part(&u->specs[h->at[i][kind]], h->r->rank, h->r->size, &begin, &count);
            set_doubles(&u->shard[h->at[i][kind]]->dl_tensor, values + begin);
        }
}

static void host_drop(struct host *h)
{
    for (int u = 0; u < h->plan->units; u++) host_unit_drop(&h->units[u]);
    for (size_t m = 0; m < strlen(h->plan->schedule); m++) free(h->grads[m]);
    free(h->moments);
    fsdp_model_release(h->model);
    fsdp_group_release(h->group);
}

static void read_layer(struct host *h, int i)
{
    struct host_unit *u = &h->units[h->plan->unit_of[i]];
    for (int kind = 0; kind < KINDS; kind++)
        get_doubles(&u->full[h->at[i][kind]]->dl_tensor, values_of(&h->layer, kind));
}

static void along_the_way(struct host *h, struct host_unit *u)
{
    if (h->plan->naps && random_below(&h->own, 6) == 0) nap(random_below(&h->own, 300));
    if (u && h->plan->edits && random_below(&h->own, 3) == 0) scribble(u, &h->own); /* dropped by the reshard to come */
}

static fsdp_status begin_unshard(struct host *h, int unit)
{
    if (!h->plan->prefetch || unit < 0 || unit >= h->plan->units) return FSDP_OK;
    fsdp_work *work = NULL;
    fsdp_status status = fsdp_unit_unshard(h->units[unit].unit, &work);
    fsdp_work_release(work);
    return status;
}

/* Passes a failure on, so that broken iterations can be tried. */
#define PASS(call)                                                                                                     \
    do {                                                                                                               \
        fsdp_status status_ = (call);                                                                                  \
        if (status_ != FSDP_OK) return status_;                                                                        \
    } while (0)

/* Units hold consecutive layers: unit_of only grows. */
static fsdp_status host_forward(struct host *h, int rows, int stop_at)
{
    const struct plan *plan = h->plan;
    for (int u = 0, i = 0; u < plan->units; u++) {
        if (u == stop_at) return FSDP_ERR_CALLBACK; /* this rank's host raised */
        PASS(begin_unshard(h, u + 1));
        PASS(fsdp_unit_pre_forward(h->units[u].unit));
        for (; i < plan->layers && plan->unit_of[i] == u; i++) {
            read_layer(h, i);
            forward_layer(plan, i, &h->layer, h->a.at[i], h->a.at[i + 1], rows);
        }
        along_the_way(h, plan->options.reshard_after_forward < 0 ? NULL : &h->units[u]);
        PASS(fsdp_unit_post_forward(h->units[u].unit));
    }
    return FSDP_OK;
}

static fsdp_status host_backward(struct host *h, int m, double *dy, int rows, int stop_at)
{
    const struct plan *plan = h->plan;
    for (int u = plan->units - 1, i = plan->layers - 1; u >= 0; u--) {
        if (u == stop_at) return FSDP_ERR_CALLBACK;
        struct host_unit *unit = &h->units[u];
        DLTensor tensors[HOST_PARAMS];
        const DLTensor *grads[HOST_PARAMS] = {0};
        PASS(begin_unshard(h, u - 1));
        PASS(fsdp_unit_pre_backward(unit->unit));
        for (; i >= 0 && plan->unit_of[i] == u; i--) {
            read_layer(h, i);
            backward_layer(plan, i, &h->layer, &h->grad, h->a.at[i], h->a.at[i + 1], dy, rows);
            for (int kind = 0; kind < KINDS; kind++) {
                int p = h->at[i][kind];
                if (plan->frozen[i][kind] || (rows == 0 && random_below(&h->own, 2))) continue;
                tensors[p] = view(h->grads[m] + (size_t)(i * KINDS + kind) * GRAD_BYTES, plan->type,
                                  unit->specs[p].ndim, unit->specs[p].shape);
                set_doubles(&tensors[p], values_of(&h->grad, kind));
                grads[p] = &tensors[p];
            }
        }
        along_the_way(h, unit);
        fsdp_work *work = NULL;
        PASS(fsdp_unit_post_backward(unit->unit, grads, unit->n, plan->asynchronous ? &work : NULL));
        fsdp_work_release(work);
    }
    return FSDP_OK;
}

/* One micro-batch of this rank's rows. */
static fsdp_status host_microbatch(struct host *h, int step, int m, int stop_forward, int stop_backward)
{
    int64_t begin, rows, mine, at;
    double targets[ROWS * WIDE], dy[ROWS * WIDE];
    microbatch(h->plan, m, &begin, &rows);
    OK(fsdp_shard_extent(rows, h->r->rank, h->r->size, &at, &mine));
    for (int64_t r = 0; r < mine; r++)
        data_row(h->plan, step, (int)(begin + at + r), h->a.at[0] + r * WIDE, targets + r * WIDE);
    PASS(fsdp_model_set_gradient_sync(h->model, h->plan->schedule[m] == 'S'));
    PASS(host_forward(h, (int)mine, stop_forward));
    loss_gradient(h->plan, &h->a, targets, dy, (int)mine);
    PASS(host_backward(h, m, dy, (int)mine, stop_backward));
    return fsdp_model_finish_backward(h->model);
}

static void host_update(struct host *h, int step)
{
    const struct plan *plan = h->plan;
    for (int i = 0; i < plan->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            if (plan->frozen[i][kind]) continue;
            struct host_unit *u = &h->units[plan->unit_of[i]];
            int p = h->at[i][kind];
            int64_t begin, count;
            double values[WIDE * WIDE], grad[WIDE * WIDE];
            spec_part(&u->specs[p], h->r->rank, h->r->size, &begin, &count);
            get_doubles(&u->shard[p]->dl_tensor, values);
            get_doubles(&u->grad[p]->dl_tensor, grad);
            update(plan, step, values, grad, &h->moments[i * KINDS + kind], begin, count);
            set_doubles(&u->shard[p]->dl_tensor, values);
        }
}

static void host_step(struct host *h, int step)
{
    OK(fsdp_model_zero_grad(h->model));
    for (int m = 0; h->plan->schedule[m]; m++) OK(host_microbatch(h, step, m, -1, -1));
    host_update(h, step);
}

/* The largest difference between the trained parameters and `layers`. */
static double difference(struct host *h, struct layer *layers)
{
    double most = 0;
    for (int u = 0; u < h->plan->units; u++) OK(fsdp_unit_unshard(h->units[u].unit, NULL));
    for (int i = 0; i < h->plan->layers; i++) {
        read_layer(h, i);
        for (int kind = 0; kind < KINDS; kind++)
            for (int64_t k = 0; k < count_of(h->plan, i, kind); k++) {
                double d = fabs(values_of(&h->layer, kind)[k] - values_of(&layers[i], kind)[k]);
                if (!(d <= most)) most = d;
            }
    }
    for (int u = 0; u < h->plan->units; u++) OK(fsdp_unit_reshard(h->units[u].unit));
    return most;
}

static double bound(enum dtype type)
{
    return type == DTYPE_F64 ? 1e-12 : type == DTYPE_F32 ? 1e-6 : 0.05;
}

static struct host *host_new(struct rank *r)
{
    struct host *h = calloc(1, sizeof *h);
    CHECK(h, "memory");
    h->r = r;
    h->plan = r->argument;
    h->own = h->plan->seed * 31 + (uint64_t)r->rank;
    host_make(h);
    return h;
}

static void rank_train(struct rank *r)
{
    struct host *h = host_new(r);
    const struct plan *plan = h->plan;
    for (int step = 0; step < plan->steps; step++) host_step(h, step);
    struct layer *layers = calloc(LAYERS, sizeof *layers);
    oracle(plan, plan->type, layers);
    double d = difference(h, layers);
    CHECK(d <= bound(plan->type), "%s, schedule %s, FSDP_TEST_SEED=%llu: off by %g", dtype_name(plan->type),
          plan->schedule, (unsigned long long)plan->seed, d);
    if (plan->type == DTYPE_F32) { /* and against the same in double */
        oracle(plan, DTYPE_F64, layers);
        d = difference(h, layers);
        CHECK(d <= 1e-4, "FSDP_TEST_SEED=%llu: off by %g from double", (unsigned long long)plan->seed, d);
    }
    free(layers);
    host_drop(h);
    free(h);
}

/* ---- the plans */

static const struct plan usual = {
    .seed = 1,
    .type = DTYPE_F32,
    .layers = 4,
    .width = {7, 13, 10, 3, 5},
    .unit_of = {0, 1, 1, 2},
    .units = 3,
    .steps = 20,
    .rows = 22,
    .schedule = "S",
    .options = {.gradient_divisor = 1},
};

static void train_everywhere(struct plan plan)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_train, &plan);
}

Test(fsdp_train, equals_one_process_with_sgd_and_adam)
{
    for (int o = 0; o < 2; o++)
        for (int t = 0; t < 2; t++) {
            struct plan plan = usual;
            plan.optimizer = o ? ADAM : SGD;
            plan.type = t ? DTYPE_F64 : DTYPE_F32;
            train_everywhere(plan);
        }
}

Test(fsdp_train, equals_one_process_under_every_option)
{
    for (int o = 0; o < 8; o++) {
        struct plan plan = usual;
        plan.options.private_unshard = o & 1;
        plan.options.reshard_after_forward = -(o >> 1 & 1);
        plan.asynchronous = plan.prefetch = o >> 2 & 1;
        plan.edits = plan.naps = plan.unused = 1;
        plan.frozen[1][WEIGHT] = plan.frozen[2][BIAS] = 1;
        ranks_run(2 + o % 3, rank_train, &plan);
    }
}

Test(fsdp_train, equals_one_process_with_microbatches_in_any_order)
{
    static const char *const schedules[] = {"SS", "NS", "NNS", "SNS", "NSNS", "SNNS"};
    for (size_t s = 0; s < sizeof schedules / sizeof *schedules; s++) {
        struct plan plan = usual;
        snprintf(plan.schedule, sizeof plan.schedule, "%s", schedules[s]);
        plan.asynchronous = s % 2;
        ranks_run(1 + (int)s % 4, rank_train, &plan);
    }
}

Test(fsdp_train, bf16_stays_near_its_oracle)
{
    struct plan plan = usual;
    plan.type = DTYPE_BF16;
    train_everywhere(plan);
}

/* The bits of private and shared unsharding are the same. */
static void rank_bits(struct rank *r)
{
    struct plan plan = *(const struct plan *)r->argument;
    struct rank with = *r;
    with.argument = &plan;
    struct layer *layers = calloc(2 * LAYERS, sizeof *layers);
    for (int private = 0; private < 2; private ++) {
        plan.options.private_unshard = private;
        struct host *h = host_new(&with);
        for (int step = 0; step < plan.steps; step++) host_step(h, step);
        for (int u = 0; u < plan.units; u++) OK(fsdp_unit_unshard(h->units[u].unit, NULL));
        for (int i = 0; i < plan.layers; i++) {
            read_layer(h, i);
            layers[private * LAYERS + i] = h->layer;
        }
        host_drop(h);
        free(h);
    }
    for (int i = 0; i < plan.layers; i++)
        for (int kind = 0; kind < KINDS; kind++)
            CHECK(memcmp(values_of(&layers[i], kind), values_of(&layers[LAYERS + i], kind),
                         (size_t)count_of(&plan, i, kind) * sizeof(double)) == 0,
                  "layer %d differs", i);
    free(layers);
}

Test(fsdp_train, private_unsharding_gives_the_same_bits)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_bits, &usual);
}

/* ---- broken iterations */

/* All ranks stop at the same place; or only one does, and the others run into it. */
static void rank_broken(struct rank *r)
{
    struct host *h = host_new(r);
    const struct plan *plan = h->plan;
    int broken = 0;
    for (int step = 0; step < plan->steps; step++) {
        for (int place = 0; place < 2 * plan->units && step % 5 == 1; place++)
            for (int culprit = -1; culprit < r->size; culprit++) {
                int mine = culprit < 0 || culprit == r->rank, forward = place < plan->units ? place : -1;
                int backward = place < plan->units ? -1 : place - plan->units;
                int last = (int)strlen(plan->schedule) - 1;
                fsdp_status status = FSDP_OK;
                for (int m = 0; m <= last && status == FSDP_OK; m++)
                    status = host_microbatch(h, step, m, mine && m == last ? forward : -1,
                                             mine && m == last ? backward : -1);
                if (mine) CHECK(status == FSDP_ERR_CALLBACK, "stopped with %s", fsdp_status_name(status));
                /* The others may have come to the end without needing the one that stopped (it had joined in
                 * all operations, if the last was its own); if not, they were told. */
                if (!mine) CHECK(status == FSDP_OK || status == FSDP_ERR_MISMATCH, "%s", fsdp_last_error());
                broken += status == FSDP_ERR_MISMATCH;
                if (plan->naps) nap(random_below(&h->own, 500));
                OK(fsdp_model_reset(h->model));
                for (int u = 0; u < plan->units; u++)
                    CHECK(state_of(&h->units[u]) == FSDP_UNIT_SHARDED, "unsharded after reset");
                fsdp_memory_info memory = memory_of(h->model);
                CHECK(memory.gradients <= memory.shards, "accumulated gradients are left");
            }
        host_step(h, step);
    }
    if (r->size > 1) CHECK(broken > 0, "no rank ran into the one that stopped");
    struct layer *layers = calloc(LAYERS, sizeof *layers);
    oracle(plan, plan->type, layers);
    double d = difference(h, layers);
    CHECK(d <= bound(plan->type), "off by %g after resets", d);
    free(layers);
    host_drop(h);
    free(h);
}

Test(fsdp_train, reset_makes_good_a_broken_iteration)
{
    for (int o = 0; o < 4; o++)
        for (int n = 1; n <= 3; n++) {
            struct plan plan = usual;
            plan.steps = 8;
            plan.options.private_unshard = o & 1;
            plan.asynchronous = plan.prefetch = o >> 1;
            plan.naps = 1;
            plan.options.reshard_after_forward = -(o == 3);
            strcpy(plan.schedule, o >> 1 ? "NS" : "S");
            ranks_run(n, rank_broken, &plan);
        }
}

/* ---- random plans */

static uint64_t last_seed; /* the one that failed, if one did */

static void tell_seed(void)
{
    fprintf(stderr, "FSDP_TEST_SEED=%llu was the last\n", (unsigned long long)last_seed);
}

Test(fsdp_train, random_models_and_schedules, .fini = tell_seed)
{
    uint64_t seed = random_seed(), random = seed;
    int trials = getenv("FSDP_TEST_SEED") ? 1 : SANITIZED ? 20 : 60;
    for (int trial = 0; trial < trials; trial++) {
        struct plan plan = {.seed = trials == 1 ? seed : random_next(&random) % 1000000000u};
        uint64_t p = plan.seed;
        int n = 1 + random_below(&p, 4);
        plan.type = random_below(&p, 3) ? DTYPE_F64 : DTYPE_F32;
        plan.layers = 1 + random_below(&p, LAYERS);
        for (int i = 0; i <= plan.layers; i++) plan.width[i] = 1 + random_below(&p, 12);
        for (int i = 1; i < plan.layers; i++) plan.unit_of[i] = plan.unit_of[i - 1] + random_below(&p, 2);
        plan.units = plan.unit_of[plan.layers - 1] + 1;
        for (int i = 0; i < plan.layers; i++)
            for (int kind = 0; kind < KINDS; kind++) plan.frozen[i][kind] = random_below(&p, 5) == 0;
        plan.optimizer = random_below(&p, 2) ? ADAM : SGD;
        plan.steps = 1 + random_below(&p, 6);
        plan.rows = 1 + random_below(&p, ROWS);
        int micro = 1 + random_below(&p, 4);
        for (int m = 0; m < micro; m++) plan.schedule[m] = m + 1 < micro && random_below(&p, 2) ? 'N' : 'S';
        plan.options.gradient_divisor = 1;
        plan.options.private_unshard = random_below(&p, 3) == 0;
        plan.options.reshard_after_forward = -(random_below(&p, 3) == 0);
        plan.asynchronous = random_below(&p, 2);
        plan.prefetch = random_below(&p, 2);
        plan.edits = random_below(&p, 2);
        plan.naps = random_below(&p, 2);
        plan.unused = random_below(&p, 2);
        last_seed = plan.seed;
        ranks_run(n, rank_train, &plan);
    }
}
