/* See tape_model.h: the models, their data, and the loop over micro-batches. */
#include "tape_model.h"

#include "fsdp_host.h"

#include <math.h>

#define BLOCKS 2 /* of the attention model */

/* ---- modules and parameters */

int block_count(const struct shape *s)
{
    return s->kind == MLP ? (s->layers + 1) / 2 : BLOCKS;
}

int block_module(const struct shape *s, int block)
{
    return s->kind == MLP ? 1 + block : 2 + 3 * block;
}

int layer_module(const struct shape *s, int layer)
{
    return 1 + block_count(s) + layer;
}

int attn_module(int block)
{
    return 3 + 3 * block;
}

int ffn_module(int block)
{
    return 4 + 3 * block;
}

int head_module(void)
{
    return 2 + 3 * BLOCKS;
}

int module_count(const struct shape *s)
{
    return s->kind == MLP ? 1 + block_count(s) + s->layers + (s->aux ? 1 : 0) : head_module() + 1;
}

static void add_module(struct model *m, int parent, const char *name)
{
    int at = m->n_modules++;
    snprintf(m->modules[at].name, sizeof m->modules[at].name, "%s", name);
    m->modules[at].parent = parent;
    m->modules[at].first = m->n_params;
    m->modules[at].unit = -1;
}

/* cols 0: a row of `rows` elements, as a parameter of one dimension. */
static struct model_param *add_param(struct model *m, const char *name, int rows, int cols, double spread)
{
    struct model_param *p = &m->params[m->n_params++];
    int module = m->n_modules - 1;
    *p = (struct model_param){.module = module, .unit = -1, .tied_to = -1, .ndim = cols ? 2 : 1, .spread = spread};
    char prefix[sizeof m->modules[0].name + 1] = "";
    if (module) snprintf(prefix, sizeof prefix, "%s.", m->modules[module].name);
    snprintf(p->name, sizeof p->name, "%s%s", prefix, name);
    p->rows = cols ? rows : 1;
    p->cols = cols ? cols : rows;
    p->shape[0] = rows;
    p->shape[1] = cols;
    p->count = (long)p->rows * p->cols;
    return p;
}

static void add_extra(struct model *m)
{
    int extra = m->plan->extra[m->n_modules - 1];
    if (extra > 0) add_param(m, "extra", extra - 1, 0, 1);
    if (extra < 0) { /* (3, 0) */
        struct model_param *p = add_param(m, "extra", -extra, 1, 1);
        p->cols = 0;
        p->shape[1] = p->count = 0;
    }
}

static void build_mlp(struct model *m)
{
    const struct shape *s = &m->plan->shape;
    char name[32];
    add_module(m, -1, "model");
    add_param(m, "gain", s->width[s->layers], 0, 0.2)->centre = 1;
    add_extra(m);
    for (int b = 0; b < block_count(s); b++) {
        snprintf(name, sizeof name, "blocks.%d", b);
        add_module(m, 0, name);
        add_extra(m);
    }
    for (int i = 0; i < s->layers; i++) {
        snprintf(name, sizeof name, "blocks.%d.layers.%d", i / 2, i % 2);
        add_module(m, block_module(s, i / 2), name);
        add_param(m, "weight", s->width[i + 1], s->width[i], 1.2 / sqrt(s->width[i]));
        add_param(m, "bias", s->width[i + 1], 0, 0.1);
        if (s->lora && i == 1) {
            add_param(m, "lora_a", s->width[i], s->lora, 0.5);
            add_param(m, "lora_b", s->lora, s->width[i + 1], 0.5);
        }
        add_extra(m);
    }
    if (s->aux) {
        add_module(m, 0, "aux");
        add_param(m, "weight", s->width[s->layers], s->width[s->layers], 0.5);
        add_extra(m);
    }
}

