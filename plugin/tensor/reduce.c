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
 * The sum of two sources is one pass instead of a load and an addition, and f32 and bf16 are added as they
 * are read: these are the gradients.
 */
#include "tensor/block.h"
#include "tensor/float_bits.h"
#include "tensor/kernel.h"

/* ---- Combining a source into the accumulator
 * --------------------------------------------------------------------- */

typedef void (*combine_fn)(void *acc, const void *src, size_t n);

#define COMBINE(name, acc_t, src_t, value)                                                                   \
    KERNEL_CLONES static void name(void *acc, const void *src, size_t n)                                     \
    {                                                                                                        \
        acc_t *restrict to = acc;                                                                            \
        const src_t *restrict from = src;                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            acc_t a = to[i];                                                                                 \
            src_t b = from[i];                                                                               \
            to[i] = (acc_t)(value);                                                                          \
        }                                                                                                    \
    }

COMBINE(sum_f32, f32_any, f32_any, a + b)
COMBINE(sum_f32_bf16, f32_any, u16_any, a + f32_from_bf16(b))
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

#define COMBINE_MIN_MAX(type)                                                                                \
    COMBINE(min_##type, type##_any, type##_any, b < a ? b : a)                                               \
    COMBINE(max_##type, type##_any, type##_any, b > a ? b : a)

COMBINE_MIN_MAX(i8)
COMBINE_MIN_MAX(i16)
COMBINE_MIN_MAX(i32)
COMBINE_MIN_MAX(i64)
COMBINE_MIN_MAX(u8)
COMBINE_MIN_MAX(u16)
COMBINE_MIN_MAX(u32)
COMBINE_MIN_MAX(u64)

#define COMBINE_BITS(type)                                                                                   \
    COMBINE(and_##type, type##_any, type##_any, a &b)                                                        \
    COMBINE(or_##type, type##_any, type##_any, a | b)                                                        \
    COMBINE(xor_##type, type##_any, type##_any, a ^ b)

COMBINE_BITS(u8)
COMBINE_BITS(u16)
COMBINE_BITS(u32)
COMBINE_BITS(u64)

/* By accumulator type and operation; NULL: not supported. The order is that of the numbers in fsdp.h. */
#define ROW_FLOAT(t)                                                                                         \
    {                                                                                                        \
        sum_##t, sum_##t, prod_##t, min_##t, max_##t, NULL, NULL, NULL                                       \
    }
#define ROW_COMPLEX(t)                                                                                       \
    {                                                                                                        \
        sum_##t, sum_##t, NULL, NULL, NULL, NULL, NULL, NULL                                                 \
    }
#define ROW_INTEGER(t, u)                                                                                    \
    {                                                                                                        \
        sum_##u, NULL, prod_##u, min_##t, max_##t, and_##u, or_##u, xor_##u                                  \
    }

#define OPS (FSDP_BXOR + 1)
_Static_assert(FSDP_SUM == 0 && FSDP_AVG == 1 && FSDP_PROD == 2 && FSDP_MIN == 3 && FSDP_MAX == 4 &&
                   FSDP_BAND == 5 && FSDP_BOR == 6 && FSDP_BXOR == 7,
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

/* ---- Sum of two, without an accumulator to read
 * ------------------------------------------------------------------ */

typedef void (*sum2_fn)(void *acc, const void *a, const void *b, size_t n);

#define SUM2(name, acc_t, src_t, widen)                                                                      \
    KERNEL_CLONES static void name(void *acc, const void *src_a, const void *src_b, size_t n)                \
    {                                                                                                        \
        acc_t *restrict to = acc;                                                                            \
        const src_t *a = src_a, *b = src_b;                                                                  \
        for (size_t i = 0; i < n; i++) to[i] = widen(a[i]) + widen(b[i]);                                    \
    }

SUM2(sum2_f32, f32_any, f32_any, )
SUM2(sum2_f64, f64_any, f64_any, )
SUM2(sum2_f32_bf16, f32_any, u16_any, f32_from_bf16)

/* ---- After the last source
 * --------------------------------------------------------------------------------------- */

#define ADJUST(name, acc_t, operation)                                                                       \
    KERNEL_CLONES static void name(void *acc, double by, size_t n)                                           \
    {                                                                                                        \
        acc_t *to = acc;                                                                                     \
        acc_t y = (acc_t)by;                                                                                 \
        for (size_t i = 0; i < n; i++) to[i] = to[i] operation y;                                            \
    }

ADJUST(multiply_f32, f32_any, *)
ADJUST(multiply_f64, f64_any, *)
ADJUST(divide_f32, f32_any, /)
ADJUST(divide_f64, f64_any, /)

static void adjust(enum dtype acc_type, void *acc, double scale, double divisor, size_t n)
{
    int wide = acc_type == DTYPE_F64;
    if (scale != 1) (wide ? multiply_f64 : multiply_f32)(acc, scale, n);
    if (divisor == 1) return;

    /* The inverse of a power of two is exact, so that multiplying by it rounds as the division would. */
    uint64_t bits;
    memcpy(&bits, &divisor, sizeof bits);
    if (divisor >= 1 && divisor <= 0x1p60 && (bits & 0xfffffffffffffu) == 0) {
        (wide ? multiply_f64 : multiply_f32)(acc, 1 / divisor, n);
    } else {
        (wide ? divide_f64 : divide_f32)(acc, divisor, n);
    }
}

/* ---- The loop
 * ---------------------------------------------------------------------------------------------------- */

/* A reduction with everything decided that does not change from block to block. */
struct plan {
    enum dtype acc_type;
    struct chain load, store, load_dst; /* src_type -> acc_type -> dst_type, dst_type -> acc_type */
    size_t acc_size, src_size, dst_size;
    combine_fn combine;     /* of two accumulators */
    combine_fn combine_raw; /* of an accumulator and a source as it is, or NULL */
    sum2_fn sum2_raw;       /* of two sources as they are, or NULL */
    int floating;           /* scale and divisor apply */
};

static enum dtype real_part(enum dtype type)
{
    return type == DTYPE_C64 ? DTYPE_F32 : type == DTYPE_C128 ? DTYPE_F64 : type;
}

static struct plan plan_make(const struct kernel_reduce *how)
{
    enum dtype src = real_part(how->src_type), dst = real_part(how->dst_type);
    struct plan plan = {.acc_type = src, .floating = dtype_is_float(src)};
    int sum = how->op == FSDP_SUM || how->op == FSDP_AVG;

    if (plan.floating) plan.acc_type = src == DTYPE_F64 || dst == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
    plan.load = chain_make(src, plan.acc_type);
    plan.store = plan.acc_type == DTYPE_BOOL ? (struct chain){.n = 0} : chain_make(plan.acc_type, dst);
    plan.load_dst = chain_make(dst, plan.acc_type);
    plan.acc_size = dtype_size(plan.acc_type);
    plan.src_size = dtype_size(src);
    plan.dst_size = dtype_size(dst);
    plan.combine = combines[plan.acc_type][how->op];

    if (plan.load.n == 0) {
        plan.combine_raw = plan.combine;
        if (sum && src == DTYPE_F32) plan.sum2_raw = sum2_f32;
        if (sum && src == DTYPE_F64) plan.sum2_raw = sum2_f64;
    } else if (sum && src == DTYPE_BF16 && plan.acc_type == DTYPE_F32) {
        plan.combine_raw = sum_f32_bf16;
        plan.sum2_raw = sum2_f32_bf16;
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

/* acc = op over sources[...][at ... at + n). A missing source is a zero of its own: with one, a sum of
 * negative zeros is positive, and so the accumulator starts from zero. */
static void reduce_block(const struct kernel_reduce *how, const struct plan *plan, void *acc,
                         const void *const *src, size_t at, size_t n, int missing)
{
    _Alignas(64) char loaded[BLOCK * sizeof(double)];
    const void *waiting = NULL; /* the first source, until it is known whether it has a second */
    int empty = !missing;

    if (missing) memset(acc, 0, n * plan->acc_size);
    for (int s = 0; s < how->n_src; s++) {
        if (!src[s]) continue;
        const char *x = (const char *)src[s] + at * plan->src_size;
        if (empty && plan->sum2_raw && s + 1 < how->n_src) {
            waiting = x;
        } else if (waiting) {
            plan->sum2_raw(acc, waiting, x, n);
            waiting = NULL;
        } else if (empty) {
            load(&plan->load, acc, x, n, plan->src_size);
        } else if (plan->combine_raw) {
            plan->combine_raw(acc, x, n);
        } else {
            chain_run(&plan->load, loaded, x, n);
            plan->combine(acc, loaded, n);
        }
        empty = 0;
    }
}

void kernel_reduce(const struct kernel_reduce *how, void *dst, const void *const *src, size_t n)
{
    _Alignas(64) char acc[BLOCK * sizeof(double)], out[BLOCK * sizeof(double)];
    const struct plan plan = plan_make(how);
    char *to = dst;
    size_t at = 0;
    int missing = 0;

    if (dtype_is_complex(how->src_type)) n *= 2;
    for (int s = 0; s < how->n_src; s++) missing |= !src[s];

    for (size_t length; at < n; at += length, to += length * plan.dst_size) {
        length = block_length(to, plan.dst_size, n - at);
        reduce_block(how, &plan, acc, src, at, length, missing);
        if (plan.floating) adjust(plan.acc_type, acc, how->scale, how->divisor, length);
        if (how->accumulate) {
            load(&plan.load_dst, out, to, length, plan.dst_size);
            plan.combine(acc, out, length);
        }
        const void *result = acc;
        if (plan.store.n) {
            void *converted = how->stream ? out : to;
            chain_run(&plan.store, converted, acc, length);
            result = converted;
        }
        if (how->stream)
            copy_stream(to, result, length * plan.dst_size);
        else if (result == acc)
            memcpy(to, acc, length * plan.dst_size);
    }
    if (how->stream) copy_stream_end();
}

void kernel_scale(enum dtype type, void *dst, size_t n, double factor)
{
    const struct kernel_reduce how = {FSDP_SUM, type, type, 1, factor, 1, 0, 0};
    const void *src = dst;
    if (factor != 1) kernel_reduce(&how, dst, &src, n);
}
