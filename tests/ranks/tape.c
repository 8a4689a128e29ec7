/* See tape.h. Every operation is an entry of its tape with a function that goes back through it; marks of modules are
 * entries without matrices. Memory is taken from blocks that the outermost tape owns; tapes made inside (a
 * checkpoint's) use the same, so that gradients handed out live on until the outermost one is freed. */
#include "tape.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum mark { OPERATION, ENTER, LEAVE };

struct entry {
    enum mark mark;
    struct mat *out; /* of LEAVE: the call's output */
    struct mat *in[3];
    void (*back)(struct tape *t, struct entry *e);
    double number;
    const int *ids;
    struct mat *const *blocks;
    float *saved;
    int at[2], n;
    tape_fn fn;
    void *user;
    const struct tape_hooks *hooks; /* of marks */
    int unit, fired, entered;       /* entered: of LEAVE, where its ENTER is */
};

struct block {
    struct block *next;
    size_t used, size;
};

struct tape {
    struct tape *root; /* itself, or the outermost */
    int record, again; /* again: it repeats what the root has counted */
    struct entry *entries;
    int n, capacity;
    struct block *blocks;                     /* of the root */
    int calls[TAPE_UNITS], begun[TAPE_UNITS]; /* of the root: calls of units in forward, and done in backward */
};

/* ---- memory */

#define BLOCK ((size_t)1 << 16)

void *tape_memory(struct tape *t, size_t bytes)
{
    t = t->root;
    size_t header = 64;
    bytes = (bytes + 63) & ~(size_t)63;
    if (!t->blocks || t->blocks->size - t->blocks->used < bytes) {
        size_t size = header + (bytes > BLOCK ? bytes : BLOCK);
        struct block *b = calloc(1, size);
        if (!b) abort();
        *b = (struct block){t->blocks, header, size};
        t->blocks = b;
    }
    void *p = (char *)t->blocks + t->blocks->used;
    t->blocks->used += bytes;
    return p;
}

struct tape *tape_new(int record)
{
    struct tape *t = calloc(1, sizeof *t);
    if (!t) abort();
    t->root = t;
    t->record = record;
    return t;
}

static struct tape *tape_inside(struct tape *outer, int record)
{
    struct tape *t = tape_memory(outer, sizeof *t);
    t->root = outer->root;
    t->record = record;
    t->again = outer->again || record;
    return t;
}

void tape_free(struct tape *t)
{
    if (!t) return;
    for (struct block *b = t->blocks, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(t);
}

static struct entry *entry_new(struct tape *t, enum mark mark)
{
    if (t->n == t->capacity) { /* the old array stays in the blocks: it is small */
        struct entry *more = tape_memory(t, (size_t)(t->capacity * 2 + 64) * sizeof *more);
        if (t->n) memcpy(more, t->entries, (size_t)t->n * sizeof *more);
        t->entries = more;
        t->capacity = t->capacity * 2 + 64;
    }
    t->entries[t->n] = (struct entry){.mark = mark};
    return &t->entries[t->n++];
}

static struct mat *mat_new(struct tape *t, int rows, int cols)
{
    struct mat *m = tape_memory(t, sizeof *m);
    m->rows = rows;
    m->cols = cols;
    m->v = tape_memory(t, (size_t)(rows * cols + 1) * sizeof(float));
    return m;
}

static long count(const struct mat *m)
{
    return (long)m->rows * m->cols;
}

static const float *values(const struct mat *m)
{
    if (!m->param) return m->v;
    if (!m->param->value && count(m)) {
        fprintf(stderr, "parameter '%s' is read while it is not there\n", m->param->name);
        abort();
    }
    return m->param->value;
}

/* Where to add the gradient of m, or NULL when none is wanted. */
static float *gradient(struct tape *t, struct mat *m)
{
    if (!m || !m->needs_grad) return NULL;
    if (m->param) {
        m->param->used = 1;
        return m->param->grad;
    }
    if (!m->g) m->g = tape_memory(t, (size_t)(count(m) + 1) * sizeof(float));
    return m->g;
}

static void shapes(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "shapes of %s\n", what);
    abort();
}

