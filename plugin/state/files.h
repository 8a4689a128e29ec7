/* The files of checkpoints: what safetensors.c, manifest.c, checkpoint.c, save_file.c and save.c share.
 * abi/checkpoint.md describes them. What is read here may have been made to do harm: nothing in it is used before it
 * was checked. */
#ifndef FSDP_STATE_FILES_H
#define FSDP_STATE_FILES_H

#include "state/block_sum.h"
#include "state/state.h"

#include <jansson.h>

#define FILE_BLOCK ((int64_t)1 << 20)     /* of which each has a checksum */
#define FILE_HEADER_MOST 100000000        /* bytes of a safetensors header, as the safetensors package has it */
#define FILE_JSON_MOST ((int64_t)1 << 30) /* bytes of a manifest or an index */
#define FILE_NAME_MOST 255
#define FILE_VERSION 1

#define MANIFEST_NAME "manifest.json"
#define INDEX_NAME "model.safetensors.index.json"
#define MODEL_NAME "model.safetensors"

static inline int64_t blocks_of(int64_t bytes)
{
    return bytes / FILE_BLOCK + (bytes % FILE_BLOCK != 0);
}

/* ---- text.c: JSON written, JSON read */

struct text {
    char *at;
    size_t used, room;
    int failed; /* for want of memory; text_end says so */
};
void text_add(struct text *t, const char *words);
void text_bytes(struct text *t, const char *bytes, size_t n);
void text_number(struct text *t, int64_t number);
void text_numbers(struct text *t, const int64_t *numbers, int32_t n); /* [1,2] */
void text_hex(struct text *t, uint64_t number);                       /* 16 digits */
void text_string(struct text *t, const char *string, size_t n);       /* in quotes, with escapes */
fsdp_status text_end(const struct text *t);
void text_free(struct text *t);

/* `path` names the file, and `what` the part of it, in messages. *out is released with json_decref. Errors: CORRUPT,
 * NOMEM. */
fsdp_status json_read(const char *path, const char *what, const char *text, size_t bytes, json_t **out);
/* 1 when the value is there and of the kind: an integer of at least `least` and at most `most`; n digits of
 * hexadecimal; n integers of 0 or more. */
int json_number_in(const json_t *value, int64_t least, int64_t most, int64_t *out);
int json_hex(const json_t *value, uint64_t *out);
int hex_read(const char *digits, uint64_t *out); /* 16 of them */
/* As the text of JSON that dicts keep: on one line. mem_free it; NULL: no memory. */
char *json_text(const json_t *value);

/* ---- safetensors.c */

struct st_tensor {
    const char *name;
    enum dtype type;
    int32_t ndim;
    const int64_t *shape;
    int64_t begin, bytes; /* in the file */
};

/* The header of a file, checked: the tensors fill the file from the header to its end, in order. */
struct st_file {
    json_t *root; /* has the names */
    int64_t n;
    struct st_tensor *tensors;
    int64_t *shapes;
    uint64_t header_sum; /* of the header with its length */
    const char *fsdp;    /* metadata of this library, or NULL */
    size_t fsdp_bytes;
};

const char *st_dtype_name(enum dtype type); /* NULL: safetensors has none */
/* header: without its length. data_bytes: what the file has behind it. */
fsdp_status st_parse(const char *path, const char *header, size_t bytes, int64_t data_bytes, struct st_file *out);
fsdp_status st_read(int fd, const char *path, int64_t file_bytes, struct st_file *out);
void st_free(struct st_file *file);

/* ---- manifest.c: the texts of a manifest, of an index, and of `fsdp` in a file's metadata */

struct manifest {
    json_t *root;
    uint64_t save;
    int32_t rank, ranks;                               /* -1: none said */
    int32_t part;                                      /* one of several files of a full checkpoint */
    const json_t *tensors, *files, *tied, *json, *map; /* NULL: not there */
};

struct manifest_tensor {
    int64_t index;
    enum dtype type;
    int32_t ndim, of_rank;
    int64_t shape[TENSOR_MAX_DIMS], offset[TENSOR_MAX_DIMS];
    const char *sums; /* 16 digits each */
    int64_t n_sums;
};

struct manifest_file {
    const char *name;
    int64_t bytes;
    uint64_t header_sum;
};

struct manifest_tied {
    int64_t index;
    const char *name, *to;
};

