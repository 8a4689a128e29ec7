/* A state dict into files, by all ranks: abi/checkpoint.md has the steps.
 *
 * All that can be wrong with the call, and all memory, is found out before the ranks agree that they begin; from there
 * on each step ends with all telling each other how they fared, through operations that were prepared beforehand. So a
 * failure on one rank ends the save on all, and nobody waits for one that has gone another way.
 *
 * What makes the new checkpoint the one is one rename (or, where one file takes the place of several, one removal) by
 * rank 0, after all else is on the disk. Until then a failure removes what is new, after it nothing. A rank that can't
 * tell whether it came to that leaves its file: what no manifest names is removed by the next save.
 *
 * Threads: the caller's; in the background one of the save's own, which alone uses its group, and works on copies.
 * `lock` guards done, abandoned and the failure. Ownership: `ref` counts the host's handles; a save that goes on
 * without them is freed by its thread.
 */
#include "state/files.h"

#include "base/log.h"
#include "base/mem.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TELL_BEGIN, TELL_WRITTEN, TELL_DONE, TELLS };

struct told {
    fsdp_status status;
    int32_t complete; /* TELL_WRITTEN: my file is; TELL_DONE: the new checkpoint is the one */
    uint64_t number[2];
    char message[500];
};
_Static_assert(sizeof(struct told) <= TRANSPORT_PAYLOAD, "what a rank tells must fit into an exchange");

/* Where the values of an entry go to. */
struct place {
    int32_t file;
    int64_t part;
};

struct fsdp_save {
    struct ref ref;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int done, abandoned, threaded;
    pthread_t thread;
    fsdp_error_info failure;
    _Atomic int64_t written;
    int64_t total;

    fsdp_group *group; /* NULL: one process */
    int own_group;
    int32_t rank, size;
    fsdp_save_options options;
    const fsdp_state_dict *dict; /* the caller's, or `copy` */
    fsdp_state_dict copy;
    struct state_entry *copied;
    char *strings; /* its names and JSON */
    void *values;  /* and values */
    size_t values_bytes;
    struct tensor *data; /* SHARDED: of each entry, what this rank writes */
    struct state_layout *layout;
    fsdp_work *tells[TELLS];
    int64_t pulse_ns, pulse_at; /* how often a writer tells that it goes on, and when next; 0: never */
    int over;                   /* writing has ended in a failure that was told, or could not be */

    struct os_folder folder;
    int locked;
    char file_name[SAVE_NAME]; /* FULL into one file that the path names; else "" */
    uint64_t save;
    struct save_file *files;
    int32_t n_files;
    struct place *places; /* FULL, of each entry */
    struct text rest;
    char *buffer;   /* of files */
    void *gathered; /* FULL: one whole tensor */
    size_t gathered_bytes;
    int had_index; /* FULL: the checkpoint there is one of several files */
    int committed;
    char path[OS_PATH_MOST + 1]; /* of the folder */
};

int save_is(const fsdp_save *save)
{
    return save && ref_is(&save->ref, REF_SAVE);
}

static int is_full(const fsdp_save *save)
{
    return save->options.format == FSDP_CHECKPOINT_FULL;
}

/* ---- telling each other */

/* All ranks' `told`; an error is the first one that any rank tells, on all ranks alike. *heard: that was told. */
static fsdp_status tell(fsdp_save *save, int which, fsdp_status status, struct told *mine, struct told *all, int *heard)
{
    fsdp_error_info failure;
    err_save(&failure);
    mine->status = status;
    if (status != FSDP_OK) snprintf(mine->message, sizeof mine->message, "%.490s", failure.message);
    *heard = 0;
    if (!save->group)
        all[0] = *mine;
    else
        TRY(group_exchange_prepared(save->group, &save->tells[which], FSDP_OP_SAVE_STATE, HASH_START + (uint64_t)which,
                                    mine, sizeof *mine, all));
    *heard = 1;
    for (int r = 0; r < save->size; r++) {
        if (all[r].status == FSDP_OK) continue;
        if (r == save->rank) return err_restore(&failure);
        all[r].message[sizeof all[r].message - 1] = 0;
        return err(all[r].status, "saving to '%.200s': rank %d reported: %s", save->path, r, all[r].message);
    }
    return FSDP_OK;
}

/* ---- what is in the folder */