static void build_attention(struct model *m)
{
    const struct shape *s = &m->plan->shape;
    double wide = 1.2 / sqrt(s->dim);
    char name[32];
    add_module(m, -1, "model");
    add_param(m, "norm.gain", s->dim, 0, 0.2)->centre = 1;
    add_param(m, "norm.bias", s->dim, 0, 0.1);
    add_extra(m);
    add_module(m, 0, "embed");
    add_param(m, "tokens", s->vocabulary, s->dim, 0.8);
    add_param(m, "places", s->sequence, s->dim, 0.3);
    add_extra(m);
    for (int b = 0; b < BLOCKS; b++) {
        snprintf(name, sizeof name, "blocks.%d", b);
        add_module(m, 0, name);
        add_param(m, "norm1.gain", s->dim, 0, 0.2)->centre = 1;
        add_param(m, "norm1.bias", s->dim, 0, 0.1);
        add_param(m, "norm2.gain", s->dim, 0, 0.2)->centre = 1;
        add_param(m, "norm2.bias", s->dim, 0, 0.1);
        add_extra(m);
        snprintf(name, sizeof name, "blocks.%d.attn", b);
        add_module(m, block_module(s, b), name);
        add_param(m, "query", s->dim, s->dim, wide);
        add_param(m, "key", s->dim, s->dim, wide);
        add_param(m, "value", s->dim, s->dim, wide);
        add_param(m, "out", s->dim, s->dim, wide);
        add_param(m, "bias", s->dim, 0, 0.1);
        add_extra(m);
        snprintf(name, sizeof name, "blocks.%d.ffn", b);
        add_module(m, block_module(s, b), name);
        add_param(m, "up", s->hidden, s->dim, wide);
        add_param(m, "up_bias", s->hidden, 0, 0.1);
        add_param(m, "down", s->dim, s->hidden, 1.2 / sqrt(s->hidden));
        add_param(m, "down_bias", s->dim, 0, 0.1);
        add_extra(m);
    }
    add_module(m, 0, "head");
    struct model_param *head = add_param(m, "weight", s->vocabulary, s->dim, wide);
    if (s->tied) head->tied_to = model_find(m, "embed.tokens");
    add_extra(m);
}

/* The plan's number of the unit that a module's own parameters are in. */
static int label_of(const struct model *m, int module)
{
    while (module > 0 && !m->plan->unit[module]) module = m->modules[module].parent;
    return m->plan->unit[module] ? m->plan->unit[module] : TAPE_UNITS;
}

/* Units are numbered in the order of the modules that begin them; one without parameters is none. */
static void number_units(struct model *m)
{
    int used[TAPE_UNITS + 1] = {0}, number[TAPE_UNITS + 1] = {0}, in_unit[TAPE_UNITS] = {0};
    for (int p = 0; p < m->n_params; p++) used[label_of(m, m->params[p].module)] = 1;
    for (int module = 0; module < m->n_modules; module++) {
        int label = module && !m->plan->unit[module] ? 0 : label_of(m, module);
        if (!label || !used[label]) continue;
        if (!number[label]) number[label] = ++m->n_units;
        m->modules[module].unit = number[label] - 1;
    }
    for (int p = 0; p < m->n_params; p++) {
        m->params[p].unit = number[label_of(m, m->params[p].module)] - 1;
        m->params[p].index = in_unit[m->params[p].unit]++;
    }
}

void model_build(struct model *m, const struct plan *plan, int units)
{
    *m = (struct model){.plan = plan};
    plan->shape.kind == MLP ? build_mlp(m) : build_attention(m);
    if (units) number_units(m);
}

int model_find(const struct model *m, const char *name)
{
    for (int p = 0; p < m->n_params; p++)
        if (strcmp(m->params[p].name, name) == 0) return p;
    fprintf(stderr, "no parameter '%s'\n", name);
    abort();
}

enum format master_format(const struct plan *plan, int p)
{
    return plan->master[p] ? plan->master[p] : FORMAT_F32;
}

