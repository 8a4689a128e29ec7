/* Tensors: a checked, flattened view of a DLTensor, and what can be done to its elements whatever its strides.
 *
 * `struct tensor` borrows the data. It is made by tensor_import, after which shape, strides and address are known to be
 * sound: counts and extents don't overflow, byte_offset is folded into data, NULL strides are filled in. */
#ifndef FSDP_TENSOR_TENSOR_H
#define FSDP_TENSOR_TENSOR_H

#include "tensor/dtype.h"

#define TENSOR_MAX_DIMS 32

struct tensor {
    char *data; /* NULL only when count is 0 */
    enum dtype type;
    int32_t ndim;
    int32_t contiguous; /* row-major without gaps; true for 0 and 1 elements */
    int64_t count;      /* elements */
    size_t bytes;       /* count * dtype size */
    int64_t shape[TENSOR_MAX_DIMS];
    int64_t strides[TENSOR_MAX_DIMS]; /* elements */
};

/* `name` is the argument's, for messages. Refused: NULL, other devices than host memory, too many dimensions, negative
 * sizes, overflow, NULL data with elements. */
fsdp_status tensor_import(const DLTensor *dl, const char *name, struct tensor *out);

/* The same for a tensor to be written: negative strides and elements that share memory are refused too. */
fsdp_status tensor_import_output(const DLTensor *dl, const char *name, struct tensor *out);

/* A contiguous tensor over `data`. */
void tensor_make(struct tensor *out, void *data, enum dtype type, int32_t ndim, const int64_t *shape);

/* Views of the same memory: `length` of dimension `dim` from `start` on; dimension `dim` moved to the front. */
void tensor_narrow(struct tensor *t, int32_t dim, int64_t start, int64_t length);
void tensor_first(struct tensor *t, int32_t dim);

/* Rows along the first dimension (a 0-dim tensor has one), and elements of one row. */
int64_t tensor_rows(const struct tensor *t);
int64_t tensor_row_count(const struct tensor *t);

int tensor_same_shape(const struct tensor *a, const struct tensor *b);
int tensor_same_place(const struct tensor *a, const struct tensor *b); /* address, dtype, shape and strides */
/* The bytes that it lies in: [*low, *high). Of a tensor with elements. */
void tensor_range(const struct tensor *t, uintptr_t *low, uintptr_t *high);
/* Whether they may share a byte. Exact for contiguous tensors and for interleaved views of one grid (two columns of a
 * matrix don't overlap); for anything odder, it errs towards yes. */
int tensor_overlap(const struct tensor *a, const struct tensor *b);

/* out[i] = in[i], casting; equal shapes, no overlap. */
void tensor_copy(const struct tensor *out, const struct tensor *in);
void tensor_pack(void *out, const struct tensor *in);         /* to a contiguous array of in's dtype */
void tensor_unpack(const struct tensor *out, const void *in); /* from one of out's dtype */

/* "(3, 4) float32" */
#define TENSOR_TEXT 160
const char *tensor_text(const struct tensor *t, char text[TENSOR_TEXT]);

/* ---- managed.c: tensors that own or share memory */

/* Hand out `data` as a managed tensor; `release(owner)` is called by its deleter, once, on any thread. On failure
 * nothing is called. */
fsdp_status managed_export(void *data, enum dtype type, int32_t ndim, const int64_t *shape,
                           void (*release)(void *owner), void *owner, DLManagedTensorVersioned **out);
/* A handle of this library's own on an accepted tensor, whoever made it, for managed_share; takes it on success. */
fsdp_status managed_adopt(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out);
/* Another handle on what managed_export or managed_adopt gave. */
fsdp_status managed_share(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out);
fsdp_status managed_empty(const DLDataType *dtype, int32_t ndim, const int64_t *shape, DLManagedTensorVersioned **out);
/* See fsdp_tensor_from_legacy and fsdp_tensor_to_legacy. */
fsdp_status managed_from_legacy(DLManagedTensor *legacy, DLManagedTensorVersioned **out);
fsdp_status managed_to_legacy(DLManagedTensorVersioned *tensor, DLManagedTensor **out);
/* Check an incoming tensor's version; an unknown major is deleted and refused. */
fsdp_status managed_accept(DLManagedTensorVersioned *tensor, const char *name);
void managed_delete(DLManagedTensorVersioned *tensor); /* NULL and a NULL deleter allowed */

#endif
