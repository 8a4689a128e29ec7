/* See block_sum.h. */
#include "state/block_sum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t block_sum(const void *data, size_t bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return block_sum_avx2(data, bytes);
#endif
    return XXH3_64bits(data, bytes);
}
