/* Opening a checkpoint: what all headers, a manifest or an index say of each tensor is brought together and checked, so
 * that each is whole and nothing overlaps, before anything is read. Files stay open: a save over the checkpoint removes
 * their names, not what is read here. */
#include "state/checkpoint.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening: what the files say, one tensor of one file after the other */

struct found {
    const char *name; /* the header's */
    int64_t index;
    int32_t rank; /* of a rank's entry; else -1 */
    int32_t file; /* -1: tied to `to` */
    const char *to;
    const struct st_tensor *tensor;
    int64_t whole[TENSOR_MAX_DIMS], at[TENSOR_MAX_DIMS];
    const char *sums; /* hexadecimal; NULL: none */
    int64_t n_sums;
};

struct opening {
    fsdp_checkpoint *checkpoint;
    struct st_file *headers; /* n_files each */
    struct manifest *metas;  /* root NULL: a foreign file */
    struct manifest top;     /* manifest.json, or the index */
    char top_path[OS_PATH_MOST + FILE_NAME_MOST + 2];
    struct found *found;
    int64_t n_found, room;
};

static fsdp_status files_make(struct opening *o, size_t n)
{
    fsdp_checkpoint *c = o->checkpoint;
    if (n > 1000000) return err(FSDP_ERR_CORRUPT, "'%.400s' names %zu files: too many", o->top_path, n);
    c->files = mem_array(n, sizeof *c->files);
    o->headers = mem_array(n, sizeof *o->headers);
    o->metas = mem_array(n, sizeof *o->metas);
    if (!c->files || !o->headers || !o->metas) return mem_none("a checkpoint's files", n * sizeof *c->files);
    c->n_files = (int32_t)n;
    for (size_t i = 0; i < n; i++) c->files[i].fd = -1;
    return FSDP_OK;
}

/* Open a file and read its header and what this library said in it. */
static fsdp_status file_take(struct opening *o, int32_t index, const char *name)
{
    struct part_file *file = &o->checkpoint->files[index];
    size_t room = strlen(o->checkpoint->folder.path) + strlen(name) + 2;
    file->name = mem_strdup(name);
    file->path = mem_alloc(room);
    if (!file->name || !file->path) return mem_none("a file's name", room);
    snprintf(file->path, room, "%s/%s", o->checkpoint->folder.path, name);
    TRY(os_file_open(&o->checkpoint->folder, name, &file->fd, &file->bytes));
    struct st_file *header = &o->headers[index];
    TRY(st_read(file->fd, file->path, file->bytes, header));
    if (!header->fsdp) return FSDP_OK;
    TRY(manifest_parse(file->path, "__metadata__.fsdp", header->fsdp, header->fsdp_bytes, &o->metas[index]));
    if (!o->metas[index].tensors)
        return err(FSDP_ERR_CORRUPT, "'%.400s': __metadata__.fsdp has no tensors", file->path);
    if (json_object_size(o->metas[index].tensors) != (size_t)header->n)
        return err(FSDP_ERR_CORRUPT, "'%.400s' has %lld tensors, but its metadata has %zu", file->path,
                   (long long)header->n, json_object_size(o->metas[index].tensors));
    return FSDP_OK;
}

static fsdp_status found_add(struct opening *o, const struct found *found)
{
    if (o->n_found == o->room) {
        int64_t room = o->room ? 2 * o->room : 64;
        struct found *more = mem_array((size_t)room, sizeof *more);
        if (!more) return mem_none("a checkpoint's tensors", (size_t)room * sizeof *more);
        if (o->n_found) memcpy(more, o->found, (size_t)o->n_found * sizeof *more);
        mem_free(o->found);
        o->found = more;
        o->room = room;
    }
    o->found[o->n_found++] = *found;
    return FSDP_OK;
}

