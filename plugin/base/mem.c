/* Heap memory: see mem.h. The allocator is set before the first object is made and is read without a lock after. */
#include "base/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static struct {
    fsdp_alloc_fn alloc;
    fsdp_free_fn release;
    void *user;
} allocator;

static atomic_size_t live_blocks;

void *mem_alloc(size_t bytes)
{
    if (bytes == 0) bytes = 1;
    void *p = allocator.alloc ? allocator.alloc(bytes, allocator.user) : malloc(bytes);
    if (!p) return NULL;
    memset(p, 0, bytes);
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return p;
}

void mem_free(void *p)
{
    if (!p) return;
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    if (allocator.release)
        allocator.release(p, allocator.user);
    else
        free(p);
}

void *mem_array(size_t n, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) return NULL;
    return mem_alloc(bytes);
}

char *mem_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = mem_alloc(bytes);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

/* The block's start is kept just below the aligned address. */
void *mem_alloc_aligned(size_t bytes, size_t alignment)
{
    size_t whole;
    if (__builtin_add_overflow(bytes, alignment + sizeof(void *), &whole)) return NULL;
    char *block = mem_alloc(whole);
    if (!block) return NULL;
    uintptr_t at = ((uintptr_t)block + sizeof(void *) + alignment - 1) & ~(uintptr_t)(alignment - 1);
    char *p = block + (at - (uintptr_t)block);
    memcpy(p - sizeof(void *), &block, sizeof(void *));
    return p;
}

void mem_free_aligned(void *p)
{
    if (!p) return;
    void *block;
    memcpy(&block, (char *)p - sizeof(void *), sizeof(void *));
    mem_free(block);
}

fsdp_status mem_none(const char *what, size_t bytes)
{
    return err(FSDP_ERR_NOMEM, "no memory for %s (%zu bytes)", what, bytes);
}

fsdp_status mem_set_allocator(fsdp_alloc_fn alloc, fsdp_free_fn release, void *user)
{
    CHECK_ARG((alloc == NULL) == (release == NULL), "alloc and release: give both functions, or neither");
    if (atomic_load(&live_blocks) != 0)
        return err(FSDP_ERR_STATE,
                   "the allocator can't change while objects of the library exist (%zu blocks are live): "
                   "set it before the first store, group or model is made",
                   atomic_load(&live_blocks));
    allocator.alloc = alloc;
    allocator.release = release;
    allocator.user = user;
    return FSDP_OK;
}