/* Words in front: that a thing is in the way. */
static fsdp_status in_the_way(const fsdp_save *save, const char *name, const char *what)
{
    return err(FSDP_ERR_INVALID, "'%.400s/%.255s' is %s: save to another path, or remove it first", save->folder.path,
               name, what);
}

/* *is: 0: there is none, 1: this library's, of *id, -1: damaged, but this library's. Else: in the way. */
static fsdp_status look_at_manifest(const fsdp_save *save, int *is, uint64_t *id)
{
    static const char begins[] = "{\"libfsdp\":\"checkpoint\"";
    char *text;
    size_t bytes;
    *is = 0;
    fsdp_status status = file_text(&save->folder, MANIFEST_NAME, FILE_JSON_MOST, &text, &bytes);
    if (status == FSDP_ERR_NOT_FOUND) return FSDP_OK;
    TRY(status);
    struct manifest m;
    if (bytes < sizeof begins - 1 || memcmp(text, begins, sizeof begins - 1) != 0)
        status = in_the_way(save, MANIFEST_NAME, "not this library's");
    else if ((status = manifest_parse(MANIFEST_NAME, "it", text, bytes, &m)) == FSDP_OK) {
        *is = 1;
        *id = m.save;
        manifest_free(&m);
    } else if (status == FSDP_ERR_CORRUPT) {
        *is = -1;
        status = FSDP_OK;
    }
    mem_free(text);
    return status;
}

static fsdp_status look_at_index(const fsdp_save *save, int *is, uint64_t *id)
{
    char *text;
    size_t bytes;
    *is = 0;
    fsdp_status status = file_text(&save->folder, INDEX_NAME, FILE_JSON_MOST, &text, &bytes);
    if (status == FSDP_ERR_NOT_FOUND) return FSDP_OK;
    TRY(status);
    struct manifest m;
    int ours = 0;
    status = index_parse(INDEX_NAME, text, bytes, &m, &ours);
    mem_free(text);
    if (status == FSDP_ERR_NOMEM) return status;
    if (status != FSDP_OK || !ours) {
        if (status == FSDP_OK) manifest_free(&m);
        return in_the_way(save, INDEX_NAME, "not this library's");
    }
    *is = 1;
    *id = m.save;
    manifest_free(&m);
    return FSDP_OK;
}

/* A file of whole tensors by itself, which a new one may take the place of. */
static fsdp_status look_at_model(const fsdp_save *save, const char *name, int *is)
{
    int fd;
    int64_t bytes;
    *is = 0;
    fsdp_status status = os_file_open(&save->folder, name, &fd, &bytes);
    if (status == FSDP_ERR_NOT_FOUND) return FSDP_OK;
    TRY(status);
    struct st_file header;
    status = st_read(fd, name, bytes, &header);
    os_close(&fd);
    int ours = status == FSDP_OK && header.fsdp;
    if (status == FSDP_OK) st_free(&header);
    if (status == FSDP_ERR_NOMEM || status == FSDP_ERR_SYSTEM) return status;
    if (!ours) return in_the_way(save, name, "not this library's");
    *is = 1;
    return FSDP_OK;
}

/* Files of saves, by their names: to be removed unless they are of save `keep`. */
struct sweep {
    const fsdp_save *save;
    uint64_t keep;
    int keep_all, keep_model, look; /* look: whether anything else is in the way, and remove nothing */
};

static int is_partial(const char *name)
{
    char of[SAVE_NAME];
    uint64_t save;
    size_t n = strlen(name);
    if (name[0] != '.' || !name_ends(name, ".partial") || n - 9 >= sizeof of) return 0;
    snprintf(of, sizeof of, "%.*s", (int)(n - 9), name + 1);
    return name_is_of_rank(of, &save) || name_is_of_part(of, &save) || strcmp(of, MANIFEST_NAME) == 0 ||
           strcmp(of, INDEX_NAME) == 0 || strcmp(of, MODEL_NAME) == 0;
}

