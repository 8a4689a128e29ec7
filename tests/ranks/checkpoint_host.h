/* What suites of checkpoints share: state dicts whose tensors are cut over ranks in many ways, with values that tell
 * entry and place, so that each rank can check each element that it reads, however it was written.
 *
 * Values are bytes made from the entry's number and the element's place in the whole; bools are 0 or 1. */
#ifndef FSDP_TEST_CHECKPOINT_HOST_H
#define FSDP_TEST_CHECKPOINT_HOST_H

#include "ranks.h"

/* How an entry lies on ranks. */
enum cut {
    ROWS,     /* chunks of the first dimension, as shards */
    UNEVEN,   /* the last rank has most, the first may have none */
    COLUMNS,  /* chunks of the last dimension */
    GRID,     /* of 4 ranks, 2 x 2; else rows */
    COPIED,   /* all ranks have all */
    PAIRED,   /* of 4 ranks, two halves, each on two; else rows */
    ONE_RANK, /* the last rank has all */
    OF_RANK,  /* each rank another: one dimension of 3 + rank, seeds differ */
    TIED,     /* to the entry before */
    CUTS
};

struct spec {
    const char *name;
    DLDataType dtype;
    int32_t ndim;
    int64_t shape[4];
    enum cut cut;
};

#define SPECS_MOST 40

struct specs {
    const struct spec *list;
    int n;
    uint64_t seed;   /* of the values: another save, others */
    int32_t strided; /* memory of parts: 0 in rows, 1 in columns, 2 with gaps */
};

/* A dict of this rank's parts, of these specs: filled, or with memory of 0xee bytes to be read into. */
struct host_dict {
    const struct specs *specs;
    fsdp_state_dict *dict;
    struct host_part {
        int64_t at[4], size[4];
        int64_t strides[4]; /* elements */
        char *data;
        int64_t count;
        int32_t copies, copy;
    } parts[SPECS_MOST];
};
void host_dict_make(struct host_dict *host, const struct specs *specs, int rank, int size, int filled);
void host_dict_free(struct host_dict *host);
/* All values are those of `specs`, which may be the seed of another; entries of ranks not, unless of_ranks. */
void host_dict_check(const struct host_dict *host, uint64_t seed, int rank);

/* The bytes of element `place` of entry `index`. */
void host_value(const struct spec *spec, int index, uint64_t seed, int64_t place, char *out);
/* Read all of a checkpoint in one process, entry by entry, and compare. ranks: that wrote it. */
void host_checkpoint_check(const char *path, const struct specs *specs, uint64_t seed, int ranks, int full);
/* The same as a question, for the test's own process: NULL, or what is wrong. Values of which of two seeds: *which. */
int host_checkpoint_seed(const char *path, const struct specs *specs, const uint64_t *seeds, int n, char *why,
                         size_t size);

extern const struct spec host_specs[];
extern const int host_n_specs;

/* A new folder below /tmp, and away with it and all in it. */
void host_folder_make(char out[64]);
void host_folder_remove(const char *path);
int host_files(const char *path, char names[][256], int most); /* sorted; how many */

#endif