/* A tensor of one file, with what this library says about it there. */
static fsdp_status found_ours(struct opening *o, int32_t file, const struct st_tensor *t, struct found *found)
{
    const char *path = o->checkpoint->files[file].path;
    struct manifest_tensor told;
    TRY(manifest_tensor_get(&o->metas[file], path, t->name, &told));
    struct box part;
    int agree = told.type == t->type && told.ndim == t->ndim;
    if (agree) {
        box_make(&part, t->ndim, told.offset, t->shape);
        agree = box_fits(&part, told.shape) && told.n_sums == blocks_of(t->bytes);
    }
    int64_t bytes = (int64_t)dtype_size(t->type);
    for (int32_t d = 0; agree && d < told.ndim; d++)
        agree = !__builtin_mul_overflow(bytes, told.shape[d] ? told.shape[d] : 1, &bytes);
    if (agree && told.of_rank) agree = memcmp(told.shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0;
    if (!agree)
        return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s': dtype, shape, offset and checksums don't fit together",
                   path, t->name);
    found->index = told.index;
    found->rank = told.of_rank ? o->metas[file].rank : -1;
    found->sums = told.sums;
    found->n_sums = told.n_sums;
    memcpy(found->whole, told.shape, sizeof found->whole);
    memcpy(found->at, told.offset, sizeof found->at);
    return FSDP_OK;
}

/* All tensors of a file; with a map, those that it says are there. */
static fsdp_status file_find(struct opening *o, int32_t file)
{
    const struct st_file *header = &o->headers[file];
    for (int64_t i = 0; i < header->n; i++) {
        const struct st_tensor *t = &header->tensors[i];
        struct found found = {.name = t->name, .tensor = t, .file = file, .rank = -1, .index = o->n_found};
        memcpy(found.whole, t->shape, (size_t)t->ndim * sizeof *t->shape);
        if (o->top.map) {
            const char *where = json_string_value(json_object_get(o->top.map, t->name));
            if (!where || strcmp(where, o->checkpoint->files[file].name) != 0) continue;
        }
        if (o->metas[file].root) TRY(found_ours(o, file, t, &found));
        TRY(found_add(o, &found));
    }
    return FSDP_OK;
}

static fsdp_status tied_find(struct opening *o, const struct manifest *m, const char *path)
{
    for (size_t i = 0; i < json_array_size(m->tied); i++) {
        struct manifest_tied tied;
        TRY(manifest_tied_get(m, path, i, &tied));
        struct found found = {.name = tied.name, .to = tied.to, .file = -1, .rank = -1, .index = tied.index};
        TRY(found_add(o, &found));
    }
    return FSDP_OK;
}

static fsdp_status json_find(struct opening *o, const struct manifest *m)
{
    fsdp_checkpoint *c = o->checkpoint;
    const char *name;
    json_t *value;
    size_t n = json_object_size(m->json);
    if (!n) return FSDP_OK;
    c->json = mem_array(n, sizeof *c->json);
    if (!c->json) return mem_none("a checkpoint's JSON", n * sizeof *c->json);
    json_object_foreach((json_t *)(uintptr_t)m->json, name, value)
    {
        struct state_json *json = &c->json[c->n_json++];
        json->name = mem_strdup(name);
        json->text = json_text(value);
        if (!json->name || !json->text) return mem_none("a checkpoint's JSON", 1);
    }
    return FSDP_OK;
}

/* ---- opening: entries of what was found */

static int by_entry(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->index != y->index) return x->index < y->index ? -1 : 1;
    return x->file < y->file ? -1 : x->file > y->file;
}

static const char *found_path(const struct opening *o, const struct found *found)
{
    return found->file < 0 ? o->top_path : o->checkpoint->files[found->file].path;
}

/* Its parts make up the tensor, each element once. */
static fsdp_status check_whole(const struct opening *o, const struct found *found, int64_t n, struct box *boxes,
                               const struct box **order)
{
    const struct found *first = found;
    int64_t a, b;
    for (int64_t i = 0; i < n; i++) {
        box_make(&boxes[i], first->tensor->ndim, found[i].at, found[i].tensor->shape);
        order[i] = &boxes[i];
    }
    switch (box_cover(order, n, first->tensor->ndim, first->whole, &a, &b)) {
    case BOX_WHOLE:
        return FSDP_OK;
    case BOX_OVERLAP:
        return err(FSDP_ERR_CORRUPT, "tensor '%.200s' has elements both in '%.300s' and in '%.300s'", first->name,
                   found_path(o, &found[order[a] - boxes]), found_path(o, &found[order[b] - boxes]));
    default:
        return err(FSDP_ERR_CORRUPT, "tensor '%.200s' is not whole: no file of '%.400s' has its missing elements",
                   first->name, o->checkpoint->folder.path);
    }
}

static fsdp_status sums_take(const char *path, const struct found *found, uint64_t *sums)
{
    for (int64_t i = 0; i < found->n_sums; i++)
        if (!hex_read(found->sums + 16 * i, &sums[i]))
            return err(FSDP_ERR_CORRUPT, "'%.400s': tensor '%.200s': a checksum is not a number", path, found->name);
    return FSDP_OK;
}