static fsdp_status sweep_one(const char *name, void *user)
{
    const struct sweep *sweep = user;
    const fsdp_save *save = sweep->save;
    uint64_t id = 0;
    int of_rank = name_is_of_rank(name, &id), of_part = name_is_of_part(name, &id),
        model = strcmp(name, MODEL_NAME) == 0;
    if (sweep->look) {
        if (!name_ends(name, ".safetensors") || name[0] == '.' || of_rank) return FSDP_OK;
        if (is_full(save) && (of_part || model)) return FSDP_OK;
        return in_the_way(save, name, of_part || model ? "of a full checkpoint" : "not this library's");
    }
    int old = is_partial(name) || (!sweep->keep_all && (of_rank || of_part) && id != sweep->keep) ||
              (!sweep->keep_all && model && !sweep->keep_model);
    if (old && os_file_remove(&save->folder, name) != FSDP_OK)
        LOG(FSDP_LOG_WARN, "a file that is left of an earlier save stays: %s", err_message());
    return FSDP_OK;
}

/* Refuse a folder that has other things in it, and remove what dead saves left. Rank 0, under the lock. */
static fsdp_status folder_check(fsdp_save *save)
{
    int manifest, index = 0, model = 0;
    uint64_t id = 0;
    if (save->file_name[0]) {
        char partial[SAVE_NAME + 16];
        TRY(look_at_model(save, save->file_name, &model));
        snprintf(partial, sizeof partial, ".%s.partial", save->file_name);
        return os_file_remove(&save->folder, partial);
    }
    TRY(look_at_manifest(save, &manifest, &id));
    if (manifest && is_full(save)) return in_the_way(save, MANIFEST_NAME, "of a sharded checkpoint");
    TRY(look_at_index(save, &index, &id));
    if (index && !is_full(save)) return in_the_way(save, INDEX_NAME, "of a full checkpoint");
    struct sweep sweep = {.save = save, .look = 1};
    TRY(os_folder_list(&save->folder, sweep_one, &sweep));
    if (is_full(save)) TRY(look_at_model(save, MODEL_NAME, &model));
    save->had_index = index;
    sweep = (struct sweep){.save = save, .keep = id, .keep_all = manifest < 0, .keep_model = !index};
    if (!manifest && !index) sweep.keep = 0; /* of no save */
    return os_folder_list(&save->folder, sweep_one, &sweep);
}

/* The new checkpoint is the one: what else there is goes. */
static void folder_clean(fsdp_save *save, int keep_model)
{
    if (save->file_name[0]) return;
    struct sweep sweep = {.save = save, .keep = save->save, .keep_model = keep_model};
    if (os_folder_list(&save->folder, sweep_one, &sweep) != FSDP_OK)
        LOG(FSDP_LOG_WARN, "files of an earlier save may stay: %s", err_message());
}

/* Rank 0: the folder, for this save alone. */
static fsdp_status folder_begin(fsdp_save *save)
{
    TRY(os_folder_make(save->path));
    TRY(os_folder_open(save->path, &save->folder));
    TRY(os_folder_lock(&save->folder, &save->locked));
    if (!save->locked)
        return err(FSDP_ERR_STATE, "another save into '%.600s' is under way: wait until it is complete", save->path);
    if (save->locked < 0)
        LOG(FSDP_LOG_WARN, "the file system of '%s' has no locks: two saves into it at once would not be noticed",
            save->path);
    TRY(folder_check(save));
    do os_random(&save->save, sizeof save->save);
    while (!save->save);
    return FSDP_OK;
}

static fsdp_status folder_sync(const fsdp_save *save)
{
    return save->options.no_sync ? FSDP_OK : os_folder_sync(&save->folder);
}

/* ---- each rank its own file */

/* A round in which each tells whether its file is complete, or why it never will be. There are as many as it takes: the
 * operation of the next one is prepared while there is still one to tell that in. */
static fsdp_status round_of_writers(fsdp_save *save, fsdp_status status, struct told *mine, struct told *all,
                                    int *heard)
{
    fsdp_work *next = NULL;
    if (status == FSDP_OK && save->group) status = group_prepare(save->group, &next);
    status = tell(save, TELL_WRITTEN, status, mine, all, heard);
    work_release(save->tells[TELL_WRITTEN]);
    save->tells[TELL_WRITTEN] = next;
    return status;
}

/* Between blocks. Those that are done wait for those that are not, and would take one for dead of which they hear
 * nothing for longer than the group's timeout; and one hears so that another has failed. */
