/* See job.h. Values come from tables of 4096 per dtype; which one an element has is a hash of seed, rank and
 * position. */
#include "job.h"

#include "../unit/kernel_oracle.h"

#define TABLE 4096
#define EDGE 64 /* guard bytes on each side */

const fsdp_op_kind job_kinds[8] = {FSDP_OP_ALL_GATHER, FSDP_OP_REDUCE_SCATTER, FSDP_OP_ALL_REDUCE, FSDP_OP_REDUCE,
                                   FSDP_OP_BROADCAST,  FSDP_OP_GATHER,         FSDP_OP_SCATTER,    FSDP_OP_ALL_TO_ALL};

int job_reduces(fsdp_op_kind kind)
{
    return kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_REDUCE || kind == FSDP_OP_REDUCE;
}

int job_has_root(fsdp_op_kind kind)
{
    return kind == FSDP_OP_REDUCE || kind == FSDP_OP_BROADCAST || kind == FSDP_OP_GATHER || kind == FSDP_OP_SCATTER;
}

int job_can_be_uneven(fsdp_op_kind kind)
{
    return kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_TO_ALL;
}

int job_can_be_in_place(fsdp_op_kind kind)
{
    return kind != FSDP_OP_ALL_TO_ALL && kind != FSDP_OP_BROADCAST;
}

int job_op_defined(enum dtype type, fsdp_reduce_op op)
{
    if (type == DTYPE_C64 || type == DTYPE_C128) return op == FSDP_SUM || op == FSDP_AVG;
    if (is_integer(type) || type == DTYPE_BOOL) return op != FSDP_AVG;
    return op <= FSDP_MAX;
}

/* ---- values */

static char tables[DTYPE_COUNT][TABLE * 16];
static float decoded[DTYPE_COUNT][TABLE]; /* of the floats that accumulate in f32 */

void job_tables(void)
{
    uint64_t state = 1;
    for (int type = 0; type < DTYPE_COUNT; type++)
        for (int k = 0; k < TABLE; k++) {
            char *at = tables[type] + (size_t)k * dtype_size((enum dtype)type);
            uint64_t bits[2] = {random_bits(&state), random_bits(&state)};
            if (is_integer((enum dtype)type)) {
                memcpy(at, bits, dtype_size((enum dtype)type));
                continue;
            }
            /* 1.0 to 2.0, by 2^-3 to 2^3, either sign: sums round, products of eight don't overflow f32. */
            struct value v;
            v.re = ldexpl((bits[0] & 1 ? -1 : 1) * (1 + (real)(bits[0] >> 32) / 4294967296.0L),
                          (int)(bits[0] >> 1 & 7) - 3);
            v.im = ldexpl((bits[1] & 1 ? -1 : 1) * (1 + (real)(bits[1] >> 32) / 4294967296.0L),
                          (int)(bits[1] >> 1 & 7) - 3);
            if (type == DTYPE_BOOL) v.re = (real)(bits[0] & 1), v.im = 0;
            element_set((enum dtype)type, at, v, 0);
            decoded[type][k] = (float)element_get((enum dtype)type, at).re;
        }
}

