/* What a save will write: which parts go to which file, and copies of them for the background. All memory is taken
 * here, before the ranks agree. */
#include "state/save.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

fsdp_status save_check_entries(const fsdp_save *save)
{
    for (int64_t i = 0; i < save->dict->n_entries; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        if (!st_dtype_name(entry->type))
            return err(FSDP_ERR_UNSUPPORTED,
                       "entry '%.400s' is %s, which safetensors files can't hold: save its real and imaginary parts "
                       "as two entries",
                       entry->name, dtype_name(entry->type));
        CHECK_ARG(strcmp(entry->name, "__metadata__") != 0,
                  "an entry is named '__metadata__', which safetensors files keep for themselves");
    }
    return FSDP_OK;
}

int save_has_values(const fsdp_save *save, int64_t index)
{
    const struct state_entry *entry = save->dict->entries[index];
    return entry->tied_to < 0 && (entry->kind == FSDP_ENTRY_TENSOR || !save_is_full(save));
}

/* What of an entry this rank writes in the sharded format: its part, or its slice of one that others have, too; of a
 * tensor without elements rank 0 all. 0: nothing. */
static int sharded_box(const fsdp_save *save, const struct state_entry *entry, struct box *box)
{
    *box = entry->part;
    if (entry->kind == FSDP_ENTRY_OF_RANK) return 1;
    if (!box_count(&entry->whole)) {
        *box = entry->whole;
        return save->rank == 0;
    }
    box_slice(&entry->part, entry->copy, entry->copies, box);
    return box_count(box) > 0;
}

static void part_make(struct save_part *part, const struct state_entry *entry, int64_t i, int64_t index,
                      const struct box *box)
{
    *part = (struct save_part){.name = entry->name,
                               .entry = i,
                               .index = index,
                               .type = entry->type,
                               .of_rank = entry->kind == FSDP_ENTRY_OF_RANK,
                               .ndim = entry->whole.ndim,
                               .shape = entry->whole.size,
                               .box = *box};
}

static fsdp_status files_make(fsdp_save *save, int32_t n)
{
    save->files = mem_array((size_t)n, sizeof *save->files);
    if (!save->files) return mem_none("the files of a save", (size_t)n * sizeof *save->files);
    save->n_files = n;
    for (int32_t i = 0; i < n; i++) {
        save->files[i].folder = &save->folder;
        save->files[i].fd = -1;
        save->files[i].rank = save_is_full(save) ? -1 : save->rank;
        save->files[i].ranks = save->size;
        save->files[i].part = n > 1;
        save->files[i].rest = "";
        save->files[i].sync = !save->options.no_sync;
        save->files[i].written = &save->written;
        save->files[i].buffer = save->buffer;
    }
    return FSDP_OK;
}

static fsdp_status parts_room(struct save_file *file, int64_t n)
{
    file->parts = mem_array((size_t)n, sizeof *file->parts);
    return file->parts ? FSDP_OK : mem_none("the parts of a save", (size_t)n * sizeof *file->parts);
}

fsdp_status save_plan_sharded(fsdp_save *save)
{
    TRY(files_make(save, 1));
    struct save_file *file = save->files;
    int64_t n = save->dict->n_entries, index = 0;
    name_of_rank(file->name, save->rank, save->size, 0);
    save->data = mem_array((size_t)n, sizeof *save->data);
    if (!save->data) return mem_none("the parts of a save", (size_t)n * sizeof *save->data);
    TRY(parts_room(file, n));
    for (int64_t i = 0; i < n; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        struct box box;
        int64_t own = entry->kind == FSDP_ENTRY_TENSOR ? index++ : i;
        if (!save_has_values(save, i) || !sharded_box(save, entry, &box)) continue;
        save->data[i] = entry->data;
        if (!save->copied && entry->data.count) box_narrow(&save->data[i], &entry->part, &box);
        part_make(&file->parts[file->n++], entry, i, own, &box);
    }
    return save_file_plan(file);
}

/* About what the header says of a tensor. */
static int64_t header_share(const struct state_entry *entry, int64_t bytes)
{
    return 2 * (int64_t)strlen(entry->name) + 256 + 64 * entry->whole.ndim + bytes / FILE_BLOCK * 16;
}

