/* Scalar conversions between f32 and the narrow floats, and the roundings to odd that make longer chains
 * safe.
 *
 * Every function is branch-free integer and f32 arithmetic, so that a loop over one of them vectorises. They
 * assume the default rounding mode and hold with denormals flushed to zero as well: a subnormal f16 or fp8
 * value is never represented as a subnormal f32, and the bf16 conversions are integer only.
 *
 * Rounding to odd: a value that does not fit is cut toward zero and its last bit set. When the target of that
 * step has at least two bits more than the final format, rounding the result to nearest even gives what
 * rounding the original value once would have given, because the odd last bit still says on which side of
 * every tie the value was. So f64, i64 and u64 reach the narrow floats through f32 with a single effective
 * rounding.
 */
#ifndef FSDP_TENSOR_FLOAT_BITS_H
#define FSDP_TENSOR_FLOAT_BITS_H

#include "tensor/simd.h"

KERNEL_INLINE uint32_t f32_to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

KERNEL_INLINE float f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- Widening: exact; a signalling f16 NaN becomes quiet, as the F16C instruction makes it ------------- */

KERNEL_INLINE float f32_from_bf16(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

KERNEL_INLINE float f32_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    uint32_t special = magnitude | 0x7f800000u | (magnitude > 0x0f800000u ? 0x00400000u : 0u);
    /* A subnormal m is read as 2^-14 * (1 + m / 2^10), and the 2^-14 taken off again: exact. */
    uint32_t subnormal = f32_to_bits(f32_from_bits(magnitude + (113u << 23)) - 0x1p-14f);
    uint32_t bits = magnitude < 0x00800000u ? subnormal : magnitude >= 0x0f800000u ? special : normal;
    return f32_from_bits(sign | bits);
}

/* e5m2 is f16 without its last eight bits. */
KERNEL_INLINE float f32_from_e5m2(uint8_t q)
{
    return f32_from_f16((uint16_t)(q << 8));
}

KERNEL_INLINE float f32_from_e4m3fn(uint8_t q)
{
    uint32_t sign = (uint32_t)(q & 0x80u) << 24;
    uint32_t magnitude = (uint32_t)(q & 0x7fu) << 20;
    uint32_t normal = magnitude + ((127u - 7u) << 23);
    uint32_t subnormal = f32_to_bits(f32_from_bits(magnitude + (121u << 23)) - 0x1p-6f);
    uint32_t bits = magnitude < 0x00800000u ? subnormal : magnitude == 0x07f00000u ? 0x7fc00000u : normal;
    return f32_from_bits(sign | bits);
}

/* ---- Narrowing: once, to nearest even; the sign is kept (not always NaN's) ----------------------------- */

/* Half of the last place is added, less one where the kept part is even, so that ties fall to even. A NaN
 * gets all bits below the sign: its payload may be only in the bits that go. Keeping the payload costs sums
 * of bf16 a seventh. */
KERNEL_INLINE uint16_t f32_to_bf16(float x)
{
    uint32_t bits = f32_to_bits(x);
    uint32_t rounded = bits + 0x8000u - ((bits & 0x10000u) == 0);
    return (uint16_t)((rounded | (x != x ? 0x7fffffffu : 0)) >> 16);
}

/* The magnitude of |x| (bits without sign, not NaN) in a format with `mantissa` stored bits and exponent
 * `bias`. Overflow is whatever the carry gives; the caller clamps it. Below the smallest normal number,
 * adding a power of two whose last place is the format's smallest step lets the adder do the rounding. */
KERNEL_INLINE uint32_t f32_round_magnitude(uint32_t magnitude, int mantissa, int bias)
{
    int drop = 23 - mantissa;
    uint32_t odd = (magnitude >> drop) & 1u;
    uint32_t normal = ((magnitude + (1u << (drop - 1)) - 1u + odd) >> drop) - ((uint32_t)(127 - bias) << mantissa);
    uint32_t step = (uint32_t)(127 + 1 - bias - mantissa + 23) << 23;
    uint32_t subnormal = f32_to_bits(f32_from_bits(magnitude) + f32_from_bits(step)) - step;
    return magnitude < (uint32_t)(127 + 1 - bias) << 23 ? subnormal : normal;
}

KERNEL_INLINE uint16_t f32_to_f16(float x)
{
    uint32_t bits = f32_to_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = f32_round_magnitude(magnitude, 10, 15);
    rounded = rounded > 0x7c00u ? 0x7c00u : rounded;
    rounded = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : rounded;
    return (uint16_t)((bits >> 16 & 0x8000u) | rounded);
}

KERNEL_INLINE uint8_t f32_to_e5m2(float x)
{
    uint32_t bits = f32_to_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = f32_round_magnitude(magnitude, 2, 15);
    rounded = rounded > 0x7cu ? 0x7cu : rounded;
    rounded = magnitude > 0x7f800000u ? 0x7fu : rounded;
    return (uint8_t)((bits >> 24 & 0x80u) | rounded);
}

/* 448 is 0x7e; the next code would be 480 and is NaN. The tie at 464 goes to 448, everything above to NaN. */
KERNEL_INLINE uint8_t f32_to_e4m3fn(float x)
{
    uint32_t bits = f32_to_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = f32_round_magnitude(magnitude, 3, 7);
    rounded = rounded > 0x7fu ? 0x7fu : rounded;
    return (uint8_t)((bits >> 24 & 0x80u) | rounded);
}

/* ---- Rounding to odd ----------------------------------------------------------------------------------- */

/* NaN stays NaN, infinity stays; what overflows becomes the largest finite f32, which is odd. */
KERNEL_INLINE float f32_odd_from_f64(double x)
{
    float near = (float)x;
    double back = near;
    uint32_t bits = f32_to_bits(near);
    uint32_t away = (back < 0 ? -back : back) > (x < 0 ? -x : x);
    uint32_t inexact = back != x;
    return f32_from_bits((bits - away) | inexact);
}

/* Above 2^53 the last 11 bits collapse into one sticky bit: exact in f64, and odd where something was lost.
 */
KERNEL_INLINE double f64_odd_from_u64(uint64_t x)
{
    uint64_t cut = (x >> 11 | ((x & 0x7ffu) != 0)) << 11;
    return (double)(x >> 53 ? cut : x);
}

KERNEL_INLINE double f64_odd_from_i64(int64_t x)
{
    double magnitude = f64_odd_from_u64(x < 0 ? 0u - (uint64_t)x : (uint64_t)x);
    return x < 0 ? -magnitude : magnitude;
}

/* ---- Float to integer: toward zero, saturating, NaN is 0 ----------------------------------------------- */

/* `low` and `high` are limits that f64 holds exactly. */
KERNEL_INLINE int64_t i64_from_f64_within(double x, double low, double high)
{
    x = x < low ? low : x;
    x = x > high ? high : x;
    return x != x ? 0 : (int64_t)x;
}

KERNEL_INLINE int64_t i64_from_f64(double x)
{
    if (x >= 0x1p63) return INT64_MAX;
    if (x < -0x1p63) return INT64_MIN;
    return x != x ? 0 : (int64_t)x;
}

KERNEL_INLINE uint64_t u64_from_f64(double x)
{
    if (x >= 0x1p64) return UINT64_MAX;
    return x >= 1 ? (uint64_t)x : 0;
}

#endif
