/* Reductions: dst = op over the sources, with the rounding and the order that kernel.h promises.
 *
 * One loop serves every dtype. It takes a block of elements at a time, small enough for the L1 cache, and
 * combines the sources into an accumulator block in the order in which they are given; so the result of an
 * element depends on the values and the order of the sources alone, not on the length, the address or the
 * machine. Then it scales, divides, adds what dst held, and converts to dst's type: the only rounding of a
 * narrow float. The accumulator's type is
 *
 *   f32     for f32 and the narrow floats (pairs for complex64)
 *   f64     for f64 (pairs for complex128), and whenever the result is f64
 *   itself  for integers, as unsigned where wrapping matters, and for bool as 0 and 1
 *
 * Gradients are f32, bf16 or f16 and are summed or averaged: there the additions read the sources as they
 * are, and the last one scales and rounds as well.
 */
#include "tensor/block.h"
#include "tensor/kernel.h"
#include "tensor/vec8.h"

/* ---- Combining a source into the accumulator ----------------------------------------------------------- */

typedef void (*combine_fn)(void *acc, const void *src, size_t n);

#define COMBINE(name, acc_t, src_t, value)                                                                             \
    KERNEL_CLONES static void name(void *acc, const void *src, size_t n)                                               \
    {                                                                                                                  \
        acc_t *restrict to = acc;                                                                                      \
        const src_t *restrict from = src;                                                                              \
        for (size_t i = 0; i < n; i++) {                                                                               \
            acc_t a = to[i];                                                                                           \
            src_t b = from[i];                                                                                         \
            to[i] = (acc_t)(value);                                                                                    \
        }                                                                                                              \
    }

COMBINE(sum_f32, f32_any, f32_any, a + b)
COMBINE(sum_f64, f64_any, f64_any, a + b)
COMBINE(prod_f32, f32_any, f32_any, a *b)
COMBINE(prod_f64, f64_any, f64_any, a *b)

/* 1u *: u16 would be multiplied as int, which can overflow. */
COMBINE(sum_u8, u8_any, u8_any, a + b)
COMBINE(sum_u16, u16_any, u16_any, a + b)
COMBINE(sum_u32, u32_any, u32_any, a + b)
COMBINE(sum_u64, u64_any, u64_any, a + b)
COMBINE(prod_u8, u8_any, u8_any, a *b)
COMBINE(prod_u16, u16_any, u16_any, 1u * a * b)
COMBINE(prod_u32, u32_any, u32_any, a *b)
COMBINE(prod_u64, u64_any, u64_any, a *b)

/* A NaN on either side wins: b is taken when it is NaN, and no comparison replaces an accumulator that is. */
COMBINE(min_f32, f32_any, f32_any, b < a || b != b ? b : a)
COMBINE(max_f32, f32_any, f32_any, b > a || b != b ? b : a)
COMBINE(min_f64, f64_any, f64_any, b < a || b != b ? b : a)
COMBINE(max_f64, f64_any, f64_any, b > a || b != b ? b : a)

