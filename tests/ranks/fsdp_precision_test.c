/* Precision: what full parameters and sharded gradients hold, to the bit, whatever the dtypes.
 *
 * The oracle rounds by arithmetic of its own and follows one rule: each rank's gradient, rounded to reduce_dtype, is
 * added in float32 (float64, where the gradient that travels or the sharded gradient is of that dtype) in rank order;
 * the sum is divided, what the sharded gradient held is added, and that is rounded once to the gradient's dtype. Where
 * parameters are sharded and replicated (hybrid), the ranks of one shard dimension are summed so, undivided and not
 * rounded below float32, and then these sums over the replicas. Gradients without sync add up in float32 (float64) on
 * each rank and are rounded when they travel. */
#include "fsdp_host.h"

#include <math.h>

TestSuite(fsdp_precision, .timeout = RANKS_SECONDS + 30);

#define NONE DTYPE_COUNT
#define MOST 15 /* elements of the largest parameter */
#define PARAMS 6

/* ---- rounding, by arithmetic */

static double narrow(enum dtype type, double v)
{
    static const struct {
        int mantissa, lowest;
        double largest;
    } formats[] = {
        [DTYPE_F16] = {10, -14, 65504},
        [DTYPE_BF16] = {7, -126, 0x1.fep127},
        [DTYPE_F8E4M3FN] = {3, -6, 448},
        [DTYPE_F8E5M2] = {2, -14, 57344},
    };
    if (type == DTYPE_F64 || type == NONE || !isfinite(v)) {
        return type == DTYPE_F8E4M3FN && isinf(v) ? NAN : v;
    } else if (type == DTYPE_F32) {
        return (double)(float)v;
    } else if (v == 0) {
        return v;
    }
    int exponent = ilogb(v) < formats[type].lowest ? formats[type].lowest : ilogb(v);
    double step = ldexp(1, exponent - formats[type].mantissa), near = nearbyint(v / step) * step;
    if (fabs(near) <= formats[type].largest) return near;
    return type == DTYPE_F8E4M3FN ? NAN : copysign(INFINITY, v);
}

static enum dtype wide(enum dtype a, enum dtype b)
{
    return a == DTYPE_F64 || b == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
}

static int alike(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

/* ---- parameters */

struct par {
    const char *name;
    enum dtype type;
    int ndim;
    int64_t shape[3];
    int dim; /* that is sharded */
};

static int64_t count_of(const struct par *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++) n *= p->shape[d];
    return n;
}

/* The elements of rank's shard, as they lie in it: where each is in the whole. */
static int64_t shard_places(const struct par *p, int rank, int size, int64_t *places)
{
    int64_t rows = p->shape[p->dim], chunk = (rows + size - 1) / size, n = 0, inner = 1;
    for (int d = p->dim + 1; d < p->ndim; d++) inner *= p->shape[d];
    for (int64_t k = 0; k < count_of(p); k++) {
        int64_t row = k / inner % rows;
        if (row / chunk == rank) places[n++] = k;
    }
    return n;
}

/* ---- a case */

enum layout { SHARDED, PRIVATE, REPLICATED, HYBRID, HYBRID_PRIVATE };
static const char *const layouts[] = {"shared", "private", "no-shard", "hybrid", "hybrid, private"};

struct plan {
    enum dtype param, reduce;
    int keep;
    const char *schedule; /* S: synced, N: without sync, H: without all-reduce */
    double divisor;
    const struct par *pars;
    int n;
    /* Rank r's gradient of parameter i in micro-batch m; NULL: as random_gradient */
    int (*gives)(int r, int m, int i);
    double (*gradient)(int r, int m, int i, int64_t k);
};

static double hashed(uint64_t a, uint64_t b)
{
    uint64_t state = a * 1000003u + b;
    (void)random_next(&state);
    return random_real(&state);
}

/* Some parameter gets none on some rank; 'h' gets its first in the last micro-batch but one, 'unused' never any. */
static int random_gives(int r, int m, int i)
{
    if (i == 4) return 0;
    return hashed(77, (uint64_t)(r * 64 + m * 8 + i)) > -0.6;
}

/* Spread over several binades, so that the order and place of rounding shows. */
static double random_gradient(int r, int m, int i, int64_t k)
{
    uint64_t which = (uint64_t)(((r * 8 + m) * 8 + i) * 64) + (uint64_t)k;
    return ldexp(hashed(5, which), (int)(which * 7 % 9) - 4);
}

