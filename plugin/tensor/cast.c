/* Casts: a chain of conversion steps (convert.c) over the array, in blocks.
 *
 * The pairs that training moves by the gigabyte, f32 <-> bf16 and f32 <-> f16, are chains of one step; with
 * cached stores they run over the whole array at once. Non-temporal output goes through a block in the L1
 * cache, which costs little beside the memory it saves.
 */
#include "tensor/block.h"
#include "tensor/kernel.h"

static int is_integer(enum dtype type)
{
    return type != DTYPE_BOOL && !dtype_is_float(type) && !dtype_is_complex(type);
}

void kernel_cast(enum dtype dst_type, void *dst, enum dtype src_type, const void *src, size_t n, int stream)
{
    if (n == 0) return;
    if (dtype_is_complex(dst_type) && dtype_is_complex(src_type)) {
        dst_type = dst_type == DTYPE_C64 ? DTYPE_F32 : DTYPE_F64;
        src_type = src_type == DTYPE_C64 ? DTYPE_F32 : DTYPE_F64;
        n *= 2;
    }

    struct chain chain = chain_make(src_type, dst_type);
    size_t dst_size = dtype_size(dst_type), src_size = dtype_size(src_type);
    if (chain.n == 0 || (is_integer(dst_type) && is_integer(src_type) && dst_size == src_size)) {
        kernel_copy(dst, src, n * dst_size, stream);
        return;
    }
    if (chain.n == 1 && !stream) {
        chain_run(&chain, dst, src, n);
        return;
    }

    _Alignas(64) char out[BLOCK * BLOCK_MAX_SIZE];
    char *to = dst;
    const char *from = src;
    while (n) {
        size_t length = block_length(to, dst_size, n);
        chain_run(&chain, stream ? out : to, from, length);
        if (stream) copy_stream(to, out, length * dst_size);
        to += length * dst_size, from += length * src_size, n -= length;
    }
    if (stream) copy_stream_end();
}
