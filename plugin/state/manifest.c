/* The texts that say what a checkpoint is made of: manifest.json, `fsdp` in an index, and `fsdp` in a file's metadata.
 * All are of one form, and end with a sum of themselves. Pure but for file_text. */
#include "state/files.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- read */

#define SUM_BEFORE ",\"sum\":\""
#define SUM_BYTES (sizeof SUM_BEFORE - 1 + 16 + 2)

static int sum_holds(const char *text, size_t bytes)
{
    while (bytes && (text[bytes - 1] == '\n' || text[bytes - 1] == ' ')) bytes--;
    uint64_t sum;
    if (bytes < SUM_BYTES) return 0;
    const char *end = text + bytes - SUM_BYTES;
    return memcmp(end, SUM_BEFORE, sizeof SUM_BEFORE - 1) == 0 && hex_read(end + sizeof SUM_BEFORE - 1, &sum) &&
           memcmp(text + bytes - 2, "\"}", 2) == 0 && sum == block_sum(text, bytes - SUM_BYTES);
}

static fsdp_status take(const char *path, const char *what, const char *text, size_t bytes, struct manifest *out)
{
    int64_t version, number;
    json_t *root = out->root;
    const json_t *value;
    if (!json_number_in(json_object_get(root, "version"), 1, INT64_MAX, &version))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s has no version", path, what);
    if (version > FILE_VERSION)
        return err(FSDP_ERR_UNSUPPORTED,
                   "'%.400s': %s is of version %lld: this library reads up to %d; take a newer one", path, what,
                   (long long)version, FILE_VERSION);
    if (!sum_holds(text, bytes))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s is not what was written: its checksum differs", path, what);
    if (!json_hex(json_object_get(root, "save"), &out->save))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s does not name its save", path, what);
    out->rank = out->ranks = -1;
    if (!json_number_in(json_object_get(root, "ranks"), 1, INT32_MAX, &number))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s has no number of ranks", path, what);
    out->ranks = (int32_t)number;
    value = json_object_get(root, "rank");
    if (value && !json_number_in(value, 0, out->ranks - 1, &number))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s: its rank is not one of %d", path, what, out->ranks);
    if (value) out->rank = (int32_t)number;
    out->part = json_is_true(json_object_get(root, "part"));
    out->tensors = json_object_get(root, "tensors");
    out->files = json_object_get(root, "files");
    out->tied = json_object_get(root, "tied");
    out->json = json_object_get(root, "json");
    if ((out->tensors && !json_is_object(out->tensors)) || (out->files && !json_is_array(out->files)) ||
        (out->tied && !json_is_array(out->tied)) || (out->json && !json_is_object(out->json)))
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s: tensors, files, tied or json is not a list of such", path, what);
    if (!out->tensors) return FSDP_OK;
    const char *kind = json_string_value(json_object_get(root, "checksum"));
    if (!kind || strcmp(kind, "xxh3-64") != 0 ||
        !json_number_in(json_object_get(root, "block"), FILE_BLOCK, FILE_BLOCK, &number))
        return err(FSDP_ERR_UNSUPPORTED, "'%.400s': %s has checksums of another kind than this library's", path, what);
    return FSDP_OK;
}

fsdp_status manifest_parse(const char *path, const char *what, const char *text, size_t bytes, struct manifest *out)
{
    *out = (struct manifest){0};
    TRY(json_read(path, what, text, bytes, &out->root));
    fsdp_status status = take(path, what, text, bytes, out);
    if (status != FSDP_OK) manifest_free(out);
    return status;
}

