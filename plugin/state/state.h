/* State dicts and checkpoints: what the rest of the library sees of them, and their own files share.
 *
 *   dict.c         the container                        safetensors.c  one file: its header, read and written
 *   load.c         names and parts against each other   manifest.c     what makes several files a checkpoint
 *   gather.c       parts to whole tensors               checkpoint.c   open, read, verify
 *   model_state.c  a model's parameters as a dict       save.c         writing one, with all ranks
 *   box.c          parts of tensors                     save_file.c    writing one file, with its checksums
 *
 * Ownership: a dict has the managed tensors that it was given, and hands out handles that keep them. A checkpoint has
 * its folder and files open. A save holds what it writes: the dict, or copies of its parts, and a group.
 * Threads: a dict is one thread's at a time. A checkpoint never changes after it was opened. A save in the background
 * has a thread of its own, which is the only one that uses its group.
 */
#ifndef FSDP_STATE_STATE_H
#define FSDP_STATE_STATE_H

#include "group/group.h"
#include "state/box.h"

struct fsdp_model;
struct fsdp_unit;

#define STATE_NAME_MOST 4095         /* bytes of a name */
#define STATE_JSON_MOST (64ll << 20) /* of one JSON value */

/* ---- dicts */

struct state_entry {
    char *name;
    fsdp_entry_kind kind;
    enum dtype type;  /* in files */
    struct box whole; /* at zeros */
    struct box part;  /* this rank's */
    int32_t copies, copy;
    int32_t rank;                     /* OF_RANK: whose; else -1 */
    int64_t tied_to;                  /* index of an earlier entry, never itself a tied one; -1: none */
    DLManagedTensorVersioned *tensor; /* NULL: tied */
    struct tensor data;               /* a view of it, of `part`'s size and any dtype that casts to `type` */
};

struct state_json {
    char *name, *text;
};

struct fsdp_state_dict {
    struct ref ref;
    struct state_entry *entries;
    int64_t n_entries, room_entries;
    struct state_json *json;
    int64_t n_json, room_json;
    /* and an index by name, which is dict.c's */
    struct state_index *index;
};

int state_dict_is(const fsdp_state_dict *dict);
fsdp_status state_dict_create(fsdp_state_dict **out);
void state_dict_release(fsdp_state_dict *dict);
/* entry: of this library's size, its tensor imported. Takes `tensor` when it succeeds. */
fsdp_status state_dict_add(fsdp_state_dict *dict, const fsdp_entry *entry, DLManagedTensorVersioned *tensor);
fsdp_status state_dict_set_json(fsdp_state_dict *dict, const char *name, const char *text);
int64_t state_dict_find(const fsdp_state_dict *dict, const char *name); /* -1: no such entry */
/* The entry that has the values of this one. */
const struct state_entry *state_dict_values(const fsdp_state_dict *dict, int64_t index);
void state_dict_query(const fsdp_state_dict *dict, fsdp_state_dict_info *info);
fsdp_status state_dict_tensor(fsdp_state_dict *dict, int64_t index, DLManagedTensorVersioned **out);
/* Of all that ranks must agree on: names, kinds (entries of a rank excepted), dtypes, whole shapes, ties. */
uint64_t state_dict_hash(const fsdp_state_dict *dict);
/* All ranks' dicts agree: MISMATCH on all ranks otherwise, naming the first entry that differs. Collective. */
fsdp_status state_dict_agree(const fsdp_state_dict *dict, fsdp_group *group, fsdp_op_kind kind);
/* name, kind, shape, .. of an entry as the ABI tells them; pointers are the entry's. */
void state_entry_tell(const struct state_entry *entry, const char *tied_to, fsdp_entry *out);

/* ---- what can be loaded: a dict or a checkpoint */

struct source {
    const char *what; /* "the state dict", "the checkpoint": for messages */
    int64_t n;
    const struct state_entry *(*entry)(const struct source *source, int64_t index); /* `data` is not looked at */
    int64_t (*find)(const struct source *source, const char *name);                 /* a tensor's; -1: none */
    /* Whether the elements of `want` are there; NULL: always. */
    int (*holds)(const struct source *source, int64_t index, const struct box *want);
    fsdp_status (*read)(const struct source *source, int64_t index, const struct box *want, const struct tensor *out);
    int64_t n_json;
    void (*json)(const struct source *source, int64_t index, const char **name, const char **text);
    const void *of;
};
/* See fsdp_state_dict_load: checks all, tells names, then reads entry by entry. options is of this library's size. */
fsdp_status state_load(const struct source *from, fsdp_state_dict *into, const fsdp_load_options *options);
void state_dict_source(const fsdp_state_dict *dict, struct source *out);

/* ---- gather.c */

/* Whether the ranks' parts make up each tensor; keeps all ranks' parts for state_gather_entry. Collective; an error is
 * the same on all ranks. */
struct state_layout;
fsdp_status state_layout_make(const fsdp_state_dict *dict, fsdp_group *group, fsdp_op_kind kind,
                              struct state_layout **out);
void state_layout_free(struct state_layout *layout);
/* The whole of entry `index` (one with values) in `out`, of the entry's dtype in files and whole shape, contiguous; only on
 * `root`, unless that is -1: out is NULL on the others. Collective. */
fsdp_status state_gather_entry(const fsdp_state_dict *dict, fsdp_group *group, const struct state_layout *layout,
                               int64_t index, int32_t root, const struct tensor *out);
fsdp_status state_dict_gather(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                              fsdp_state_dict **out);

/* ---- model_state.c */

fsdp_status model_state_dict(struct fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **out);
fsdp_status model_load_state_dict(struct fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options);
fsdp_status unit_param_entry(struct fsdp_unit *unit, int32_t index, fsdp_entry *out);

/* ---- checkpoints */

int checkpoint_is(const fsdp_checkpoint *checkpoint);
fsdp_status checkpoint_open(const char *path, fsdp_checkpoint **out);
void checkpoint_release(fsdp_checkpoint *checkpoint);
void checkpoint_query(const fsdp_checkpoint *checkpoint, fsdp_checkpoint_info *info);
fsdp_status checkpoint_entry(const fsdp_checkpoint *checkpoint, int64_t index, fsdp_entry *entry);
fsdp_status checkpoint_find(const fsdp_checkpoint *checkpoint, const char *name, int32_t rank, int64_t *index);
fsdp_status checkpoint_json(const fsdp_checkpoint *checkpoint, int64_t index, const char **name, const char **text);
fsdp_status checkpoint_n_parts(const fsdp_checkpoint *checkpoint, int64_t index, int64_t *n);
fsdp_status checkpoint_part_of(const fsdp_checkpoint *checkpoint, int64_t index, int64_t part,
                               fsdp_checkpoint_part *out);
fsdp_status checkpoint_read(const fsdp_checkpoint *checkpoint, int64_t index, const struct box *want,
                            const struct tensor *out);
fsdp_status checkpoint_load(const fsdp_checkpoint *checkpoint, fsdp_state_dict *into, const fsdp_load_options *options);
fsdp_status checkpoint_verify(const fsdp_checkpoint *checkpoint, fsdp_progress_fn on_progress, void *user);

int save_is(const fsdp_save *save);
fsdp_status checkpoint_save(fsdp_group *group, fsdp_state_dict *dict, const char *path,
                            const fsdp_save_options *options, fsdp_save **out);
void save_query(fsdp_save *save, fsdp_save_info *info);
fsdp_status save_wait(fsdp_save *save, int64_t timeout_ms);
void save_release(fsdp_save *save);

#endif
