/* A save, as save.c runs it: save_folder.c knows what may be in the folder, save_plan.c what will be written. */
#ifndef FSDP_STATE_SAVE_H
#define FSDP_STATE_SAVE_H

#include "state/files.h"

#include <pthread.h>

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

static inline int save_is_full(const fsdp_save *save)
{
    return save->options.format == FSDP_CHECKPOINT_FULL;
}

/* ---- save_folder.c: rank 0 */

/* The folder, for this save alone: made, locked, looked at, and rid of what dead saves left. INVALID where something
 * else is in the way. Gives the save its number. */
fsdp_status save_folder_begin(fsdp_save *save);
/* The new checkpoint is the one: what else there is of saves goes; keep_model: but for MODEL_NAME. */
void save_folder_clean(fsdp_save *save, int keep_model);

/* ---- save_plan.c */

fsdp_status save_check_entries(const fsdp_save *save); /* whether files can hold them */
int save_has_values(const fsdp_save *save, int64_t index);
/* The files of this rank, and all memory that they take. */
fsdp_status save_plan_sharded(fsdp_save *save);
fsdp_status save_plan_full(fsdp_save *save);
/* Copies of all that the background will need of the dict; before a plan is made. */
fsdp_status save_copies_make(fsdp_save *save);

#endif
