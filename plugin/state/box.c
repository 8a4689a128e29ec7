/* Boxes. See box.h. */
#include "state/box.h"

#include <stdlib.h>
#include <string.h>

void box_make(struct box *box, int32_t ndim, const int64_t *at, const int64_t *size)
{
    box->ndim = ndim;
    memset(box->at, 0, sizeof box->at);
    memset(box->size, 0, sizeof box->size);
    for (int32_t d = 0; d < ndim; d++) {
        box->at[d] = at ? at[d] : 0;
        box->size[d] = size[d];
    }
}

static int box_empty(const struct box *box)
{
    for (int32_t d = 0; d < box->ndim; d++)
        if (!box->size[d]) return 1;
    return 0;
}

int64_t box_count(const struct box *box)
{
    int64_t count = 1;
    if (box_empty(box)) return 0; /* its other extents may be of any size */
    for (int32_t d = 0; d < box->ndim; d++) count *= box->size[d];
    return count;
}

int box_same(const struct box *a, const struct box *b)
{
    size_t bytes = (size_t)a->ndim * sizeof *a->at;
    return a->ndim == b->ndim && memcmp(a->at, b->at, bytes) == 0 && memcmp(a->size, b->size, bytes) == 0;
}

int box_fits(const struct box *box, const int64_t *shape)
{
    for (int32_t d = 0; d < box->ndim; d++)
        if (box->at[d] < 0 || box->size[d] < 0 || box->size[d] > shape[d] || box->at[d] > shape[d] - box->size[d])
            return 0;
    return 1;
}

int box_contains(const struct box *outer, const struct box *inner)
{
    if (box_empty(inner)) return 1;
    for (int32_t d = 0; d < inner->ndim; d++)
        if (inner->at[d] < outer->at[d] || inner->at[d] + inner->size[d] > outer->at[d] + outer->size[d]) return 0;
    return 1;
}

int box_common(const struct box *a, const struct box *b, struct box *out)
{
    struct box common = {.ndim = a->ndim};
    for (int32_t d = 0; d < a->ndim; d++) {
        int64_t low = a->at[d] > b->at[d] ? a->at[d] : b->at[d];
        int64_t a_end = a->at[d] + a->size[d], b_end = b->at[d] + b->size[d];
        int64_t high = a_end < b_end ? a_end : b_end;
        if (low >= high) return 0;
        common.at[d] = low;
        common.size[d] = high - low;
    }
    *out = common;
    return 1;
}

void box_narrow(struct tensor *t, const struct box *whole, const struct box *part)
{
    for (int32_t d = 0; d < whole->ndim; d++) tensor_narrow(t, d, part->at[d] - whole->at[d], part->size[d]);
}

void box_slice(const struct box *box, int32_t copy, int32_t copies, struct box *out)
{
    *out = *box;
    if (copies <= 1) return;
    if (!box->ndim) {
        /* A 0-dim box can't be empty: the other copies get one dimension of none. */
        if (copy) *out = (struct box){.ndim = 1};
        return;
    }
    int64_t rows = box->size[0], chunk = (rows + copies - 1) / copies;
    int64_t start = chunk * copy < rows ? chunk * copy : rows;
    int64_t end = start + chunk < rows ? start + chunk : rows;
    out->at[0] += start;
    out->size[0] = end - start;
}

static int by_corner(const void *a, const void *b)
{
    const struct box *x = *(const struct box *const *)a, *y = *(const struct box *const *)b;
    for (int32_t d = 0; d < x->ndim; d++)
        if (x->at[d] != y->at[d]) return x->at[d] < y->at[d] ? -1 : 1;
    return 0;
}

int64_t box_rows(const struct box *box, int64_t from, int64_t to, struct box *out)
{
    int64_t rows[TENSOR_MAX_DIMS + 1] = {0}, left = from;
    rows[box->ndim] = 1;
    for (int32_t d = box->ndim - 1; d >= 0; d--) rows[d] = rows[d + 1] * box->size[d];
    *out = *box;
    for (int32_t d = 0; d < box->ndim; d++) {
        int64_t row = rows[d + 1];
        out->at[d] = box->at[d] + left / row;
        left %= row;
        if (left == 0 && from + row <= to) {
            int64_t n = (to - from) / row, most = box->at[d] + box->size[d] - out->at[d];
            out->size[d] = n < most ? n : most;
            return out->size[d] * row;
        }
        out->size[d] = 1;
    }
    return 1;
}

enum box_cover box_cover(const struct box **boxes, int64_t n, int32_t ndim, const int64_t *shape, int64_t *a,
                         int64_t *b)
{
    struct box whole, common;
    box_make(&whole, ndim, NULL, shape);
    int64_t filled = 0, wanted = box_count(&whole);
    if (n) qsort(boxes, (size_t)n, sizeof *boxes, by_corner);
    for (int64_t i = 0; i < n; i++) {
        filled += box_count(boxes[i]); /* no overflow: overlaps end the loop before it could */
        for (int64_t j = i + 1; j < n; j++) {
            if (ndim && boxes[j]->at[0] >= boxes[i]->at[0] + boxes[i]->size[0]) break;
            if (box_common(boxes[i], boxes[j], &common)) {
                *a = i;
                *b = j;
                return BOX_OVERLAP;
            }
        }
    }
    return filled == wanted ? BOX_WHOLE : BOX_GAP;
}
