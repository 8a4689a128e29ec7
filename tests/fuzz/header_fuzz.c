/* The header of a safetensors file, and what this library says in it, made by libFuzzer. The first two bytes of the
 * input say how much data the file has behind the header; the rest is the header. What is taken must be sound. */
#include "state/files.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void look_at_metadata(const struct st_file *file)
{
    struct manifest m;
    if (manifest_parse("file", "metadata", file->fsdp, file->fsdp_bytes, &m) != FSDP_OK) return;
    for (int64_t i = 0; i < file->n; i++) {
        struct manifest_tensor t;
        if (manifest_tensor_get(&m, "file", file->tensors[i].name, &t) != FSDP_OK) continue;
        if (t.index < 0 || t.ndim < 0 || t.ndim > TENSOR_MAX_DIMS) abort();
    }
    manifest_free(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return -1;
    struct st_file file;
    int64_t bytes = data[0] | data[1] << 8, at = 8 + (int64_t)size - 2;
    if (st_parse("file", (const char *)data + 2, size - 2, bytes, &file) != FSDP_OK) return 0;
    int64_t sum = 0;
    for (int64_t i = 0; i < file.n; i++) {
        const struct st_tensor *t = &file.tensors[i];
        int64_t count = 1;
        for (int32_t d = 0; d < t->ndim; d++) count = t->shape[d] && count ? count * t->shape[d] : 0;
        if (t->begin != at + sum || count * (int64_t)dtype_size(t->type) != t->bytes) abort();
        sum += t->bytes;
    }
    if (sum != bytes) abort();
    if (file.fsdp) look_at_metadata(&file);
    st_free(&file);
    return 0;
}
