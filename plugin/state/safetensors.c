/* The header of a safetensors file: checked, and taken apart. A file's tensors must fill it, in order, from the end of
 * the header to the end of the file, as the safetensors package demands: so none overlap, and nothing is hidden between
 * them. Pure but for st_read. */
#include "state/files.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

static const char *const dtype_names[DTYPE_COUNT] = {
    [DTYPE_F64] = "F64",          [DTYPE_F32] = "F32",        [DTYPE_F16] = "F16",   [DTYPE_BF16] = "BF16",
    [DTYPE_F8E4M3FN] = "F8_E4M3", [DTYPE_F8E5M2] = "F8_E5M2", [DTYPE_I8] = "I8",     [DTYPE_I16] = "I16",
    [DTYPE_I32] = "I32",          [DTYPE_I64] = "I64",        [DTYPE_U8] = "U8",     [DTYPE_U16] = "U16",
    [DTYPE_U32] = "U32",          [DTYPE_U64] = "U64",        [DTYPE_BOOL] = "BOOL", [DTYPE_C64] = "C64",
};

const char *st_dtype_name(enum dtype type)
{
    return dtype_names[type];
}

/* What a dtype of a newer version might be called. */
static int could_be_dtype(const char *name)
{
    size_t n = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    return n > 0 && n <= 24 && !name[n] && name[0] >= 'A' && name[0] <= 'Z';
}

static fsdp_status dtype_read(const char *path, const char *tensor, const json_t *value, enum dtype *out)
{
    const char *name = json_string_value(value);
    if (!name) return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' has no dtype", path, tensor);
    for (int type = 0; type < DTYPE_COUNT; type++)
        if (dtype_names[type] && strcmp(name, dtype_names[type]) == 0) {
            *out = (enum dtype)type;
            return FSDP_OK;
        }
    if (could_be_dtype(name))
        return err(FSDP_ERR_UNSUPPORTED, "'%.400s': tensor '%.200s' has dtype %s, which this library does not have",
                   path, tensor, name);
    return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' has dtype '%.40s', which there is not", path, tensor, name);
}

static fsdp_status tensor_read(const char *path, const char *name, const json_t *value, int64_t data_at,
                               int64_t data_bytes, int64_t *shape, struct st_tensor *out)
{
    const json_t *sizes = json_object_get(value, "shape"), *offsets = json_object_get(value, "data_offsets");
    *out = (struct st_tensor){.name = name, .shape = shape};
    TRY(dtype_read(path, name, json_object_get(value, "dtype"), &out->type));
    if (!json_is_array(sizes)) return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' has no shape", path, name);
    if (json_array_size(sizes) > TENSOR_MAX_DIMS)
        return err(FSDP_ERR_UNSUPPORTED, "'%.400s': tensor '%.200s' has %zu dimensions: at most %d are supported", path,
                   name, json_array_size(sizes), TENSOR_MAX_DIMS);
    out->ndim = (int32_t)json_array_size(sizes);
    int64_t bytes = (int64_t)dtype_size(out->type), end;
    int empty = 0, over = 0;
    for (int32_t d = 0; d < out->ndim; d++) {
        if (!json_number_in(json_array_get(sizes, (size_t)d), 0, INT64_MAX, &shape[d]))
            return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s': size %d is not a number of elements", path, name,
                       d);
        empty |= shape[d] == 0;
        over |= !over && __builtin_mul_overflow(bytes, shape[d] ? shape[d] : 1, &bytes);
    }
    if (over && !empty) return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' is larger than any memory", path, name);
    out->bytes = empty ? 0 : bytes;
    if (json_array_size(offsets) != 2 || !json_number_in(json_array_get(offsets, 0), 0, data_bytes, &out->begin) ||
        !json_number_in(json_array_get(offsets, 1), out->begin, data_bytes, &end))
        return err(FSDP_ERR_CORRUPT,
                   "'%.400s': tensor '%.200s': its data_offsets don't lie in the file's %lld bytes of data", path, name,
                   (long long)data_bytes);
    if (end - out->begin != out->bytes)
        return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' has %lld bytes of data, but its shape needs %lld", path,
                   name, (long long)(end - out->begin), (long long)out->bytes);
    out->begin += data_at;
    return FSDP_OK;
}

static fsdp_status metadata_read(const char *path, const json_t *value, struct st_file *out)
{
    const char *key;
    json_t *text;
    if (!json_is_object(value)) return err(FSDP_ERR_CORRUPT, "'%.400s': __metadata__ is not an object", path);
    json_object_foreach((json_t *)(uintptr_t)value, key, text)
    {
        if (!json_is_string(text))
            return err(FSDP_ERR_CORRUPT, "'%.400s': '%.100s' in __metadata__ is not a string", path, key);
        if (strcmp(key, "fsdp") != 0) continue;
        out->fsdp = json_string_value(text);
        out->fsdp_bytes = json_string_length(text);
    }
    return FSDP_OK;
}

