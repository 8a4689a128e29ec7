/* Checkpoints, read: see checkpoint_open.c for how one is opened.
 *
 * Reading goes by blocks of a part, each of which has a checksum: a block that is wanted whole, and lies so in the
 * destination, is read there and looked at there; of the others the wanted elements are copied from a buffer. Files are
 * read, not mapped: one that is cut short by somebody meanwhile is an error and no signal.
 *
 * Threads: nothing changes after opening but the spare buffer, which is taken and given back by one atomic exchange.
 */
#include "state/checkpoint.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int checkpoint_is(const fsdp_checkpoint *checkpoint)
{
    return checkpoint && ref_is(&checkpoint->ref, REF_CHECKPOINT);
}

/* ---- the object */

void checkpoint_empty(fsdp_checkpoint *c)
{
    for (int32_t i = 0; i < c->n_files; i++) {
        os_close(&c->files[i].fd);
        mem_free(c->files[i].name);
        mem_free(c->files[i].path);
    }
    for (int64_t i = 0; i < c->n_entries; i++) mem_free(c->entries[i].name);
    for (int64_t i = 0; i < c->n_pieces; i++) mem_free((void *)(uintptr_t)c->pieces[i].sums);
    for (int64_t i = 0; i < c->n_json; i++) {
        mem_free(c->json[i].name);
        mem_free(c->json[i].text);
    }
    mem_free(c->files);
    mem_free(c->entries);
    mem_free(c->first);
    mem_free(c->pieces);
    mem_free(c->names);
    mem_free(c->json);
    c->files = NULL;
    c->entries = NULL;
    c->first = NULL;
    c->pieces = NULL;
    c->names = NULL;
    c->json = NULL;
    c->n_files = 0;
    c->n_entries = c->n_pieces = c->n_json = c->bytes = 0;
}

void checkpoint_release(fsdp_checkpoint *c)
{
    if (!ref_put(&c->ref)) return;
    checkpoint_empty(c);
    os_folder_close(&c->folder);
    char *spare = atomic_load(&c->spare);
    if (spare) os_unmap(spare, (size_t)FILE_BLOCK);
    mem_free(c);
}

/* ---- names */

int checkpoint_compare_names(const struct named *x, const struct named *y)
{
    int order = strcmp(x->name, y->name);
    return order ? order : x->rank < y->rank ? -1 : x->rank > y->rank;
}

static int by_name(const void *a, const void *b)
{
    return checkpoint_compare_names(a, b);
}

int64_t checkpoint_find_named(const fsdp_checkpoint *c, const char *name, int32_t rank)
{
    struct named key = {.name = name, .rank = rank};
    const struct named *at = bsearch(&key, c->names, (size_t)c->n_entries, sizeof *c->names, by_name);
    return at ? at->index : -1;
}

void checkpoint_sort_names(fsdp_checkpoint *c)
{
    if (c->n_entries) qsort(c->names, (size_t)c->n_entries, sizeof *c->names, by_name);
}

/* ---- questions */

void checkpoint_query(const fsdp_checkpoint *c, fsdp_checkpoint_info *info)
{
    *info = (fsdp_checkpoint_info){.struct_size = sizeof *info,
                                   .format = c->format,
                                   .ranks = c->ranks,
                                   .checksums = c->checksums,
                                   .n_entries = c->n_entries,
                                   .n_json = c->n_json,
                                   .n_files = c->n_files,
                                   .bytes = c->bytes};
    if (c->ours) snprintf(info->save_id, sizeof info->save_id, "%016llx", (unsigned long long)c->save);
}

static fsdp_status check_index(int64_t index, int64_t n, const char *what)
{
    if (index >= 0 && index < n) return FSDP_OK;
    return err(FSDP_ERR_INVALID, "index is %lld: the checkpoint has %lld %s", (long long)index, (long long)n, what);
}

