/* Checksums of blocks: XXH3, 64 bits, seed 0, of xxHash's header. The same numbers from every variant. */
#ifndef FSDP_STATE_BLOCK_SUM_H
#define FSDP_STATE_BLOCK_SUM_H

#include <stddef.h>
#include <stdint.h>

uint64_t block_sum(const void *data, size_t bytes);

#if defined(__x86_64__)
uint64_t block_sum_avx2(const void *data, size_t bytes); /* where the processor has it: a fifth faster */
#endif

#endif