/* `what`: "the manifest", "its metadata". Errors: CORRUPT, UNSUPPORTED (a newer version), NOMEM. */
fsdp_status manifest_parse(const char *path, const char *what, const char *text, size_t bytes, struct manifest *out);
/* An index; `map` is set, and the rest only when this library wrote it: *ours. */
fsdp_status index_parse(const char *path, const char *text, size_t bytes, struct manifest *out, int *ours);
void manifest_free(struct manifest *m);
fsdp_status manifest_tensor_get(const struct manifest *m, const char *path, const char *name,
                                struct manifest_tensor *out);
fsdp_status manifest_file_get(const struct manifest *m, const char *path, size_t index, struct manifest_file *out);
fsdp_status manifest_tied_get(const struct manifest *m, const char *path, size_t index, struct manifest_tied *out);
/* A name in the same folder and nothing else. */
int file_name_plain(const char *name);
/* The whole of a small file; mem_free it. NOT_FOUND. */
fsdp_status file_text(const struct os_folder *folder, const char *name, int64_t most, char **text, size_t *bytes);

/* How the texts begin and end: {"version":1,"save":"..","rank":0,"ranks":4 and ,"sum":".."}; rank -1: none. */
void manifest_begin(struct text *t, const char *first, uint64_t save, int32_t rank, int32_t ranks);
void manifest_end(struct text *t);
/* ,"tied":[..],"json":{..} */
void manifest_rest(struct text *t, const fsdp_state_dict *dict);

/* Names of a save's files, and whether a name is such a one: then *save is whose. */
#define SAVE_NAME (FILE_NAME_MOST + 1)
void name_of_rank(char out[SAVE_NAME], int32_t rank, int32_t ranks, uint64_t save);
int name_is_of_rank(const char *name, uint64_t *save);
void name_of_part(char out[SAVE_NAME], int32_t part, int32_t parts, uint64_t save);
int name_is_of_part(const char *name, uint64_t *save);
int name_ends(const char *name, const char *with);

/* ---- save_file.c */

/* A tensor that will be in a file. */
struct save_part {
    const char *name;
    int64_t index; /* in files */
    int64_t entry; /* in the dict */
    enum dtype type;
    int32_t of_rank;
    int32_t ndim;
    const int64_t *shape; /* of the whole */
    struct box box;
    int64_t begin, bytes; /* in the file's data */
    int64_t first_sum;    /* of the file's */
};

struct save_file {
    const struct os_folder *folder;
    char name[SAVE_NAME], temp[SAVE_NAME + 16];
    char path[OS_PATH_MOST + SAVE_NAME + 32];
    int fd;      /* -1: none */
    int renamed; /* it has its name */
    uint64_t save;
    int32_t rank, ranks; /* rank -1: whole tensors */
    int32_t part;
    const char *rest; /* of `fsdp` before its sum; may be "" */
    struct save_part *parts;
    int64_t n;
    uint64_t *sums;
    int64_t data_at, bytes; /* of the whole file */
    uint64_t header_sum;
    char *buffer;
    int64_t filled, filled_at; /* bytes that wait in it, and where they go */
    int64_t begun;             /* up to here the disk was told of */
    int32_t sync;
    _Atomic int64_t *written; /* progress */
    /* Called now and then while values are written; a failure ends that. NULL: nothing. */
    fsdp_status (*pulse)(void *user);
    void *user;
};

#define SAVE_BUFFER (4 * FILE_BLOCK)

/* The order of parts in the file, their places, and so the file's length. buffer: SAVE_BUFFER bytes. Takes memory, and
 * nothing of the disk. */
fsdp_status save_file_plan(struct save_file *file);
fsdp_status save_file_begin(struct save_file *file);
/* The values of part `index`, of its box's size and any dtype that casts to its. */
fsdp_status save_file_put(struct save_file *file, int64_t index, const struct tensor *data);
/* All parts are there: header, sync, and the name. */
fsdp_status save_file_finish(struct save_file *file);
void save_file_drop(struct save_file *file, int remove); /* frees; `remove`: whatever is on the disk, too */
/* A small file in one go: temporary name, sync, rename. *renamed: whether it got that far. */
fsdp_status save_text(const struct os_folder *folder, const char *name, const char *text, size_t bytes, int32_t sync,
                      int *renamed);

#endif