static fsdp_status pulse(void *user)
{
    fsdp_save *save = user;
    if (!save->pulse_ns || os_now_ns() < save->pulse_at) return FSDP_OK;
    struct told mine = {0}, all[GROUP_MAX_RANKS];
    int heard;
    fsdp_status status = round_of_writers(save, FSDP_OK, &mine, all, &heard);
    save->over = status != FSDP_OK;
    save->pulse_at = os_now_ns() + save->pulse_ns;
    return status;
}

static fsdp_status write_own_file(fsdp_save *save)
{
    struct save_file *file = save->files;
    if (save->rank != 0) TRY(os_folder_open(save->path, &save->folder));
    file->save = save->save;
    file->pulse = pulse;
    file->user = save;
    name_of_rank(file->name, save->rank, save->size, save->save);
    TRY(save_file_begin(file));
    for (int64_t i = 0; i < file->n; i++) TRY(save_file_put(file, i, &save->data[file->parts[i].entry]));
    TRY(save_file_finish(file));
    return folder_sync(save);
}

static void tell_file(struct text *t, int first, const char *name, int64_t bytes, uint64_t header_sum)
{
    text_add(t, first ? "{\"name\":" : ",{\"name\":");
    text_string(t, name, strlen(name));
    text_add(t, ",\"bytes\":");
    text_number(t, bytes);
    text_add(t, ",\"header\":\"");
    text_hex(t, header_sum);
    text_add(t, "\"}");
}

/* Rank 0, when all files are there. */
static fsdp_status write_manifest(fsdp_save *save, const struct told *all)
{
    struct text t = {0};
    manifest_begin(&t, "\"libfsdp\":\"checkpoint\",", save->save, -1, save->size);
    text_add(&t, ",\"files\":[");
    for (int r = 0; r < save->size; r++) {
        char name[SAVE_NAME];
        name_of_rank(name, r, save->size, save->save);
        tell_file(&t, r == 0, name, (int64_t)all[r].number[0], all[r].number[1]);
    }
    text_add(&t, "]");
    if (save->rest.at) text_bytes(&t, save->rest.at, save->rest.used);
    manifest_end(&t);
    fsdp_status status = text_end(&t);
    if (status == FSDP_OK)
        status = save_text(&save->folder, MANIFEST_NAME, t.at, t.used, !save->options.no_sync, &save->committed);
    text_free(&t);
    if (status == FSDP_OK) status = folder_sync(save);
    if (status == FSDP_OK) folder_clean(save, 0);
    return status;
}

static fsdp_status write_sharded(fsdp_save *save)
{
    struct told mine = {0}, all[GROUP_MAX_RANKS];
    int heard = 0, missing = 1;
    fsdp_status status = write_own_file(save);
    mine.complete = 1;
    mine.number[0] = (uint64_t)save->files->bytes;
    mine.number[1] = save->files->header_sum;
    while (missing && !save->over) {
        status = round_of_writers(save, status, &mine, all, &heard);
        save->over = status != FSDP_OK;
        missing = 0;
        for (int r = 0; r < save->size && !save->over; r++) missing |= !all[r].complete;
    }
    /* Rank 0 may have heard of all what did not come through to this one. */
    int remove = heard || !save->files->renamed;
    if (status == FSDP_OK) {
        if (save->rank == 0) status = write_manifest(save, all);
        mine = (struct told){.complete = save->committed};
        status = tell(save, TELL_DONE, status, &mine, all, &heard);
        /* Rank 0 itself knows; the others only what they have heard of it. */
        if (save->rank != 0 && heard) save->committed = all[0].complete;
        remove = save->rank == 0 || heard;
    }
    save_file_drop(save->files, status != FSDP_OK && remove && !save->committed);
    return status;
}

/* ---- rank 0 all tensors */

static fsdp_status full_file_begin(fsdp_save *save, int32_t index)
{
    struct save_file *file = &save->files[index];
    file->save = save->save;
    if (save->file_name[0])
        snprintf(file->name, sizeof file->name, "%s", save->file_name);
    else if (save->n_files == 1)
        snprintf(file->name, sizeof file->name, "%s", MODEL_NAME);
    else
        name_of_part(file->name, index + 1, save->n_files, save->save);
    return save_file_begin(file);
}

static fsdp_status full_file_end(fsdp_save *save, int32_t index)
{
    TRY(save_file_finish(&save->files[index]));
    if (save->n_files == 1 && !save->had_index) save->committed = 1;
    return FSDP_OK;
}

