/* State dicts and checkpoints: what the rest of the library sees of them, and their own files share.
 *
 *   dict.c             the container                  model_state.c  a model's parameters as a dict
 *   load.c             names and parts, compared      layout.c       what the ranks have of each tensor
 *   overlap.c          and their memory               gather.c       parts to whole tensors; scatter.c: and back
 *   box.c              parts of tensors               safetensors.c  the header of one file, checked
 *   block_sum*.c       checksums                      text.c         JSON in and out
 *   manifest.c         what says which files make     save.c         writing a checkpoint, by all ranks: save_plan.c
 *                      up a checkpoint                               says what, save_folder.c where, save_file.c writes
 *   checkpoint_open.c  headers brought together                      one file, save_step.c keeps ranks together
 *   checkpoint.c       one that is open, read
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
#define STATE_JSON_DEPTH 1000        /* levels that it nests: a checkpoint's text adds a few, and readers have limits */

/* ---- dicts */

/* Where the tensor of a LOCAL dict's entry lies in the parameter that it is a part of. */
struct state_home {
    struct box whole, part;
};

struct state_entry {
    char *name;
    fsdp_entry_kind kind;
    enum dtype type;  /* in files */
    struct box whole; /* at zeros */
    struct box part;  /* this rank's */
    int32_t copies, copy;
    int32_t rank;                     /* a checkpoint's OF_RANK: whose; else -1 */
    int64_t tied_to;                  /* index of an earlier entry, never itself a tied one; -1: none */
    DLManagedTensorVersioned *tensor; /* NULL: tied */
    struct tensor data;               /* a view of it, of `part`'s size and any dtype that casts to `type` */
    struct state_home *home;          /* LOCAL: of one with values; else NULL */
};

struct state_json {
    char *name, *text;
};

struct fsdp_state_dict {
    struct ref ref;
    struct state_entry **entries; /* each in its place for life: what is told of it stays */
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
/* Of all that ranks must agree on about an entry: name, dtype, whole shape, what it is tied to. */
uint64_t state_entry_hash(const fsdp_state_dict *dict, int64_t index);
/* Room for so many more JSON values; and one in its place, which can't fail then. Takes *value. */
fsdp_status state_json_room(fsdp_state_dict *dict, int64_t more);
void state_json_put(fsdp_state_dict *dict, struct state_json *value);
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
    /* Where `want` lies in memory; NULL: in none. */
    void (*view)(const struct source *source, int64_t index, const struct box *want, struct tensor *out);
    fsdp_status (*read)(const struct source *source, int64_t index, const struct box *want, const struct tensor *out);
    int64_t n_json;
    void (*json)(const struct source *source, int64_t index, const char **name, const char **text);
    const void *of;
};
/* What a load will do: for each entry of `into` the index of what it is read from, or -1: nothing (not wanted, not
 * there, of a rank, or tied to one that is read). */
struct state_plan {
    int64_t *from;
    int64_t bytes; /* that it will write */
};
/* All checks of fsdp_state_dict_load, names told. whole: entries are read whole, though `into` has parts of them. */
fsdp_status state_plan_make(const struct source *from, const fsdp_state_dict *into, const fsdp_load_options *options,
                            int whole, struct state_plan *plan);
void state_plan_free(struct state_plan *plan);
/* overlap.c: no entry is written where another is, or where what another will read lies; where it is read from itself,
 * only if it lies there in the very same way. */
fsdp_status state_check_memory(const struct source *from, const fsdp_state_dict *into, const struct state_plan *plan,
                               int whole);
/* Whether they share a byte; as tensor_overlap, but exact whatever the strides are. It may go through all elements. */
int tensor_meet(const struct tensor *a, const struct tensor *b);
/* Tell the host how far it is; CALLBACK when that ends it. */
fsdp_status state_progress(const fsdp_load_options *options, int64_t done, int64_t total);
/* See fsdp_state_dict_load. options is of this library's size. */
fsdp_status state_load(const struct source *from, fsdp_state_dict *into, const fsdp_load_options *options);
void state_dict_source(const fsdp_state_dict *dict, struct source *out);

/* ---- layout.c, gather.c, scatter.c */

/* All ranks' parts of all entries. Making one is collective: the ranks compare names, dtypes, shapes and ties (MISMATCH
 * names the first entry that differs), tell each other their parts, and check that they make up each tensor, each
 * element once but for copies. Entries of a rank are left out. An error is the same on all ranks.
 *
 * status: how this rank fared so far, with its error record: a failure of one rank is everyone's, so it makes this call
 * all the same (dict may be NULL then). options: a hash of what else must be the same on all ranks, and so must path
 * (NULL: none). root: who will have whole tensors: in state_gather_entry all ranks get it, or this one. dict and group
 * are borrowed. */
struct state_layout;
enum { STATE_ROOT_ALL = -1, STATE_ROOT_NONE = -2 };
fsdp_status state_layout_make(const fsdp_state_dict *dict, fsdp_group *group, fsdp_op_kind kind, int32_t root,
                              uint64_t options, const char *path, fsdp_status status, struct state_layout **out);
void state_layout_free(struct state_layout *layout);
/* The whole of entry `index` (one with values, not of a rank) in `out`, of the entry's dtype in files and whole shape,
 * contiguous; NULL on ranks that get nothing. Collective. status: as above: after a failure of any rank nothing is
 * moved, and none of these calls may follow. */
fsdp_status state_gather_entry(struct state_layout *layout, int64_t index, fsdp_status status,
                               const struct tensor *out);
/* Every rank says how it fared; the first failure is everyone's. Collective. */
fsdp_status state_layout_tell(struct state_layout *layout, fsdp_status status);
/* See fsdp_state_dict_gather; status as above. */
fsdp_status state_gather(const fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                         fsdp_status status, fsdp_state_dict **out);
/* Into all ranks' parts from rank 0's source, which is looked at there alone; status as above. */
fsdp_status state_load_from_rank0(const struct source *source, const fsdp_state_dict *into, fsdp_group *group,
                                  const fsdp_load_options *options, fsdp_status status);
/* Add with a prefix before its name and that of what it is tied to. Takes `tensor` in any case. */
fsdp_status state_add_prefixed(fsdp_state_dict *dict, const char *prefix, const fsdp_entry *entry,
                               DLManagedTensorVersioned *tensor);
fsdp_status state_dict_gather(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                              fsdp_state_dict **out);

/* ---- model_state.c */

fsdp_status model_state_dict(struct fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **out);
/* status: of the check of `from`, which all ranks hear of with from_rank0. */
fsdp_status model_load_state_dict(struct fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options,
                                  fsdp_status status);
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