static double master(int i, int64_t k)
{
    return ldexp(hashed(9, (uint64_t)(i * 100) + (uint64_t)k), (int)(k * 5 % 7) - 3);
}

static enum dtype full_type(const struct plan *c, int i)
{
    return c->param != NONE ? c->param : c->pars[i].type;
}

static enum dtype grad_type(const struct plan *c, int i)
{
    if (!c->keep) return c->pars[i].type;
    return c->reduce != NONE ? c->reduce : full_type(c, i);
}

/* ---- the oracle: sharded gradients of all ranks as wholes */

struct sums {
    double pending[RANKS_MAX][PARAMS][MOST]; /* without sync, of each rank */
    int waiting;                             /* some rank may have such */
    double partial[RANKS_MAX][PARAMS][MOST]; /* hybrid: of each replica */
    double held[PARAMS][MOST];
};

static double given(const struct plan *c, int r, int m, int i, int64_t k)
{
    if (!(c->gives ? c->gives : random_gives)(r, m, i)) return 0;
    return narrow(full_type(c, i), (c->gradient ? c->gradient : random_gradient)(r, m, i, k));
}

static void follow(const struct plan *c, struct sums *s, int m, int shards, int replicas, int hybrid)
{
    char step = c->schedule[m];
    double divisor = c->divisor != 0 ? c->divisor : shards * replicas;
    for (int i = 0; i < c->n; i++)
        for (int64_t k = 0; k < count_of(&c->pars[i]); k++) {
            enum dtype full = full_type(c, i), grad = grad_type(c, i), sum = wide(full, full), travels;
            double total = 0, *pending;
            travels = c->reduce != NONE ? c->reduce : s->waiting ? sum : full;
            for (int a = 0; a < replicas; a++) {
                double part = 0;
                enum dtype first = hybrid ? wide(travels, sum) : wide(travels, grad);
                for (int b = 0; b < shards; b++) {
                    int r = a * shards + b;
                    double g = given(c, r, m, i, k);
                    pending = &s->pending[r][i][k];
                    if (step == 'N' || s->waiting) g = *pending = narrow(sum, *pending + g);
                    if (step == 'N') continue;
                    g = narrow(c->reduce, g);
                    part = narrow(first, part + g);
                    if (!hybrid && replicas > 1) total = narrow(first, total + g);
                    *pending = 0;
                }
                if (step == 'N') continue;
                if (hybrid) {
                    double *partial = &s->partial[a][i][k];
                    *partial = narrow(sum, narrow(first, part + *partial));
                    if (step == 'H') continue;
                    total = narrow(wide(sum, grad), total + *partial);
                    *partial = 0;
                } else if (replicas == 1) {
                    total = part;
                }
            }
            if (step != 'S') continue;
            enum dtype last = hybrid ? wide(sum, grad) : wide(travels, grad);
            s->held[i][k] = narrow(grad, narrow(last, narrow(last, total / narrow(last, divisor)) + s->held[i][k]));
        }
    s->waiting = step == 'N';
}

/* ---- the product */

static DLDataType dl_or_none(enum dtype type)
{
    return type == NONE ? (DLDataType){0, 0, 0} : dtype_to_dl(type);
}

static fsdp_model *model_of(fsdp_group *group, fsdp_mesh *mesh, enum layout layout, const struct plan *c)
{
    fsdp_precision precision = {.struct_size = sizeof precision,
                                .param_dtype = dl_or_none(c->param),
                                .reduce_dtype = dl_or_none(c->reduce),
                                .keep_low_precision_grads = c->keep};
    fsdp_model_options options = {.struct_size = sizeof options,
                                  .private_unshard = layout == PRIVATE || layout == HYBRID_PRIVATE,
                                  .strategy = layout == REPLICATED ? FSDP_NO_SHARD
                                              : layout >= HYBRID   ? FSDP_HYBRID_SHARD
                                                                   : FSDP_FULL_SHARD,
                                  .gradient_divisor = c->divisor,
                                  .precision = &precision};
    fsdp_model *model;
    if (layout >= HYBRID)
        OK(fsdp_model_create_on_mesh(mesh, &options, &model));
    else
        OK(fsdp_model_create(group, &options, &model));
    return model;
}

