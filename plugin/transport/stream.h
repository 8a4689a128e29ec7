/* Streams: the bytes of a transfer that one rank offers another, cut into chunks.
 *
 * A stream is the concatenation of the pieces' parts, each padded to STREAM_ALIGN, so that no element straddles a
 * chunk. Both ends walk it with the same arithmetic and so agree on what lies where without telling each other. */
#ifndef FSDP_TRANSPORT_STREAM_H
#define FSDP_TRANSPORT_STREAM_H

#include "transport/transport.h"

#define STREAM_ALIGN 64

enum stream_side { STREAM_IN, STREAM_OUT }; /* which split cuts the pieces */

struct stream {
    const struct transfer *transfer;
    enum stream_side side;
    int32_t part; /* the rank whose part of each piece it is */
    int32_t piece;
    size_t skip; /* bytes of the current piece's part already passed */
};

struct span {
    int32_t piece;
    size_t begin;  /* byte offset within the whole split (not the part) */
    size_t offset; /* byte offset within the part */
    size_t at;     /* byte offset within the chunk */
    size_t bytes;
};

static inline const struct split *stream_split(const struct piece *p, enum stream_side side)
{
    return side == STREAM_IN ? &p->in_split : &p->out_split;
}

static inline void stream_begin(struct stream *s, const struct transfer *transfer, enum stream_side side, int part)
{
    *s = (struct stream){.transfer = transfer, .side = side, .part = part};
}

static inline size_t stream_pad(size_t bytes)
{
    return (bytes + STREAM_ALIGN - 1) & ~(size_t)(STREAM_ALIGN - 1);
}

/* The next span of the current chunk, of which *used of `chunk` bytes (a multiple of STREAM_ALIGN) are taken. 0 when
 * the chunk is full or the stream at its end. */
static inline int stream_next(struct stream *s, size_t chunk, size_t *used, struct span *out)
{
    while (s->piece < s->transfer->n_pieces) {
        const struct piece *p = &s->transfer->pieces[s->piece];
        const struct split *split = stream_split(p, s->side);
        size_t size = dtype_size(p->type), part = (size_t)split_length(split, s->part) * size;
        if (s->skip >= part) {
            s->piece++;
            s->skip = 0;
            continue;
        }
        if (*used >= chunk) return 0;
        size_t bytes = part - s->skip, room = chunk - *used;
        if (bytes > room) bytes = room;
        out->piece = s->piece;
        out->begin = (size_t)split_begin(split, s->part) * size + s->skip;
        out->offset = s->skip;
        out->at = *used;
        out->bytes = bytes;
        s->skip += bytes;
        *used += stream_pad(bytes);
        return 1;
    }
    return 0;
}

static inline size_t stream_bytes(const struct transfer *transfer, enum stream_side side, int part)
{
    size_t sum = 0;
    for (int32_t i = 0; i < transfer->n_pieces; i++) {
        const struct piece *p = &transfer->pieces[i];
        sum += stream_pad((size_t)split_length(stream_split(p, side), part) * dtype_size(p->type));
    }
    return sum;
}

#endif
