/* The same for AVX2: the header's functions are compiled for it here, whatever the rest is compiled for. */
#include "state/block_sum.h"

#if defined(__x86_64__)

/* Before the pragma: what xxHash includes is not to be compiled for AVX2. */
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define XXH_INLINE_ALL
#define XXH_VECTOR 2 /* XXH_AVX2 */
#include <xxhash.h>

uint64_t block_sum_avx2(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
