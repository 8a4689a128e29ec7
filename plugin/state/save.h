/* A save, as save.c runs it: save_folder.c knows what may be in the folder, save_plan.c what will be written. */
#ifndef FSDP_STATE_SAVE_H
#define FSDP_STATE_SAVE_H

#include "state/files.h"

#include <pthread.h>

enum save_step { SAVE_BEGIN, SAVE_WRITE, SAVE_END };

/* What a rank tells all in a round. */
struct told {
    fsdp_status status;
    int32_t through;    /* my part of the step is done */
    int32_t committed;  /* the new checkpoint is the one */
    uint64_t number[2]; /* SAVE_BEGIN: of the save, and this rank's timeout; SAVE_WRITE: the file's bytes and sum */
    char message[500];
};
_Static_assert(sizeof(struct told) <= TRANSPORT_PAYLOAD, "what a rank tells must fit into an exchange");

/* The thread that does what the disk is needed for, see save_step.c. */
struct save_writer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int started, quit;
    fsdp_status (*job)(fsdp_save *save); /* NULL: it has none */
    fsdp_status status;                  /* of the one before */
    fsdp_error_info failure;
    atomic_int stop; /* the save has failed: what is being written need not be */
};

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
    struct save_writer writer;
    fsdp_work *round; /* the operation of the next one */
    int64_t round_ns; /* how often one that writes tells that it does */
    struct told mine, *all;
    uint64_t number[2]; /* what a job has for `mine` */

    struct os_folder folder;
    int locked;
    char file_name[SAVE_NAME]; /* FULL into one file that the path names; else "" */
    uint64_t save;
    struct save_file *files;
    int32_t n_files;
    struct place *places; /* FULL, of each entry */
    struct text rest;
    char *buffer;   /* of files */
    void *gathered; /* FULL: whole tensors, or one; with several ranks */
    size_t gathered_bytes;
    int64_t first, end; /* those entries are gathered and written in one step, */
    int32_t open;       /* into this file; -1: none yet */
    int had_index;      /* FULL: the checkpoint there is one of several files */
    struct text text;   /* SHARDED: the manifest */
    int committed;
    char path[OS_PATH_MOST + 1]; /* of the folder */
};

static inline int save_is_full(const fsdp_save *save)
{
    return save->options.format == FSDP_CHECKPOINT_FULL;
}

/* ---- save_step.c */

/* Do this rank's part of a step (job; NULL: none) while all tell each other that they go on, until all are through:
 * then `all` is what they told last, this one `mine`. status: how this rank fared so far. A failure of one is
 * everyone's, on all ranks in the same round, and no step may follow it. *heard: the last round came through to this
 * rank. */
fsdp_status save_step(fsdp_save *save, enum save_step which, fsdp_status status, fsdp_status (*job)(fsdp_save *save),
                      int *heard);
void save_rounds_set(fsdp_save *save, int64_t timeout_ns); /* rounds come more often than this */
/* Without a writer, jobs are done on the save's thread: where nobody waits. */
fsdp_status save_writer_start(fsdp_save *save);
void save_writer_stop(fsdp_save *save);
/* For a job, now and then: an error when it need not go on. user: the save. */
fsdp_status save_goes_on(void *user);

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