static fsdp_status write_index(fsdp_save *save)
{
    struct text t = {0}, fsdp = {0};
    int64_t bytes = 0;
    manifest_begin(&fsdp, "", save->save, -1, save->size);
    text_add(&fsdp, ",\"files\":[");
    for (int32_t i = 0; i < save->n_files; i++) {
        tell_file(&fsdp, i == 0, save->files[i].name, save->files[i].bytes, save->files[i].header_sum);
        bytes += save->files[i].bytes - save->files[i].data_at;
    }
    text_add(&fsdp, "]");
    if (save->rest.at) text_bytes(&fsdp, save->rest.at, save->rest.used);
    manifest_end(&fsdp);
    text_add(&t, "{\"metadata\":{\"total_size\":");
    text_number(&t, bytes);
    text_add(&t, ",\"fsdp\":");
    if (!fsdp.failed) text_string(&t, fsdp.at, fsdp.used);
    text_add(&t, "},\"weight_map\":{");
    int first = 1;
    for (int32_t i = 0; i < save->n_files; i++)
        for (int64_t k = 0; k < save->files[i].n; k++, first = 0) {
            if (!first) text_add(&t, ",");
            text_string(&t, save->files[i].parts[k].name, strlen(save->files[i].parts[k].name));
            text_add(&t, ":");
            text_string(&t, save->files[i].name, strlen(save->files[i].name));
        }
    text_add(&t, "}}");
    fsdp_status status = text_end(&fsdp);
    if (status == FSDP_OK) status = text_end(&t);
    if (status == FSDP_OK) status = folder_sync(save);
    if (status == FSDP_OK)
        status = save_text(&save->folder, INDEX_NAME, t.at, t.used, !save->options.no_sync, &save->committed);
    text_free(&fsdp);
    text_free(&t);
    return status;
}

/* All files are there: make them the checkpoint. */
static fsdp_status full_commit(fsdp_save *save)
{
    if (save->n_files > 1) {
        TRY(write_index(save));
    } else if (save->had_index) {
        TRY(folder_sync(save));
        TRY(os_file_remove(&save->folder, INDEX_NAME));
        save->committed = 1;
    }
    TRY(folder_sync(save));
    folder_clean(save, save->n_files == 1);
    return FSDP_OK;
}

/* The whole of entry `index`, on rank 0. Collective. */
static fsdp_status full_values(fsdp_save *save, int64_t index, fsdp_status status, struct tensor *out)
{
    const struct state_entry *entry = save->dict->entries[index];
    if (save->size == 1) {
        *out = entry->data;
        return status;
    }
    tensor_make(out, save->gathered, entry->type, entry->whole.ndim, entry->whole.size);
    return state_gather_entry(save->layout, index, status, save->rank == 0 ? out : NULL);
}

static fsdp_status write_full(fsdp_save *save)
{
    fsdp_status status = FSDP_OK;
    int32_t open = -1; /* the file that is being written */
    int known = 0;     /* a failure, to all ranks */
    for (int64_t i = 0; i < save->dict->n_entries; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        struct tensor values;
        if (entry->kind != FSDP_ENTRY_TENSOR || entry->tied_to >= 0) continue;
        status = full_values(save, i, status, &values);
        if (status != FSDP_OK) {
            known = save->size > 1;
            break;
        }
        if (save->rank != 0) continue;
        const struct place *place = &save->places[i];
        if (place->file != open) {
            if (open >= 0) status = full_file_end(save, open);
            if (status == FSDP_OK) status = full_file_begin(save, open = place->file);
        }
        if (status == FSDP_OK) status = save_file_put(&save->files[open], place->part, &values);
    }
    if (!known) {
        struct told mine = {0}, all[GROUP_MAX_RANKS];
        int heard;
        if (save->rank == 0) {
            if (status == FSDP_OK && open < 0) status = full_file_begin(save, open = 0);
            if (status == FSDP_OK) status = full_file_end(save, open);
            if (status == FSDP_OK) status = full_commit(save);
        }
        status = tell(save, TELL_DONE, status, &mine, all, &heard);
    }
    for (int32_t i = 0; save->files && i < save->n_files; i++)
        save_file_drop(&save->files[i], status != FSDP_OK && !save->committed);
    return status;
}

/* ---- what will be written */

static fsdp_status check_entries(const fsdp_save *save)
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