enum format full_format(const struct plan *plan, int p)
{
    return plan->param_type ? plan->param_type : master_format(plan, p);
}

enum format grad_format(const struct plan *plan, int p)
{
    if (!plan->keep_low_precision_grads) return master_format(plan, p);
    return plan->reduce_type ? plan->reduce_type : full_format(plan, p);
}

int frozen_at(const struct plan *plan, int p, int step)
{
    return plan->frozen[p] ^ (plan->toggled[p] && step >= plan->toggle_step);
}

void model_initial(const struct model *m, int p, double *values)
{
    const struct model_param *info = &m->params[p];
    if (info->tied_to >= 0) {
        model_initial(m, info->tied_to, values);
        return;
    }
    uint64_t random = m->plan->seed * 977 + (uint64_t)p;
    for (long k = 0; k < info->count; k++)
        values[k] = format_round(master_format(m->plan, p), info->centre + random_real(&random) * info->spread);
}

/* ---- data */

void rows_of(int rows, int index, int n, int *begin, int *length)
{
    int chunk = (rows + n - 1) / n;
    *begin = index * chunk < rows ? index * chunk : rows;
    *length = rows - *begin < chunk ? rows - *begin : chunk;
}

static void batch_fill(const struct plan *plan, int step, int begin, int rows, struct batch *b)
{
    const struct shape *s = &plan->shape;
    b->rows = rows;
    b->step = step;
    for (int r = 0; r < rows; r++) {
        uint64_t random = plan->seed + (uint64_t)(step * 1000 + begin + r) * 77;
        if (s->kind == MLP) {
            int in = s->width[0], out = s->width[s->layers];
            for (int k = 0; k < in; k++) b->x[r * in + k] = (float)random_real(&random);
            for (int k = 0; k < out; k++) b->target[r * out + k] = (float)random_real(&random);
        }
        for (int k = 0; s->kind == ATTENTION && k < s->sequence; k++) {
            b->ids[r * s->sequence + k] = random_below(&random, s->vocabulary);
            b->next[r * s->sequence + k] = random_below(&random, s->vocabulary);
        }
    }
}

/* ---- calls of modules */

/* What a module's code knows: kept by the tape, since backward may run it again. */
struct call {
    struct trainer *tr;
    const struct batch *batch;
    int module, unit, number;
    tape_fn fn;
};

static struct mat *use(struct tape *t, const struct call *c, int nth)
{
    return tape_use(t, &c->tr->params[c->tr->model->modules[c->module].first + nth]);
}

static struct mat *run_again(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    return tape_checkpoint(t, c->fn, c, x);
}

struct casting {
    struct trainer *tr;
    int unit, kind;
};

static void cast_values(void *user, float *values, int count)
{
    struct casting *c = user;
    c->tr->backend->cast(c->tr, c->unit, c->kind, values, count);
}

static struct mat *cast(struct tape *t, const struct call *c, int kind, struct mat *x)
{
    if (!x || !c->tr->plan->cast) return x;
    struct casting *casting = tape_memory(t, sizeof *casting);
    *casting = (struct casting){c->tr, c->unit, kind};
    return tape_round(t, x, cast_values, casting);
}

static struct mat *body(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    x = cast(t, c, 0, x);
    x = c->tr->plan->checkpoint[c->module] == RUN_AGAIN_IN_UNIT ? run_again(t, c, x) : c->fn(t, c, x);
    return cast(t, c, 1, x);
}

static struct mat *as_unit(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    return tape_call(t, &c->tr->hooks, c->unit, body, c, x);
}