/* The result of an operation on a and b (and c). The entry is only good until the next one is made. */
static struct mat *operation(struct tape *t, int rows, int cols, struct mat *a, struct mat *b, struct mat *c,
                             void (*back)(struct tape *, struct entry *), struct entry **entry)
{
    static _Thread_local struct entry unrecorded;
    struct mat *out = mat_new(t, rows, cols);
    out->needs_grad = (a && a->needs_grad) || (b && b->needs_grad) || (c && c->needs_grad);
    struct entry *e = t->record ? entry_new(t, OPERATION) : &unrecorded;
    *e = (struct entry){.out = out, .in = {a, b, c}, .back = back};
    if (entry) *entry = e;
    return out;
}

/* ---- leaves */

struct mat *tape_input(struct tape *t, int rows, int cols, const float *from)
{
    struct mat *m = mat_new(t, rows, cols);
    if (count(m)) memcpy(m->v, from, (size_t)count(m) * sizeof(float));
    return m;
}

struct mat *tape_use(struct tape *t, struct tape_param *p)
{
    struct mat *m = tape_memory(t, sizeof *m);
    *m = (struct mat){.rows = p->rows, .cols = p->cols, .param = p, .needs_grad = !p->frozen && t->record};
    return m;
}

/* ---- operations */

static void matmul_back(struct tape *t, struct entry *e)
{
    struct mat *a = e->in[0], *b = e->in[1];
    const float *g = e->out->g;
    float *ga = gradient(t, a), *gb = gradient(t, b);
    int n = a->rows, k = a->cols, m = b->cols;
    if (ga) {
        const float *vb = values(b);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < k; j++) {
                double sum = 0;
                for (int o = 0; o < m; o++) sum += (double)g[i * m + o] * vb[j * m + o];
                ga[i * k + j] += (float)sum;
            }
    }
    if (gb) {
        const float *va = values(a);
        for (int j = 0; j < k; j++)
            for (int o = 0; o < m; o++) {
                double sum = 0;
                for (int i = 0; i < n; i++) sum += (double)va[i * k + j] * g[i * m + o];
                gb[j * m + o] += (float)sum;
            }
    }
}

struct mat *tape_matmul(struct tape *t, struct mat *a, struct mat *b)
{
    shapes(a->cols == b->rows, "matmul");
    struct mat *out = operation(t, a->rows, b->cols, a, b, NULL, matmul_back, NULL);
    const float *va = values(a), *vb = values(b);
    for (int i = 0; i < a->rows; i++)
        for (int o = 0; o < b->cols; o++) {
            double sum = 0;
            for (int k = 0; k < a->cols; k++) sum += (double)va[i * a->cols + k] * vb[k * b->cols + o];
            out->v[i * b->cols + o] = (float)sum;
        }
    return out;
}

static void matmul_nt_back(struct tape *t, struct entry *e)
{
    struct mat *a = e->in[0], *b = e->in[1];
    const float *g = e->out->g;
    float *ga = gradient(t, a), *gb = gradient(t, b);
    int n = a->rows, k = a->cols, m = b->rows;
    if (ga) {
        const float *vb = values(b);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < k; j++) {
                double sum = 0;
                for (int o = 0; o < m; o++) sum += (double)g[i * m + o] * vb[o * k + j];
                ga[i * k + j] += (float)sum;
            }
    }
    if (gb) {
        const float *va = values(a);
        for (int o = 0; o < m; o++)
            for (int j = 0; j < k; j++) {
                double sum = 0;
                for (int i = 0; i < n; i++) sum += (double)g[i * m + o] * va[i * k + j];
                gb[o * k + j] += (float)sum;
            }
    }
}

struct mat *tape_matmul_nt(struct tape *t, struct mat *a, struct mat *b)
{
    shapes(a->cols == b->cols, "matmul_nt");
    struct mat *out = operation(t, a->rows, b->rows, a, b, NULL, matmul_nt_back, NULL);
    const float *va = values(a), *vb = values(b);
    for (int i = 0; i < a->rows; i++)
        for (int o = 0; o < b->rows; o++) {
            double sum = 0;
            for (int k = 0; k < a->cols; k++) sum += (double)va[i * a->cols + k] * vb[o * a->cols + k];
            out->v[i * b->rows + o] = (float)sum;
        }
    return out;
}