static int has_values(const fsdp_save *save, int64_t index)
{
    const struct state_entry *entry = save->dict->entries[index];
    return entry->tied_to < 0 && (entry->kind == FSDP_ENTRY_TENSOR || !is_full(save));
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
        save->files[i].rank = is_full(save) ? -1 : save->rank;
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

static fsdp_status plan_sharded(fsdp_save *save)
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
        if (!has_values(save, i) || !sharded_box(save, entry, &box)) continue;
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
static fsdp_status plan_full(fsdp_save *save)
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
        if (!has_values(save, i)) continue;
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
        if (!has_values(save, i)) continue;
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
    if (!has_values(save, i)) return 0;
    if (is_full(save))
        *box = entry->part;
    else if (!sharded_box(save, entry, box) || !entry->data.count)
        return 0;
    return box_count(box) * (int64_t)dtype_size(entry->type);
}

/* Entries with their names, and what this rank will need of their values. What is copied is a slice where that is all
 * that will be written: `part` stays what it is to the others. */
static fsdp_status copies_make(fsdp_save *save)
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

/* ---- the object */

static void tells_free(fsdp_save *save)
{
    for (int i = 0; i < TELLS; i++) work_release(save->tells[i]);
    memset(save->tells, 0, sizeof save->tells);
}

/* All but what handles may still ask. */
static void save_settle(fsdp_save *save)
{
    fsdp_error_info failure;
    err_save(&failure);
    if (save->folder.fd >= 0 && save->locked > 0) os_folder_unlock(&save->folder);
    os_folder_close(&save->folder);
    for (int32_t i = 0; save->files && i < save->n_files; i++) save_file_drop(&save->files[i], 0);
    mem_free(save->files);
    mem_free(save->places);
    mem_free(save->data);
    mem_free(save->copied);
    mem_free(save->copy.entries);
    mem_free(save->strings);
    save->files = NULL;
    save->places = NULL;
    save->data = NULL;
    save->copied = NULL;
    save->copy.entries = NULL;
    save->strings = NULL;
    save->dict = NULL;
    text_free(&save->rest);
    state_layout_free(save->layout);
    save->layout = NULL;
    tells_free(save);
    if (save->own_group) group_release(save->group);
    save->group = NULL;
    void *memory[] = {save->values, save->gathered, save->buffer};
    size_t bytes[] = {save->values_bytes, save->gathered_bytes, (size_t)SAVE_BUFFER};
    save->values = save->gathered = NULL;
    save->buffer = NULL;
    for (int i = 0; i < 3; i++) os_unmap(memory[i], bytes[i]);
    (void)err_restore(&failure);
}

static void save_free(fsdp_save *save)
{
    save_settle(save);
    pthread_cond_destroy(&save->changed);
    pthread_mutex_destroy(&save->lock);
    mem_free(save);
}

static fsdp_status path_take(fsdp_save *save, const char *path)
{
    snprintf(save->path, sizeof save->path, "%s", path);
    size_t length = strlen(save->path);
    while (length > 1 && save->path[length - 1] == '/') save->path[--length] = 0;
    if (!is_full(save) || !name_ends(save->path, ".safetensors")) return FSDP_OK;
    CHECK_ARG(!save->options.max_file_bytes,
              "options.max_file_bytes is set, but path is one file: give a folder for several");
    char *slash = strrchr(save->path, '/');
    const char *name = slash ? slash + 1 : save->path;
    CHECK_ARG(strlen(name) <= FILE_NAME_MOST - 9, "path: a file's name of %zu bytes: at most %d", strlen(name),
              FILE_NAME_MOST - 9);
    snprintf(save->file_name, sizeof save->file_name, "%.*s", FILE_NAME_MOST, name);
    if (!slash)
        snprintf(save->path, sizeof save->path, ".");
    else
        slash[slash == save->path] = 0;
    return FSDP_OK;
}

static fsdp_status map(size_t bytes, void **out)
{
    return bytes ? os_map_anonymous(bytes, out) : FSDP_OK;
}

