/* Passes that look at values and change none: whether all are finite, and the norm that gradient clipping
 * needs.
 *
 * Norms are summed in f64 whatever the type. Eight partial sums, each of every eighth element, let the loop
 * vectorise without reordering that would depend on the machine: the result depends on the values and their
 * number alone.
 */
#include <math.h>

#include "tensor/block.h"
#include "tensor/float_bits.h"
#include "tensor/kernel.h"

#define LANES 8

/* src as an array of `to`, through `block` when the types differ. */
static const void *view(const struct chain *chain, void *block, const void *src, size_t n)
{
    if (chain->n == 0) return src;
    chain_run(chain, block, src, n);
    return block;
}

KERNEL_CLONES static int finite_f32(const void *src, size_t n)
{
    const u32_any *bits = src;
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (bits[i] & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

KERNEL_CLONES static int finite_f64(const void *src, size_t n)
{
    const u64_any *bits = src;
    uint64_t bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (bits[i] & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    return !bad;
}

int kernel_all_finite(enum dtype type, const void *src, size_t n)
{
    _Alignas(64) char block[BLOCK * sizeof(double)];
    const char *from = src;

    if (!dtype_is_float(type) && !dtype_is_complex(type)) return 1;
    if (dtype_is_complex(type)) {
        type = type == DTYPE_C64 ? DTYPE_F32 : DTYPE_F64;
        n *= 2;
    }
    enum dtype wide = type == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
    const struct chain chain = chain_make(type, wide);
    while (n) {
        size_t length = n < BLOCK ? n : BLOCK;
        const void *x = view(&chain, block, from, length);
        if (!(wide == DTYPE_F64 ? finite_f64 : finite_f32)(x, length)) return 0;
        from += length * dtype_size(type), n -= length;
    }
    return 1;
}

#define SUM_LANES(name, src_t, term)                                                                                   \
    KERNEL_CLONES static void name(double *lane, const void *src, size_t n)                                            \
    {                                                                                                                  \
        const src_t *from = src;                                                                                       \
        double sum[LANES];                                                                                             \
        size_t i = 0;                                                                                                  \
        memcpy(sum, lane, sizeof sum);                                                                                 \
        for (; i + LANES <= n; i += LANES) {                                                                           \
            for (size_t j = 0; j < LANES; j++) {                                                                       \
                double x = from[i + j];                                                                                \
                sum[j] += term;                                                                                        \
            }                                                                                                          \
        }                                                                                                              \
        for (size_t j = 0; i + j < n; j++) {                                                                           \
            double x = from[i + j];                                                                                    \
            sum[j] += term;                                                                                            \
        }                                                                                                              \
        memcpy(lane, sum, sizeof sum);                                                                                 \
    }

SUM_LANES(sum_abs_f64, f64_any, fabs(x))
SUM_LANES(sum_squares_f64, f64_any, x *x)
SUM_LANES(sum_squares_f32, f32_any, x *x)

static void sum_powers(double *lane, const f64_any *x, size_t n, double p)
{
    for (size_t i = 0; i < n; i++) lane[i % LANES] += pow(fabs(x[i]), p);
}

static void max_abs(double *lane, const f64_any *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double a = fabs(x[i]);
        lane[i % LANES] = a > lane[i % LANES] || a != a ? a : lane[i % LANES];
    }
}

/* Absolute values of n complex numbers; `to` may be where they are. */
static void moduli(double *to, const f64_any *pairs, size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = hypot(pairs[2 * i], pairs[2 * i + 1]);
}

double kernel_norm(enum dtype type, const void *src, size_t n, double p)
{
    _Alignas(64) double block[BLOCK];
    double lane[LANES] = {0};
    const char *from = src;
    int complex_pairs = dtype_is_complex(type);

    if (complex_pairs) {
        type = type == DTYPE_C64 ? DTYPE_F32 : DTYPE_F64;
        n *= 2;
    }
    /* The squares of f32 are taken as they are read: that is the norm of gradient clipping. */
    int squares_f32 = p == 2 && dtype_is_float(type) && type != DTYPE_F64;
    const struct chain chain = chain_make(type, squares_f32 ? DTYPE_F32 : DTYPE_F64);
    while (n) {
        size_t length = n < BLOCK ? n : BLOCK, values = length;
        const void *x = from;
        if (chain.n) chain_run(&chain, block, from, length), x = block;
        if (complex_pairs && p != 2) moduli(block, x, values = length / 2), x = block;
        if (squares_f32)
            sum_squares_f32(lane, x, values);
        else if (p == 2)
            sum_squares_f64(lane, x, values);
        else if (p == 1)
            sum_abs_f64(lane, x, values);
        else if (isinf(p))
            max_abs(lane, x, values);
        else
            sum_powers(lane, x, values, p);
        from += length * dtype_size(type), n -= length;
    }

    double total = lane[0];
    for (int j = 1; j < LANES; j++) {
        if (!isinf(p))
            total += lane[j];
        else if (lane[j] > total || lane[j] != lane[j])
            total = lane[j];
    }
    return total;
}
