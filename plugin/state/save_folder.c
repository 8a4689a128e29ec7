/* The folder of a save, on rank 0: one save at a time, over a checkpoint of the same kind or nothing, and clean of what
 * dead saves left. What is removed has a name that only saves give. */
#include "state/save.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        if (save_is_full(save) && (of_part || model)) return FSDP_OK;
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
    if (manifest && save_is_full(save)) return in_the_way(save, MANIFEST_NAME, "of a sharded checkpoint");
    TRY(look_at_index(save, &index, &id));
    if (index && !save_is_full(save)) return in_the_way(save, INDEX_NAME, "of a full checkpoint");
    struct sweep sweep = {.save = save, .look = 1};
    TRY(os_folder_list(&save->folder, sweep_one, &sweep));
    if (save_is_full(save)) TRY(look_at_model(save, MODEL_NAME, &model));
    save->had_index = index;
    sweep = (struct sweep){.save = save, .keep = id, .keep_all = manifest < 0, .keep_model = !index};
    if (!manifest && !index) sweep.keep = 0; /* of no save */
    return os_folder_list(&save->folder, sweep_one, &sweep);
}

/* The new checkpoint is the one: what else there is goes. */
void save_folder_clean(fsdp_save *save, int keep_model)
{
    if (save->file_name[0]) return;
    struct sweep sweep = {.save = save, .keep = save->save, .keep_model = keep_model};
    if (os_folder_list(&save->folder, sweep_one, &sweep) != FSDP_OK)
        LOG(FSDP_LOG_WARN, "files of an earlier save may stay: %s", err_message());
}

/* Rank 0: the folder, for this save alone. */
fsdp_status save_folder_begin(fsdp_save *save)
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