fsdp_status index_parse(const char *path, const char *text, size_t bytes, struct manifest *out, int *ours)
{
    json_t *root;
    *out = (struct manifest){.rank = -1, .ranks = -1};
    *ours = 0;
    TRY(json_read(path, "the index", text, bytes, &root));
    const json_t *fsdp = json_object_get(json_object_get(root, "metadata"), "fsdp");
    fsdp_status status = FSDP_OK;
    if (fsdp && !json_is_string(fsdp))
        status = err(FSDP_ERR_CORRUPT, "'%.400s': metadata.fsdp is not a string", path);
    else if (fsdp)
        status = manifest_parse(path, "metadata.fsdp", json_string_value(fsdp), json_string_length(fsdp), out);
    json_t *map = json_object_get(root, "weight_map");
    const char *name;
    json_t *file;
    if (status == FSDP_OK && !json_is_object(map)) status = err(FSDP_ERR_CORRUPT, "'%.400s' has no weight_map", path);
    if (status == FSDP_OK) json_object_foreach(map, name, file)
        {
            if (!json_is_string(file) || !file_name_plain(json_string_value(file))) {
                status = err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s' is not in a file of this folder", path, name);
                break;
            }
        }
    if (status == FSDP_OK && out->root && json_object_set_new(out->root, "weight_map", json_incref(map)) != 0)
        status = mem_none("an index", bytes);
    if (status != FSDP_OK) {
        json_decref(root);
        manifest_free(out);
        return status;
    }
    *ours = out->root != NULL;
    out->map = map;
    if (out->root)
        json_decref(root); /* the other one has the map now */
    else
        out->root = root;
    return FSDP_OK;
}

void manifest_free(struct manifest *m)
{
    json_decref(m->root);
    *m = (struct manifest){0};
}

static int numbers_read(const json_t *list, int64_t *out)
{
    if (!json_is_array(list) || json_array_size(list) > TENSOR_MAX_DIMS) return -1;
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!json_number_in(json_array_get(list, i), 0, INT64_MAX, &out[i])) return -1;
    return (int)json_array_size(list);
}

fsdp_status manifest_tensor_get(const struct manifest *m, const char *path, const char *name,
                                struct manifest_tensor *out)
{
    const json_t *value = json_object_get(m->tensors, name), *offset = json_object_get(value, "offset");
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    const json_t *sums = json_object_get(value, "sums");
    *out = (struct manifest_tensor){0};
    if (!value) return err(FSDP_ERR_CORRUPT, "'%.400s': its metadata lacks tensor '%.200s'", path, name);
    out->type = DTYPE_COUNT;
    for (int type = 0; dtype && type < DTYPE_COUNT; type++)
        if (st_dtype_name((enum dtype)type) && strcmp(dtype, st_dtype_name((enum dtype)type)) == 0)
            out->type = (enum dtype)type;
    out->ndim = numbers_read(json_object_get(value, "shape"), out->shape);
    int offsets = offset ? numbers_read(offset, out->offset) : out->ndim;
    out->of_rank = json_is_true(json_object_get(value, "of_rank"));
    out->sums = json_string_value(sums);
    if (!json_number_in(json_object_get(value, "index"), 0, INT64_MAX - 1, &out->index) || out->type == DTYPE_COUNT ||
        out->ndim < 0 || offsets != out->ndim || !out->sums || json_string_length(sums) % 16 ||
        (out->of_rank && m->rank < 0))
        return err(FSDP_ERR_CORRUPT, "'%.400s': its metadata of tensor '%.200s' makes no sense", path, name);
    out->n_sums = (int64_t)json_string_length(sums) / 16;
    return FSDP_OK;
}

fsdp_status manifest_file_get(const struct manifest *m, const char *path, size_t index, struct manifest_file *out)
{
    const json_t *value = json_array_get(m->files, index);
    out->name = json_string_value(json_object_get(value, "name"));
    if (!out->name || !file_name_plain(out->name))
        return err(FSDP_ERR_CORRUPT, "'%.400s': the name of file %zu is not that of a file in this folder", path,
                   index);
    if (!json_number_in(json_object_get(value, "bytes"), 0, INT64_MAX, &out->bytes) ||
        !json_hex(json_object_get(value, "header"), &out->header_sum))
        return err(FSDP_ERR_CORRUPT, "'%.400s': it does not say how file '%.255s' must be", path, out->name);
    return FSDP_OK;
}

fsdp_status manifest_tied_get(const struct manifest *m, const char *path, size_t index, struct manifest_tied *out)
{
    const json_t *value = json_array_get(m->tied, index);
    out->name = json_string_value(json_object_get(value, "name"));
    out->to = json_string_value(json_object_get(value, "to"));
    if (!out->name || !*out->name || strlen(out->name) > STATE_NAME_MOST || !out->to ||
        !json_number_in(json_object_get(value, "index"), 0, INT64_MAX - 1, &out->index))
        return err(FSDP_ERR_CORRUPT, "'%.400s': tied tensor %zu makes no sense", path, index);
    return FSDP_OK;
}