fsdp_status checkpoint_entry(const fsdp_checkpoint *c, int64_t index, fsdp_entry *entry)
{
    TRY(check_index(index, c->n_entries, "entries"));
    const struct state_entry *e = &c->entries[index];
    state_entry_tell(e, e->tied_to < 0 ? NULL : c->entries[e->tied_to].name, entry);
    return FSDP_OK;
}

fsdp_status checkpoint_find(const fsdp_checkpoint *c, const char *name, int32_t rank, int64_t *index)
{
    CHECK_ARG(rank >= -1, "rank is %d: -1 for a tensor, else the rank whose entry is meant", rank);
    int64_t at = checkpoint_find_named(c, name, rank);
    if (at < 0 && rank < 0) return err(FSDP_ERR_NOT_FOUND, "the checkpoint has no tensor '%.400s'", name);
    if (at < 0) return err(FSDP_ERR_NOT_FOUND, "the checkpoint has no entry '%.400s' of rank %d", name, rank);
    *index = at;
    return FSDP_OK;
}

fsdp_status checkpoint_json(const fsdp_checkpoint *c, int64_t index, const char **name, const char **text)
{
    TRY(check_index(index, c->n_json, "JSON values"));
    *name = c->json[index].name;
    *text = c->json[index].text;
    return FSDP_OK;
}

/* The entry that has the values. */
static int64_t valued(const fsdp_checkpoint *c, int64_t index)
{
    return c->entries[index].tied_to < 0 ? index : c->entries[index].tied_to;
}

fsdp_status checkpoint_n_parts(const fsdp_checkpoint *c, int64_t index, int64_t *n)
{
    TRY(check_index(index, c->n_entries, "entries"));
    index = valued(c, index);
    *n = c->first[index + 1] - c->first[index];
    return FSDP_OK;
}

fsdp_status checkpoint_part_of(const fsdp_checkpoint *c, int64_t index, int64_t part, fsdp_checkpoint_part *out)
{
    int64_t n;
    TRY(checkpoint_n_parts(c, index, &n));
    CHECK_ARG(part >= 0 && part < n, "part is %lld: entry '%.200s' has %lld", (long long)part, c->entries[index].name,
              (long long)n);
    index = valued(c, index);
    const struct stored *piece = &c->pieces[c->first[index] + part];
    *out = (fsdp_checkpoint_part){.struct_size = sizeof *out,
                                  .file = c->files[piece->file].name,
                                  .ndim = c->entries[index].whole.ndim,
                                  .offset = piece->at,
                                  .length = piece->size,
                                  .bytes = piece->bytes};
    return FSDP_OK;
}

/* ---- reading */

static fsdp_status buffer_take(const fsdp_checkpoint *c, char **out)
{
    void *at = atomic_exchange(&((fsdp_checkpoint *)(uintptr_t)c)->spare, NULL);
    if (!at) TRY(os_map_anonymous((size_t)FILE_BLOCK, &at));
    *out = at;
    return FSDP_OK;
}

static void buffer_give(const fsdp_checkpoint *c, char *buffer)
{
    if (!buffer) return;
    buffer = atomic_exchange(&((fsdp_checkpoint *)(uintptr_t)c)->spare, buffer);
    if (buffer) os_unmap(buffer, (size_t)FILE_BLOCK);
}

/* Block `index` of a piece, to `to`, and as it was written. */
static fsdp_status block_read(const fsdp_checkpoint *c, const char *name, const struct stored *piece, int64_t index,
                              void *to)
{
    const struct part_file *file = &c->files[piece->file];
    int64_t at = index * FILE_BLOCK, bytes = piece->bytes - at < FILE_BLOCK ? piece->bytes - at : FILE_BLOCK;
    fsdp_status status = os_file_read(file->fd, file->path, to, (size_t)bytes, piece->begin + at);
    if (status != FSDP_OK) return err_prefix(status, "tensor '%.200s': ", name);
    if (!c->checksums || block_sum(to, (size_t)bytes) == piece->sums[index]) return FSDP_OK;
    return err(FSDP_ERR_CORRUPT,
               "'%.400s': tensor '%.200s' is damaged: bytes %lld to %lld of the file are not what was "
               "written",
               file->path, name, (long long)(piece->begin + at), (long long)(piece->begin + at + bytes));
}

