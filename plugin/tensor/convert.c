/* Conversion between any two dtypes, in steps, with one rounding.
 *
 * Every type has a wide form that holds all its values exactly: f32 for the narrow floats, f64, i64 or u64. A
 * chain goes from the source to its wide form, from there to the wide form the destination is made from, and
 * from there to the destination; steps that would change nothing are left out. This needs a step per type and
 * per pair of wide forms instead of one per pair of types, and the rounding is easy to see:
 *
 *   to f64, f32       the step between the wide forms rounds, once (i64 -> f64, f64 -> f32)
 *   to narrow floats  that step rounds to odd (float_bits.h), so that only the last step counts
 *   to integers       from i64 or u64 the low bits are taken, from f64 the value is cut and saturated
 *   to bool           the wide form is compared with zero
 *   complex           the real part is the source (both for bool); as a destination the imaginary part is
 * zero
 */
#include "tensor/block.h"
#include "tensor/vec8.h"

#if KERNEL_X86_64
#include <cpuid.h>
#include <stdatomic.h>
#endif

#define STEP(name, dst_t, src_t, value)                                                                                \
    KERNEL_CLONES static void name(void *dst, const void *src, size_t n)                                               \
    {                                                                                                                  \
        dst_t *restrict to = dst;                                                                                      \
        const src_t *restrict from = src;                                                                              \
        for (size_t i = 0; i < n; i++) {                                                                               \
            src_t x = from[i];                                                                                         \
            to[i] = value;                                                                                             \
        }                                                                                                              \
    }

/* ---- To the wide form ---------------------------------------------------------------------------------- */

STEP(f32_of_f16_soft, f32_any, u16_any, f32_from_f16(x))
STEP(f32_of_e4m3fn, f32_any, u8_any, f32_from_e4m3fn(x))
STEP(f32_of_e5m2, f32_any, u8_any, f32_from_e5m2(x))
STEP(i64_of_i8, i64_any, i8_any, x)
STEP(i64_of_i16, i64_any, i16_any, x)
STEP(i64_of_i32, i64_any, i32_any, x)
STEP(u64_of_u8, u64_any, u8_any, x)
STEP(u64_of_u16, u64_any, u16_any, x)
STEP(u64_of_u32, u64_any, u32_any, x)
STEP(u64_of_bool, u64_any, u8_any, x != 0)

/* ---- Between wide forms -------------------------------------------------------------------------------- */

STEP(f64_of_f32, f64_any, f32_any, x)
STEP(f64_of_i64, f64_any, i64_any, (double)x)
STEP(f64_of_u64, f64_any, u64_any, (double)x)
STEP(f32_of_f64, f32_any, f64_any, (float)x)
STEP(f32_of_i64, f32_any, i64_any, (float)x)
STEP(f32_of_u64, f32_any, u64_any, (float)x)
STEP(f32_odd_of_f64, f32_any, f64_any, f32_odd_from_f64(x))
STEP(f32_odd_of_i64, f32_any, i64_any, f32_odd_from_f64(f64_odd_from_i64(x)))
STEP(f32_odd_of_u64, f32_any, u64_any, f32_odd_from_f64(f64_odd_from_u64(x)))

/* ---- From a wide form ---------------------------------------------------------------------------------- */

STEP(f16_of_f32_soft, u16_any, f32_any, f32_to_f16(x))
STEP(e4m3fn_of_f32, u8_any, f32_any, f32_to_e4m3fn(x))
STEP(e5m2_of_f32, u8_any, f32_any, f32_to_e5m2(x))

STEP(i8_of_f64, i8_any, f64_any, (int8_t)i64_from_f64_within(x, INT8_MIN, INT8_MAX))
STEP(i16_of_f64, i16_any, f64_any, (int16_t)i64_from_f64_within(x, INT16_MIN, INT16_MAX))
STEP(i32_of_f64, i32_any, f64_any, (int32_t)i64_from_f64_within(x, INT32_MIN, INT32_MAX))
STEP(i64_of_f64, i64_any, f64_any, i64_from_f64(x))
STEP(u8_of_f64, u8_any, f64_any, (uint8_t)i64_from_f64_within(x, 0, UINT8_MAX))
STEP(u16_of_f64, u16_any, f64_any, (uint16_t)i64_from_f64_within(x, 0, UINT16_MAX))
STEP(u32_of_f64, u32_any, f64_any, (uint32_t)i64_from_f64_within(x, 0, UINT32_MAX))
STEP(u64_of_f64, u64_any, f64_any, u64_from_f64(x))