/* Rank 0. Files take tensors in the dict's order. */
fsdp_status save_plan_full(fsdp_save *save)
{
    int64_t n = save->dict->n_entries, most = save->options.max_file_bytes, used = 0, index = 0;
    save->places = mem_array((size_t)n, sizeof *save->places);
    int64_t *counts = mem_array((size_t)n + 1, sizeof *counts);
    if (!save->places || !counts) {
        mem_free(counts);
        return mem_none("the parts of a save", (size_t)n * sizeof *save->places);
    }
    int32_t file = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        if (!save_has_values(save, i)) continue;
        int64_t bytes = box_count(&entry->whole) * (int64_t)dtype_size(entry->type), all;
        bytes += header_share(entry, bytes);
        if (__builtin_add_overflow(used, bytes, &all)) all = INT64_MAX;
        if (most && used && all > most) {
            file++;
            all = bytes;
        }
        used = all;
        save->places[i].file = file;
        counts[file]++;
    }
    fsdp_status status = files_make(save, file + 1);
    for (int32_t f = 0; status == FSDP_OK && f <= file; f++) {
        snprintf(save->files[f].name, SAVE_NAME, "%s", save->file_name[0] ? save->file_name : MODEL_NAME);
        status = parts_room(&save->files[f], counts[f]);
    }
    mem_free(counts);
    TRY(status);
    for (int64_t i = 0; i < n; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        int64_t own = entry->kind == FSDP_ENTRY_TENSOR ? index++ : -1;
        if (!save_has_values(save, i)) continue;
        struct save_file *to = &save->files[save->places[i].file];
        part_make(&to->parts[to->n++], entry, i, own, &entry->whole);
    }
    if (file == 0 && save->rest.at) save->files[0].rest = save->rest.at;
    for (int32_t f = 0; f <= file; f++) {
        TRY(save_file_plan(&save->files[f]));
        for (int64_t k = 0; k < save->files[f].n; k++) save->places[save->files[f].parts[k].entry].part = k;
    }
    return FSDP_OK;
}

/* ---- copies for the background */

static int64_t part_bytes(const fsdp_save *save, int64_t i, struct box *box)
{
    const struct state_entry *entry = save->dict->entries[i];
    if (!save_has_values(save, i)) return 0;
    if (save_is_full(save))
        *box = entry->part;
    else if (!sharded_box(save, entry, box) || !entry->data.count)
        return 0;
    return box_count(box) * (int64_t)dtype_size(entry->type);
}

/* Entries with their names, and what this rank will need of their values. What is copied is a slice where that is all
 * that will be written: `part` stays what it is to the others. */
fsdp_status save_copies_make(fsdp_save *save)
{
    const fsdp_state_dict *dict = save->dict;
    int64_t n = dict->n_entries;
    size_t names = 0, bytes = 0;
    struct box box;
    for (int64_t i = 0; i < n; i++) {
        names += strlen(dict->entries[i]->name) + 1;
        bytes += ((size_t)part_bytes(save, i, &box) + 63) & ~(size_t)63;
    }
    save->copied = mem_array((size_t)n, sizeof *save->copied);
    save->copy.entries = mem_array((size_t)n, sizeof *save->copy.entries);
    save->strings = mem_alloc(names);
    if (!save->copied || !save->copy.entries || !save->strings)
        return mem_none("the entries of a save", (size_t)n * sizeof *save->copied);
    if (bytes) TRY(os_map_anonymous(os_page_round(bytes), &save->values));
    save->values_bytes = os_page_round(bytes);
    char *name = save->strings, *to = save->values;
    for (int64_t i = 0; i < n; i++) {
        struct state_entry *copy = save->copy.entries[i] = &save->copied[i];
        size_t length = strlen(dict->entries[i]->name) + 1;
        *copy = *dict->entries[i];
        copy->name = memcpy(name, copy->name, length);
        name += length;
        copy->tensor = NULL;
        copy->home = NULL;
        int64_t now = part_bytes(save, i, &box);
        if (now) {
            struct tensor source = copy->data, values;
            box_narrow(&source, &copy->part, &box);
            tensor_make(&values, to, copy->type, box.ndim, box.size);
            tensor_copy(&values, &source);
            to += ((size_t)now + 63) & ~(size_t)63;
            copy->data = values;
        }
    }
    save->copy.n_entries = n;
    save->dict = &save->copy;
    return FSDP_OK;
}