/* All that this rank can do by itself before the ranks agree. */
static fsdp_status prepare(fsdp_save *save, const char *path)
{
    void *buffer;
    TRY(path_take(save, path));
    TRY(check_entries(save));
    int writes = !is_full(save) || save->rank == 0;
    for (int i = 0; save->group && i < TELLS; i++) TRY(group_prepare(save->group, &save->tells[i]));
    if (save->rank == 0) {
        manifest_rest(&save->rest, save->dict);
        TRY(text_end(&save->rest));
    }
    if (save->options.background) TRY(copies_make(save));
    if (writes) {
        TRY(os_map_anonymous((size_t)SAVE_BUFFER, &buffer));
        save->buffer = buffer;
        TRY(is_full(save) ? plan_full(save) : plan_sharded(save));
    }
    for (int32_t i = 0; i < save->n_files; i++) save->total += save->files[i].bytes;
    if (!is_full(save) || save->rank != 0 || save->size == 1) return FSDP_OK;
    for (int64_t i = 0; i < save->dict->n_entries; i++) {
        const struct state_entry *entry = save->dict->entries[i];
        size_t bytes = (size_t)box_count(&entry->whole) * dtype_size(entry->type);
        if (has_values(save, i) && bytes > save->gathered_bytes) save->gathered_bytes = bytes;
    }
    save->gathered_bytes = save->gathered_bytes ? os_page_round(save->gathered_bytes) : 0;
    return map(save->gathered_bytes, &save->gathered);
}

static void run(fsdp_save *save, fsdp_status status)
{
    struct told mine = {0}, all[GROUP_MAX_RANKS];
    int heard;
    if (status == FSDP_OK && save->rank == 0) status = folder_begin(save);
    int64_t timeout_ns = save->size > 1 ? atomic_load(&save->group->timeout_ms) * 1000000 : 0;
    mine.number[0] = save->save;
    mine.number[1] = (uint64_t)timeout_ns;
    status = tell(save, TELL_BEGIN, status, &mine, all, &heard);
    if (status == FSDP_OK) {
        save->save = all[0].number[0];
        for (int r = 0; r < save->size; r++)
            if ((int64_t)all[r].number[1] < timeout_ns) timeout_ns = (int64_t)all[r].number[1];
        save->pulse_ns = timeout_ns / 4;
        save->pulse_at = os_now_ns() + save->pulse_ns;
        status = is_full(save) ? write_full(save) : write_sharded(save);
    }
    if (status != FSDP_OK) err_save(&save->failure);
    save_settle(save);
}

static void *run_in_background(void *argument)
{
    fsdp_save *save = argument;
    run(save, FSDP_OK);
    pthread_mutex_lock(&save->lock);
    save->done = 1;
    int abandoned = save->abandoned;
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
    if (abandoned && save->failure.status != FSDP_OK)
        LOG(FSDP_LOG_ERROR, "a save whose handle was released failed: %s", save->failure.message);
    if (abandoned) save_free(save);
    return NULL;
}

static fsdp_status check_options(const fsdp_save_options *options, const char *path, int handle)
{
    size_t length = strlen(path);
    CHECK_ARG(length > 0 && length <= OS_PATH_MOST, "path has %zu bytes: 1 to %d", length, OS_PATH_MOST);
    CHECK_ARG(options->format == FSDP_CHECKPOINT_SHARDED || options->format == FSDP_CHECKPOINT_FULL,
              "options.format is %d: FSDP_CHECKPOINT_SHARDED (0) or FSDP_CHECKPOINT_FULL (1)", options->format);
    CHECK_ARG(options->no_sync == 0 || options->no_sync == 1, "options.no_sync is %d: 0 or 1", options->no_sync);
    CHECK_ARG(options->background == 0 || options->background == 1, "options.background is %d: 0 or 1",
              options->background);
    CHECK_ARG(!options->background || handle,
              "options.background is 1, but save is NULL: there is nowhere to ask for it");
    CHECK_ARG(options->max_file_bytes >= 0, "options.max_file_bytes is %lld: a size, or 0 for one file",
              (long long)options->max_file_bytes);
    CHECK_ARG(!options->max_file_bytes || options->format == FSDP_CHECKPOINT_FULL,
              "options.max_file_bytes is for the full format: in the sharded one each rank writes one file");
    return FSDP_OK;
}

static fsdp_save *save_make(const fsdp_state_dict *dict, const fsdp_save_options *options, fsdp_group *group)
{
    fsdp_save *save = mem_alloc(sizeof *save);
    if (!save) return NULL;
    pthread_condattr_t attributes;
    ref_init(&save->ref, REF_SAVE);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&save->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&save->lock, NULL);
    save->folder.fd = -1;
    save->options = *options;
    save->dict = dict;
    save->group = group;
    save->rank = group ? group->rank : 0;
    save->size = group ? group->size : 1;
    return save;
}