STEP(low8_of_u64, u8_any, u64_any, (uint8_t)x)
STEP(low16_of_u64, u16_any, u64_any, (uint16_t)x)
STEP(low32_of_u64, u32_any, u64_any, (uint32_t)x)

STEP(bool_of_bool, u8_any, u8_any, x != 0)
STEP(bool_of_f32, u8_any, f32_any, x != 0)
STEP(bool_of_f64, u8_any, f64_any, x != 0)
STEP(bool_of_u64, u8_any, u64_any, x != 0)

/* ---- Complex ------------------------------------------------------------------------------------------- */

typedef struct __attribute__((packed, may_alias)) {
    float re, im;
} c64_any;

typedef struct __attribute__((packed, may_alias)) {
    double re, im;
} c128_any;

STEP(f32_of_c64, f32_any, c64_any, x.re)
STEP(f64_of_c128, f64_any, c128_any, x.re)
STEP(c64_of_f32, c64_any, f32_any, ((c64_any){x, 0}))
STEP(c128_of_f64, c128_any, f64_any, ((c128_any){x, 0}))
STEP(bool_of_c64, u8_any, c64_any, x.re != 0 || x.im != 0)
STEP(bool_of_c128, u8_any, c128_any, x.re != 0 || x.im != 0)

/* ---- bf16, the pair that moves most -----------------------------------------------------------------------
 */

#define STEP_VEC8(dst_f, dst_t, src_f, src_t)                                                                          \
    KERNEL_CLONES static void dst_f##_of_##src_f(void *dst, const void *src, size_t n)                                 \
    {                                                                                                                  \
        dst_t *to = dst;                                                                                               \
        const src_t *from = src;                                                                                       \
        size_t i = 0;                                                                                                  \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            __builtin_prefetch((const char *)(from + i) + VEC8_AHEAD);                                                 \
            vec8_store_##dst_f(to + i, vec8_load_##src_f(from + i));                                                   \
        }                                                                                                              \
        for (; i < n; i++) vec1_store_##dst_f(to + i, vec1_load_##src_f(from + i));                                    \
    }

STEP_VEC8(f32, f32_any, bf16, u16_any)
STEP_VEC8(bf16, u16_any, f32, f32_any)

/* ---- f16 by instruction -------------------------------------------------------------------------------- */

/* F16C gives the same bits as the plain code, NaN payloads included (tests/unit/kernel_cast_test.c). */
#if KERNEL_X86_64
KERNEL_F16C static void f32_of_f16_f16c(void *dst, const void *src, size_t n)
{
    char *to = dst;
    const char *from = src;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(from + 2 * i));
        _mm256_storeu_ps((float *)(void *)(to + 4 * i), _mm256_cvtph_ps(half));
    }
    f32_of_f16_soft(to + 4 * i, from + 2 * i, n - i);
}

KERNEL_F16C static void f16_of_f32_f16c(void *dst, const void *src, size_t n)
{
    char *to = dst;
    const char *from = src;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 single = _mm256_loadu_ps((const float *)(const void *)(from + 4 * i));
        _mm_storeu_si128((__m128i *)(void *)(to + 2 * i), _mm256_cvtps_ph(single, _MM_FROUND_TO_NEAREST_INT));
    }
    f16_of_f32_soft(to + 2 * i, from + 4 * i, n - i);
}

/* __builtin_cpu_supports knows "avx", which includes the system's part, but not "f16c" in every compiler. The
 * answer is kept: in a virtual machine the CPUID instruction costs microseconds. */
int cpu_has_f16c(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int known;
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == UNKNOWN) {
        unsigned a, b, c = 0, d;
        int has = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
        answer = has ? YES : NO;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == YES;
}
#else
#define f32_of_f16_f16c f32_of_f16_soft
#define f16_of_f32_f16c f16_of_f32_soft
int cpu_has_f16c(void)
{
    return 0;
}
#endif

/* ---- Chains -------------------------------------------------------------------------------------------- */

