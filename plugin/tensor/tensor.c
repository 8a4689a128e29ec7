/* Checked views of DLTensors, and strided copies: see tensor.h.
 *
 * A strided copy works on "runs": dimensions are first merged where one continues the next, then the innermost is
 * copied as a whole when it is contiguous on both sides, else element by element. All functions are pure. */
#include "tensor/tensor.h"

#include "tensor/kernel.h"

#include <stdio.h>
#include <string.h>

/* ---- import */

static fsdp_status check_extent(const struct tensor *t, const char *name)
{
    /* Lowest and highest element offsets must fit the address space. */
    __int128 low = 0, high = 0;
    for (int d = 0; d < t->ndim; d++) {
        __int128 reach = (__int128)(t->shape[d] - 1) * t->strides[d];
        if (reach < 0)
            low += reach;
        else
            high += reach;
    }
    __int128 size = (__int128)dtype_size(t->type), at = (__int128)(uintptr_t)t->data;
    if (at + low * size < 0 || at + (high + 1) * size > (__int128)UINTPTR_MAX)
        return err(FSDP_ERR_INVALID, "%s: shape and strides reach outside the address space", name);
    return FSDP_OK;
}

fsdp_status tensor_import(const DLTensor *dl, const char *name, struct tensor *out)
{
    CHECK_ARG(dl, "%s is NULL: a tensor is needed", name);
    if (dl->device.device_type != kDLCPU && dl->device.device_type != kDLCUDAHost)
        return err(FSDP_ERR_UNSUPPORTED, "%s is on device type %d: only host memory (kDLCPU, kDLCUDAHost) is supported",
                   name, (int)dl->device.device_type);
    CHECK_ARG(dl->ndim >= 0 && dl->ndim <= TENSOR_MAX_DIMS, "%s has %d dimensions: 0 to %d are supported", name,
              (int)dl->ndim, TENSOR_MAX_DIMS);
    CHECK_ARG(dl->ndim == 0 || dl->shape, "%s has %d dimensions but its shape is NULL", name, (int)dl->ndim);

    struct tensor t;
    TRY(dtype_from_dl(dl->dtype, name, &t.type));
    t.ndim = dl->ndim;
    t.count = 1;
    int empty = 0;
    for (int d = 0; d < t.ndim; d++) {
        CHECK_ARG(dl->shape[d] >= 0, "%s: dimension %d is %lld: sizes can't be negative", name, d,
                  (long long)dl->shape[d]);
        t.shape[d] = dl->shape[d];
        if (t.shape[d] == 0) empty = 1;
        if (!empty && __builtin_mul_overflow(t.count, t.shape[d], &t.count))
            return err(FSDP_ERR_INVALID, "%s: the number of elements overflows", name);
    }
    if (empty) t.count = 0;
    int64_t bytes;
    if (__builtin_mul_overflow(t.count, (int64_t)dtype_size(t.type), &bytes))
        return err(FSDP_ERR_INVALID, "%s: the number of bytes overflows", name);
    t.bytes = (size_t)bytes;
    CHECK_ARG(t.count == 0 || dl->data, "%s has %lld elements but its data is NULL", name, (long long)t.count);
    t.data = t.count ? (char *)dl->data + dl->byte_offset : NULL;

    /* Strides mean nothing in a dimension of size 1, or when there is no element: use the contiguous ones. */
    t.contiguous = 1;
    int64_t dense = 1;
    for (int d = t.ndim - 1; d >= 0; d--) {
        int given = dl->strides && t.count > 0 && t.shape[d] > 1;
        t.strides[d] = given ? dl->strides[d] : dense;
        if (t.strides[d] != dense) t.contiguous = 0;
        if (t.shape[d] > 1 && t.count > 0) dense *= t.shape[d];
    }
    if (t.count > 0) TRY(check_extent(&t, name));
    *out = t;
    return FSDP_OK;
}

fsdp_status tensor_import_output(const DLTensor *dl, const char *name, struct tensor *out)
{
    struct tensor t;
    TRY(tensor_import(dl, name, &t));
    if (!t.contiguous) {
        /* In order of stride, each dimension must step over all that the smaller ones cover. */
        int64_t covered = 1, last = 0;
        for (int step = 0; step < t.ndim; step++) {
            int next = -1;
            for (int d = 0; d < t.ndim; d++) {
                if (t.shape[d] < 2) continue;
                CHECK_ARG(t.strides[d] >= 0,
                          "%s: the stride of dimension %d is negative (%lld): not allowed for an output", name, d,
                          (long long)t.strides[d]);
                int later = t.strides[d] > last || (t.strides[d] == last && last == 0 && step == 0);
                if (later && (next < 0 || t.strides[d] < t.strides[next])) next = d;
            }
            if (next < 0) break;
            int twins = 0;
            for (int d = 0; d < t.ndim; d++) twins += t.shape[d] >= 2 && t.strides[d] == t.strides[next];
            CHECK_ARG(
                twins == 1 && t.strides[next] >= covered,
                "%s: elements share memory (stride %lld of dimension %d): an output needs distinct elements, so copy "
                "an expanded or overlapping tensor first",
                name, (long long)t.strides[next], next);
            last = t.strides[next];
            covered = last * (t.shape[next] - 1) + covered;
        }
    }
    *out = t;
    return FSDP_OK;
}