static fsdp_unit *unit_of(fsdp_model *model, const struct plan *c)
{
    fsdp_param params[PARAMS] = {0};
    DLTensor tensors[PARAMS];
    char memory[PARAMS][MOST * 8];
    fsdp_unit *unit;
    for (int i = 0; i < c->n; i++) {
        double values[MOST];
        for (int64_t k = 0; k < count_of(&c->pars[i]); k++) values[k] = narrow(c->pars[i].type, master(i, k));
        tensors[i] = view(memory[i], c->pars[i].type, c->pars[i].ndim, c->pars[i].shape);
        set_doubles(&tensors[i], values);
        params[i] = (fsdp_param){
            .struct_size = sizeof *params, .name = c->pars[i].name, .full = &tensors[i], .shard_dim = c->pars[i].dim};
    }
    OK(fsdp_unit_create(model, "u", params, c->n, NULL, &unit));
    return unit;
}

static int type_is(DLDataType got, enum dtype want)
{
    DLDataType dl = dtype_to_dl(want);
    return got.code == dl.code && got.bits == dl.bits && got.lanes == dl.lanes;
}

static void expect_elements(const DLTensor *t, enum dtype type, const double *whole, const int64_t *places, int64_t n,
                            const char *what, const char *when)
{
    double got[MOST];
    CHECK(elements(t) == n && type_is(t->dtype, type), "%s: %s has %lld elements, not %lld, or another dtype", when,
          what, (long long)elements(t), (long long)n);
    get_doubles(t, got);
    for (int64_t j = 0; j < n; j++) {
        double want = whole[places ? places[j] : j];
        CHECK(alike(got[j], want), "%s: %s[%lld] is %a, not %a", when, what, (long long)j, got[j], want);
    }
}

static void expect_values(fsdp_unit *unit, const struct plan *c, int rank, int shards, const char *when)
{
    for (int i = 0; i < c->n; i++) {
        DLManagedTensorVersioned *full, *shard;
        double values[MOST];
        int64_t places[MOST], n = count_of(&c->pars[i]);
        OK(fsdp_unit_param_full(unit, i, &full));
        OK(fsdp_unit_param_shard(unit, i, &shard));
        for (int64_t k = 0; k < n; k++) values[k] = narrow(c->pars[i].type, master(i, k));
        int64_t own = shard_places(&c->pars[i], rank, shards, places);
        expect_elements(&shard->dl_tensor, c->pars[i].type, values, places, own, c->pars[i].name, when);
        for (int64_t k = 0; k < n; k++) values[k] = narrow(full_type(c, i), values[k]);
        expect_elements(&full->dl_tensor, full_type(c, i), values, NULL, n, c->pars[i].name, when);
        full->deleter(full);
        shard->deleter(shard);
    }
}

static void give(fsdp_unit *unit, const struct plan *c, int rank, int m)
{
    DLTensor tensors[PARAMS];
    const DLTensor *grads[PARAMS] = {0};
    char memory[PARAMS][MOST * 8];
    for (int i = 0; i < c->n; i++) {
        if (!(c->gives ? c->gives : random_gives)(rank, m, i)) continue;
        double values[MOST];
        for (int64_t k = 0; k < count_of(&c->pars[i]); k++) values[k] = given(c, rank, m, i, k);
        tensors[i] = view(memory[i], full_type(c, i), c->pars[i].ndim, c->pars[i].shape);
        set_doubles(&tensors[i], values);
        grads[i] = &tensors[i];
    }
    fsdp_work *work = NULL;
    OK(fsdp_unit_post_backward(unit, grads, c->n, m % 2 ? &work : NULL));
    if (work) OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
}

