/* Eight floats at a time, read from f32, bf16 or (with F16C) f16 and written as any of these.
 *
 * Compilers widen and narrow 16-bit floats with twice the shuffles needed, which is what bounds sums of bf16
 * gradients. Interleaving with zeros makes f32 of bf16 in one step, and taking the odd halves of two vectors
 * is the way back. The rounding is f32_to_bf16 on four lanes. Little-endian, like the library.
 */
#ifndef FSDP_TENSOR_VEC8_H
#define FSDP_TENSOR_VEC8_H

#include "tensor/float_bits.h"

typedef float vec_f32 __attribute__((vector_size(16)));
typedef uint32_t vec_u32 __attribute__((vector_size(16)));
typedef uint16_t vec_u16 __attribute__((vector_size(16)));
typedef float vec_f32_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t vec_u16_any __attribute__((vector_size(16), aligned(1), may_alias));

struct vec8 {
    vec_f32 low, high;
};

KERNEL_INLINE struct vec8 vec8_load_f32(const f32_any *p)
{
    const vec_f32_any *from = (const vec_f32_any *)(const void *)p;
    return (struct vec8){from[0], from[1]};
}

KERNEL_INLINE struct vec8 vec8_load_bf16(const u16_any *p)
{
    vec_u16 h = *(const vec_u16_any *)(const void *)p, zero = {0};
    return (struct vec8){(vec_f32)__builtin_shufflevector(zero, h, 0, 8, 0, 9, 0, 10, 0, 11),
                         (vec_f32)__builtin_shufflevector(zero, h, 0, 12, 0, 13, 0, 14, 0, 15)};
}

KERNEL_INLINE void vec8_store_f32(f32_any *p, struct vec8 x)
{
    vec_f32_any *to = (vec_f32_any *)(void *)p;
    to[0] = x.low, to[1] = x.high;
}

KERNEL_INLINE vec_u16 vec_round_bf16(vec_f32 x)
{
    vec_u32 bits = (vec_u32)x;
    vec_u32 rounded = bits + 0x8000u + (vec_u32)((bits & 0x10000u) == 0);
    vec_u32 nan = (vec_u32)(x != x);
    return (vec_u16)(rounded | (nan & 0x7fffffffu));
}

KERNEL_INLINE void vec8_store_bf16(u16_any *p, struct vec8 x)
{
    vec_u16 low = vec_round_bf16(x.low), high = vec_round_bf16(x.high);
    *(vec_u16_any *)(void *)p = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
}

#if KERNEL_X86_64
KERNEL_F16C KERNEL_INLINE struct vec8 vec8_load_f16(const u16_any *p)
{
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (struct vec8){(vec_f32)_mm_cvtph_ps(half), (vec_f32)_mm_cvtph_ps(_mm_unpackhi_epi64(half, half))};
}

KERNEL_F16C KERNEL_INLINE void vec8_store_f16(u16_any *p, struct vec8 x)
{
    __m128i low = _mm_cvtps_ph((__m128)x.low, _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm_cvtps_ph((__m128)x.high, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_unpacklo_epi64(low, high));
}
#endif

KERNEL_INLINE struct vec8 vec8_sum_scaled(struct vec8 a, struct vec8 b, float by)
{
    return (struct vec8){(a.low + b.low) * by, (a.high + b.high) * by};
}

/* Where a loop computes so much per byte that the hardware's prefetching falls behind (conversions of bf16
 * and sums of them, by 10 %), it asks for what comes VEC8_AHEAD bytes later. Sums of f32 are better off
 * without. */
#define VEC8_AHEAD 2048
KERNEL_INLINE void vec8_ahead_f32(const f32_any *p)
{
    (void)p;
}

KERNEL_INLINE void vec8_ahead_bf16(const u16_any *p)
{
    __builtin_prefetch((const char *)p + VEC8_AHEAD);
}

KERNEL_INLINE void vec8_ahead_f16(const u16_any *p)
{
    __builtin_prefetch((const char *)p + VEC8_AHEAD);
}

/* Loads and stores of one element, so that a loop's tail can be written like its body. */
KERNEL_INLINE float vec1_load_f32(const f32_any *p)
{
    return *p;
}
KERNEL_INLINE float vec1_load_bf16(const u16_any *p)
{
    return f32_from_bf16(*p);
}
KERNEL_INLINE float vec1_load_f16(const u16_any *p)
{
    return f32_from_f16(*p);
}
KERNEL_INLINE void vec1_store_f32(f32_any *p, float x)
{
    *p = x;
}
KERNEL_INLINE void vec1_store_bf16(u16_any *p, float x)
{
    *p = f32_to_bf16(x);
}

KERNEL_INLINE void vec1_store_f16(u16_any *p, float x)
{
    *p = f32_to_f16(x);
}

#endif