/* What a read wants of one piece. */
struct wanted {
    const char *name;
    const struct stored *piece;
    struct box box;    /* the piece's, in the whole */
    struct box common; /* in the whole, too */
    struct tensor out; /* of common's size */
    enum dtype type;
    int64_t low, high; /* in elements of the piece: all that is wanted lies between */
    int dense;         /* all of that is wanted, and lies in `out` so */
};

static int64_t place_in(const struct box *box, const int64_t *at)
{
    int64_t place = 0;
    for (int32_t d = 0; d < box->ndim; d++) place = place * box->size[d] + (at[d] - box->at[d]);
    return place;
}

/* Copy what is wanted of elements [from, to) of the piece, which are in `data`; NULL: only say whether anything is. */
static int range_copy(const struct wanted *w, int64_t from, int64_t to, char *data)
{
    size_t size = dtype_size(w->type);
    int any = 0;
    for (int64_t at = from; at < to;) {
        struct box rows, part;
        int64_t n = box_rows(&w->box, at, to, &rows);
        if (box_common(&rows, &w->common, &part)) {
            any = 1;
            if (!data) return 1;
            struct tensor source, out = w->out;
            /* A view with the piece's strides, of the rows that are here. */
            tensor_make(&source, data + (size_t)(at - from) * size, w->type, rows.ndim, rows.size);
            box_narrow(&source, &rows, &part);
            box_narrow(&out, &w->common, &part);
            tensor_copy(&out, &source);
        }
        at += n;
    }
    return any;
}

static fsdp_status wanted_read(const fsdp_checkpoint *c, const struct wanted *w)
{
    const struct stored *piece = w->piece;
    int64_t size = (int64_t)dtype_size(w->type), per_block = FILE_BLOCK / size, low = w->low * size,
            high = w->high * size;
    if (w->dense && !c->checksums) {
        const struct part_file *file = &c->files[piece->file];
        fsdp_status status = os_file_read(file->fd, file->path, w->out.data, (size_t)(high - low), piece->begin + low);
        return status == FSDP_OK ? status : err_prefix(status, "tensor '%.200s': ", w->name);
    }
    char *buffer = NULL;
    fsdp_status status = FSDP_OK;
    for (int64_t block = w->low / per_block; status == FSDP_OK && block * per_block < w->high; block++) {
        int64_t begin = block * FILE_BLOCK, end = begin + FILE_BLOCK < piece->bytes ? begin + FILE_BLOCK : piece->bytes;
        if (w->dense && low <= begin && end <= high) {
            status = block_read(c, w->name, piece, block, w->out.data + (begin - low));
            continue;
        }
        int64_t from = begin > low ? begin : low, to = end < high ? end : high;
        if (!w->dense && !range_copy(w, from / size, to / size, NULL)) continue;
        if (!buffer) status = buffer_take(c, &buffer);
        if (status == FSDP_OK) status = block_read(c, w->name, piece, block, buffer);
        if (status != FSDP_OK) break;
        if (w->dense)
            memcpy(w->out.data + (from - low), buffer + (from - begin), (size_t)(to - from));
        else
            range_copy(w, from / size, to / size, buffer + (from - begin));
    }
    buffer_give(c, buffer);
    return status;
}

/* want: in the whole; out: of its size. */
static fsdp_status entry_read(const fsdp_checkpoint *c, int64_t index, const struct box *want, const struct tensor *out)
{
    const struct state_entry *entry = &c->entries[index];
    for (int64_t i = c->first[index]; i < c->first[index + 1]; i++) {
        struct wanted w = {.name = entry->name, .piece = &c->pieces[i], .type = entry->type, .out = *out};
        box_make(&w.box, want->ndim, w.piece->at, w.piece->size);
        if (!w.piece->bytes || !box_common(&w.box, want, &w.common)) continue;
        box_narrow(&w.out, want, &w.common);
        int64_t last[TENSOR_MAX_DIMS];
        for (int32_t d = 0; d < want->ndim; d++) last[d] = w.common.at[d] + w.common.size[d] - 1;
        w.low = place_in(&w.box, w.common.at);
        w.high = place_in(&w.box, last) + 1;
        w.dense = w.out.contiguous && w.out.type == entry->type && w.high - w.low == box_count(&w.common);
        TRY(wanted_read(c, &w));
    }
    return FSDP_OK;
}