/* FNV-1a of the sharded gradients' bytes. */
static uint64_t check_plan(struct rank *r, fsdp_group *group, fsdp_mesh *mesh, enum layout layout, const struct plan *c)
{
    int hybrid = layout >= HYBRID,
        shards = hybrid                 ? 2
                 : layout == REPLICATED ? 1
                                        : r->size,
        replicas = r->size / shards;
    char when[160];
    snprintf(when, sizeof when, "%s, %d ranks, param %s, reduce %s, keep %d, %s", layouts[layout], r->size,
             c->param == NONE ? "as it is" : dtype_name(c->param),
             c->reduce == NONE ? "as it comes" : dtype_name(c->reduce), c->keep, c->schedule);
    fsdp_model *model = model_of(group, mesh, layout, c);
    fsdp_unit *unit = unit_of(model, c);
    static _Thread_local struct sums sums;
    memset(&sums, 0, sizeof sums);
    for (int m = 0; c->schedule[m]; m++) {
        OK(fsdp_model_set_gradient_sync(model, c->schedule[m] != 'N'));
        OK(fsdp_model_set_all_reduce(model, c->schedule[m] != 'H'));
        OK(fsdp_unit_pre_forward(unit));
        expect_values(unit, c, r->rank % shards, shards, when);
        OK(fsdp_unit_post_forward(unit));
        OK(fsdp_unit_pre_backward(unit));
        give(unit, c, r->rank, m);
        follow(c, &sums, m, shards, replicas, hybrid);
    }
    OK(fsdp_model_finish_backward(model));
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < c->n; i++) {
        DLManagedTensorVersioned *grad;
        int64_t places[MOST], n = shard_places(&c->pars[i], r->rank % shards, shards, places);
        OK(fsdp_unit_param_grad(unit, i, &grad));
        expect_elements(&grad->dl_tensor, grad_type(c, i), sums.held[i], places, n, c->pars[i].name, when);
        const unsigned char *bytes = grad->dl_tensor.data;
        for (size_t b = 0; b < tensor_bytes(&grad->dl_tensor); b++) hash = (hash ^ bytes[b]) * 0x100000001b3u;
        fsdp_param_info info = {.struct_size = sizeof info};
        OK(fsdp_unit_param_query(unit, i, &info));
        CHECK(type_is(info.dtype, c->pars[i].type) && type_is(info.full_dtype, full_type(c, i)) &&
                  type_is(info.grad_dtype, grad_type(c, i)),
              "%s: dtypes of '%s' as told", when, info.name);
        grad->deleter(grad);
    }
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    return hash;
}

/* ---- all combinations */

static const struct par mixed[] = {{"w", DTYPE_F32, 2, {5, 3}, 0},     {"v", DTYPE_F64, 2, {3, 4}, 1},
                                   {"h", DTYPE_BF16, 3, {2, 3, 2}, 2}, {"f", DTYPE_F16, 1, {7}, 0},
                                   {"unused", DTYPE_F32, 1, {3}, 0},   {"q", DTYPE_F8E5M2, 1, {2}, 0}};

static fsdp_mesh *square(fsdp_group *group, int size)
{
    static const char *const names[] = {"replicate", "shard"};
    int64_t sizes[] = {2, 2};
    fsdp_mesh *mesh = NULL;
    if (size == 4) OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
    return mesh;
}

static void rank_combinations(struct rank *r)
{
    static const enum dtype params[] = {NONE,      DTYPE_BF16,     DTYPE_F16,   DTYPE_F32,
                                        DTYPE_F64, DTYPE_F8E4M3FN, DTYPE_F8E5M2};
    static const enum dtype reduces[] = {NONE, DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64, DTYPE_F8E5M2};
    static const char *const schedules[] = {"S", "NS", "SS", "NNS", "NSNS"};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_mesh *mesh = square(group, r->size);
    int turn = 0;
    for (size_t p = 0; p < sizeof params / sizeof *params; p++)
        for (size_t q = 0; q < sizeof reduces / sizeof *reduces; q++)
            for (int keep = 0; keep < 2; keep++, turn++) {
                struct plan c = {.param = params[p],
                                 .reduce = reduces[q],
                                 .keep = keep,
                                 .schedule = schedules[turn % 5],
                                 .divisor = turn % 3 == 1 ? 3 : 0,
                                 .pars = mixed,
                                 .n = PARAMS};
                uint64_t in_shared = check_plan(r, group, mesh, SHARDED, &c);
                uint64_t in_private = check_plan(r, group, mesh, PRIVATE, &c);
                CHECK(in_shared == in_private, "private full parameters give the same bits");
                check_plan(r, group, mesh, REPLICATED, &c);
                if (!mesh) continue;
                check_plan(r, group, mesh, HYBRID, &c);
                c.schedule = turn % 2 ? "HS" : "HNSHHS";
                in_shared = check_plan(r, group, mesh, HYBRID, &c);
                in_private = check_plan(r, group, mesh, HYBRID_PRIVATE, &c);
                CHECK(in_shared == in_private, "private full parameters give the same bits");
            }
    fsdp_mesh_release(mesh);
    fsdp_group_release(group);
}

