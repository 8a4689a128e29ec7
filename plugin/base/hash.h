/* FNV-1a, 64 bits, for what is not hostile: start with HASH_START, feed it parts one after the other. Every step is
 * one-to-one, in the low 32 bits alone too, so one changed byte always changes the hash. */
#ifndef FSDP_BASE_HASH_H
#define FSDP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define HASH_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static inline uint64_t hash_number(uint64_t hash, uint64_t number)
{
    return hash_bytes(hash, &number, sizeof number);
}

#endif