/* fn(x) as a call of a module, of its unit if it begins one, with checkpointing as planned. */
static struct mat *call(struct tape *t, const struct call *from, int module, int number, tape_fn fn, struct mat *x)
{
    struct call *c = tape_memory(t, sizeof *c);
    *c = (struct call){from->tr, from->batch, module, from->tr->model->modules[module].unit, number, fn};
    enum checkpointing checkpoint = from->tr->plan->checkpoint[module];
    if (c->unit < 0) return checkpoint ? run_again(t, c, x) : fn(t, c, x);
    return checkpoint == RUN_AGAIN_AROUND_UNIT ? tape_checkpoint(t, as_unit, c, x) : as_unit(t, c, x);
}

static int skipped(const struct call *c, int block)
{
    const struct plan *plan = c->tr->plan;
    return plan->skip_every && block == plan->skip_block - 1 && c->batch->step % plan->skip_every == 1;
}

/* ---- the models */

static struct mat *layer(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    const struct plan *plan = c->tr->plan;
    struct mat *y = tape_matmul_nt(t, x, use(t, c, 0));
    if (!plan->uneven_use || (c->number + c->batch->rank) % 3 != 1) y = tape_add_row(t, y, use(t, c, 1));
    if (plan->shape.lora && c->number == 1)
        y = tape_add(t, y, tape_matmul(t, tape_matmul(t, x, use(t, c, 2)), use(t, c, 3)));
    return c->number + 1 < plan->shape.layers ? tape_tanh(t, y) : y;
}

static struct mat *mlp_block(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    const struct shape *s = &c->tr->plan->shape;
    for (int i = 2 * c->number; i < 2 * c->number + 2 && i < s->layers; i++)
        x = call(t, c, layer_module(s, i), i, layer, x);
    return x;
}

static struct mat *blocks(struct tape *t, const struct call *c, tape_fn fn, struct mat *x)
{
    const struct shape *s = &c->tr->plan->shape;
    for (int b = 0; b < block_count(s); b++) {
        if (skipped(c, b)) continue;
        for (int turn = 0; turn <= (c->tr->plan->twice[b] != 0); turn++) x = call(t, c, block_module(s, b), b, fn, x);
    }
    return x;
}

static struct mat *auxiliary(struct tape *t, void *user, struct mat *x)
{
    return tape_matmul_nt(t, x, use(t, user, 0));
}

/* Gives the loss. The auxiliary output is made in any case. */
static struct mat *mlp(struct tape *t, void *user, struct mat *none)
{
    struct call *c = user;
    const struct plan *plan = c->tr->plan;
    const struct shape *s = &plan->shape;
    struct mat *x = tape_input(t, c->batch->rows, s->width[0], c->batch->x);
    x = tape_mul_row(t, blocks(t, c, mlp_block, x), use(t, c, 0));
    struct mat *loss = tape_squared_error(t, x, c->batch->target);
    if (!s->aux) return loss;
    struct mat *other = call(t, c, module_count(s) - 1, 0, auxiliary, x);
    if (plan->aux_every && c->batch->step % plan->aux_every != plan->aux_every - 1) return loss;
    return tape_add(t, loss, tape_squared_error(t, other, c->batch->target));
}

static struct mat *embed(struct tape *t, void *user, struct mat *none)
{
    struct call *c = user;
    int sequence = c->tr->plan->shape.sequence, n = c->batch->rows * sequence, places[ROWS * SEQUENCE];
    for (int i = 0; i < n; i++) places[i] = i % sequence;
    struct mat *x = tape_embed(t, use(t, c, 0), n, c->batch->ids);
    return tape_add(t, x, tape_embed(t, use(t, c, 1), n, places));
}