Test(fsdp_precision, every_combination_on_one_and_two_ranks)
{
    ranks_run(1, rank_combinations, NULL);
    ranks_run(2, rank_combinations, NULL);
}

Test(fsdp_precision, every_combination_on_three_and_four_ranks)
{
    ranks_run(3, rank_combinations, NULL);
    ranks_run(4, rank_combinations, NULL);
}

/* ---- A12: one rounding, whichever rank holds the large number */

static const struct par low[] = {
    {"h", DTYPE_BF16, 1, {4}, 0}, {"f", DTYPE_F16, 2, {2, 4}, 1}, {"w", DTYPE_F32, 1, {5}, 0}};

static int all_give(int r, int m, int i)
{
    return r >= 0 && m >= 0 && i >= 0;
}

static _Thread_local int holder; /* the rank with the large number */

/* h and w: 256 on one rank and 1 on the others; f: 40000 on each. */
static double large_gradient(int r, int m, int i, int64_t k)
{
    (void)m;
    (void)k;
    return i == 1 ? 40000 : r == holder ? 256 : 1;
}

static void expect_all(fsdp_unit *unit, int index, double want, const char *when)
{
    DLManagedTensorVersioned *grad;
    double got[MOST];
    OK(fsdp_unit_param_grad(unit, index, &grad));
    get_doubles(&grad->dl_tensor, got);
    for (int64_t k = 0; k < elements(&grad->dl_tensor); k++)
        CHECK(got[k] == want, "%s: gradient %d at %lld is %.9g, not %.9g", when, index, (long long)k, got[k], want);
    grad->deleter(grad);
}

static void rank_large(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_mesh *mesh = square(group, 4);
    for (holder = 0; holder < 4; holder++)
        for (int layout = SHARDED; layout <= HYBRID_PRIVATE; layout++)
            for (int keep = 0; keep < 2; keep++) {
                /* The divisor 1 shows the sum: 259, which is 260 in bf16 when rounded once and 256 hop by hop. */
                struct plan sum = {.param = NONE,
                                   .reduce = NONE,
                                   .keep = keep,
                                   .schedule = "S",
                                   .divisor = 1,
                                   .pars = low,
                                   .n = 3,
                                   .gives = all_give,
                                   .gradient = large_gradient};
                fsdp_model *model = model_of(group, mesh, (enum layout)layout, &sum);
                fsdp_unit *unit = unit_of(model, &sum);
                give(unit, &sum, r->rank, 0);
                OK(fsdp_model_finish_backward(model));
                expect_all(unit, 0, 260, layouts[layout]);
                expect_all(unit, 1, INFINITY, layouts[layout]);
                expect_all(unit, 2, 259, layouts[layout]);
                /* The mean of what overflows f16 as a sum is there. */
                OK(fsdp_model_zero_grad(model));
                OK(fsdp_model_set_gradient_divisor(model, 0));
                give(unit, &sum, r->rank, 0);
                OK(fsdp_model_finish_backward(model));
                expect_all(unit, 0, 65, layouts[layout]); /* 64.75 lies between 64.5 and 65: to the even one */
                expect_all(unit, 1, 40000, layouts[layout]);
                expect_all(unit, 2, 64.75, layouts[layout]);
                fsdp_unit_release(unit);
                fsdp_model_release(model);
            }
    fsdp_mesh_release(mesh);
    fsdp_group_release(group);
}

Test(fsdp_precision, a12_sums_are_rounded_once_whoever_holds_the_large_number)
{
    ranks_run(4, rank_large, NULL);
}

/* ---- A07: fresh gradients in low precision and accumulated ones in one unit */

static int late_gives(int r, int m, int i)
{
    (void)r;
    return i == 0 || (i == 1 && m == 1);
}

static void rank_late(struct rank *r)
{
    static const struct par pars[] = {
        {"p1", DTYPE_F32, 2, {4, 3}, 0}, {"p2", DTYPE_F32, 2, {3, 5}, 1}, {"p3", DTYPE_F32, 1, {5}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_mesh *mesh = square(group, r->size);
    for (int layout = SHARDED; layout <= (mesh ? HYBRID_PRIVATE : REPLICATED); layout++)
        for (int keep = 0; keep < 2; keep++) {
            struct plan c = {.param = DTYPE_BF16,
                             .reduce = DTYPE_F32,
                             .keep = keep,
                             .schedule = "NS",
                             .pars = pars,
                             .n = 3,
                             .gives = late_gives};
            check_plan(r, group, mesh, (enum layout)layout, &c);
            c.schedule = "NSNS";
            check_plan(r, group, mesh, (enum layout)layout, &c);
        }
    fsdp_mesh_release(mesh);
    fsdp_group_release(group);
}

Test(fsdp_precision, a07_a_parameter_first_used_in_the_last_micro_batch)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_late, NULL);
}