static void add_back(struct tape *t, struct entry *e)
{
    for (int which = 0; which < 2; which++) {
        float *to = gradient(t, e->in[which]);
        for (long i = 0; to && i < count(e->out); i++) to[i] += e->out->g[i];
    }
}

struct mat *tape_add(struct tape *t, struct mat *a, struct mat *b)
{
    shapes(a->rows == b->rows && a->cols == b->cols, "add");
    struct mat *out = operation(t, a->rows, a->cols, a, b, NULL, add_back, NULL);
    const float *va = values(a), *vb = values(b);
    for (long i = 0; i < count(a); i++) out->v[i] = va[i] + vb[i];
    return out;
}

static void add_row_back(struct tape *t, struct entry *e)
{
    float *ga = gradient(t, e->in[0]), *gb = gradient(t, e->in[1]);
    const float *g = e->out->g;
    int cols = e->out->cols;
    for (long i = 0; ga && i < count(e->out); i++) ga[i] += g[i];
    for (int c = 0; gb && c < cols; c++) {
        double sum = 0;
        for (int r = 0; r < e->out->rows; r++) sum += g[r * cols + c];
        gb[c] += (float)sum;
    }
}

struct mat *tape_add_row(struct tape *t, struct mat *a, struct mat *row)
{
    shapes(row->rows == 1 && a->cols == row->cols, "add_row");
    struct mat *out = operation(t, a->rows, a->cols, a, row, NULL, add_row_back, NULL);
    const float *va = values(a), *vb = values(row);
    for (long i = 0; i < count(a); i++) out->v[i] = va[i] + vb[i % a->cols];
    return out;
}

static void mul_back(struct tape *t, struct entry *e)
{
    const float *g = e->out->g;
    for (int which = 0; which < 2; which++) {
        float *to = gradient(t, e->in[which]);
        const float *other = to ? values(e->in[1 - which]) : NULL;
        for (long i = 0; to && i < count(e->out); i++) to[i] += g[i] * other[i];
    }
}

struct mat *tape_mul(struct tape *t, struct mat *a, struct mat *b)
{
    shapes(a->rows == b->rows && a->cols == b->cols, "mul");
    struct mat *out = operation(t, a->rows, a->cols, a, b, NULL, mul_back, NULL);
    const float *va = values(a), *vb = values(b);
    for (long i = 0; i < count(a); i++) out->v[i] = va[i] * vb[i];
    return out;
}

static void mul_row_back(struct tape *t, struct entry *e)
{
    struct mat *a = e->in[0], *row = e->in[1];
    float *ga = gradient(t, a), *gb = gradient(t, row);
    const float *g = e->out->g;
    int cols = a->cols;
    if (ga) {
        const float *vb = values(row);
        for (long i = 0; i < count(a); i++) ga[i] += g[i] * vb[i % cols];
    }
    if (gb) {
        const float *va = values(a);
        for (int c = 0; c < cols; c++) {
            double sum = 0;
            for (int r = 0; r < a->rows; r++) sum += (double)g[r * cols + c] * va[r * cols + c];
            gb[c] += (float)sum;
        }
    }
}

struct mat *tape_mul_row(struct tape *t, struct mat *a, struct mat *row)
{
    shapes(row->rows == 1 && a->cols == row->cols, "mul_row");
    struct mat *out = operation(t, a->rows, a->cols, a, row, NULL, mul_row_back, NULL);
    const float *va = values(a), *vb = values(row);
    for (long i = 0; i < count(a); i++) out->v[i] = va[i] * vb[i % a->cols];
    return out;
}

static void scale_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    for (long i = 0; to && i < count(e->out); i++) to[i] += (float)(e->out->g[i] * e->number);
}