static fsdp_status piece_make(struct opening *o, const struct found *found)
{
    fsdp_checkpoint *c = o->checkpoint;
    const struct st_tensor *t = found->tensor;
    size_t dims = 2 * (size_t)t->ndim * sizeof(int64_t);
    /* One block: sums, then where it begins and how large it is. */
    uint64_t *block = mem_alloc((size_t)found->n_sums * sizeof *block + dims);
    if (!block) return mem_none("a checkpoint's part", dims);
    int64_t *at = (int64_t *)(block + found->n_sums), *size = at + t->ndim;
    struct stored *piece = &c->pieces[c->n_pieces++];
    *piece = (struct stored){
        .file = found->file, .begin = t->begin, .bytes = t->bytes, .at = at, .size = size, .sums = block};
    if (t->ndim) memcpy(at, found->at, dims / 2);
    if (t->ndim) memcpy(size, t->shape, dims / 2);
    c->bytes += t->bytes;
    return sums_take(c->files[found->file].path, found, block);
}

/* found[0 .. n): all that there is of one entry. */
static fsdp_status entry_make(struct opening *o, const struct found *found, int64_t n, struct box *boxes,
                              const struct box **order)
{
    fsdp_checkpoint *c = o->checkpoint;
    struct state_entry *entry = &c->entries[c->n_entries];
    c->first[c->n_entries++] = c->n_pieces;
    *entry = (struct state_entry){.name = mem_strdup(found->name),
                                  .kind = found->rank < 0 ? FSDP_ENTRY_TENSOR : FSDP_ENTRY_OF_RANK,
                                  .copies = 1,
                                  .rank = found->rank,
                                  .tied_to = -1};
    if (!entry->name) return mem_none("a name", strlen(found->name));
    for (int64_t i = 1; i < n; i++) {
        const struct st_tensor *a = found->tensor, *b = found[i].tensor;
        int same = a && b && strcmp(a->name, b->name) == 0 && a->type == b->type && a->ndim == b->ndim &&
                   memcmp(found->whole, found[i].whole, sizeof found->whole) == 0;
        if (!same)
            return err(FSDP_ERR_CORRUPT, "'%.300s' and '%.300s' don't agree about tensor '%.200s'",
                       found_path(o, found), found_path(o, &found[i]), found->name);
    }
    if (found->file < 0) return FSDP_OK; /* tied: see ties_make */
    entry->type = found->tensor->type;
    box_make(&entry->whole, found->tensor->ndim, NULL, found->whole);
    entry->part = entry->whole;
    TRY(check_whole(o, found, n, boxes, order));
    for (int64_t i = 0; i < n; i++) TRY(piece_make(o, &found[i]));
    return FSDP_OK;
}

static fsdp_status ties_make(struct opening *o)
{
    fsdp_checkpoint *c = o->checkpoint;
    for (int64_t i = 0; i < o->n_found; i++) {
        const struct found *found = &o->found[i];
        if (found->file >= 0) continue;
        int64_t index = checkpoint_find_named(c, found->name, -1), to = checkpoint_find_named(c, found->to, -1);
        struct state_entry *entry = &c->entries[index];
        const struct state_entry *target = to < 0 ? NULL : &c->entries[to];
        if (!target || to >= index || c->first[to] == c->first[to + 1])
            return err(FSDP_ERR_CORRUPT, "'%.400s': '%.150s' is tied to '%.150s', which is no earlier tensor",
                       o->top_path, found->name, found->to);
        entry->type = target->type;
        entry->whole = target->whole;
        entry->part = target->part;
        entry->tied_to = to;
    }
    return FSDP_OK;
}