static int by_place(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static fsdp_status check_places(const char *path, const struct st_file *file, int64_t data_at, int64_t data_bytes)
{
    int64_t at = data_at;
    for (int64_t i = 0; i < file->n; i++) {
        const struct st_tensor *t = &file->tensors[i];
        if (t->begin < at)
            return err(FSDP_ERR_CORRUPT, "'%.400s': tensors '%.200s' and '%.200s' overlap", path,
                       file->tensors[i - 1].name, t->name);
        if (t->begin > at)
            return err(FSDP_ERR_CORRUPT, "'%.400s': there is a hole of %lld bytes before tensor '%.200s'", path,
                       (long long)(t->begin - at), t->name);
        at += t->bytes;
    }
    if (at != data_at + data_bytes)
        return err(FSDP_ERR_CORRUPT, "'%.400s': the tensors end at byte %lld, but the file at %lld", path,
                   (long long)at, (long long)(data_at + data_bytes));
    return FSDP_OK;
}

static fsdp_status parse(const char *path, int64_t data_at, int64_t data_bytes, struct st_file *out)
{
    const char *name;
    json_t *value;
    size_t dims = 0;
    json_object_foreach(out->root, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) continue;
        if (!json_is_object(value))
            return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' is not an object", path, name);
        if (!*name || strlen(name) > STATE_NAME_MOST)
            return err(FSDP_ERR_CORRUPT, "'%.400s': a tensor's name has %zu bytes: 1 to %d", path, strlen(name),
                       STATE_NAME_MOST);
        size_t ndim = json_array_size(json_object_get(value, "shape"));
        dims += ndim < TENSOR_MAX_DIMS ? ndim : TENSOR_MAX_DIMS;
        out->n++;
    }
    out->tensors = mem_array((size_t)out->n, sizeof *out->tensors);
    out->shapes = mem_array(dims, sizeof *out->shapes);
    if (!out->tensors || !out->shapes) return mem_none("a file's tensors", (size_t)out->n * sizeof *out->tensors);
    int64_t i = 0;
    int64_t *shape = out->shapes;
    json_object_foreach(out->root, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            TRY(metadata_read(path, value, out));
            continue;
        }
        TRY(tensor_read(path, name, value, data_at, data_bytes, shape, &out->tensors[i]));
        shape += out->tensors[i++].ndim;
    }
    if (out->n) qsort(out->tensors, (size_t)out->n, sizeof *out->tensors, by_place);
    return check_places(path, out, data_at, data_bytes);
}

fsdp_status st_parse(const char *path, const char *header, size_t bytes, int64_t data_bytes, struct st_file *out)
{
    *out = (struct st_file){0};
    if (!bytes || header[0] != '{')
        return err(FSDP_ERR_CORRUPT, "'%.400s' is not a safetensors file: its header does not begin with '{'", path);
    TRY(json_read(path, "the header", header, bytes, &out->root));
    fsdp_status status = parse(path, 8 + (int64_t)bytes, data_bytes, out);
    if (status != FSDP_OK) st_free(out);
    return status;
}

fsdp_status st_read(int fd, const char *path, int64_t file_bytes, struct st_file *out)
{
    unsigned char length[8];
    *out = (struct st_file){0};
    if (file_bytes < 8)
        return err(FSDP_ERR_CORRUPT, "'%.400s' has %lld bytes: too short for a safetensors file", path,
                   (long long)file_bytes);
    TRY(os_file_read(fd, path, length, sizeof length, 0));
    uint64_t bytes = 0;
    for (int i = 7; i >= 0; i--) bytes = bytes << 8 | length[i];
    if (bytes > FILE_HEADER_MOST || (int64_t)bytes > file_bytes - 8)
        return err(FSDP_ERR_CORRUPT,
                   "'%.400s': a header of %llu bytes in a file of %lld: damaged, or not a safetensors file", path,
                   (unsigned long long)bytes, (long long)file_bytes);
    char *text = mem_alloc((size_t)bytes + 8);
    if (!text) return mem_none("the header of a file", (size_t)bytes);
    memcpy(text, length, 8);
    fsdp_status status = os_file_read(fd, path, text + 8, (size_t)bytes, 8);
    if (status == FSDP_OK) status = st_parse(path, text + 8, (size_t)bytes, file_bytes - 8 - (int64_t)bytes, out);
    if (status == FSDP_OK) out->header_sum = block_sum(text, (size_t)bytes + 8);
    mem_free(text);
    return status;
}

void st_free(struct st_file *file)
{
    json_decref(file->root);
    mem_free(file->tensors);
    mem_free(file->shapes);
    *file = (struct st_file){0};
}