struct mat *tape_scale(struct tape *t, struct mat *a, double factor)
{
    struct entry *e;
    struct mat *out = operation(t, a->rows, a->cols, a, NULL, NULL, scale_back, &e);
    const float *va = values(a);
    e->number = factor;
    for (long i = 0; i < count(a); i++) out->v[i] = (float)(va[i] * factor);
    return out;
}

static void tanh_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    for (long i = 0; to && i < count(e->out); i++) {
        double y = e->out->v[i];
        to[i] += (float)(e->out->g[i] * (1 - y * y));
    }
}

struct mat *tape_tanh(struct tape *t, struct mat *a)
{
    struct mat *out = operation(t, a->rows, a->cols, a, NULL, NULL, tanh_back, NULL);
    const float *va = values(a);
    for (long i = 0; i < count(a); i++) out->v[i] = (float)tanh(va[i]);
    return out;
}

static void gelu_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    const float *x = to ? values(e->in[0]) : NULL;
    for (long i = 0; to && i < count(e->out); i++) {
        double below = 0.5 * (1 + erf(x[i] * M_SQRT1_2)),
               density = exp(-0.5 * x[i] * x[i]) * 0.5 * M_2_SQRTPI * M_SQRT1_2;
        to[i] += (float)(e->out->g[i] * (below + x[i] * density));
    }
}

struct mat *tape_gelu(struct tape *t, struct mat *a)
{
    struct mat *out = operation(t, a->rows, a->cols, a, NULL, NULL, gelu_back, NULL);
    const float *va = values(a);
    for (long i = 0; i < count(a); i++) out->v[i] = (float)(va[i] * 0.5 * (1 + erf(va[i] * M_SQRT1_2)));
    return out;
}

static void softmax_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    int cols = e->out->cols;
    for (int r = 0; to && r < e->out->rows; r++) {
        const float *y = e->out->v + r * cols, *g = e->out->g + r * cols;
        double sum = 0;
        for (int c = 0; c < cols; c++) sum += (double)y[c] * g[c];
        for (int c = 0; c < cols; c++) to[r * cols + c] += (float)(y[c] * (g[c] - sum));
    }
}

/* The softmax of n values; gives the logarithm of its divisor. */
static double softmax_row(const float *x, float *y, int n)
{
    double most = -INFINITY, sum = 0;
    for (int c = 0; c < n; c++) most = x[c] > most ? x[c] : most;
    for (int c = 0; c < n; c++) sum += exp(x[c] - most);
    for (int c = 0; c < n; c++) y[c] = (float)(exp(x[c] - most) / sum);
    return log(sum) + most;
}

struct mat *tape_softmax(struct tape *t, struct mat *a, int causal)
{
    struct mat *out = operation(t, a->rows, a->cols, a, NULL, NULL, softmax_back, NULL);
    for (int r = 0; r < a->rows; r++)
        softmax_row(values(a) + r * a->cols, out->v + r * a->cols, causal && r < a->cols ? r + 1 : a->cols);
    return out;
}

#define NORM_EPSILON 1e-5

/* saved: for each row, mean and 1 / deviation. */
static void layer_norm_back(struct tape *t, struct entry *e)
{
    struct mat *a = e->in[0], *gain = e->in[1], *bias = e->in[2];
    float *ga = gradient(t, a), *gg = gradient(t, gain), *gb = gradient(t, bias);
    const float *g = e->out->g, *x = values(a);
    int cols = a->cols, rows = a->rows;
    for (int r = 0; ga && r < rows; r++) {
        const float *vg = values(gain);
        double mean = e->saved[2 * r], scale = e->saved[2 * r + 1], sum = 0, product = 0;
        for (int c = 0; c < cols; c++) {
            double d = (double)g[r * cols + c] * vg[c];
            sum += d;
            product += d * (x[r * cols + c] - mean) * scale;
        }
        for (int c = 0; c < cols; c++) {
            double d = (double)g[r * cols + c] * vg[c], y = (x[r * cols + c] - mean) * scale;
            ga[r * cols + c] += (float)(scale * (d - (sum + y * product) / cols));
        }
    }
    for (int c = 0; c < cols; c++) {
        double by_gain = 0, by_bias = 0;
        for (int r = 0; r < rows; r++) {
            by_gain += g[r * cols + c] * ((double)x[r * cols + c] - e->saved[2 * r]) * e->saved[2 * r + 1];
            by_bias += g[r * cols + c];
        }
        if (gg) gg[c] += (float)by_gain;
        if (gb) gb[c] += (float)by_bias;
    }
}