fsdp_status checkpoint_save(fsdp_group *group, fsdp_state_dict *dict, const char *path,
                            const fsdp_save_options *options, fsdp_save **out)
{
    fsdp_group *own = NULL;
    TRY(check_options(options, path, out != NULL));
    if (group) TRY(group_usable(group));
    if (group && options->background) {
        TRY(group_split(group, 0, group->rank, NULL, &own));
        group_adopt(group, own);
    }
    if (own) group = own;
    fsdp_save *save = save_make(dict, options, group);
    fsdp_status status = save ? prepare(save, path) : mem_none("a save", sizeof *save);
    /* The others hear of it there, if it went wrong. */
    const int64_t agreed[] = {options->format, options->no_sync, options->background, options->max_file_bytes};
    uint64_t hash = hash_bytes(hash_bytes(HASH_START, agreed, sizeof agreed), path, strlen(path));
    int32_t root = options->format == FSDP_CHECKPOINT_FULL ? 0 : STATE_ROOT_NONE;
    struct state_layout *layout = NULL;
    status = state_layout_make(save && status == FSDP_OK ? save->dict : NULL, group, FSDP_OP_SAVE_STATE, root, hash,
                               status, &layout);
    if (!save) {
        if (own) group_release(own);
        return status;
    }
    save->layout = layout;
    save->own_group = own != NULL;
    if (status == FSDP_OK && options->background) {
        save->threaded = 1;
        int failed = os_thread_start(&save->thread, run_in_background, save);
        if (!failed) {
            *out = save;
            return FSDP_OK;
        }
        save->threaded = 0; /* the others' threads have begun, and hear of it */
        run(save, err_sys(FSDP_ERR_NOMEM, failed, "a thread for saving in the background"));
        status = err_restore(&save->failure);
    } else if (status == FSDP_OK) {
        run(save, FSDP_OK);
        if (save->failure.status != FSDP_OK) status = err_restore(&save->failure);
    }
    save->done = 1;
    if (status == FSDP_OK && out)
        *out = save;
    else
        save_free(save);
    return status;
}

void save_query(fsdp_save *save, fsdp_save_info *info)
{
    pthread_mutex_lock(&save->lock);
    *info = (fsdp_save_info){.struct_size = sizeof *info,
                             .done = save->done,
                             .status = save->done ? save->failure.status : FSDP_OK,
                             .written_bytes = atomic_load_explicit(&save->written, memory_order_relaxed),
                             .total_bytes = save->total};
    pthread_mutex_unlock(&save->lock);
}

fsdp_status save_wait(fsdp_save *save, int64_t timeout_ms)
{
    int late = 0;
    if (timeout_ms > GROUP_TIMEOUT_MOST_MS) timeout_ms = GROUP_TIMEOUT_MOST_MS;
    int64_t end = os_now_ns() + timeout_ms * 1000000;
    struct timespec at = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    pthread_mutex_lock(&save->lock);
    while (!save->done && !late)
        late = timeout_ms < 0 ? pthread_cond_wait(&save->changed, &save->lock)
                              : pthread_cond_timedwait(&save->changed, &save->lock, &at);
    int done = save->done;
    pthread_mutex_unlock(&save->lock);
    if (!done)
        return err(FSDP_ERR_PENDING, "the save is not complete after %lld ms: it goes on", (long long)timeout_ms);
    return save->failure.status == FSDP_OK ? FSDP_OK : err_restore(&save->failure);
}

void save_release(fsdp_save *save)
{
    if (!ref_put(&save->ref)) return;
    if (ref_forked(&save->ref)) {
        /* The thread is the parent's, and may have held anything at the fork. The values are a copy here, too. */
        void *values = save->values;
        size_t bytes = save->values_bytes;
        mem_free(save);
        os_unmap(values, bytes);
        return;
    }
    if (save->threaded) {
        pthread_mutex_lock(&save->lock);
        int done = save->done;
        if (!done) {
            save->abandoned = 1;
            pthread_detach(save->thread);
        }
        pthread_mutex_unlock(&save->lock);
        if (!done) return; /* the thread frees it */
        pthread_join(save->thread, NULL);
    }
    save_free(save);
}
