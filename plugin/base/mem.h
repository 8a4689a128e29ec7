/* Heap memory of the library's own objects. All of it goes through these calls, so that a host can supply its
 * allocator (fsdp_set_allocator) and so that the tests can make any one allocation fail. Tensor-sized memory comes
 * from os.h mappings instead. */
#ifndef FSDP_BASE_MEM_H
#define FSDP_BASE_MEM_H

#include "base/error.h"

/* Zeroed, aligned to 16 bytes. NULL when there is none: the caller reports FSDP_ERR_NOMEM through mem_none(). */
void *mem_alloc(size_t bytes);
void mem_free(void *p);
char *mem_strdup(const char *text);

/* Zeroed and aligned to `alignment` (a power of two); free with mem_free_aligned. */
void *mem_alloc_aligned(size_t bytes, size_t alignment);
void mem_free_aligned(void *p);

/* Array of n elements, overflow checked. */
void *mem_array(size_t n, size_t size);

/* The one way to report that an allocation failed: names what it was for. */
fsdp_status mem_none(const char *what, size_t bytes);

/* NULL functions mean malloc and free. */
fsdp_status mem_set_allocator(fsdp_alloc_fn alloc, fsdp_free_fn release, void *user);

#endif