/* ---- A08: the divisor does not depend on the mesh */

static double plain_gradient(int r, int64_t k)
{
    return random_gradient(r, 1, 2, k) * 100;
}

/* The four ranks' gradients, given by as many ranks as there are; the shards' gradients against the sum over all four
 * divided by 300, in double. */
static void check_divisor(struct rank *r, fsdp_model *model, int shard_rank, int shards, const char *what)
{
    static const struct par par = {"w", DTYPE_F32, 2, {3, 5}, 1};
    struct plan c = {.param = NONE, .reduce = NONE, .pars = &par, .n = 1};
    fsdp_unit *unit = unit_of(model, &c);
    int each = 4 / r->size; /* micro-batches: one rank has all the data */
    for (int m = 0; m < each; m++) {
        float values[MOST];
        for (int k = 0; k < MOST; k++) values[k] = (float)plain_gradient(r->rank * each + m, k);
        DLTensor t = view(values, DTYPE_F32, 2, par.shape);
        const DLTensor *grads[] = {&t};
        OK(fsdp_model_set_gradient_sync(model, m == each - 1));
        OK(fsdp_unit_post_backward(unit, grads, 1, NULL));
    }
    OK(fsdp_model_finish_backward(model));
    DLManagedTensorVersioned *grad;
    double got[MOST];
    int64_t places[MOST], n = shard_places(&par, shard_rank, shards, places);
    OK(fsdp_unit_param_grad(unit, 0, &grad));
    CHECK(elements(&grad->dl_tensor) == n, "%s: %lld elements", what, (long long)n);
    get_doubles(&grad->dl_tensor, got);
    for (int64_t j = 0; j < n; j++) {
        double want = 0, scale = 0;
        for (int s = 0; s < 4; s++) {
            want += (double)(float)plain_gradient(s, places[j]) / 300;
            scale += fabs(plain_gradient(s, places[j])) / 300;
        }
        CHECK(fabs(got[j] - want) <= 4 * scale * 0x1p-24, "%s: gradient at %lld is %.9g, not %.9g", what,
              (long long)places[j], got[j], want);
        CHECK(want != 0, "a value to look at");
    }
    grad->deleter(grad);
    fsdp_unit_release(unit);
}

static void rank_divisor(struct rank *r)
{
    static const char *const names[] = {"replicate", "shard"};
    fsdp_group *group = group_make(r, 0, 0);
    for (int later = 0; later < 2; later++) { /* as an option, or set afterwards */
        fsdp_model_options options = {.struct_size = sizeof options, .gradient_divisor = later ? 0 : 300};
        for (int private = 0; private < 3; private ++) {
            fsdp_model *model;
            options.private_unshard = private == 1;
            options.strategy = private == 2 ? FSDP_NO_SHARD : FSDP_FULL_SHARD;
            OK(fsdp_model_create(group, &options, &model));
            if (later) OK(fsdp_model_set_gradient_divisor(model, 300));
            check_divisor(r, model, private == 2 ? 0 : r->rank, private == 2 ? 1 : r->size, "a line");
            fsdp_model_release(model);
        }
        options.private_unshard = 0;
        options.strategy = FSDP_HYBRID_SHARD;
        for (int64_t replicas = 1; replicas <= r->size; replicas *= 2) {
            int64_t sizes[] = {replicas, r->size / replicas};
            fsdp_mesh *mesh;
            fsdp_model *model;
            OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
            OK(fsdp_model_create_on_mesh(mesh, &options, &model));
            if (later) OK(fsdp_model_set_gradient_divisor(model, 300));
            check_divisor(r, model, r->rank % (int)sizes[1], (int)sizes[1], "a grid");
            fsdp_model_release(model);
            fsdp_mesh_release(mesh);
        }
    }
    fsdp_group_release(group);
}

Test(fsdp_precision, a08_the_divisor_is_the_same_on_every_mesh)
{
    ranks_run(4, rank_divisor, NULL);
    ranks_run(2, rank_divisor, NULL);
    ranks_run(1, rank_divisor, NULL);
}