void tensor_make(struct tensor *out, void *data, enum dtype type, int32_t ndim, const int64_t *shape)
{
    out->data = data;
    out->type = type;
    out->ndim = ndim;
    out->contiguous = 1;
    out->count = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        out->shape[d] = shape[d];
        out->strides[d] = out->count ? out->count : 1;
        out->count *= shape[d];
    }
    out->bytes = (size_t)out->count * dtype_size(type);
    if (out->count == 0) out->data = NULL;
}

/* ---- questions */

/* After shape or strides have changed: strides that mean nothing are the contiguous ones, as tensor_import has them. */
static void settle_strides(struct tensor *t)
{
    int64_t dense = 1;
    t->contiguous = 1;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        if (t->count == 0 || t->shape[d] < 2) t->strides[d] = dense;
        if (t->strides[d] != dense) t->contiguous = 0;
        if (t->shape[d] > 1 && t->count > 0) dense *= t->shape[d];
    }
}

void tensor_narrow(struct tensor *t, int32_t dim, int64_t start, int64_t length)
{
    size_t size = dtype_size(t->type);
    if (t->count) t->data += start * t->strides[dim] * (int64_t)size;
    t->count = t->shape[dim] ? t->count / t->shape[dim] * length : 0;
    t->bytes = (size_t)t->count * size;
    t->shape[dim] = length;
    if (!t->count) t->data = NULL;
    settle_strides(t);
}

void tensor_first(struct tensor *t, int32_t dim)
{
    int64_t shape = t->shape[dim], stride = t->strides[dim];
    for (int32_t d = dim; d > 0; d--) {
        t->shape[d] = t->shape[d - 1];
        t->strides[d] = t->strides[d - 1];
    }
    t->shape[0] = shape;
    t->strides[0] = stride;
    settle_strides(t);
}

int64_t tensor_rows(const struct tensor *t)
{
    return t->ndim ? t->shape[0] : 1;
}

int64_t tensor_row_count(const struct tensor *t)
{
    int64_t n = 1;
    for (int d = 1; d < t->ndim; d++) /* a tensor without rows may have rows of any size */
        if (__builtin_mul_overflow(n, t->shape[d], &n)) return INT64_MAX;
    return n;
}

int tensor_same_shape(const struct tensor *a, const struct tensor *b)
{
    if (a->ndim != b->ndim) return 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d]) return 0;
    return 1;
}

int tensor_same_place(const struct tensor *a, const struct tensor *b)
{
    if (a->data != b->data || a->type != b->type || a->count != b->count) return 0;
    if (a->contiguous && b->contiguous) return 1;
    if (!tensor_same_shape(a, b)) return 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->strides[d] != b->strides[d]) return 0;
    return 1;
}

void tensor_range(const struct tensor *t, uintptr_t *low, uintptr_t *high)
{
    int64_t down = 0, up = 0, size = (int64_t)dtype_size(t->type);
    for (int d = 0; d < t->ndim; d++) {
        int64_t reach = (t->shape[d] - 1) * t->strides[d] * size;
        if (reach < 0)
            down += reach;
        else
            up += reach;
    }
    *low = (uintptr_t)t->data + (uintptr_t)down;
    *high = (uintptr_t)t->data + (uintptr_t)(up + size);
}

static uint64_t stride_gcd(const struct tensor *t, uint64_t g)
{
    for (int d = 0; d < t->ndim; d++) {
        if (t->shape[d] < 2) continue;
        uint64_t b = (uint64_t)(t->strides[d] < 0 ? -t->strides[d] : t->strides[d]) * dtype_size(t->type);
        while (b) {
            uint64_t r = g % b;
            g = b;
            b = r;
        }
    }
    return g;
}

int tensor_overlap(const struct tensor *a, const struct tensor *b)
{
    if (a->count == 0 || b->count == 0) return 0;
    uintptr_t a_low, a_high, b_low, b_high;
    tensor_range(a, &a_low, &a_high);
    tensor_range(b, &b_low, &b_high);
    if (a_high <= b_low || b_high <= a_low) return 0;
    if (a->contiguous && b->contiguous) return 1;
    /* Every element of either starts at a multiple of g from its data: residues that don't meet never share a byte. */
    uint64_t g = stride_gcd(b, stride_gcd(a, 0)), size_a = dtype_size(a->type), size_b = dtype_size(b->type);
    if (g == 0) return 1;
    uint64_t apart = ((uintptr_t)b->data % g + g - (uintptr_t)a->data % g) % g;
    return !(apart >= size_a && apart + size_b <= g);
}

