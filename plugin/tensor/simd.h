/* What the kernels need of the compiler: several instruction sets from one plain loop, misaligned element
 * access, and 16-byte vectors with non-temporal stores.
 *
 * KERNEL_CLONES compiles a function for the baseline, AVX2 and AVX-512 and lets the loader pick one.
 * Arithmetic is the same in all three: contraction to fused multiply-add stays off, and no loop is reordered.
 * The choice is made by an ifunc resolver, which runs before a sanitizer's runtime is set up; sanitized
 * builds take the baseline.
 */
#ifndef FSDP_TENSOR_SIMD_H
#define FSDP_TENSOR_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KERNEL_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define KERNEL_SANITIZED 1
#endif
#endif
#ifndef KERNEL_SANITIZED
#define KERNEL_SANITIZED 0
#endif

#if defined(__x86_64__)
#define KERNEL_X86_64 1
#else
#define KERNEL_X86_64 0
#endif

#if defined(__clang__)
#define KERNEL_HAS_CLONES (__clang_major__ >= 14)
#pragma STDC FP_CONTRACT OFF
#else
#define KERNEL_HAS_CLONES 1
#pragma GCC optimize("O3") /* gcc's -O2 leaves most loops scalar */
#endif

#if KERNEL_X86_64 && KERNEL_HAS_CLONES && !KERNEL_SANITIZED && defined(__linux__)
#define KERNEL_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define KERNEL_CLONES
#endif

#define KERNEL_INLINE static inline __attribute__((always_inline, unused))

/* Elements at any address. */
typedef float f32_any __attribute__((aligned(1), may_alias));
typedef double f64_any __attribute__((aligned(1), may_alias));
typedef int8_t i8_any __attribute__((aligned(1), may_alias));
typedef int16_t i16_any __attribute__((aligned(1), may_alias));
typedef int32_t i32_any __attribute__((aligned(1), may_alias));
typedef int64_t i64_any __attribute__((aligned(1), may_alias));
typedef uint8_t u8_any __attribute__((aligned(1), may_alias));
typedef uint16_t u16_any __attribute__((aligned(1), may_alias));
typedef uint32_t u32_any __attribute__((aligned(1), may_alias));
typedef uint64_t u64_any __attribute__((aligned(1), may_alias));

typedef long long vec128 __attribute__((vector_size(16), may_alias));
typedef long long vec128_any __attribute__((vector_size(16), aligned(1), may_alias));

/* Non-temporal stores are weakly ordered: a function that issued some calls vec128_stream_end before it
 * returns, so that a later store that publishes the data (a flag in shared memory) cannot overtake them. */
#if KERNEL_X86_64
#include <immintrin.h>
#define KERNEL_F16C __attribute__((target("avx,f16c")))
KERNEL_INLINE void vec128_stream(void *aligned, vec128 v)
{
    _mm_stream_si128((__m128i *)aligned, (__m128i)v);
}
KERNEL_INLINE void vec128_stream_end(void)
{
    _mm_sfence();
}
#elif defined(__clang__)
KERNEL_INLINE void vec128_stream(void *aligned, vec128 v)
{
    __builtin_nontemporal_store(v, (vec128 *)aligned);
}
KERNEL_INLINE void vec128_stream_end(void)
{
    __atomic_thread_fence(__ATOMIC_RELEASE);
}
#else
KERNEL_INLINE void vec128_stream(void *aligned, vec128 v)
{
    *(vec128 *)aligned = v;
}
KERNEL_INLINE void vec128_stream_end(void) {}
#endif

#endif