/* ---- a unit's own precision, and what is refused */

static void rank_own(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    struct plan c = {.param = DTYPE_BF16, .reduce = DTYPE_F32, .schedule = "S", .pars = mixed, .n = 3};
    fsdp_model *model = model_of(group, NULL, SHARDED, &c);
    fsdp_precision own = {
        .struct_size = sizeof own, .param_dtype = dtype_to_dl(DTYPE_F16), .keep_low_precision_grads = 1};
    fsdp_unit_options options = {.struct_size = sizeof options, .precision = &own};
    float values[4] = {1.0009765625f, 65519, 65520, 1e-8f};
    int64_t four = 4;
    DLTensor full = view(values, DTYPE_F32, 1, &four);
    fsdp_param param = {.struct_size = sizeof param, .name = "own", .full = &full};
    fsdp_unit *unit, *none = NULL;

    own.param_dtype = dtype_to_dl(DTYPE_I32);
    REFUSED(fsdp_unit_create(model, "u", &param, 1, &options, &none), FSDP_ERR_INVALID, "precision.param_dtype");
    own.param_dtype = dtype_to_dl(DTYPE_F16);
    own.reduce_dtype = (DLDataType){kDLFloat, 32, 2};
    CHECK(fsdp_unit_create(model, "u", &param, 1, &options, &none) != FSDP_OK &&
              strstr(fsdp_last_error(), "reduce_dtype"),
          "lanes: %s", fsdp_last_error());
    own.reduce_dtype = dtype_to_dl(DTYPE_BOOL);
    REFUSED(fsdp_unit_create(model, "u", &param, 1, &options, &none), FSDP_ERR_INVALID, "precision.reduce_dtype");
    own.reduce_dtype = (DLDataType){0, 0, 0};
    own.output_dtype = dtype_to_dl(DTYPE_I64);
    REFUSED(fsdp_unit_create(model, "u", &param, 1, &options, &none), FSDP_ERR_INVALID, "precision.output_dtype");
    own.output_dtype = (DLDataType){0, 0, 0};
    own.buffer_dtype = dtype_to_dl(DTYPE_U8);
    REFUSED(fsdp_unit_create(model, "u", &param, 1, &options, &none), FSDP_ERR_INVALID, "precision.buffer_dtype");
    own.buffer_dtype = (DLDataType){0, 0, 0};
    own.struct_size = 3;
    CHECK(fsdp_unit_create(model, "u", &param, 1, &options, &none) == FSDP_ERR_STRUCT_SIZE, "its size is checked");
    own.struct_size = sizeof own;
    CHECK(!none, "nothing was made");

    /* The unit's precision replaces the model's as a whole: gradients travel and stay in f16. */
    OK(fsdp_unit_create(model, "u", &param, 1, &options, &unit));
    fsdp_param_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_param_query(unit, 0, &info));
    CHECK(type_is(info.full_dtype, DTYPE_F16) && type_is(info.grad_dtype, DTYPE_F16) && type_is(info.dtype, DTYPE_F32),
          "dtypes of a unit of its own");
    OK(fsdp_unit_unshard(unit, NULL));
    DLManagedTensorVersioned *t;
    double got[4], want[4] = {1.0009765625, 65504, INFINITY, 0};
    OK(fsdp_unit_param_full(unit, 0, &t));
    get_doubles(&t->dl_tensor, got);
    for (int k = 0; k < 4; k++) CHECK(got[k] == want[k], "element %d is %g, not %g", k, got[k], want[k]);
    t->deleter(t);
    /* A gradient of the shard's dtype is refused by name where the full parameter's is asked for. */
    const DLTensor *wrong[] = {&full};
    REFUSED(fsdp_unit_post_backward(unit, wrong, 1, NULL), FSDP_ERR_INVALID, "'own'");
    fsdp_unit_release(unit);

    /* Ranks whose precision differs are told. */
    if (r->size > 1) {
        own.param_dtype = dtype_to_dl(r->rank == 1 ? DTYPE_BF16 : DTYPE_F16);
        REFUSED(fsdp_unit_create(model, "u", &param, 1, &options, &none), FSDP_ERR_MISMATCH, "options");
    }
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_precision, a_unit_may_have_its_own_and_what_is_no_float_dtype_is_refused)
{
    ranks_run(1, rank_own, NULL);
    ranks_run(2, rank_own, NULL);
}
