/* Copies. Cached ones are memcpy; the others write past the cache, a line at a time, so that a large output
 * neither evicts what the caller is about to use nor has its old content read from memory first.
 */
#include "tensor/block.h"
#include "tensor/kernel.h"
#include "tensor/simd.h"

#define LINE 64
#define AHEAD 512 /* bytes: the hardware's prefetching alone leaves a sixth of the copy rate unused */

/* Bytes from p to the next cache line, at most n. */
static size_t bytes_to_line(const void *p, size_t n)
{
    size_t gap = -(uintptr_t)p & (LINE - 1);
    return gap < n ? gap : n;
}

void copy_stream(void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = bytes_to_line(to, bytes);

    if (bytes == 0) return;
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= LINE; to += LINE, from += LINE, bytes -= LINE) {
        const vec128_any *line = (const vec128_any *)(const void *)from;
        __builtin_prefetch(from + AHEAD);
        vec128 a = line[0], b = line[1], c = line[2], d = line[3];
        vec128_stream(to, a);
        vec128_stream(to + 16, b);
        vec128_stream(to + 32, c);
        vec128_stream(to + 48, d);
    }
    memcpy(to, from, bytes);
}

void copy_stream_end(void)
{
    vec128_stream_end();
}

size_t block_length(const void *dst, size_t size, size_t n)
{
    size_t length = BLOCK - ((uintptr_t)dst & (LINE - 1)) / size;
    return length < n ? length : n;
}

void kernel_copy(void *dst, const void *src, size_t bytes, int stream)
{
    if (bytes == 0) return;
    if (!stream) {
        memcpy(dst, src, bytes);
        return;
    }
    copy_stream(dst, src, bytes);
    copy_stream_end();
}

void kernel_copy2(void *dst_stream, void *dst_cached, const void *src, size_t bytes)
{
    char *past = dst_stream, *cached = dst_cached;
    const char *from = src;
    size_t head = bytes_to_line(past, bytes);

    if (bytes == 0) return;
    memcpy(past, from, head);
    memcpy(cached, from, head);
    past += head, cached += head, from += head, bytes -= head;
    for (; bytes >= LINE; past += LINE, cached += LINE, from += LINE, bytes -= LINE) {
        const vec128_any *line = (const vec128_any *)(const void *)from;
        vec128_any *copy = (vec128_any *)(void *)cached;
        __builtin_prefetch(from + AHEAD);
        vec128 a = line[0], b = line[1], c = line[2], d = line[3];
        vec128_stream(past, a);
        vec128_stream(past + 16, b);
        vec128_stream(past + 32, c);
        vec128_stream(past + 48, d);
        copy[0] = a, copy[1] = b, copy[2] = c, copy[3] = d;
    }
    memcpy(past, from, bytes);
    memcpy(cached, from, bytes);
    copy_stream_end();
}