static struct mat *attention(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    const struct shape *s = &c->tr->plan->shape;
    int wide = s->dim / s->heads, n = 0, at[2 * ROWS * 4];
    struct mat *parts[ROWS * 4], *all[3];
    for (int i = 0; i < 3; i++) all[i] = tape_matmul_nt(t, x, use(t, c, i));
    for (int r = 0; r < c->batch->rows; r++)
        for (int h = 0; h < s->heads; h++) {
            struct mat *p[3];
            for (int i = 0; i < 3; i++) p[i] = tape_slice(t, all[i], r * s->sequence, s->sequence, h * wide, wide);
            struct mat *scores = tape_scale(t, tape_matmul_nt(t, p[0], p[1]), 1 / sqrt(wide));
            at[2 * n] = r * s->sequence;
            at[2 * n + 1] = h * wide;
            parts[n++] = tape_matmul(t, tape_softmax(t, scores, 1), p[2]);
        }
    /* Without rows too, the output depends on all three: whether it has a gradient is to be the same on all ranks. */
    struct mat *none = tape_add(t, tape_add(t, all[0], all[1]), all[2]);
    struct mat *y = n ? tape_join(t, x->rows, s->dim, n, parts, at) : none;
    y = tape_matmul_nt(t, y, use(t, c, 3));
    return c->tr->plan->uneven_use && c->batch->rank == 1 ? y : tape_add_row(t, y, use(t, c, 4));
}

static struct mat *feed_forward(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    x = tape_gelu(t, tape_add_row(t, tape_matmul_nt(t, x, use(t, c, 0)), use(t, c, 1)));
    return tape_add_row(t, tape_matmul_nt(t, x, use(t, c, 2)), use(t, c, 3));
}

static struct mat *attention_block(struct tape *t, void *user, struct mat *x)
{
    struct call *c = user;
    struct mat *y = tape_layer_norm(t, x, use(t, c, 0), use(t, c, 1));
    x = tape_add(t, x, call(t, c, attn_module(c->number), 0, attention, y));
    y = tape_layer_norm(t, x, use(t, c, 2), use(t, c, 3));
    return tape_add(t, x, call(t, c, ffn_module(c->number), 0, feed_forward, y));
}

static struct mat *head(struct tape *t, void *user, struct mat *x)
{
    return tape_matmul_nt(t, x, use(t, user, 0));
}

static struct mat *attention_model(struct tape *t, void *user, struct mat *none)
{
    struct call *c = user;
    struct mat *x = blocks(t, c, attention_block, call(t, c, 1, 0, embed, NULL));
    x = tape_layer_norm(t, x, use(t, c, 0), use(t, c, 1));
    return tape_cross_entropy(t, call(t, c, head_module(), 0, head, x), c->batch->next);
}

/* ---- the trainer */

static void pre_forward(void *user, struct tape *t, int unit)
{
    struct trainer *tr = user;
    tr->backend->pre_forward(tr, unit);
}

static void post_forward(void *user, struct tape *t, int unit)
{
    struct trainer *tr = user;
    tr->backend->post_forward(tr, unit);
}

static void enter_backward(void *user, struct tape *t, int unit)
{
    struct trainer *tr = user;
    tr->backend->pre_backward(tr, unit);
}

static void hand_out(struct trainer *tr, struct tape *t, int unit)
{
    tr->waiting[unit] = 0;
    tr->backend->post_backward(tr, t, unit);
}

static void leave_backward(void *user, struct tape *t, int unit, int fired, int remaining)
{
    struct trainer *tr = user;
    tr->waiting[unit] |= fired;
    if (tr->waiting[unit] && (tr->plan->post_each || !remaining)) hand_out(tr, t, unit);
}

void trainer_init(struct trainer *tr, const struct model *m, const struct backend *backend, void *owner, int rank,
                  int size)
{
    *tr = (struct trainer){.plan = m->plan, .model = m, .backend = backend, .owner = owner, .rank = rank, .size = size};
    tr->hooks = (struct tape_hooks){tr, pre_forward, post_forward, enter_backward, leave_backward};
    for (int p = 0; p < m->n_params; p++) {
        const struct model_param *info = &m->params[p];
        tr->params[p] = (struct tape_param){.name = info->name, .rows = info->rows, .cols = info->cols};
        tr->params[p].grad = calloc((size_t)info->count + 1, sizeof(float));
    }
}