/* A wide form is named by the dtype it is. `store` makes the type from its own wide form. */
static const struct {
    enum dtype wide;
    step_fn load, store, from_f64;
} types[DTYPE_COUNT] = {
    [DTYPE_F64] = {DTYPE_F64, NULL, NULL, NULL},
    [DTYPE_F32] = {DTYPE_F32, NULL, NULL, NULL},
    [DTYPE_F16] = {DTYPE_F32, f32_of_f16_soft, f16_of_f32_soft, NULL},
    [DTYPE_BF16] = {DTYPE_F32, f32_of_bf16, bf16_of_f32, NULL},
    [DTYPE_F8E4M3FN] = {DTYPE_F32, f32_of_e4m3fn, e4m3fn_of_f32, NULL},
    [DTYPE_F8E5M2] = {DTYPE_F32, f32_of_e5m2, e5m2_of_f32, NULL},
    [DTYPE_I8] = {DTYPE_I64, i64_of_i8, low8_of_u64, i8_of_f64},
    [DTYPE_I16] = {DTYPE_I64, i64_of_i16, low16_of_u64, i16_of_f64},
    [DTYPE_I32] = {DTYPE_I64, i64_of_i32, low32_of_u64, i32_of_f64},
    [DTYPE_I64] = {DTYPE_I64, NULL, NULL, i64_of_f64},
    [DTYPE_U8] = {DTYPE_U64, u64_of_u8, low8_of_u64, u8_of_f64},
    [DTYPE_U16] = {DTYPE_U64, u64_of_u16, low16_of_u64, u16_of_f64},
    [DTYPE_U32] = {DTYPE_U64, u64_of_u32, low32_of_u64, u32_of_f64},
    [DTYPE_U64] = {DTYPE_U64, NULL, NULL, u64_of_f64},
    [DTYPE_BOOL] = {DTYPE_U64, u64_of_bool, bool_of_u64, bool_of_f64},
    [DTYPE_C64] = {DTYPE_F32, f32_of_c64, c64_of_f32, NULL},
    [DTYPE_C128] = {DTYPE_F64, f64_of_c128, c128_of_f64, NULL},
};

static void chain_add(struct chain *chain, step_fn step, size_t size)
{
    if (!step) return;
    chain->step[chain->n] = step;
    chain->size[chain->n++] = size;
}

/* From the wide form `wide` to f32. `odd`: on the way to a narrower float. */
static step_fn step_to_f32(enum dtype wide, int odd)
{
    switch (wide) {
    case DTYPE_F64:
        return odd ? f32_odd_of_f64 : f32_of_f64;
    case DTYPE_I64:
        return odd ? f32_odd_of_i64 : f32_of_i64;
    case DTYPE_U64:
        return odd ? f32_odd_of_u64 : f32_of_u64;
    default:
        return NULL;
    }
}

static step_fn step_to_f64(enum dtype wide)
{
    switch (wide) {
    case DTYPE_F32:
        return f64_of_f32;
    case DTYPE_I64:
        return f64_of_i64;
    case DTYPE_U64:
        return f64_of_u64;
    default:
        return NULL;
    }
}

struct chain chain_make(enum dtype from, enum dtype to)
{
    struct chain chain = {0, {NULL}, {0}};
    enum dtype wide = types[from].wide;
    int integer = wide == DTYPE_I64 || wide == DTYPE_U64;
    int to_integer = types[to].wide == DTYPE_I64 || types[to].wide == DTYPE_U64;
    step_fn load = types[from].load, store = types[to].store;

    if (to == DTYPE_BOOL) { /* from bool too: any nonzero byte is true */
        step_fn direct = from == DTYPE_BOOL   ? bool_of_bool
                         : from == DTYPE_C64  ? bool_of_c64
                         : from == DTYPE_C128 ? bool_of_c128
                                              : NULL;
        chain_add(&chain, direct, 1);
        if (direct) return chain;
    }
    if (from == to) return chain;

    if (from == DTYPE_F16 && cpu_has_f16c()) load = f32_of_f16_f16c;
    if (to == DTYPE_F16 && cpu_has_f16c()) store = f16_of_f32_f16c;

    chain_add(&chain, load, dtype_size(wide));
    if (to == DTYPE_BOOL && wide == DTYPE_F32) {
        store = bool_of_f32;
    } else if (to_integer && !integer) {
        chain_add(&chain, step_to_f64(wide), sizeof(double));
        store = types[to].from_f64;
    } else if (types[to].wide == DTYPE_F32) {
        chain_add(&chain, step_to_f32(wide, to != DTYPE_F32 && to != DTYPE_C64), sizeof(float));
    } else if (types[to].wide == DTYPE_F64) {
        chain_add(&chain, step_to_f64(wide), sizeof(double));
    }
    chain_add(&chain, store, dtype_size(to));
    return chain;
}

void chain_run(const struct chain *chain, void *dst, const void *src, size_t n)
{
    _Alignas(64) char between[2][BLOCK * sizeof(double)];
    for (int i = 0; i < chain->n; i++) {
        void *to = i == chain->n - 1 ? dst : between[i];
        chain->step[i](to, src, n);
        src = to;
    }
}