struct mat *tape_layer_norm(struct tape *t, struct mat *a, struct mat *gain, struct mat *bias)
{
    shapes(gain->cols == a->cols && bias->cols == a->cols, "layer_norm");
    struct entry *e;
    struct mat *out = operation(t, a->rows, a->cols, a, gain, bias, layer_norm_back, &e);
    const float *x = values(a), *vg = values(gain), *vb = values(bias);
    int cols = a->cols;
    e->saved = tape_memory(t, (size_t)(2 * a->rows + 1) * sizeof(float));
    for (int r = 0; r < a->rows; r++) {
        double mean = 0, square = 0;
        for (int c = 0; c < cols; c++) mean += x[r * cols + c];
        mean /= cols;
        for (int c = 0; c < cols; c++) square += (x[r * cols + c] - mean) * (x[r * cols + c] - mean);
        double scale = 1 / sqrt(square / cols + NORM_EPSILON);
        for (int c = 0; c < cols; c++) out->v[r * cols + c] = (float)((x[r * cols + c] - mean) * scale * vg[c] + vb[c]);
        e->saved[2 * r] = (float)mean;
        e->saved[2 * r + 1] = (float)scale;
    }
    return out;
}

static void slice_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    for (int r = 0; to && r < e->out->rows; r++)
        for (int c = 0; c < e->out->cols; c++)
            to[(e->at[0] + r) * e->in[0]->cols + e->at[1] + c] += e->out->g[r * e->out->cols + c];
}

struct mat *tape_slice(struct tape *t, struct mat *a, int row, int rows, int col, int cols)
{
    shapes(row + rows <= a->rows && col + cols <= a->cols, "slice");
    struct entry *e;
    struct mat *out = operation(t, rows, cols, a, NULL, NULL, slice_back, &e);
    e->at[0] = row;
    e->at[1] = col;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) out->v[r * cols + c] = values(a)[(row + r) * a->cols + col + c];
    return out;
}

static void join_back(struct tape *t, struct entry *e)
{
    for (int i = 0; i < e->n; i++) {
        float *to = gradient(t, e->blocks[i]);
        int cols = e->blocks[i]->cols;
        for (int r = 0; to && r < e->blocks[i]->rows; r++)
            for (int c = 0; c < cols; c++)
                to[r * cols + c] += e->out->g[(e->ids[2 * i] + r) * e->out->cols + e->ids[2 * i + 1] + c];
    }
}

struct mat *tape_join(struct tape *t, int rows, int cols, int n, struct mat *const *blocks, const int *at)
{
    struct entry *e;
    struct mat *out = operation(t, rows, cols, NULL, NULL, NULL, join_back, &e);
    e->n = n;
    e->ids = memcpy(tape_memory(t, (size_t)n * 2 * sizeof *at + 1), at, (size_t)n * 2 * sizeof *at);
    e->blocks = memcpy(tape_memory(t, (size_t)n * sizeof *blocks + 1), blocks, (size_t)n * sizeof *blocks);
    for (int i = 0; i < n; i++) {
        out->needs_grad |= blocks[i]->needs_grad;
        for (int r = 0; r < blocks[i]->rows; r++)
            for (int c = 0; c < blocks[i]->cols; c++)
                out->v[(at[2 * i] + r) * cols + at[2 * i + 1] + c] = values(blocks[i])[r * blocks[i]->cols + c];
    }
    return out;
}

static void embed_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    int cols = e->out->cols;
    for (int row = 0; to && row < e->in[0]->rows; row++)
        for (int c = 0; c < cols; c++) {
            double sum = 0;
            for (int i = 0; i < e->out->rows; i++)
                if (e->ids[i] == row) sum += e->out->g[i * cols + c];
            to[row * cols + c] += (float)sum;
        }
}