static fsdp_status entries_make(struct opening *o)
{
    fsdp_checkpoint *c = o->checkpoint;
    int64_t n = o->n_found, most = 1;
    if (n) qsort(o->found, (size_t)n, sizeof *o->found, by_entry);
    int64_t groups = 0;
    for (int64_t i = 0, begin = 0; i < n; i++) {
        int first = i == 0 || o->found[i].rank != o->found[i - 1].rank || o->found[i].index != o->found[i - 1].index;
        if (first) begin = i;
        if (i - begin + 1 > most) most = i - begin + 1;
        if (!first) continue;
        if (o->found[i].rank < 0 && o->found[i].index != groups)
            return err(FSDP_ERR_CORRUPT, "'%.400s': tensor %lld of the checkpoint is in none of its files", o->top_path,
                       (long long)groups);
        groups++;
    }
    c->entries = mem_array((size_t)groups, sizeof *c->entries);
    c->names = mem_array((size_t)groups, sizeof *c->names);
    c->first = mem_array((size_t)groups + 1, sizeof *c->first);
    c->pieces = mem_array((size_t)n, sizeof *c->pieces);
    struct box *boxes = mem_array((size_t)most, sizeof *boxes);
    const struct box **order = mem_array((size_t)most, sizeof *order);
    fsdp_status status = FSDP_OK;
    if (!c->entries || !c->names || !c->first || !c->pieces || !boxes || !order)
        status = mem_none("a checkpoint's entries", (size_t)groups * sizeof *c->entries);
    for (int64_t i = 0, end; status == FSDP_OK && i < n; i = end) {
        for (end = i + 1;
             end < n && o->found[end].rank == o->found[i].rank && o->found[end].index == o->found[i].index;)
            end++;
        status = entry_make(o, &o->found[i], end - i, boxes, order);
    }
    mem_free(boxes);
    mem_free((void *)order);
    if (status != FSDP_OK) return status;
    c->first[c->n_entries] = c->n_pieces;
    for (int64_t i = 0; i < c->n_entries; i++)
        c->names[i] = (struct named){.name = c->entries[i].name, .rank = c->entries[i].rank, .index = i};
    checkpoint_sort_names(c);
    for (int64_t i = 1; i < c->n_entries; i++)
        if (checkpoint_compare_names(&c->names[i - 1], &c->names[i]) == 0)
            return err(FSDP_ERR_CORRUPT, "'%.400s': the name '%.200s' is there twice", o->top_path, c->names[i].name);
    return ties_make(o);
}

/* ---- opening: the forms of a checkpoint */

static fsdp_status open_single(struct opening *o, const char *name)
{
    fsdp_checkpoint *c = o->checkpoint;
    snprintf(o->top_path, sizeof o->top_path, "%s/%s", c->folder.path, name);
    TRY(files_make(o, 1));
    TRY(file_take(o, 0, name));
    const struct manifest *meta = &o->metas[0];
    c->format = FSDP_CHECKPOINT_FULL;
    if (meta->root && (meta->rank >= 0 || meta->part))
        return err(FSDP_ERR_NOT_FOUND, "'%.400s' is one of several files of a checkpoint: open its folder",
                   o->top_path);
    c->ours = meta->root != NULL;
    c->ranks = c->ours ? meta->ranks : 0;
    c->save = meta->save;
    TRY(file_find(o, 0));
    TRY(tied_find(o, meta, o->top_path));
    return json_find(o, meta);
}