const char *tensor_text(const struct tensor *t, char text[TENSOR_TEXT])
{
    size_t used = (size_t)snprintf(text, TENSOR_TEXT, "(");
    for (int d = 0; d < t->ndim && used < TENSOR_TEXT - 48; d++)
        used += (size_t)snprintf(text + used, TENSOR_TEXT - used, d ? ", %lld" : "%lld", (long long)t->shape[d]);
    snprintf(text + used, TENSOR_TEXT - used, t->ndim == 1 ? ",) %s" : ") %s", dtype_name(t->type));
    return text;
}

/* ---- strided copy */

/* Outer dimensions, merged; the innermost run of `run` elements has its own two strides. */
struct walk {
    int ndim;
    int64_t shape[TENSOR_MAX_DIMS], out[TENSOR_MAX_DIMS], in[TENSOR_MAX_DIMS]; /* strides in elements */
};

static void walk_make(struct walk *w, const struct tensor *out, const struct tensor *in)
{
    w->ndim = 0;
    for (int d = 0; d < out->ndim; d++) {
        if (out->shape[d] == 1) continue;
        int last = w->ndim - 1;
        if (last >= 0 && w->out[last] == out->strides[d] * out->shape[d] &&
            w->in[last] == in->strides[d] * out->shape[d]) {
            w->shape[last] *= out->shape[d];
            w->out[last] = out->strides[d];
            w->in[last] = in->strides[d];
            continue;
        }
        w->shape[w->ndim] = out->shape[d];
        w->out[w->ndim] = out->strides[d];
        w->in[w->ndim] = in->strides[d];
        w->ndim++;
    }
    if (w->ndim == 0) {
        w->ndim = 1;
        w->shape[0] = 1;
        w->out[0] = w->in[0] = 1;
    }
}

#define COPY_ELEMENTS(bytes)                                                                                           \
    for (int64_t i = 0; i < n; i++) memcpy(out + i * out_step, in + i * in_step, bytes)

/* n elements of one dtype; steps in bytes. */
static void copy_run(char *out, int64_t out_step, const char *in, int64_t in_step, int64_t n, size_t size)
{
    switch (size) {
    case 1:
        COPY_ELEMENTS(1);
        break;
    case 2:
        COPY_ELEMENTS(2);
        break;
    case 4:
        COPY_ELEMENTS(4);
        break;
    case 8:
        COPY_ELEMENTS(8);
        break;
    default:
        COPY_ELEMENTS(16);
        break;
    }
}

#define CAST_BLOCK 256

/* The same with a cast: strided input is gathered into a block, the block cast, and scattered. */
static void cast_run(char *out, int64_t out_step, enum dtype out_type, const char *in, int64_t in_step,
                     enum dtype in_type, int64_t n)
{
    char gathered[CAST_BLOCK * 16], cast[CAST_BLOCK * 16];
    int64_t in_size = (int64_t)dtype_size(in_type), out_size = (int64_t)dtype_size(out_type);
    if (in_step == in_size && out_step == out_size) {
        kernel_cast(out_type, out, in_type, in, (size_t)n, 0);
        return;
    }
    for (int64_t done = 0; done < n; done += CAST_BLOCK) {
        int64_t now = n - done < CAST_BLOCK ? n - done : CAST_BLOCK;
        copy_run(gathered, in_size, in + done * in_step, in_step, now, (size_t)in_size);
        kernel_cast(out_type, cast, in_type, gathered, (size_t)now, 0);
        copy_run(out + done * out_step, out_step, cast, out_size, now, (size_t)out_size);
    }
}

void tensor_copy(const struct tensor *out, const struct tensor *in)
{
    if (out->count == 0) return;
    struct walk w;
    walk_make(&w, out, in);
    int64_t out_size = (int64_t)dtype_size(out->type), in_size = (int64_t)dtype_size(in->type);
    int inner = w.ndim - 1, same = out->type == in->type;
    int64_t run = w.shape[inner], out_step = w.out[inner] * out_size, in_step = w.in[inner] * in_size;
    int dense = same && out_step == out_size && in_step == in_size;

    int64_t index[TENSOR_MAX_DIMS] = {0};
    char *to = out->data;
    const char *from = in->data;
    for (;;) {
        if (dense)
            kernel_copy(to, from, (size_t)(run * in_size), 0);
        else if (same)
            copy_run(to, out_step, from, in_step, run, (size_t)in_size);
        else
            cast_run(to, out_step, out->type, from, in_step, in->type, run);
        int d = inner - 1;
        for (; d >= 0; d--) {
            to += w.out[d] * out_size;
            from += w.in[d] * in_size;
            if (++index[d] < w.shape[d]) break;
            to -= w.out[d] * out_size * w.shape[d];
            from -= w.in[d] * in_size * w.shape[d];
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

void tensor_pack(void *out, const struct tensor *in)
{
    struct tensor packed;
    tensor_make(&packed, out, in->type, in->ndim, in->shape);
    tensor_copy(&packed, in);
}

void tensor_unpack(const struct tensor *out, const void *in)
{
    struct tensor packed;
    tensor_make(&packed, (void *)(uintptr_t)in, out->type, out->ndim, out->shape);
    tensor_copy(out, &packed);
}
