/* An open checkpoint, as checkpoint_open.c makes it and checkpoint.c reads it. */
#ifndef FSDP_STATE_CHECKPOINT_H
#define FSDP_STATE_CHECKPOINT_H

#include "state/files.h"

struct part_file {
    char *name, *path;
    int fd;
    int64_t bytes;
};

/* Of an entry, in one file. */
struct stored {
    int32_t file;
    int64_t begin, bytes;
    const int64_t *at, *size; /* in the whole */
    const uint64_t *sums;     /* of its blocks; NULL: none */
};

struct named {
    const char *name;
    int32_t rank;
    int64_t index;
};

struct fsdp_checkpoint {
    struct ref ref;
    struct os_folder folder;
    fsdp_checkpoint_format format;
    int32_t ranks, checksums, ours;
    uint64_t save;
    int32_t n_files;
    struct part_file *files;
    int64_t n_entries, n_pieces, bytes;
    struct state_entry *entries;
    int64_t *first; /* piece of each entry, and one more */
    struct stored *pieces;
    struct named *names; /* sorted */
    int64_t n_json;
    struct state_json *json;
    _Atomic(char *) spare; /* FILE_BLOCK bytes, or NULL */
};

void checkpoint_sort_names(fsdp_checkpoint *c); /* for checkpoint_find_named */
int checkpoint_compare_names(const struct named *x, const struct named *y);
int64_t checkpoint_find_named(const fsdp_checkpoint *c, const char *name, int32_t rank); /* -1: none */
void checkpoint_empty(fsdp_checkpoint *c); /* lets go of all that was read of files, and of the files */

#endif