void trainer_forget(struct trainer *tr)
{
    for (int m = 0; m < MICROS; m++) {
        tape_free(tr->tapes[m]);
        tr->tapes[m] = NULL;
    }
    memset(tr->waiting, 0, sizeof tr->waiting);
    for (int p = 0; p < tr->model->n_params; p++) {
        memset(tr->params[p].grad, 0, (size_t)tr->model->params[p].count * sizeof(float));
        tr->params[p].used = 0;
    }
}

void trainer_drop(struct trainer *tr)
{
    trainer_forget(tr);
    for (int p = 0; p < tr->model->n_params; p++) free(tr->params[p].grad);
}

static struct mat *forward(struct trainer *tr, struct tape *t, int rank, int step, int begin, int rows)
{
    struct batch *b = tape_memory(t, sizeof *b);
    b->rank = rank;
    batch_fill(tr->plan, step, begin, rows, b);
    struct call whole = {.tr = tr, .batch = b};
    return call(t, &whole, 0, 0, tr->plan->shape.kind == MLP ? mlp : attention_model, NULL);
}

double loss_factor(const struct plan *plan, int size)
{
    double divisor = plan->divisor != 0 ? plan->divisor : size;
    return divisor / (plan->rows *
                      (plan->shape.kind == MLP ? plan->shape.width[plan->shape.layers] / 2.0 : plan->shape.sequence));
}

static void forward_micro(struct trainer *tr, int step, int m)
{
    int begin, rows, at, mine;
    rows_of(tr->plan->rows, m, (int)strlen(tr->plan->schedule), &begin, &rows);
    rows_of(rows, tr->rank, tr->size, &at, &mine);
    tr->tapes[m] = tape_new(1);
    tr->losses[m] = forward(tr, tr->tapes[m], tr->rank, step, begin + at, mine);
}

/* nth: among the step's backwards, which is what the schedule's letters count. */
static void backward_micro(struct trainer *tr, int m, int nth)
{
    tr->backend->begin_backward(tr, nth);
    tape_backward(tr->tapes[m], tr->losses[m], loss_factor(tr->plan, tr->size));
    for (int u = 0; u < tr->model->n_units; u++) /* calls that no gradient came to leave their unit waiting */
        if (tr->waiting[u]) hand_out(tr, tr->tapes[m], u);
}

void trainer_micros(struct trainer *tr, int step)
{
    int n = (int)strlen(tr->plan->schedule), group = tr->plan->paired ? 2 : 1;
    for (int m = 0; m < n; m += group) {
        int end = m + group < n ? m + group : n;
        for (int k = m; k < end; k++) forward_micro(tr, step, k);
        for (int k = m; k < end; k++) backward_micro(tr, tr->plan->paired == 2 ? m + end - 1 - k : k, k);
        if (tr->plan->finish_each || end == n) tr->backend->end_backward(tr, end == n);
    }
}

double trainer_evaluate(struct trainer *tr, int step)
{
    struct tape *t = tr->tapes[0] = tape_new(0);
    double loss = forward(tr, t, 0, step, 0, tr->plan->rows)->v[0];
    trainer_forget(tr);
    return loss;
}

void optimizer_step(const struct plan *plan, int step, enum format f, void *values, const double *grad, double *first,
                    double *second, long n)
{
    for (long k = 0; k < n; k++) {
        double g = grad[k], v = format_get(f, values, k);
        if (plan->optimizer == SGD) {
            first[k] = 0.9 * first[k] + g;
            v -= 0.05 * first[k];
        } else {
            first[k] = 0.9 * first[k] + 0.1 * g;
            second[k] = 0.99 * second[k] + 0.01 * g * g;
            double a = first[k] / (1 - pow(0.9, step + 1)), b = second[k] / (1 - pow(0.99, step + 1));
            v -= 0.01 * a / (sqrt(b) + 1e-3);
        }
        format_set(f, values, k, v);
    }
}