static unsigned pick(uint64_t seed, int rank, int64_t index)
{
    uint64_t z = (seed * 64 + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15u + (uint64_t)index * 0xd6e8feb86659fd93u;
    z = (z ^ z >> 32) * 0xd6e8feb86659fd93u;
    return (unsigned)((z ^ z >> 32) % TABLE);
}

static uint64_t mix(uint64_t seed, uint64_t salt)
{
    uint64_t state = seed * 1000003u + salt;
    return random_bits(&state);
}

/* ---- reductions, one element at a time */

static uint64_t integer_combine(enum dtype type, fsdp_reduce_op op, uint64_t a, uint64_t b)
{
    int shift = 64 - 8 * (int)dtype_size(type);
    int64_t sa = (int64_t)(a << shift) >> shift, sb = (int64_t)(b << shift) >> shift;
    int less = is_signed(type) ? sb < sa : b < a, more = is_signed(type) ? sb > sa : b > a;
    switch (op) {
    case FSDP_SUM:
        return type == DTYPE_BOOL ? a | b : a + b;
    case FSDP_PROD:
        return type == DTYPE_BOOL ? a & b : a * b;
    case FSDP_MIN:
        return less ? b : a;
    case FSDP_MAX:
        return more ? b : a;
    case FSDP_BAND:
        return a & b;
    case FSDP_BOR:
        return a | b;
    default:
        return a ^ b;
    }
}

static float f32_combine(fsdp_reduce_op op, float a, float b)
{
    return op == FSDP_PROD ? a * b : op == FSDP_MIN ? (b < a ? b : a) : op == FSDP_MAX ? (b > a ? b : a) : a + b;
}

static double f64_combine(fsdp_reduce_op op, double a, double b)
{
    return op == FSDP_PROD ? a * b : op == FSDP_MIN ? (b < a ? b : a) : op == FSDP_MAX ? (b > a ? b : a) : a + b;
}

static void reduce_element(const struct job *job, int size, int64_t index, char *out)
{
    enum dtype type = job->type;
    size_t bytes = dtype_size(type), part = type == DTYPE_C64 ? 4 : type == DTYPE_C128 ? 8 : bytes;
    int average = job->op == FSDP_AVG;
    for (size_t at = 0; at < bytes; at += part) {
        uint64_t u = 0;
        float f = 0;
        double d = 0;
        for (int r = 0; r < size; r++) {
            unsigned k = pick(job->seed, r, index);
            const char *from = tables[type] + k * bytes + at;
            if (is_integer(type) || type == DTYPE_BOOL) {
                uint64_t b = 0;
                memcpy(&b, from, bytes);
                u = r ? integer_combine(type, job->op, u, b) : b;
            } else if (type == DTYPE_F64 || type == DTYPE_C128) {
                d = r ? f64_combine(job->op, d, READ(double, from)) : READ(double, from);
            } else {
                float b = type == DTYPE_F32 || type == DTYPE_C64 ? READ(float, from) : decoded[type][k];
                f = r ? f32_combine(job->op, f, b) : b;
            }
        }
        if (average) f /= (float)size, d /= size;
        if (is_integer(type) || type == DTYPE_BOOL)
            memcpy(out, &u, bytes);
        else if (type == DTYPE_F64 || type == DTYPE_C128)
            memcpy(out + at, &d, 8);
        else if (type == DTYPE_F32 || type == DTYPE_C64)
            memcpy(out + at, &f, 4);
        else
            element_set(type, out, (struct value){f, 0}, 0);
    }
}

/* ---- shapes, layouts and memory */

static int64_t product(const int64_t *shape, int n)
{
    int64_t count = 1;
    for (int d = 0; d < n; d++) count *= shape[d];
    return count;
}

/* The shape of one rank's part: 0-dim, empty, with or without a second dimension. */
static int part_shape(const struct job *job, int64_t *shape)
{
    uint64_t choice = mix(job->seed, 1);
    if (job->count == 0 && choice & 1) {
        shape[0] = 1, shape[1] = 0, shape[2] = 2;
        return 3;
    }
    if (job->count == 1 && choice & 1) return 0;
    int64_t divisor = 2 + (int64_t)(choice >> 1) % 6;
    while (divisor > 1 && job->count % divisor) divisor--;
    shape[0] = job->count / divisor, shape[1] = divisor;
    return divisor == 1 ? 1 : 2;
}

static int whole_shape(const struct job *job, int size, int64_t *shape)
{
    int64_t part[JOB_DIMS];
    int n = part_shape(job, part), new_dimension = n == 0 || mix(job->seed, 2) & 1;
    memcpy(shape + new_dimension, part, (size_t)n * sizeof *part);
    if (new_dimension)
        shape[0] = size;
    else
        shape[0] *= size;
    return n + new_dimension;
}

static int rows_shape(const struct job *job, int64_t rows, int64_t *shape)
{
    shape[0] = rows;
    shape[1] = 3;
    return mix(job->seed, 3) & 1 ? 2 : 1;
}

static int64_t random_rows(const struct job *job, int a, int b)
{
    uint64_t bits = mix(job->seed, 100 + 16 * (uint64_t)a + (uint64_t)b);
    return bits % 4 == 0 ? 0 : (int64_t)(bits >> 8) % (job->count + 1);
}

static void view_shape(struct view *v, enum dtype type, const int64_t *shape, int ndim, enum layout layout)
{
    memset(v, 0, sizeof *v);
    v->given = 1;
    memcpy(v->shape, shape, (size_t)ndim * sizeof *shape);
    v->count = product(shape, ndim);
    v->dl = (DLTensor){.device = {kDLCPU, 0}, .ndim = ndim, .dtype = dtype_to_dl(type), .shape = v->shape};
    int64_t step = layout == STEPPED ? 3 : layout == REVERSED ? -1 : 1;
    for (int i = 0; i < ndim; i++) {
        int d = layout == TRANSPOSED ? i : ndim - 1 - i;
        v->strides[d] = layout == EXPANDED && d == 0 ? 0 : step;
        if (layout == REVERSED) v->base += v->shape[d] ? (1 - v->shape[d]) * step : 0;
        step *= v->shape[d] ? v->shape[d] : 1;
        if (layout == PADDED && i == 0) step += 5;
    }
}

static int64_t view_at(const struct view *v, int64_t index)
{
    int64_t at = v->base;
    for (int d = v->dl.ndim - 1; d >= 0; d--) {
        at += index % v->shape[d] * v->strides[d];
        index /= v->shape[d];
    }
    return at;
}

static int64_t view_extent(const struct view *v)
{
    int64_t last = v->base;
    if (v->count == 0) return 0;
    for (int d = 0; d < v->dl.ndim; d++)
        if (v->strides[d] > 0) last += (v->shape[d] - 1) * v->strides[d];
    return last + 1;
}

/* The address of element 0 is split between data and byte_offset; strides may be left out where they say
 * nothing. */
static void view_place(struct view *v, const struct job *job, char *data, size_t size, enum layout layout,
                       uint64_t salt)
{
    uint64_t choice = mix(job->seed, salt);
    size_t first = (size_t)v->base * size;
    v->dl.byte_offset = choice & 1 ? EDGE + first : 0;
    v->dl.data = data + first - v->dl.byte_offset;
    v->dl.strides = layout == DENSE && choice & 2 ? NULL : v->strides;
}

static void view_make(struct view *v, const struct job *job, int64_t rank_of_values, const int64_t *shape, int ndim,
                      enum layout layout, uint64_t salt)
{
    size_t size = dtype_size(job->type);
    view_shape(v, job->type, shape, ndim, layout);
    int64_t extent = view_extent(v);
    size_t shift = mix(job->seed, salt + 1) % 3 * size + (mix(job->seed, salt + 2) % 4 == 0); /* odd addresses too */
    v->bytes = (size_t)extent * size + 2 * EDGE + shift;
    v->block = malloc(v->bytes);
    CHECK(v->block, "no memory for %zu bytes", v->bytes);
    memset(v->block, 0xa5, v->bytes);
    char *data = v->block + EDGE + shift;
    for (int64_t i = 0; i < extent && rank_of_values >= 0; i++)
        memcpy(data + (size_t)i * size, tables[job->type] + pick(job->seed, (int)rank_of_values, i) * size, size);
    view_place(v, job, data, size, layout, salt);
}

/* A part of another view's block. */
static void view_inside(struct view *v, const struct job *job, const struct view *whole, int64_t begin,
                        const int64_t *shape, int ndim, uint64_t salt)
{
    size_t size = dtype_size(job->type);
    view_shape(v, job->type, shape, ndim, DENSE);
    view_place(v, job, (char *)whole->dl.data + whole->dl.byte_offset + (size_t)begin * size, size, DENSE, salt);
}

static char *view_element(const struct view *v, char *block, int64_t index, size_t size)
{
    size_t at = (size_t)((char *)v->dl.data + v->dl.byte_offset - v->block);
    return block + at + (size_t)((view_at(v, index) - v->base) * (int64_t)size);
}

/* ---- preparing */

static void sizes(struct job_run *run, int64_t rows[RANKS_MAX][RANKS_MAX])
{
    const struct job *job = &run->job;
    for (int a = 0; a < run->size; a++)
        for (int b = 0; b < run->size; b++) rows[a][b] = random_rows(job, job->kind == FSDP_OP_ALL_TO_ALL ? a : b, b);
}

static int64_t sum(const int64_t *rows, int n)
{
    int64_t total = 0;
    for (int r = 0; r < n; r++) total += rows[r];
    return total;
}

struct plan {
    int64_t rows[RANKS_MAX][RANKS_MAX]; /* [from][to] */
    int64_t in_shape[JOB_DIMS], out_shape[JOB_DIMS];
    int in_dims, out_dims;
    int64_t row; /* elements of one row */
};

static void plan_make(struct job_run *run, struct plan *plan)
{
    const struct job *job = &run->job;
    int me = run->rank, size = run->size, dims;
    if (!job->uneven) {
        int64_t part[JOB_DIMS], whole[JOB_DIMS];
        int part_dims = part_shape(job, part), whole_dims = whole_shape(job, size, whole);
        int in_whole =
            job->kind == FSDP_OP_REDUCE_SCATTER || job->kind == FSDP_OP_SCATTER || job->kind == FSDP_OP_ALL_TO_ALL;
        int out_whole =
            job->kind == FSDP_OP_ALL_GATHER || job->kind == FSDP_OP_GATHER || job->kind == FSDP_OP_ALL_TO_ALL;
        memcpy(plan->in_shape, in_whole ? whole : part, sizeof part);
        memcpy(plan->out_shape, out_whole ? whole : part, sizeof part);
        plan->in_dims = in_whole ? whole_dims : part_dims;
        plan->out_dims = out_whole ? whole_dims : part_dims;
        return;
    }
    sizes(run, plan->rows);
    for (int r = 0; r < size; r++) run->in_rows[r] = plan->rows[me][r], run->out_rows[r] = plan->rows[r][me];
    int64_t in = sum(run->in_rows, size), out = sum(run->out_rows, size);
    if (job->kind == FSDP_OP_ALL_GATHER) out = in, in = plan->rows[0][me];
    if (job->kind == FSDP_OP_REDUCE_SCATTER) out = plan->rows[0][me];
    dims = rows_shape(job, in, plan->in_shape);
    plan->row = dims == 2 ? plan->in_shape[1] : 1;
    rows_shape(job, out, plan->out_shape);
    plan->in_dims = plan->out_dims = dims;
}

/* Element `index` of this rank's output is element *from_index of *from's input; for a reduction, of all
 * ranks'. */
static void source_of(const struct job_run *run, const struct plan *plan, int64_t index, int *from, int64_t *from_index)
{
    const struct job *job = &run->job;
    int me = run->rank;
    *from = 0;
    *from_index = index;
    if (job->uneven && job->kind == FSDP_OP_REDUCE_SCATTER) {
        *from_index += sum(plan->rows[0], me) * plan->row;
    } else if (job->uneven) { /* all-gather: what each has; all-to-all: what each gives this rank */
        int gather = job->kind == FSDP_OP_ALL_GATHER;
        while (*from_index >= plan->rows[gather ? 0 : *from][gather ? *from : me] * plan->row) {
            *from_index -= plan->rows[gather ? 0 : *from][gather ? *from : me] * plan->row;
            ++*from;
        }
        if (!gather) *from_index += sum(plan->rows[*from], me) * plan->row;
    } else if (job->kind == FSDP_OP_REDUCE_SCATTER) {
        *from_index += me * job->count;
    } else if (job->kind == FSDP_OP_ALL_GATHER || job->kind == FSDP_OP_GATHER || job->kind == FSDP_OP_ALL_TO_ALL) {
        *from = (int)(index / job->count);
        *from_index = index % job->count;
        if (job->kind == FSDP_OP_ALL_TO_ALL) *from_index += me * job->count;
    } else if (job->kind == FSDP_OP_SCATTER) {
        *from = job->root;
        *from_index += me * job->count;
    } else if (job->kind == FSDP_OP_BROADCAST) {
        *from = job->root;
    }
}

static void make_in_place(struct job_run *run, const struct plan *plan)
{
    const struct job *job = &run->job;
    int me = run->rank;
    int64_t begin = job->uneven ? sum(plan->rows[0], me) * plan->row : me * job->count;
    if (job->kind == FSDP_OP_ALL_GATHER || job->kind == FSDP_OP_GATHER) {
        view_make(&run->out, job, -1, plan->out_shape, plan->out_dims, DENSE, 20);
        view_inside(&run->in, job, &run->out, begin, plan->in_shape, plan->in_dims, 10);
        size_t size = dtype_size(job->type);
        for (int64_t i = 0; i < run->in.count; i++)
            memcpy((char *)run->in.dl.data + run->in.dl.byte_offset + (size_t)i * size,
                   tables[job->type] + pick(job->seed, me, i) * size, size);
    } else {
        view_make(&run->in, job, me, plan->in_shape, plan->in_dims, DENSE, 10);
        if (job->kind == FSDP_OP_ALL_REDUCE || job->kind == FSDP_OP_REDUCE) begin = 0;
        view_inside(&run->out, job, &run->in, begin, plan->out_shape, plan->out_dims, 20);
    }
}

static char *keep_copy(const struct view *v)
{
    char *copy = malloc(v->bytes ? v->bytes : 1);
    CHECK(copy, "no memory");
    memcpy(copy, v->block, v->bytes);
    return copy;
}

void job_prepare(struct job_run *run, const struct job *job, int rank, int size)
{
    memset(run, 0, sizeof *run);
    run->job = *job;
    run->rank = rank;
    run->size = size;
    struct plan plan = {0};
    plan_make(run, &plan);

    int root = !job_has_root(job->kind) || job->root == rank, broadcast = job->kind == FSDP_OP_BROADCAST;
    int useless = mix(job->seed, 4) & 1; /* whether tensors are given where they are not used */
    int want_in = broadcast ? root : root || job->kind != FSDP_OP_SCATTER || useless;
    int want_out = broadcast ? !root : root || job->kind == FSDP_OP_SCATTER || useless;
    if (job->in_place && root) {
        make_in_place(run, &plan);
    } else {
        if (want_in) view_make(&run->in, job, rank, plan.in_shape, plan.in_dims, job->in, 10);
        if (want_out) view_make(&run->out, job, -1, plan.out_shape, plan.out_dims, job->out, 20);
    }
    if (run->in.block) run->in.want = keep_copy(&run->in);
    if (run->out.block) run->out.want = keep_copy(&run->out);

    /* What the output must be. */
    if (!run->out.given || (!root && job->kind != FSDP_OP_SCATTER && !broadcast)) return;
    struct view peers; /* how an input of another rank is laid out: as this one's would be */
    size_t bytes = dtype_size(job->type);
    struct view *owner = run->out.block ? &run->out : &run->in;
    for (int64_t i = 0, last = -1; i < run->out.count; i++) {
        int from;
        int64_t index;
        source_of(run, &plan, i, &from, &index);
        if (from != last) {
            int64_t shape[JOB_DIMS];
            memcpy(shape, plan.in_shape, sizeof shape);
            if (job->uneven && job->kind == FSDP_OP_ALL_GATHER) shape[0] = plan.rows[0][from];
            if (job->uneven && job->kind == FSDP_OP_ALL_TO_ALL) shape[0] = sum(plan.rows[from], size);
            view_shape(&peers, job->type, shape, plan.in_dims, job->in_place ? DENSE : job->in);
            last = from;
        }
        int64_t at = view_at(&peers, index);
        struct view where = run->out;
        where.block = owner->block;
        char *want = view_element(&where, owner->want, i, bytes);
        if (job_reduces(job->kind))
            reduce_element(job, size, at, want);
        else
            memcpy(want, tables[job->type] + pick(job->seed, from, at) * bytes, bytes);
    }
}

/* ---- calling */

fsdp_collective job_collective(struct job_run *run)
{
    const struct job *job = &run->job;
    const DLTensor *in = run->in.given ? &run->in.dl : NULL, *out = run->out.given ? &run->out.dl : NULL;
    fsdp_collective call = {
        .struct_size = sizeof call, .kind = job->kind, .input = in, .output = out, .peer = job->root};
    if (job->kind == FSDP_OP_BROADCAST) call.input = in ? in : out, call.output = NULL;
    if (job_reduces(job->kind)) call.op = job->op;
    if (job->uneven && job->kind != FSDP_OP_ALL_GATHER) call.input_rows = run->in_rows;
    if (job->uneven && job->kind == FSDP_OP_ALL_GATHER) call.output_rows = run->in_rows; /* all ranks' */
    if (job->uneven && job->kind == FSDP_OP_ALL_TO_ALL) call.output_rows = run->out_rows;
    return call;
}

fsdp_status job_call(struct job_run *run, fsdp_group *group, fsdp_work **work)
{
    fsdp_collective c = job_collective(run);
    switch (c.kind) {
    case FSDP_OP_ALL_GATHER:
        return c.output_rows ? fsdp_all_gather_v(group, c.input, c.output, c.output_rows, work)
                             : fsdp_all_gather(group, c.input, c.output, work);
    case FSDP_OP_REDUCE_SCATTER:
        return c.input_rows ? fsdp_reduce_scatter_v(group, c.input, c.output, c.input_rows, c.op, work)
                            : fsdp_reduce_scatter(group, c.input, c.output, c.op, work);
    case FSDP_OP_ALL_REDUCE:
        return fsdp_all_reduce(group, c.input, c.output, c.op, work);
    case FSDP_OP_REDUCE:
        return fsdp_reduce(group, c.input, c.output, c.op, c.peer, work);
    case FSDP_OP_BROADCAST:
        return fsdp_broadcast(group, c.input, c.peer, work);
    case FSDP_OP_GATHER:
        return fsdp_gather(group, c.input, c.output, c.peer, work);
    case FSDP_OP_SCATTER:
        return fsdp_scatter(group, c.input, c.output, c.peer, work);
    default:
        return c.input_rows ? fsdp_all_to_all_v(group, c.input, c.output, c.input_rows, c.output_rows, work)
                            : fsdp_all_to_all(group, c.input, c.output, work);
    }
}

/* ---- checking */

static const char *job_text(const struct job_run *run)
{
    static const char *const kinds[] = {"",          "all_gather", "reduce_scatter", "all_reduce", "reduce",
                                        "broadcast", "gather",     "scatter",        "all_to_all"};
    static const char *const layouts[] = {"dense", "stepped", "transposed", "padded", "reversed", "expanded"};
    static _Thread_local char text[256];
    const struct job *j = &run->job;
    snprintf(text, sizeof text, "%s%s of %lld %s, op %d, root %d, in %s, out %s%s, seed %llu, %d ranks", kinds[j->kind],
             j->uneven ? "_v" : "", (long long)j->count, dtype_name(j->type), j->op, j->root, layouts[j->in],
             layouts[j->out], j->in_place ? ", in place" : "", (unsigned long long)j->seed, run->size);
    return text;
}

void job_verify(struct job_run *run)
{
    size_t bytes = dtype_size(run->job.type);
    struct view *owner = run->out.block ? &run->out : &run->in, where = run->out;
    where.block = owner->block;
    if (run->out.given && owner->want && memcmp(owner->block, owner->want, owner->bytes) != 0)
        for (int64_t i = 0; i < run->out.count; i++) {
            char *got = view_element(&where, owner->block, i, bytes),
                 *want = view_element(&where, owner->want, i, bytes);
            if (memcmp(got, want, bytes) == 0) continue;
            struct value a = element_get(run->job.type, got), b = element_get(run->job.type, want);
            CHECK(element_equal(run->job.type, got, want),
                  "%s: element %lld of %lld is %.10Lg%+.10Lgi, not %.10Lg%+.10Lgi", job_text(run), (long long)i,
                  (long long)run->out.count, a.re, a.im, b.re, b.im);
            memcpy(want, got, bytes); /* another NaN */
        }
    struct view *views[] = {&run->in, &run->out};
    for (int i = 0; i < 2; i++) {
        if (!views[i]->block) continue;
        CHECK(memcmp(views[i]->block, views[i]->want, views[i]->bytes) == 0,
              "%s: bytes of %s changed that are not the output's", job_text(run), i ? "out" : "in");
        free(views[i]->block);
        free(views[i]->want);
    }
}

void job_do(const struct job *job, struct rank *r, fsdp_group *group)
{
    struct job_run run;
    job_prepare(&run, job, r->rank, r->size);
    fsdp_status status = job_call(&run, group, NULL);
    CHECK(status == FSDP_OK, "%s: %s", job_text(&run), fsdp_last_error());
    job_verify(&run);
}

/* ---- any job */

uint64_t job_bits(uint64_t *state)
{
    return random_bits(state);
}

struct job job_random(uint64_t *state, int size)
{
    struct job job = {.kind = job_kinds[random_bits(state) % 8],
                      .type = (enum dtype)(random_bits(state) % DTYPE_COUNT)};
    job.seed = random_bits(state) >> 8;
    uint64_t scale = random_bits(state) % 16;
    job.count = (int64_t)(random_bits(state) % (scale == 0 ? 3 : scale < 10 ? 70 : scale < 15 ? 3000 : 40000));
    do job.op = (int32_t)(random_bits(state) % (FSDP_BXOR + 1));
    while (!job_op_defined(job.type, job.op));
    if (job_has_root(job.kind)) job.root = (int32_t)(random_bits(state) % (uint64_t)size);
    job.uneven = job_can_be_uneven(job.kind) && random_bits(state) % 3 == 0;
    job.in_place = job_can_be_in_place(job.kind) && random_bits(state) % 4 == 0;
    if (!job.in_place && random_bits(state) % 3 == 0) job.in = (enum layout)(random_bits(state) % LAYOUTS);
    if (!job.in_place && random_bits(state) % 3 == 0) job.out = (enum layout)(random_bits(state) % (PADDED + 1));
    return job;
}