int file_name_plain(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n <= FILE_NAME_MOST && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

fsdp_status file_text(const struct os_folder *folder, const char *name, int64_t most, char **text, size_t *bytes)
{
    char path[OS_PATH_MOST + FILE_NAME_MOST + 2];
    int fd;
    int64_t size;
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    TRY(os_file_open(folder, name, &fd, &size));
    fsdp_status status = FSDP_OK;
    char *at = NULL;
    if (size > most)
        status = err(FSDP_ERR_CORRUPT, "'%.400s' has %lld bytes: such a file has at most %lld", path, (long long)size,
                     (long long)most);
    if (status == FSDP_OK && !(at = mem_alloc((size_t)size + 1))) status = mem_none("a file's text", (size_t)size);
    if (status == FSDP_OK) status = os_file_read(fd, path, at, (size_t)size, 0);
    os_close(&fd);
    if (status != FSDP_OK) {
        mem_free(at);
        return status;
    }
    *text = at;
    *bytes = (size_t)size;
    return FSDP_OK;
}

/* ---- written */

void manifest_begin(struct text *t, const char *first, uint64_t save, int32_t rank, int32_t ranks)
{
    text_add(t, "{");
    text_add(t, first);
    text_add(t, "\"version\":");
    text_number(t, FILE_VERSION);
    text_add(t, ",\"save\":\"");
    text_hex(t, save);
    text_add(t, "\"");
    if (rank >= 0) {
        text_add(t, ",\"rank\":");
        text_number(t, rank);
    }
    text_add(t, ",\"ranks\":");
    text_number(t, ranks);
}

void manifest_end(struct text *t)
{
    uint64_t sum = t->failed ? 0 : block_sum(t->at, t->used);
    text_add(t, SUM_BEFORE);
    text_hex(t, sum);
    text_add(t, "\"}");
}

void manifest_rest(struct text *t, const fsdp_state_dict *dict)
{
    int64_t told = 0, index = 0;
    text_add(t, ",\"tied\":[");
    for (int64_t i = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        index += entry->kind == FSDP_ENTRY_TENSOR; /* entries of a rank don't count */
        if (entry->tied_to < 0) continue;
        text_add(t, told++ ? ",{\"index\":" : "{\"index\":");
        text_number(t, index - 1);
        text_add(t, ",\"name\":");
        text_string(t, entry->name, strlen(entry->name));
        text_add(t, ",\"to\":");
        text_string(t, dict->entries[entry->tied_to]->name, strlen(dict->entries[entry->tied_to]->name));
        text_add(t, "}");
    }
    text_add(t, "],\"json\":{");
    for (int64_t i = 0; i < dict->n_json; i++) {
        if (i) text_add(t, ",");
        text_string(t, dict->json[i].name, strlen(dict->json[i].name));
        text_add(t, ":");
        text_add(t, dict->json[i].text);
    }
    text_add(t, "}");
}

/* ---- names */

int name_ends(const char *name, const char *with)
{
    size_t n = strlen(name), m = strlen(with);
    return n >= m && strcmp(name + n - m, with) == 0;
}

void name_of_rank(char out[SAVE_NAME], int32_t rank, int32_t ranks, uint64_t save)
{
    snprintf(out, SAVE_NAME, "rank-%05d-of-%05d.%016llx.safetensors", rank, ranks, (unsigned long long)save);
}

void name_of_part(char out[SAVE_NAME], int32_t part, int32_t parts, uint64_t save)
{
    snprintf(out, SAVE_NAME, "model-%016llx-%05d-of-%05d.safetensors", (unsigned long long)save, part, parts);
}

/* `form`: '0' stands for a run of digits, 'x' for 16 of hexadecimal. */
static int name_has_form(const char *name, const char *form, uint64_t *save)
{
    for (; *form; form++) {
        if (*form == '0') {
            size_t n = strspn(name, "0123456789");
            if (n < 5 || n > 10) return 0;
            name += n;
        } else if (*form == 'x') {
            if (strnlen(name, 16) < 16 || !hex_read(name, save)) return 0;
            name += 16;
        } else if (*name++ != *form) {
            return 0;
        }
    }
    return strcmp(name, ".safetensors") == 0;
}

int name_is_of_rank(const char *name, uint64_t *save)
{
    return name_has_form(name, "rank-0-of-0.x", save);
}

int name_is_of_part(const char *name, uint64_t *save)
{
    return name_has_form(name, "model-x-0-of-0", save);
}
