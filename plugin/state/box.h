/* Boxes: the part of a tensor that lies between two corners, in elements. A rank's shard is one, and so is what a file
 * holds of a tensor, or what a load wants of it. */
#ifndef FSDP_STATE_BOX_H
#define FSDP_STATE_BOX_H

#include "tensor/tensor.h"

struct box {
    int32_t ndim;
    int64_t at[TENSOR_MAX_DIMS];   /* the first corner */
    int64_t size[TENSOR_MAX_DIMS]; /* extents; any 0: empty */
};

/* at NULL: all zeros. */
void box_make(struct box *box, int32_t ndim, const int64_t *at, const int64_t *size);
int64_t box_count(const struct box *box); /* elements; 1 of a 0-dim one */
int box_same(const struct box *a, const struct box *b);
/* Whether it lies in a tensor of this shape; never overflows, whatever the numbers are. */
int box_fits(const struct box *box, const int64_t *shape);
int box_contains(const struct box *outer, const struct box *inner); /* an empty inner one: always */
/* What two have in common; 0: nothing, and *out is not set. Of the same ndim; two 0-dim ones have their element in
 * common. */
int box_common(const struct box *a, const struct box *b, struct box *out);
/* `t`, which holds the elements of `whole`, narrowed to those of `part`, which lies in it. */
void box_narrow(struct tensor *t, const struct box *whole, const struct box *part);
/* Rank `copy` of `copies`' slice of a box that all of them have: cut along its first dimension, as shards are. A 0-dim
 * one is the first copy's. Empty ones are common. */
void box_slice(const struct box *box, int32_t copy, int32_t copies, struct box *out);

/* The largest box of whole rows that begins with element `from` of `box`, in row-major order, and has none from `to`
 * on; returns how many elements it has. So any range of elements is a few boxes. */
int64_t box_rows(const struct box *box, int64_t from, int64_t to, struct box *out);

enum box_cover { BOX_WHOLE, BOX_OVERLAP, BOX_GAP };
/* Whether n boxes, each of which fits, make up a tensor of this shape, each element once. On OVERLAP *a and *b are two
 * that overlap. Sorts `boxes` (by corner); n log n where the boxes are slices along the first dimension. */
enum box_cover box_cover(const struct box **boxes, int64_t n, int32_t ndim, const int64_t *shape, int64_t *a,
                         int64_t *b);

#endif
