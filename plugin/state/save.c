/* A state dict into files, by all ranks: abi/checkpoint.md has the steps.
 *
 * All that can be wrong with the call, and all memory, is found out before the ranks agree that they begin; from there
 * on it goes by steps, see save_step.c. What uses the disk is a job of a step.
 *
 * What makes the new checkpoint the one is one rename (or, where one file takes the place of several, one removal) by
 * rank 0, after all else is on the disk. Until then a failure removes what is new, after it nothing. A rank that can't
 * tell whether it came to that leaves its file: what no manifest names is removed by the next save.
 *
 * Threads: the caller's; in the background one of the save's own, which alone uses its group, and works on copies. And
 * the writer, for which either waits. `lock` guards done, abandoned and the failure. Ownership: `ref` counts the host's
 * handles; a save that goes on without them is freed by its thread.
 */
#include "state/save.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int save_is(const fsdp_save *save)
{
    return save && ref_is(&save->ref, REF_SAVE);
}

static fsdp_status folder_sync(const fsdp_save *save)
{
    return save->options.no_sync ? FSDP_OK : os_folder_sync(&save->folder);
}

/* ---- each rank its own file */

static fsdp_status write_own_file(fsdp_save *save)
{
    struct save_file *file = save->files;
    if (save->rank != 0) TRY(os_folder_open(save->path, &save->folder));
    file->save = save->save;
    name_of_rank(file->name, save->rank, save->size, save->save);
    TRY(save_file_begin(file));
    for (int64_t i = 0; i < file->n; i++) TRY(save_file_put(file, i, &save->data[file->parts[i].entry]));
    TRY(save_file_finish(file));
    save->number[0] = (uint64_t)file->bytes;
    save->number[1] = file->header_sum;
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

/* Rank 0, when all files are there: of what the ranks told last. */
static fsdp_status manifest_make(fsdp_save *save)
{
    struct text *t = &save->text;
    manifest_begin(t, "\"libfsdp\":\"checkpoint\",", save->save, -1, save->size);
    text_add(t, ",\"files\":[");
    for (int r = 0; r < save->size; r++) {
        char name[SAVE_NAME];
        name_of_rank(name, r, save->size, save->save);
        tell_file(t, r == 0, name, (int64_t)save->all[r].number[0], save->all[r].number[1]);
    }
    text_add(t, "]");
    if (save->rest.at) text_bytes(t, save->rest.at, save->rest.used);
    manifest_end(t);
    return text_end(t);
}

static fsdp_status write_manifest(fsdp_save *save)
{
    fsdp_status status = save_text(&save->folder, MANIFEST_NAME, save->text.at, save->text.used, !save->options.no_sync,
                                   &save->committed);
    if (status == FSDP_OK) status = folder_sync(save);
    if (status == FSDP_OK) save_folder_clean(save, 0);
    return status;
}

static fsdp_status write_sharded(fsdp_save *save)
{
    int heard;
    fsdp_status status = save_step(save, SAVE_WRITE, FSDP_OK, write_own_file, &heard);
    /* Rank 0 may have heard of all what did not come through to this one. */
    int remove = heard || !save->files->renamed;
    if (status == FSDP_OK) {
        int root = save->rank == 0;
        if (root) status = manifest_make(save);
        status = save_step(save, SAVE_END, status, root ? write_manifest : NULL, &heard);
        /* Rank 0 itself knows; the others only what they have heard of it. */
        if (!root && heard) save->committed = save->all[0].committed;
        remove = root || heard;
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
    save_folder_clean(save, save->n_files == 1);
    return FSDP_OK;
}

#define FULL_STEP ((size_t)1 << 20) /* bytes of small tensors that are written between two rounds */

/* What the whole of an entry takes of the memory for a step's. */
static size_t whole_room(const struct state_entry *entry)
{
    return ((size_t)box_count(&entry->whole) * dtype_size(entry->type) + 63) / 64 * 64;
}

/* Where the whole of the next entry of a step lies on rank 0, behind `used` bytes of others. */
static void whole_at(const fsdp_save *save, int64_t index, size_t *used, struct tensor *out)
{
    const struct state_entry *entry = save->dict->entries[index];
    if (save->size == 1) {
        *out = entry->data;
        return;
    }
    tensor_make(out, (char *)save->gathered + *used, entry->type, entry->whole.ndim, entry->whole.size);
    *used += whole_room(entry);
}

/* Those of a step. */
static fsdp_status write_entries(fsdp_save *save)
{
    size_t used = 0;
    for (int64_t i = save->first; i < save->end; i++) {
        const struct place *place = &save->places[i];
        struct tensor whole;
        if (!save_has_values(save, i)) continue;
        if (place->file != save->open) {
            if (save->open >= 0) TRY(full_file_end(save, save->open));
            TRY(full_file_begin(save, save->open = place->file));
        }
        whole_at(save, i, &used, &whole);
        TRY(save_file_put(&save->files[save->open], place->part, &whole));
    }
    return FSDP_OK;
}

static fsdp_status write_last(fsdp_save *save)
{
    if (save->open < 0) TRY(full_file_begin(save, save->open = 0));
    TRY(full_file_end(save, save->open));
    return full_commit(save);
}

static fsdp_status write_full(fsdp_save *save)
{
    fsdp_status status = FSDP_OK;
    int root = save->rank == 0, heard;
    int64_t n = save->dict->n_entries;
    size_t used = 0;
    save->open = -1;
    /* A step has as many entries as rank 0 has memory for, which all ranks know. */
    for (save->first = save->end = 0; save->end < n && status == FSDP_OK; save->first = save->end, used = 0) {
        for (; save->end < n && status == FSDP_OK; save->end++) {
            struct tensor whole;
            if (!save_has_values(save, save->end) || save->size == 1) continue;
            if (used && used + whole_room(save->dict->entries[save->end]) > save->gathered_bytes) break;
            whole_at(save, save->end, &used, &whole);
            status = state_gather_entry(save->layout, save->end, FSDP_OK, root ? &whole : NULL);
        }
        if (status == FSDP_OK) status = save_step(save, SAVE_WRITE, FSDP_OK, root ? write_entries : NULL, &heard);
    }
    if (status == FSDP_OK) status = save_step(save, SAVE_END, FSDP_OK, root ? write_last : NULL, &heard);
    for (int32_t i = 0; save->files && i < save->n_files; i++)
        save_file_drop(&save->files[i], status != FSDP_OK && !save->committed);
    return status;
}

/* ---- the object */

/* All but what handles may still ask. */
static void save_settle(fsdp_save *save)
{
    fsdp_error_info failure;
    err_save(&failure);
    save_writer_stop(save);
    if (save->folder.fd >= 0 && save->locked > 0) os_folder_unlock(&save->folder);
    os_folder_close(&save->folder);
    for (int32_t i = 0; save->files && i < save->n_files; i++) save_file_drop(&save->files[i], 0);
    mem_free(save->files);
    mem_free(save->places);
    mem_free(save->data);
    mem_free(save->copied);
    mem_free(save->copy.entries);
    mem_free(save->strings);
    mem_free(save->all);
    save->all = NULL;
    save->files = NULL;
    save->places = NULL;
    save->data = NULL;
    save->copied = NULL;
    save->copy.entries = NULL;
    save->strings = NULL;
    save->dict = NULL;
    text_free(&save->rest);
    text_free(&save->text);
    state_layout_free(save->layout);
    save->layout = NULL;
    work_release(save->round);
    save->round = NULL;
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
    pthread_cond_destroy(&save->writer.changed);
    pthread_mutex_destroy(&save->writer.lock);
    mem_free(save);
}

static fsdp_status path_take(fsdp_save *save, const char *path)
{
    if (save->options.background) /* whose thread may open it when the host has gone to another folder */
        TRY(os_path_absolute(path, save->path));
    else
        snprintf(save->path, sizeof save->path, "%s", path);
    size_t length = strlen(save->path);
    while (length > 1 && save->path[length - 1] == '/') save->path[--length] = 0;
    if (!save_is_full(save) || !name_ends(save->path, ".safetensors")) return FSDP_OK;
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
    TRY(save_check_entries(save));
    int writes = !save_is_full(save) || save->rank == 0;
    save->all = mem_array((size_t)save->size, sizeof *save->all);
    if (!save->all) return mem_none("a save", (size_t)save->size * sizeof *save->all);
    if (save->group) TRY(group_prepare(save->group, &save->round));
    if (save->rank == 0) {
        manifest_rest(&save->rest, save->dict);
        TRY(text_end(&save->rest));
    }
    if (save->options.background) TRY(save_copies_make(save));
    if (writes) {
        TRY(os_map_anonymous((size_t)SAVE_BUFFER, &buffer));
        save->buffer = buffer;
        TRY(save_is_full(save) ? save_plan_full(save) : save_plan_sharded(save));
        if (save->size > 1) TRY(save_writer_start(save));
    }
    for (int32_t i = 0; i < save->n_files; i++) {
        save->files[i].pulse = save_goes_on;
        save->files[i].user = save;
        save->total += save->files[i].bytes;
    }
    if (!save_is_full(save) || save->size == 1) return FSDP_OK;
    size_t largest = 0, all = 0;
    for (int64_t i = 0; i < save->dict->n_entries; i++) {
        size_t bytes = save_has_values(save, i) ? whole_room(save->dict->entries[i]) : 0;
        all += bytes;
        if (bytes > largest) largest = bytes;
    }
    save->gathered_bytes = os_page_round(largest > FULL_STEP ? largest : all < FULL_STEP ? all : FULL_STEP);
    return save->rank == 0 ? map(save->gathered_bytes, &save->gathered) : FSDP_OK;
}

static fsdp_status begin(fsdp_save *save)
{
    TRY(save_folder_begin(save));
    save->number[0] = save->save;
    return FSDP_OK;
}

static void run(fsdp_save *save, fsdp_status status)
{
    int heard;
    int64_t timeout_ns = save->size > 1 ? save->round->timeout_ms * 1000000 : 0;
    save->number[1] = (uint64_t)timeout_ns;
    save_rounds_set(save, timeout_ns);
    status = save_step(save, SAVE_BEGIN, status, save->rank == 0 ? begin : NULL, &heard);
    if (status == FSDP_OK) {
        save->save = save->all[0].number[0];
        for (int r = 0; r < save->size; r++)
            if ((int64_t)save->all[r].number[1] < timeout_ns) timeout_ns = (int64_t)save->all[r].number[1];
        save_rounds_set(save, timeout_ns);
        status = save_is_full(save) ? write_full(save) : write_sharded(save);
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
    pthread_cond_init(&save->writer.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&save->lock, NULL);
    pthread_mutex_init(&save->writer.lock, NULL);
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
    uint64_t hash = hash_bytes(HASH_START, agreed, sizeof agreed);
    int32_t root = options->format == FSDP_CHECKPOINT_FULL ? 0 : STATE_ROOT_NONE;
    struct state_layout *layout = NULL;
    status = state_layout_make(save && status == FSDP_OK ? save->dict : NULL, group, FSDP_OP_SAVE_STATE, root, hash,
                               path, status, &layout);
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