#define COMBINE_MIN_MAX(type)                                                                                          \
    COMBINE(min_##type, type##_any, type##_any, b < a ? b : a)                                                         \
    COMBINE(max_##type, type##_any, type##_any, b > a ? b : a)

COMBINE_MIN_MAX(i8)
COMBINE_MIN_MAX(i16)
COMBINE_MIN_MAX(i32)
COMBINE_MIN_MAX(i64)
COMBINE_MIN_MAX(u8)
COMBINE_MIN_MAX(u16)
COMBINE_MIN_MAX(u32)
COMBINE_MIN_MAX(u64)

#define COMBINE_BITS(type)                                                                                             \
    COMBINE(and_##type, type##_any, type##_any, a &b)                                                                  \
    COMBINE(or_##type, type##_any, type##_any, a | b)                                                                  \
    COMBINE(xor_##type, type##_any, type##_any, a ^ b)

COMBINE_BITS(u8)
COMBINE_BITS(u16)
COMBINE_BITS(u32)
COMBINE_BITS(u64)

/* By accumulator type and operation; NULL: not supported. The order is that of the numbers in fsdp.h. */
#define ROW_FLOAT(t)                                                                                                   \
    {                                                                                                                  \
        sum_##t, sum_##t, prod_##t, min_##t, max_##t, NULL, NULL, NULL                                                 \
    }
#define ROW_COMPLEX(t)                                                                                                 \
    {                                                                                                                  \
        sum_##t, sum_##t, NULL, NULL, NULL, NULL, NULL, NULL                                                           \
    }
#define ROW_INTEGER(t, u)                                                                                              \
    {                                                                                                                  \
        sum_##u, NULL, prod_##u, min_##t, max_##t, and_##u, or_##u, xor_##u                                            \
    }

#define OPS (FSDP_BXOR + 1)
_Static_assert(FSDP_SUM == 0 && FSDP_AVG == 1 && FSDP_PROD == 2 && FSDP_MIN == 3 && FSDP_MAX == 4 && FSDP_BAND == 5 &&
                   FSDP_BOR == 6 && FSDP_BXOR == 7,
               "rows follow the numbers of the operations");

static const combine_fn combines[DTYPE_COUNT][OPS] = {
    [DTYPE_F64] = ROW_FLOAT(f64),
    [DTYPE_F32] = ROW_FLOAT(f32),
    [DTYPE_F16] = ROW_FLOAT(f32),
    [DTYPE_BF16] = ROW_FLOAT(f32),
    [DTYPE_F8E4M3FN] = ROW_FLOAT(f32),
    [DTYPE_F8E5M2] = ROW_FLOAT(f32),
    [DTYPE_I8] = ROW_INTEGER(i8, u8),
    [DTYPE_I16] = ROW_INTEGER(i16, u16),
    [DTYPE_I32] = ROW_INTEGER(i32, u32),
    [DTYPE_I64] = ROW_INTEGER(i64, u64),
    [DTYPE_U8] = ROW_INTEGER(u8, u8),
    [DTYPE_U16] = ROW_INTEGER(u16, u16),
    [DTYPE_U32] = ROW_INTEGER(u32, u32),
    [DTYPE_U64] = ROW_INTEGER(u64, u64),
    [DTYPE_BOOL] = {or_u8, NULL, and_u8, and_u8, or_u8, and_u8, or_u8, xor_u8},
    [DTYPE_C64] = ROW_COMPLEX(f32),
    [DTYPE_C128] = ROW_COMPLEX(f64),
};

int kernel_reduce_supported(enum dtype type, fsdp_reduce_op op)
{
    return op >= 0 && op < OPS && combines[type][op] != NULL;
}

/* ---- Sums of f32, bf16 and f16
 * ------------------------------------------------------------------------------ */

typedef void (*sum2_fn)(void *acc, const void *a, const void *b, float by, size_t n);

/* (a + b) * by. The product with 1 changes nothing, whatever the sum. `out` may be a or b, so none is
 * restrict. */
#define SUM2(target, out_f, out_t, a_f, a_t, b_f, b_t)                                                                 \
    target static void out_f##_of_##a_f##_##b_f(void *out, const void *src_a, const void *src_b, float by, size_t n)   \
    {                                                                                                                  \
        out_t *to = out;                                                                                               \
        const a_t *a = src_a;                                                                                          \
        const b_t *b = src_b;                                                                                          \
        size_t i = 0;                                                                                                  \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            vec8_ahead_##a_f(a + i), vec8_ahead_##b_f(b + i);                                                          \
            struct vec8 x = vec8_load_##a_f(a + i), y = vec8_load_##b_f(b + i);                                        \
            vec8_store_##out_f(to + i, vec8_sum_scaled(x, y, by));                                                     \
        }                                                                                                              \
        for (; i < n; i++) vec1_store_##out_f(to + i, (vec1_load_##a_f(a + i) + vec1_load_##b_f(b + i)) * by);         \
    }

SUM2(KERNEL_CLONES, f32, f32_any, f32, f32_any, f32, f32_any)
SUM2(KERNEL_CLONES, f32, f32_any, f32, f32_any, bf16, u16_any)
SUM2(KERNEL_CLONES, f32, f32_any, bf16, u16_any, bf16, u16_any)
SUM2(KERNEL_CLONES, bf16, u16_any, f32, f32_any, f32, f32_any)
SUM2(KERNEL_CLONES, bf16, u16_any, f32, f32_any, bf16, u16_any)
SUM2(KERNEL_CLONES, bf16, u16_any, bf16, u16_any, bf16, u16_any)

#if KERNEL_X86_64
SUM2(KERNEL_F16C, f32, f32_any, f32, f32_any, f16, u16_any)
SUM2(KERNEL_F16C, f32, f32_any, f16, u16_any, f16, u16_any)
SUM2(KERNEL_F16C, f16, u16_any, f32, f32_any, f16, u16_any)
SUM2(KERNEL_F16C, f16, u16_any, f16, u16_any, f16, u16_any)
#endif

/* How sources of one type become a result of another: the first two into the accumulator, those between added
 * to it, the accumulator and the last source into the result; or the only two into the result. */
struct fused {
    enum dtype src, dst;
    int f16c;
    sum2_fn first, next, last, only;
};

static const struct fused fused[] = {
    {DTYPE_F32, DTYPE_F32, 0, f32_of_f32_f32, f32_of_f32_f32, f32_of_f32_f32, f32_of_f32_f32},
    {DTYPE_F32, DTYPE_BF16, 0, f32_of_f32_f32, f32_of_f32_f32, bf16_of_f32_f32, bf16_of_f32_f32},
    {DTYPE_BF16, DTYPE_F32, 0, f32_of_bf16_bf16, f32_of_f32_bf16, f32_of_f32_bf16, f32_of_bf16_bf16},
    {DTYPE_BF16, DTYPE_BF16, 0, f32_of_bf16_bf16, f32_of_f32_bf16, bf16_of_f32_bf16, bf16_of_bf16_bf16},
#if KERNEL_X86_64
    {DTYPE_F16, DTYPE_F32, 1, f32_of_f16_f16, f32_of_f32_f16, f32_of_f32_f16, f32_of_f16_f16},
    {DTYPE_F16, DTYPE_F16, 1, f32_of_f16_f16, f32_of_f32_f16, f16_of_f32_f16, f16_of_f16_f16},
#endif
};

static const struct fused *fused_find(enum dtype src, enum dtype dst)
{
    for (size_t i = 0; i < sizeof fused / sizeof *fused; i++) {
        if (fused[i].src == src && fused[i].dst == dst) return fused[i].f16c && !cpu_has_f16c() ? NULL : &fused[i];
    }
    return NULL;
}

/* ---- After the last source ----------------------------------------------------------------------------- */

#define ADJUST(name, acc_t, operation)                                                                                 \
    KERNEL_CLONES static void name(void *acc, double by, size_t n)                                                     \
    {                                                                                                                  \
        acc_t *to = acc;                                                                                               \
        acc_t y = (acc_t)by;                                                                                           \
        for (size_t i = 0; i < n; i++) to[i] = to[i] operation y;                                                      \
    }

ADJUST(multiply_f32, f32_any, *)
ADJUST(multiply_f64, f64_any, *)
ADJUST(divide_f32, f32_any, /)
ADJUST(divide_f64, f64_any, /)

/* The inverse of a power of two is exact, so that multiplying by it rounds as the division would. */
static int has_exact_inverse(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x >= 1 && x <= 0x1p60 && (bits & 0xfffffffffffffu) == 0;
}

static void adjust(enum dtype acc_type, void *acc, double scale, double divisor, size_t n)
{
    int wide = acc_type == DTYPE_F64;
    if (scale != 1) (wide ? multiply_f64 : multiply_f32)(acc, scale, n);
    if (divisor == 1) return;
    if (has_exact_inverse(divisor))
        (wide ? multiply_f64 : multiply_f32)(acc, 1 / divisor, n);
    else
        (wide ? divide_f64 : divide_f32)(acc, divisor, n);
}

/* ---- The loop ------------------------------------------------------------------------------------------ */

/* A reduction with everything decided that does not change from block to block. */
struct plan {
    const struct kernel_reduce *how;
    const void *const *src;
    enum dtype acc_type;
    struct chain load, store, load_dst; /* src_type -> acc_type -> dst_type, dst_type -> acc_type */
    size_t acc_size, src_size, dst_size;
    combine_fn combine;
    const struct fused *fused;
    float by;     /* for fused */
    int floating; /* scale and divisor apply */
    int missing;  /* some source is NULL */
};

static enum dtype real_part(enum dtype type)
{
    return type == DTYPE_C64 ? DTYPE_F32 : type == DTYPE_C128 ? DTYPE_F64 : type;
}

static struct plan plan_make(const struct kernel_reduce *how, const void *const *src)
{
    enum dtype from = real_part(how->src_type), to = real_part(how->dst_type);
    struct plan plan = {.how = how, .src = src, .acc_type = from, .floating = dtype_is_float(from)};
    int sum = how->op == FSDP_SUM || how->op == FSDP_AVG;

    for (int s = 0; s < how->n_src; s++) plan.missing |= !src[s];
    if (plan.floating) plan.acc_type = from == DTYPE_F64 || to == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
    plan.load = chain_make(from, plan.acc_type);
    plan.load_dst = chain_make(to, plan.acc_type);
    if (plan.acc_type != DTYPE_BOOL) plan.store = chain_make(plan.acc_type, to);
    plan.acc_size = dtype_size(plan.acc_type);
    plan.src_size = dtype_size(from);
    plan.dst_size = dtype_size(to);
    plan.combine = combines[plan.acc_type][how->op];

    /* One multiplication can be part of the last addition; a second or a division is a pass of its own. */
    if (sum && how->n_src >= 2 && !plan.missing && !how->accumulate) {
        if (how->divisor == 1) {
            plan.fused = fused_find(from, to);
            plan.by = (float)how->scale;
        } else if (how->scale == 1 && has_exact_inverse(how->divisor)) {
            plan.fused = fused_find(from, to);
            plan.by = (float)(1 / how->divisor);
        }
    }
    return plan;
}

static void load(const struct chain *chain, void *to, const void *from, size_t n, size_t size)
{
    if (chain->n == 0)
        memcpy(to, from, n * size);
    else
        chain_run(chain, to, from, n);
}

static const void *source(const struct plan *plan, int s, size_t at)
{
    return (const char *)plan->src[s] + at * plan->src_size;
}

/* out = the result for the elements [at, at + n), through the accumulator where there are more than two
 * sources. */
static void reduce_fused(const struct plan *plan, void *out, void *acc, size_t at, size_t n)
{
    int last = plan->how->n_src - 1;
    if (last == 1) {
        plan->fused->only(out, source(plan, 0, at), source(plan, 1, at), plan->by, n);
        return;
    }
    plan->fused->first(acc, source(plan, 0, at), source(plan, 1, at), 1, n);
    for (int s = 2; s < last; s++) plan->fused->next(acc, acc, source(plan, s, at), 1, n);
    plan->fused->last(out, acc, source(plan, last, at), plan->by, n);
}

/* acc = op over the sources, for the elements [at, at + n). A missing source is a zero of its own: with one,
 * a sum of negative zeros is positive, and so the accumulator starts from zero. `spare` holds a block of
 * accumulators. */
static void reduce_block(const struct plan *plan, void *acc, void *spare, size_t at, size_t n)
{
    int empty = !plan->missing;

    if (plan->missing) memset(acc, 0, n * plan->acc_size);
    for (int s = 0; s < plan->how->n_src; s++) {
        if (!plan->src[s]) continue;
        if (empty) {
            load(&plan->load, acc, source(plan, s, at), n, plan->src_size);
        } else if (plan->load.n == 0) {
            plan->combine(acc, source(plan, s, at), n);
        } else {
            chain_run(&plan->load, spare, source(plan, s, at), n);
            plan->combine(acc, spare, n);
        }
        empty = 0;
    }
}

/* The rest of the work on acc: returns where the result in dst's type is, either acc or `out`. */
static const void *finish_block(const struct plan *plan, void *out, void *acc, const void *dst, size_t n)
{
    if (plan->floating) adjust(plan->acc_type, acc, plan->how->scale, plan->how->divisor, n);
    if (plan->how->accumulate) {
        load(&plan->load_dst, out, dst, n, plan->dst_size);
        plan->combine(acc, out, n);
    }
    if (plan->store.n == 0) return acc;
    chain_run(&plan->store, out, acc, n);
    return out;
}

void kernel_reduce(const struct kernel_reduce *how, void *dst, const void *const *src, size_t n)
{
    _Alignas(64) char acc[BLOCK * sizeof(double)], out[BLOCK * sizeof(double)];
    const struct plan plan = plan_make(how, src);
    char *to = dst;

    if (dtype_is_complex(how->src_type)) n *= 2;
    for (size_t at = 0, length; at < n; at += length, to += length * plan.dst_size) {
        length = block_length(to, plan.dst_size, n - at);
        const void *result = out;
        if (plan.fused && !how->stream) {
            reduce_fused(&plan, to, acc, at, length);
            continue;
        } else if (plan.fused) {
            reduce_fused(&plan, out, acc, at, length);
        } else {
            reduce_block(&plan, acc, out, at, length);
            result = finish_block(&plan, out, acc, to, length);
        }
        if (how->stream)
            copy_stream(to, result, length * plan.dst_size);
        else
            memcpy(to, result, length * plan.dst_size);
    }
    if (how->stream) copy_stream_end();
}

void kernel_scale(enum dtype type, void *dst, size_t n, double factor)
{
    const struct kernel_reduce how = {FSDP_SUM, type, type, 1, factor, 1, 0, 0};
    const void *src = dst;
    if (factor != 1) kernel_reduce(&how, dst, &src, n);
}
