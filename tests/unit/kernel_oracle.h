/* Oracles and buffers of the kernel tests.
 *
 * Every number of every dtype is exact in the 64-bit significand of an x86 long double (and in aarch64's
 * quad), so the oracle reads an element into one, and makes an element from one by definition: the nearest of
 * all values that the type has, found by search. Nothing here shares code with the kernels.
 */
#ifndef FSDP_TEST_KERNEL_ORACLE_H
#define FSDP_TEST_KERNEL_ORACLE_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/kernel.h"

typedef long double real;

struct value {
    real re, im;
};

/* ---- Floats by definition ------------------------------------------------------------------------------ */

/* e4m3fn has no infinity: its last code is NaN, and the one where infinity would be is a number. */
static inline real narrow_decode(unsigned code, int exponent_bits, int mantissa_bits, int has_infinity)
{
    unsigned mantissa = code & ((1u << mantissa_bits) - 1);
    unsigned top = (1u << exponent_bits) - 1;
    int exponent = (int)(code >> mantissa_bits & top), bias = (1 << (exponent_bits - 1)) - 1;
    real sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;

    if (exponent == (int)top && has_infinity) return mantissa ? (real)NAN : sign * (real)INFINITY;
    if (exponent == (int)top && mantissa == (1u << mantissa_bits) - 1) return (real)NAN;
    if (exponent == 0) return sign * ldexpl(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexpl(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
}

static inline int narrow_bits(enum dtype type, int *exponent_bits, int *mantissa_bits)
{
    switch (type) {
    case DTYPE_F16:
        *exponent_bits = 5, *mantissa_bits = 10;
        return 1;
    case DTYPE_BF16:
        *exponent_bits = 8, *mantissa_bits = 7;
        return 1;
    case DTYPE_F8E4M3FN:
        *exponent_bits = 4, *mantissa_bits = 3;
        return 1;
    case DTYPE_F8E5M2:
        *exponent_bits = 5, *mantissa_bits = 2;
        return 1;
    default:
        return 0;
    }
}

static inline real narrow_value(enum dtype type, unsigned code)
{
    int e = 0, m = 0;
    narrow_bits(type, &e, &m);
    return narrow_decode(code, e, m, type != DTYPE_F8E4M3FN);
}

/* The codes of positive numbers are in the order of their values. The number after the last finite one, as if
 * the exponent went on, is where rounding to infinity (or to e4m3fn's NaN) begins to be nearer. */
static inline unsigned narrow_encode(enum dtype type, real x)
{
    static real *_Atomic tables[DTYPE_COUNT];
    int e = 0, m = 0;
    narrow_bits(type, &e, &m);
    unsigned sign = (signbit(x) ? 1u : 0u) << (e + m);
    unsigned beyond = type == DTYPE_F8E4M3FN ? 0x7f : ((1u << e) - 1) << m; /* infinity, or NaN */

    if (isnan(x)) return sign | (type == DTYPE_F8E4M3FN ? 0x7f : beyond + 1);
    x = fabsl(x);
    if (isinf(x)) return sign | beyond;
    real *values = atomic_load(&tables[type]), *other = NULL;
    if (!values) {
        values = malloc((beyond + 1) * sizeof(real));
        for (unsigned code = 0; code < beyond; code++) values[code] = narrow_value(type, code);
        values[beyond] = 2 * values[beyond - 1] - values[beyond - 2];
        if (!atomic_compare_exchange_strong(&tables[type], &other, values)) { /* ranks may be threads */
            free(values);
            values = other;
        }
    }
    if (x >= values[beyond]) return sign | beyond;
    unsigned low = 0, high = beyond; /* values[low] <= x < values[high] */
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (values[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    real below = x - values[low], above = values[high] - x;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

/* ---- Elements ------------------------------------------------------------------------------------------ */

static inline int is_integer(enum dtype type)
{
    return type >= DTYPE_I8 && type <= DTYPE_U64;
}
static inline int is_signed(enum dtype type)
{
    return type >= DTYPE_I8 && type <= DTYPE_I64;
}

#define READ(type, p)                                                                                                  \
    __extension__({                                                                                                    \
        type read_;                                                                                                    \
        memcpy(&read_, p, sizeof read_);                                                                               \
        read_;                                                                                                         \
    })

static inline struct value element_get(enum dtype type, const void *p)
{
    const char *at = p;
    struct value v = {0, 0};
    switch (type) {
    case DTYPE_F64:
        v.re = READ(double, p);
        break;
    case DTYPE_F32:
        v.re = READ(float, p);
        break;
    case DTYPE_F16:
    case DTYPE_BF16:
        v.re = narrow_value(type, READ(uint16_t, p));
        break;
    case DTYPE_F8E4M3FN:
    case DTYPE_F8E5M2:
        v.re = narrow_value(type, READ(uint8_t, p));
        break;
    case DTYPE_I8:
        v.re = READ(int8_t, p);
        break;
    case DTYPE_I16:
        v.re = READ(int16_t, p);
        break;
    case DTYPE_I32:
        v.re = READ(int32_t, p);
        break;
    case DTYPE_I64:
        v.re = READ(int64_t, p);
        break;
    case DTYPE_U8:
        v.re = READ(uint8_t, p);
        break;
    case DTYPE_U16:
        v.re = READ(uint16_t, p);
        break;
    case DTYPE_U32:
        v.re = READ(uint32_t, p);
        break;
    case DTYPE_U64:
        v.re = (real)READ(uint64_t, p);
        break;
    case DTYPE_BOOL:
        v.re = READ(uint8_t, p) != 0;
        break;
    case DTYPE_C64:
        v.re = READ(float, at), v.im = READ(float, at + 4);
        break;
    default:
        v.re = READ(double, at), v.im = READ(double, at + 8);
        break;
    }
    return v;
}

static inline uint64_t integer_from(enum dtype type, real x)
{
    int bits = (int)dtype_size(type) * 8;
    real low = is_signed(type) ? -ldexpl(1, bits - 1) : 0, high = ldexpl(1, bits - is_signed(type)) - 1;
    if (isnan(x)) return 0;
    x = truncl(x);
    x = x < low ? low : x > high ? high : x;
    return x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
}

/* Float to integer saturates; integer to integer (`wrap`) keeps the low bits. Little-endian. */
static inline void element_set(enum dtype type, void *p, struct value v, int wrap)
{
    float f = (float)v.re, fi = (float)v.im;
    double d = (double)v.re, di = (double)v.im;
    uint64_t u;
    if (narrow_bits(type, &(int){0}, &(int){0})) {
        u = narrow_encode(type, v.re);
        memcpy(p, &u, dtype_size(type));
    } else if (type == DTYPE_BOOL) {
        *(uint8_t *)p = v.re != 0 || v.im != 0;
    } else if (is_integer(type)) {
        u = wrap ? v.re < 0 ? (uint64_t)(int64_t)v.re : (uint64_t)v.re : integer_from(type, v.re);
        memcpy(p, &u, dtype_size(type));
    } else if (type == DTYPE_F32 || type == DTYPE_C64) {
        memcpy(p, &f, 4);
        if (type == DTYPE_C64) memcpy((char *)p + 4, &fi, 4);
    } else {
        memcpy(p, &d, 8);
        if (type == DTYPE_C128) memcpy((char *)p + 8, &di, 8);
    }
}

static inline int same_real(real a, real b)
{
    return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b));
}

/* Equal as values, with the sign of zero; any NaN equals any other. A bool must be a proper 0 or 1. */
static inline int element_equal(enum dtype type, const void *got, const void *want)
{
    if (type == DTYPE_BOOL || is_integer(type)) return memcmp(got, want, dtype_size(type)) == 0;
    struct value a = element_get(type, got), b = element_get(type, want);
    return same_real(a.re, b.re) && same_real(a.im, b.im);
}

/* ---- Test data ----------------------------------------------------------------------------------------- */

static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* One element: three in four are numbers of ordinary size, so that sums round; the others are any bits, or
 * special. */
static inline void element_random(enum dtype type, void *p, uint64_t *state)
{
    static const double special[] = {0.0,    -0.0,    NAN,    INFINITY, -INFINITY, 1e-46,  5e-8,   449,    464,
                                     465,    65519,   65520,  6e4,      3.39e38,   3.4e38, 4e38,   -1e300, 2147483648.0,
                                     0x1p63, -0x1p63, 0x1p64, 127.9,    -129,      9.3e18, 1.9e19, -0.5};
    uint64_t bits[2] = {random_bits(state), random_bits(state)}, choice = random_bits(state) % 8;
    size_t size = dtype_size(type);
    if (is_integer(type) || type == DTYPE_BOOL || choice == 0) {
        if (type == DTYPE_BOOL && choice & 1) bits[0] = 0;
        memcpy(p, bits, size);
    } else if (choice == 1) {
        size_t n = sizeof special / sizeof *special;
        element_set(type, p, (struct value){special[bits[0] % n], special[bits[1] % n]}, 0);
    } else {
        struct value v = {ldexpl((int32_t)bits[0], -28), ldexpl((int32_t)bits[1], -28)};
        element_set(type, p, v, 0);
    }
}

/* An array between guard bytes, at an address `shift` past a cache line. */
#define GUARD 64
struct array {
    char *base, *data;
    size_t bytes, shift;
};

static inline struct array array_new(size_t bytes, size_t shift)
{
    struct array a = {.bytes = bytes, .shift = shift};
    a.base = aligned_alloc(64, (bytes + shift + 2 * GUARD + 63) / 64 * 64);
    a.data = a.base + GUARD + shift;
    memset(a.base, 0xa5, bytes + shift + 2 * GUARD);
    return a;
}

static inline void array_free(struct array *a)
{
    for (size_t i = 0; i < GUARD + a->shift; i++) cr_assert_eq((uint8_t)a->base[i], 0xa5, "byte before written");
    for (size_t i = 0; i < GUARD; i++) cr_assert_eq((uint8_t)a->data[a->bytes + i], 0xa5, "byte after written");
    free(a->base);
}

static inline struct array array_random(enum dtype type, size_t n, size_t shift, uint64_t seed)
{
    struct array a = array_new(n * dtype_size(type), shift);
    for (size_t i = 0; i < n; i++) element_random(type, a.data + i * dtype_size(type), &seed);
    return a;
}

static inline struct array array_copy(const struct array *from)
{
    struct array a = array_new(from->bytes, from->shift);
    memcpy(a.data, from->data, from->bytes);
    return a;
}

static inline void assert_elements(enum dtype type, const void *got, const void *want, size_t n, const char *what)
{
    size_t size = dtype_size(type);
    for (size_t i = 0; i < n; i++) {
        const char *g = (const char *)got + i * size, *w = (const char *)want + i * size;
        if (element_equal(type, g, w)) continue;
        struct value a = element_get(type, g), b = element_get(type, w);
        cr_assert(0, "%s: %s element %zu of %zu is %.20Lg%+.20Lgi, not %.20Lg%+.20Lgi", what, dtype_name(type), i, n,
                  a.re, a.im, b.re, b.im);
    }
}

static const size_t lengths[] = {0, 1, 7, 31, 1023, 4099};
#define N_LENGTHS (sizeof lengths / sizeof *lengths)

#endif