fsdp_status checkpoint_read(const fsdp_checkpoint *c, int64_t index, const struct box *want, const struct tensor *out)
{
    TRY(check_index(index, c->n_entries, "entries"));
    const struct state_entry *entry = &c->entries[index];
    CHECK_ARG(want->ndim == entry->whole.ndim, "tensor has %d dimensions, but entry '%.200s' has %d", want->ndim,
              entry->name, entry->whole.ndim);
    for (int32_t d = 0; d < want->ndim; d++)
        CHECK_ARG(want->at[d] >= 0 && want->size[d] <= entry->whole.size[d] &&
                      want->at[d] <= entry->whole.size[d] - want->size[d],
                  "entry '%.200s': %lld elements of dimension %d are wanted from %lld on, of which there are %lld",
                  entry->name, (long long)want->size[d], d, (long long)want->at[d], (long long)entry->whole.size[d]);
    CHECK_ARG(out->type == entry->type || (dtype_is_float(out->type) && dtype_is_float(entry->type)),
              "entry '%.200s' is %s, but tensor is %s: only floats are cast", entry->name, dtype_name(entry->type),
              dtype_name(out->type));
    if (!out->count) return FSDP_OK;
    return entry_read(c, valued(c, index), want, out);
}

/* ---- loading */

static const struct state_entry *source_entry(const struct source *source, int64_t index)
{
    return &((const fsdp_checkpoint *)source->of)->entries[index];
}

static int64_t source_find(const struct source *source, const char *name)
{
    return checkpoint_find_named(source->of, name, -1);
}

static fsdp_status source_read(const struct source *source, int64_t index, const struct box *want,
                               const struct tensor *out)
{
    return checkpoint_read(source->of, index, want, out);
}

static void source_json(const struct source *source, int64_t index, const char **name, const char **text)
{
    const fsdp_checkpoint *c = source->of;
    *name = c->json[index].name;
    *text = c->json[index].text;
}

fsdp_status checkpoint_load(const fsdp_checkpoint *c, fsdp_state_dict *into, const fsdp_load_options *options)
{
    struct source source = {.what = "the checkpoint",
                            .n = c->n_entries,
                            .entry = source_entry,
                            .find = source_find,
                            .read = source_read,
                            .n_json = c->n_json,
                            .json = source_json,
                            .of = c};
    return state_load(&source, into, options);
}

/* ---- verifying */

fsdp_status checkpoint_verify(const fsdp_checkpoint *c, fsdp_progress_fn on_progress, void *user)
{
    char *buffer;
    int64_t done = 0;
    TRY(buffer_take(c, &buffer));
    fsdp_status status = FSDP_OK;
    for (int64_t e = 0; status == FSDP_OK && e < c->n_entries; e++)
        for (int64_t i = c->first[e]; status == FSDP_OK && i < c->first[e + 1]; i++)
            for (int64_t b = 0; status == FSDP_OK && b < blocks_of(c->pieces[i].bytes); b++) {
                status = block_read(c, c->entries[e].name, &c->pieces[i], b, buffer);
                int64_t left = c->pieces[i].bytes - b * FILE_BLOCK;
                done += left < FILE_BLOCK ? left : FILE_BLOCK;
                if (status == FSDP_OK && on_progress && on_progress(done, c->bytes, user) != 0)
                    status = err(FSDP_ERR_CALLBACK, "on_progress ended verifying after %lld of %lld bytes",
                                 (long long)done, (long long)c->bytes);
            }
    buffer_give(c, buffer);
    return status;
}
