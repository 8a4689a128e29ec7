/* Managed tensors: memory handed out with a deleter, and conversion between DLPack's two managed structs.
 *
 * A deleter runs on any thread, needs no host lock, and drops one reference of whatever owns the data. */
#include "tensor/tensor.h"

#include "base/mem.h"

#include <stdatomic.h>

/* ---- export */

/* What the handles on one memory share; the last of them lets go of the owner. */
struct shared {
    atomic_int handles;
    void (*release)(void *owner);
    void *owner;
};

struct exported {
    DLManagedTensorVersioned managed;
    struct shared *shared;
    int64_t dims[]; /* shape, then strides */
};

static void exported_delete(DLManagedTensorVersioned *self)
{
    struct exported *e = (struct exported *)self;
    struct shared *shared = e->shared;
    mem_free(e);
    if (atomic_fetch_sub_explicit(&shared->handles, 1, memory_order_acq_rel) != 1) return;
    shared->release(shared->owner);
    mem_free(shared);
}

/* A handle that shows what `like` does. */
static struct exported *exported_make(struct shared *shared, const DLTensor *like, uint64_t flags)
{
    int32_t ndim = like->ndim;
    struct exported *e = mem_alloc(sizeof(struct exported) + 2 * (size_t)ndim * sizeof(int64_t));
    if (!e) return NULL;
    int64_t *dims = e->dims, dense = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        dims[d] = like->shape[d];
        dims[ndim + d] = like->strides ? like->strides[d] : dense;
        if (like->shape[d] > 1) dense *= like->shape[d];
    }
    e->shared = shared;
    e->managed.version.major = DLPACK_MAJOR_VERSION;
    e->managed.version.minor = DLPACK_MINOR_VERSION;
    e->managed.deleter = exported_delete;
    e->managed.flags = flags;
    e->managed.dl_tensor = (DLTensor){.data = like->data ? (char *)like->data + like->byte_offset : NULL,
                                      .device = like->device,
                                      .ndim = ndim,
                                      .dtype = like->dtype,
                                      .shape = dims,
                                      .strides = dims + ndim};
    return e;
}

static fsdp_status exported_first(const DLTensor *like, uint64_t flags, void (*release)(void *owner), void *owner,
                                  DLManagedTensorVersioned **out)
{
    struct shared *shared = mem_alloc(sizeof *shared);
    struct exported *e = shared ? exported_make(shared, like, flags) : NULL;
    if (!e) {
        mem_free(shared);
        return mem_none("a tensor handle", sizeof *e);
    }
    atomic_init(&shared->handles, 1);
    shared->release = release;
    shared->owner = owner;
    *out = &e->managed;
    return FSDP_OK;
}

fsdp_status managed_export(void *data, enum dtype type, int32_t ndim, const int64_t *shape,
                           void (*release)(void *owner), void *owner, DLManagedTensorVersioned **out)
{
    DLTensor like = {.data = data,
                     .device = {kDLCPU, 0},
                     .ndim = ndim,
                     .dtype = dtype_to_dl(type),
                     .shape = (int64_t *)(uintptr_t)shape};
    return exported_first(&like, 0, release, owner, out);
}

static void adopted_release(void *owner)
{
    managed_delete(owner);
}

fsdp_status managed_adopt(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out)
{
    if (tensor->deleter == exported_delete) {
        *out = tensor;
        return FSDP_OK;
    }
    return exported_first(&tensor->dl_tensor, tensor->flags, adopted_release, tensor, out);
}

fsdp_status managed_share(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out)
{
    CHECK_ARG(tensor->version.major == DLPACK_MAJOR_VERSION && tensor->deleter == exported_delete,
              "tensor was not handed out by this library: share it with the means of whoever made it");
    struct exported *from = (struct exported *)tensor;
    struct exported *e = exported_make(from->shared, &tensor->dl_tensor, tensor->flags);
    if (!e) return mem_none("a tensor handle", sizeof *e);
    atomic_fetch_add_explicit(&from->shared->handles, 1, memory_order_relaxed);
    *out = &e->managed;
    return FSDP_OK;
}

fsdp_status managed_empty(const DLDataType *dtype, int32_t ndim, const int64_t *shape, DLManagedTensorVersioned **out)
{
    /* Borrow the import's checks: any non-NULL data will do for them. */
    char any = 0;
    struct tensor t;
    DLTensor dl = {
        .data = &any, .device = {kDLCPU, 0}, .ndim = ndim, .dtype = *dtype, .shape = (int64_t *)(uintptr_t)shape};
    TRY(tensor_import(&dl, "tensor", &t));
    void *data = mem_alloc_aligned(t.bytes, 64);
    if (!data) return mem_none("a tensor", t.bytes);
    fsdp_status status = managed_export(data, t.type, ndim, shape, mem_free_aligned, data, out);
    if (status != FSDP_OK) mem_free_aligned(data);
    return status;
}

/* ---- versions */

void managed_delete(DLManagedTensorVersioned *tensor)
{
    if (tensor && tensor->deleter) tensor->deleter(tensor);
}

fsdp_status managed_accept(DLManagedTensorVersioned *tensor, const char *name)
{
    CHECK_ARG(tensor, "%s is NULL: a managed tensor is needed", name);
    uint32_t major = tensor->version.major, minor = tensor->version.minor;
    if (major == DLPACK_MAJOR_VERSION) return FSDP_OK;
    managed_delete(tensor);
    return err(FSDP_ERR_VERSION, "%s has DLPack version %u.%u: this library reads version %d (the tensor was deleted)",
               name, major, minor, DLPACK_MAJOR_VERSION);
}

struct from_legacy {
    DLManagedTensorVersioned managed;
    DLManagedTensor *legacy;
};

static void from_legacy_delete(DLManagedTensorVersioned *self)
{
    struct from_legacy *wrap = (struct from_legacy *)self;
    if (wrap->legacy->deleter) wrap->legacy->deleter(wrap->legacy);
    mem_free(wrap);
}

fsdp_status managed_from_legacy(DLManagedTensor *legacy, DLManagedTensorVersioned **out)
{
    struct from_legacy *wrap = mem_alloc(sizeof *wrap);
    if (!wrap) return mem_none("a tensor handle", sizeof *wrap);
    wrap->legacy = legacy;
    wrap->managed.version.major = DLPACK_MAJOR_VERSION;
    wrap->managed.version.minor = DLPACK_MINOR_VERSION;
    wrap->managed.deleter = from_legacy_delete;
    wrap->managed.dl_tensor = legacy->dl_tensor;
    *out = &wrap->managed;
    return FSDP_OK;
}

struct to_legacy {
    DLManagedTensor managed;
    DLManagedTensorVersioned *versioned;
};

static void to_legacy_delete(DLManagedTensor *self)
{
    struct to_legacy *wrap = (struct to_legacy *)self;
    managed_delete(wrap->versioned);
    mem_free(wrap);
}

fsdp_status managed_to_legacy(DLManagedTensorVersioned *tensor, DLManagedTensor **out)
{
    TRY(managed_accept(tensor, "tensor"));
    CHECK_ARG(!(tensor->flags & DLPACK_FLAG_BITMASK_READ_ONLY),
              "tensor is read-only: legacy DLPack can't say so; take it as a versioned tensor, or copy it");
    struct to_legacy *wrap = mem_alloc(sizeof *wrap);
    if (!wrap) return mem_none("a tensor handle", sizeof *wrap);
    wrap->versioned = tensor;
    wrap->managed.dl_tensor = tensor->dl_tensor;
    wrap->managed.deleter = to_legacy_delete;
    *out = &wrap->managed;
    return FSDP_OK;
}
