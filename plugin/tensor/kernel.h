/* Element kernels: copy, cast and reduction over contiguous arrays, for every dtype of the library.
 *
 * Threads: pure functions over the caller's memory. Addresses may be misaligned in any way. `n` counts elements; 0 is
 * allowed with any pointers. Arguments are trusted: dtype and operation have been checked by the callers
 * (kernel_reduce_supported). Kernels are plain loops that the compiler vectorises (target_clones for AVX2 and
 * AVX-512 on x86-64); `stream` asks for non-temporal stores, for outputs larger than the cache.
 */
#ifndef FSDP_TENSOR_KERNEL_H
#define FSDP_TENSOR_KERNEL_H

#include "tensor/dtype.h"

/* Outputs of this size and more gain from being written past the cache. */
#define KERNEL_STREAM_BYTES ((size_t)4 << 20)

/* memcpy with a choice of store: cached (stream = 0) or non-temporal (stream = 1). No overlap. */
void kernel_copy(void *dst, const void *src, size_t bytes, int stream);

/* One read of src, two writes: dst_stream with non-temporal stores, dst_cached with cached stores. */
void kernel_copy2(void *dst_stream, void *dst_cached, const void *src, size_t bytes);

/* dst[i] = (dst dtype) src[i], rounded once to nearest even from the source value. Any pair of dtypes of the library:
 * float to integer truncates toward zero and saturates (NaN gives 0); to bool: x != 0 (NaN is true); complex to real
 * takes the real part; real to complex has imaginary part 0. fp8 e4m3fn has no infinity: overflow and infinity
 * saturate to NaN as in the OCP OFP8 non-saturating conversion (torch's rule); e5m2 overflows to infinity. Integer to
 * narrower integer wraps. */
void kernel_cast(enum dtype dst_type, void *dst, enum dtype src_type, const void *src, size_t n, int stream);

struct kernel_reduce {
    fsdp_reduce_op op;
    enum dtype src_type; /* of all sources */
    enum dtype dst_type; /* equal to src_type, or a float type when src_type is a float type */
    int n_src;           /* >= 1 */
    double scale;        /* multiplies the accumulator before rounding (floats and complex; 1: none) */
    double divisor;      /* divides the accumulator (AVG: number of ranks; 1: none). Division, not reciprocal */
    int accumulate;      /* 1: dst[i] = round(dst[i] + scaled result), dst taken into the accumulator. SUM, AVG */
    int stream;
};

/* dst[i] = round(op over s of src[s][i]), sources in order 0, 1, ..., n_src-1. A NULL source counts as the zeros of SUM
 * and AVG (no other op may have one; all NULL gives zeros). dst may be exactly one of the sources (in place), never
 * overlap one otherwise. The accumulator is f32 for f8, f16, bf16 and f32; f64 for f64; the type itself for integers
 * (wrapping) and bool; complex in pairs of f32 or f64; where dst_type is f64 it is f64. */
void kernel_reduce(const struct kernel_reduce *how, void *dst, const void *const *src, size_t n);

/* Whether op is defined on dtype: see the FSDP_SUM... comments in fsdp.h. */
int kernel_reduce_supported(enum dtype type, fsdp_reduce_op op);

/* Whether every element of a float or complex array is finite (integers: 1). */
int kernel_all_finite(enum dtype type, const void *src, size_t n);

/* sum over i of |src[i]|^p in f64 (p = 1, 2 or other > 0), or max |src[i]| when p is infinity; NaN propagates. */
double kernel_norm(enum dtype type, const void *src, size_t n, double p);

/* dst[i] *= factor, in the accumulator type, rounded once. Floats and complex. */
void kernel_scale(enum dtype type, void *dst, size_t n, double factor);

#endif