/* The files that a manifest or an index of ours names. */
static fsdp_status open_listed(struct opening *o)
{
    fsdp_checkpoint *c = o->checkpoint;
    const struct manifest *top = &o->top;
    int sharded = c->format == FSDP_CHECKPOINT_SHARDED;
    TRY(files_make(o, json_array_size(top->files)));
    if (sharded && c->n_files != top->ranks)
        return err(FSDP_ERR_CORRUPT, "'%.400s' names %d files of %d ranks", o->top_path, c->n_files, top->ranks);
    for (int32_t i = 0; i < c->n_files; i++) {
        struct manifest_file told;
        TRY(manifest_file_get(top, o->top_path, (size_t)i, &told));
        TRY(file_take(o, i, told.name));
        const struct manifest *meta = &o->metas[i];
        const char *path = c->files[i].path;
        if (c->files[i].bytes != told.bytes)
            return err(FSDP_ERR_CORRUPT, "'%.400s' has %lld bytes, but was written with %lld", path,
                       (long long)c->files[i].bytes, (long long)told.bytes);
        if (o->headers[i].header_sum != told.header_sum)
            return err(FSDP_ERR_CORRUPT, "'%.400s': its header is not what was written: its checksum differs", path);
        if (!meta->root || meta->save != top->save || meta->ranks != top->ranks || meta->rank != (sharded ? i : -1))
            return err(FSDP_ERR_CORRUPT, "'%.400s' is of another save, or another rank's", path);
        TRY(file_find(o, i));
    }
    c->ours = 1;
    c->ranks = top->ranks;
    c->save = top->save;
    TRY(tied_find(o, top, o->top_path));
    return json_find(o, top);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A foreign index: the files that its map names, in order of their names. */
static fsdp_status open_mapped(struct opening *o)
{
    fsdp_checkpoint *c = o->checkpoint;
    const char *name;
    json_t *file;
    size_t n = 0, n_files = 0;
    const char **files = mem_array(json_object_size(o->top.map), sizeof *files);
    if (!files) return mem_none("an index", json_object_size(o->top.map));
    json_object_foreach((json_t *)(uintptr_t)o->top.map, name, file) files[n++] = json_string_value(file);
    if (n) qsort(files, n, sizeof *files, by_text);
    for (size_t i = 0; i < n; i++)
        if (!i || strcmp(files[i], files[i - 1]) != 0) files[n_files++] = files[i];
    fsdp_status status = files_make(o, n_files);
    for (size_t i = 0; status == FSDP_OK && i < n_files; i++) {
        status = file_take(o, (int32_t)i, files[i]);
        /* What another library wrote may name this one's files; what they say then counts for nothing. */
        manifest_free(&o->metas[i]);
        if (status == FSDP_OK) status = file_find(o, (int32_t)i);
    }
    mem_free((void *)files);
    TRY(status);
    if ((size_t)o->n_found == n) return FSDP_OK;
    json_object_foreach((json_t *)(uintptr_t)o->top.map, name, file)
    {
        int there = 0;
        for (int64_t i = 0; i < o->n_found && !there; i++) there = strcmp(o->found[i].name, name) == 0;
        if (!there)
            return err(FSDP_ERR_CORRUPT, "'%.400s/%.255s' lacks tensor '%.200s', which the index says is there",
                       c->folder.path, json_string_value(file), name);
    }
    return err(FSDP_ERR_CORRUPT, "'%.400s' does not fit its files", o->top_path);
}

static fsdp_status open_manifest(struct opening *o, const char *text, size_t bytes)
{
    TRY(manifest_parse(o->top_path, "the manifest", text, bytes, &o->top));
    const char *mark = json_string_value(json_object_get(o->top.root, "libfsdp"));
    if (!mark || strcmp(mark, "checkpoint") != 0)
        return err(FSDP_ERR_CORRUPT, "'%.400s' is not the manifest of a checkpoint", o->top_path);
    o->checkpoint->format = FSDP_CHECKPOINT_SHARDED;
    return open_listed(o);
}

static fsdp_status open_index(struct opening *o, const char *text, size_t bytes)
{
    int ours;
    TRY(index_parse(o->top_path, text, bytes, &o->top, &ours));
    o->checkpoint->format = FSDP_CHECKPOINT_FULL;
    if (!ours) return open_mapped(o);
    TRY(open_listed(o));
    int64_t with_values = 0;
    for (int64_t i = 0; i < o->n_found; i++) with_values += o->found[i].file >= 0;
    if ((size_t)with_values == json_object_size(o->top.map)) return FSDP_OK;
    return err(FSDP_ERR_CORRUPT, "'%.400s' maps %zu tensors to files, which have %lld of them", o->top_path,
               json_object_size(o->top.map), (long long)with_values);
}

struct only {
    char name[FILE_NAME_MOST + 1];
    int n, parts;
};

static fsdp_status only_look(const char *name, void *user)
{
    struct only *only = user;
    uint64_t save;
    if (!name_ends(name, ".safetensors") || name[0] == '.') return FSDP_OK;
    if (name_is_of_rank(name, &save) || name_is_of_part(name, &save)) {
        only->parts++;
        return FSDP_OK;
    }
    only->n++;
    snprintf(only->name, sizeof only->name, "%s", name);
    return FSDP_OK;
}

/* A folder, once. *again: what was there changed meanwhile. */
static fsdp_status open_folder_once(struct opening *o, int *again)
{
    static const char *const tops[] = {MANIFEST_NAME, INDEX_NAME};
    fsdp_checkpoint *c = o->checkpoint;
    char *text = NULL, *now = NULL;
    size_t bytes, bytes_now;
    for (int i = 0; i < 2; i++) {
        fsdp_status status = file_text(&c->folder, tops[i], FILE_JSON_MOST, &text, &bytes);
        if (status == FSDP_ERR_NOT_FOUND) continue;
        TRY(status);
        snprintf(o->top_path, sizeof o->top_path, "%s/%s", c->folder.path, tops[i]);
        status = i ? open_index(o, text, bytes) : open_manifest(o, text, bytes);
        if (status == FSDP_ERR_NOT_FOUND) {
            /* A file that is named is not there. A save that ended meanwhile removes those of the one before. */
            fsdp_error_info failure;
            err_save(&failure);
            *again = file_text(&c->folder, tops[i], FILE_JSON_MOST, &now, &bytes_now) != FSDP_OK ||
                     bytes != bytes_now || memcmp(text, now, bytes) != 0;
            mem_free(now);
            status =
                err(FSDP_ERR_CORRUPT, "a file that '%.400s' names is missing: %.500s", o->top_path, failure.message);
        }
        mem_free(text);
        return status;
    }
    int fd;
    int64_t size;
    if (os_file_open(&c->folder, MODEL_NAME, &fd, &size) == FSDP_OK) {
        os_close(&fd);
        return open_single(o, MODEL_NAME);
    }
    struct only only = {.n = 0};
    TRY(os_folder_list(&c->folder, only_look, &only));
    if (only.n == 1) return open_single(o, only.name);
    return err(FSDP_ERR_NOT_FOUND,
               "no checkpoint in '%.400s': there is neither " MANIFEST_NAME ", nor " INDEX_NAME ", nor " MODEL_NAME
               ", %s%s",
               c->folder.path, only.n ? "and more than one *.safetensors" : "nor another *.safetensors",
               only.parts ? " (but files of a save that was not completed)" : "");
}

static void opening_free(struct opening *o)
{
    for (int32_t i = 0; o->headers && i < o->checkpoint->n_files; i++) st_free(&o->headers[i]);
    for (int32_t i = 0; o->metas && i < o->checkpoint->n_files; i++) manifest_free(&o->metas[i]);
    manifest_free(&o->top);
    mem_free(o->headers);
    mem_free(o->metas);
    mem_free(o->found);
    *o = (struct opening){.checkpoint = o->checkpoint};
}

static fsdp_status open_path(fsdp_checkpoint *c, const char *given)
{
    enum os_kind kind;
    size_t length = strlen(given);
    char path[OS_PATH_MOST + 1];
    CHECK_ARG(length > 0 && length <= OS_PATH_MOST, "path has %zu bytes: 1 to %d", length, OS_PATH_MOST);
    while (length > 1 && given[length - 1] == '/') length--; /* as a save does, behind a file's name, too */
    snprintf(path, sizeof path, "%.*s", (int)length, given);
    TRY(os_path_kind(path, &kind));
    if (kind == OS_NOTHING) return err(FSDP_ERR_NOT_FOUND, "there is no '%.600s'", path);
    if (kind == OS_OTHER) return err(FSDP_ERR_SYSTEM, "'%.600s' is neither a file nor a folder", path);
    struct opening *o = mem_alloc(sizeof *o);
    if (!o) return mem_none("opening a checkpoint", sizeof *o);
    o->checkpoint = c;
    fsdp_status status;
    if (kind == OS_FILE) {
        const char *slash = strrchr(path, '/');
        char folder[OS_PATH_MOST + 1] = ".";
        if (slash) snprintf(folder, sizeof folder, "%.*s", slash > path ? (int)(slash - path) : 1, path);
        status = os_folder_open(folder, &c->folder);
        if (status == FSDP_OK) status = open_single(o, slash ? slash + 1 : path);
    } else {
        int again = 1;
        status = os_folder_open(path, &c->folder);
        for (int tries = 0; status == FSDP_OK && again && tries < 8; tries++) {
            again = 0;
            opening_free(o);
            checkpoint_empty(c);
            status = open_folder_once(o, &again);
            if (again && tries < 7) status = FSDP_OK;
        }
    }
    if (status == FSDP_OK) status = entries_make(o);
    for (int32_t i = 0; i < c->n_files; i++) c->checksums = c->ours;
    opening_free(o);
    mem_free(o);
    return status;
}

fsdp_status checkpoint_open(const char *path, fsdp_checkpoint **out)
{
    fsdp_checkpoint *c = mem_alloc(sizeof *c);
    if (!c) return mem_none("a checkpoint", sizeof *c);
    ref_init(&c->ref, REF_CHECKPOINT);
    c->folder.fd = -1;
    fsdp_status status = open_path(c, path);
    if (status != FSDP_OK) {
        fsdp_error_info failure;
        err_save(&failure);
        checkpoint_release(c);
        return err_restore(&failure);
    }
    *out = c;
    return FSDP_OK;
}