struct mat *tape_embed(struct tape *t, struct mat *table, int n, const int *ids)
{
    struct entry *e;
    struct mat *out = operation(t, n, table->cols, table, NULL, NULL, embed_back, &e);
    e->ids = memcpy(tape_memory(t, (size_t)n * sizeof *ids + 1), ids, (size_t)n * sizeof *ids);
    for (int i = 0; i < n; i++) {
        shapes(ids[i] >= 0 && ids[i] < table->rows, "embed");
        memcpy(out->v + i * table->cols, values(table) + ids[i] * table->cols, (size_t)table->cols * sizeof(float));
    }
    return out;
}

struct mat *tape_round(struct tape *t, struct mat *a, void (*rounding)(void *, float *, int), void *user)
{
    struct mat *out = tape_scale(t, a, 1);
    rounding(user, out->v, (int)count(a));
    return out;
}

/* ---- losses; saved: the gradient of a */

static void loss_back(struct tape *t, struct entry *e)
{
    float *to = gradient(t, e->in[0]);
    for (long i = 0; to && i < count(e->in[0]); i++) to[i] += e->saved[i] * e->out->g[0];
}

struct mat *tape_squared_error(struct tape *t, struct mat *a, const float *targets)
{
    struct entry *e;
    struct mat *out = operation(t, 1, 1, a, NULL, NULL, loss_back, &e);
    double sum = 0;
    e->saved = tape_memory(t, (size_t)(count(a) + 1) * sizeof(float));
    for (long i = 0; i < count(a); i++) {
        double d = (double)values(a)[i] - targets[i];
        e->saved[i] = (float)d;
        sum += d * d / 2;
    }
    out->v[0] = (float)sum;
    return out;
}

struct mat *tape_cross_entropy(struct tape *t, struct mat *a, const int *targets)
{
    struct entry *e;
    struct mat *out = operation(t, 1, 1, a, NULL, NULL, loss_back, &e);
    double sum = 0;
    e->saved = tape_memory(t, (size_t)(count(a) + 1) * sizeof(float));
    for (int r = 0; r < a->rows; r++) {
        const float *row = values(a) + r * a->cols;
        sum += softmax_row(row, e->saved + r * a->cols, a->cols) - row[targets[r]];
        e->saved[r * a->cols + targets[r]] -= 1;
    }
    out->v[0] = (float)sum;
    return out;
}

/* ---- modules */

struct mat *tape_call(struct tape *t, const struct tape_hooks *hooks, int unit, tape_fn fn, void *user, struct mat *x)
{
    int entered = t->n;
    if (!t->again) t->root->calls[unit]++;
    hooks->pre_forward(hooks->user, t, unit);
    if (t->record) {
        struct entry *e = entry_new(t, ENTER);
        e->hooks = hooks;
        e->unit = unit;
    }
    struct mat *y = fn(t, user, x);
    if (t->record) {
        struct entry *e = entry_new(t, LEAVE);
        e->hooks = hooks;
        e->unit = unit;
        e->out = y;
        e->entered = entered;
    }
    hooks->post_forward(hooks->user, t, unit);
    return y;
}

static void run_back(struct tape *t)
{
    for (int i = t->n - 1; i >= 0; i--) {
        struct entry *e = &t->entries[i];
        if (e->mark == OPERATION && e->out->needs_grad && e->out->g) e->back(t, e);
        if (e->mark == LEAVE && e->out->needs_grad && e->out->g) {
            t->entries[e->entered].fired = 1;
            e->hooks->enter_backward(e->hooks->user, t, e->unit);
        }
        if (e->mark == ENTER) {
            int remaining = t->root->calls[e->unit] - ++t->root->begun[e->unit];
            e->hooks->leave_backward(e->hooks->user, t, e->unit, e->fired, remaining);
        }
    }
}

/* fn on a copy of x, which gathers the gradient of its own. */
static struct mat *run_again(struct tape *t, tape_fn fn, void *user, struct mat *x, struct mat **copy)
{
    *copy = NULL;
    if (x) {
        *copy = tape_input(t, x->rows, x->cols, values(x));
        (*copy)->needs_grad = t->record && x->needs_grad;
    }
    return fn(t, user, *copy);
}

static void checkpoint_back(struct tape *t, struct entry *e)
{
    struct tape *again = tape_inside(t, 1);
    struct mat *copy, *y = run_again(again, e->fn, e->user, e->in[0], &copy);
    if (!y->needs_grad) return;
    y->g = e->out->g;
    run_back(again);
    float *to = gradient(t, e->in[0]);
    for (long i = 0; to && copy->g && i < count(copy); i++) to[i] += copy->g[i];
}

struct mat *tape_checkpoint(struct tape *t, tape_fn fn, void *user, struct mat *x)
{
    if (!t->record) return fn(t, user, x);
    struct mat *copy, *y = run_again(tape_inside(t, 0), fn, user, x, &copy);
    struct entry *e;
    struct mat *out = operation(t, y->rows, y->cols, x, NULL, NULL, checkpoint_back, &e);
    out->needs_grad = 1; /* of what is inside nothing is known */
    memcpy(out->v, values(y), (size_t)count(y) * sizeof(float));
    e->fn = fn;
    e->user = user;
    return out;
}

void tape_backward(struct tape *t, struct mat *loss, double factor)
{
    if (!loss->needs_grad) return;
    loss->g = tape_memory(t, sizeof(float));
    loss->g[0] = (float)factor;
    run_back(t);
}

/* ---- number formats */

const char *const format_names[] = {"none", "f32", "f64", "bf16", "f16"};

size_t format_size(enum format f)
{
    return f == FORMAT_F64 ? 8 : f == FORMAT_F32 ? 4 : 2;
}

double format_round(enum format f, double v)
{
    if (f == FORMAT_F64 || f == FORMAT_NONE || v == 0 || !isfinite(v)) return v;
    if (f == FORMAT_F32) return (float)v;
    int bits = f == FORMAT_BF16 ? 8 : 11, least = f == FORMAT_BF16 ? -126 : -14, exponent;
    frexp(v, &exponent); /* |v| in [2^(exponent-1), 2^exponent) */
    if (exponent - 1 < least) exponent = least + 1;
    double unit = ldexp(1, exponent - bits), rounded = nearbyint(v / unit) * unit;
    double most = f == FORMAT_BF16 ? ldexp(255, 120) : 65504;
    return fabs(rounded) > most ? copysign(INFINITY, v) : rounded;
}

static double half_value(enum format f, uint16_t bits)
{
    if (f == FORMAT_BF16) {
        uint32_t wide = (uint32_t)bits << 16;
        float v;
        memcpy(&v, &wide, 4);
        return v;
    }
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double v = exponent == 31  ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? ldexp(fraction, -24)
                               : ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -v : v;
}

static uint16_t half_bits(enum format f, double v)
{
    v = format_round(f, v);
    if (f == FORMAT_BF16) {
        float narrow = (float)v;
        uint32_t wide;
        memcpy(&wide, &narrow, 4);
        return (uint16_t)(wide >> 16);
    }
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    v = fabs(v);
    if (isnan(v)) return sign | 0x7e00;
    if (isinf(v)) return sign | 0x7c00;
    if (v < ldexp(1, -14)) return sign | (uint16_t)ldexp(v, 24);
    int exponent;
    double fraction = frexp(v, &exponent);
    return (uint16_t)(sign | (exponent + 14) << 10 | ((int)ldexp(fraction, 11) & 1023));
}

double format_get(enum format f, const void *data, long at)
{
    if (f == FORMAT_F64) return ((const double *)data)[at];
    if (f == FORMAT_F32) return ((const float *)data)[at];
    return half_value(f, ((const uint16_t *)data)[at]);
}

void format_set(enum format f, void *data, long at, double v)
{
    if (f == FORMAT_F64)
        ((double *)data)[at] = v;
    else if (f == FORMAT_F32)
        ((float *)data)[at] = (float)v;
    else
        ((uint16_t *)data)[at] = half_bits(f, v);
}
