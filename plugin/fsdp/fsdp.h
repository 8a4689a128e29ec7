/* Fully sharded data parallelism: meshes, models, units and parameters, as its files see them.
 *
 *   mesh.c      named dimensions over ranks           slot.c      memory of full parameters, which units take in turn
 *   model.c     the root: groups, settings, end of    gather.c    unshard and reshard
 *               backward, reset                       schedule.c  the hooks, the order learnt, prefetch
 *   unit.c      making a unit and its end             reduce.c    gradients to the shards
 *   param.c     a parameter's layout and tensors      clip.c      norm and clipping
 *   values.c    whole values in and out of shards     scaler.c    loss scaling
 *   memory.c    counting
 *
 * Ownership: a unit holds its model, a model its groups; tensors handed out hold their unit. So memory that a host
 * still sees is never unmapped. Threads: one at a time for a model (the host's), but for the bodies of operations,
 * which may run on a group's progress thread and touch only what is named there, and for a unit's end, which comes on
 * whatever thread drops the last reference: what both touch is under the model's lock.
 *
 * Ranks decide alike: what an unshard or a reduction does follows from the calls made so far, which are the same on all
 * ranks, and never from timing. What they decided is in the hash of the operation, so that a difference is found.
 */
#ifndef FSDP_FSDP_FSDP_H
#define FSDP_FSDP_FSDP_H

#include "group/group.h"

/* Rows of a dimension for each rank: chunks of ceil(rows / size), trailing ranks shorter or empty. */
void shard_extent(int64_t rows, int rank, int size, int64_t *start, int64_t *length);

/* ---- meshes */

struct fsdp_mesh {
    struct ref ref;
    fsdp_group *group;
    int32_t ndim;
    int64_t sizes[FSDP_MESH_MAX_DIMS], coordinates[FSDP_MESH_MAX_DIMS];
    char names[FSDP_MESH_MAX_DIMS][32];
    fsdp_group *groups[FSDP_MESH_MAX_DIMS]; /* this rank's of each dimension; of a single one: the group itself */
};

int mesh_is(const fsdp_mesh *mesh);
fsdp_status mesh_create(fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names,
                        fsdp_mesh **out);
void mesh_release(fsdp_mesh *mesh);
void mesh_query(const fsdp_mesh *mesh, fsdp_mesh_info *info);
/* The index of a dimension by name; -1: none, with an error that names those there are. */
int32_t mesh_find(const fsdp_mesh *mesh, const char *name);
fsdp_status mesh_group(fsdp_mesh *mesh, const char *name, fsdp_group **out);
/* A new group of the ranks that differ from this one in the dimensions marked in `along` only. Collective. */
fsdp_status mesh_split(fsdp_mesh *mesh, uint32_t along, const char *name, fsdp_group **out);

/* ---- parameters */

#define PARAM_ALIGN 64 /* of a parameter within its unit's memory, in bytes */

struct precision {
    enum dtype param, reduce, output, buffer; /* PRECISION_NONE: as it comes */
    int32_t keep_low_precision_grads, keep_inputs;
};
#define PRECISION_NONE DTYPE_COUNT
fsdp_status precision_read(const fsdp_precision *given, struct precision *out);

struct param {
    char *name;
    enum dtype type, full_type, grad_type; /* of shard, full view, sharded gradient */
    int32_t ndim, frozen;
    int32_t shard_dim; /* 0 also where nothing is sharded */
    int64_t shape[TENSOR_MAX_DIMS];
    int64_t corner[TENSOR_MAX_DIMS], extent[TENSOR_MAX_DIMS]; /* of this rank's part */
    int64_t count, row;                                       /* elements in all, and in one row of shard_dim */
    int64_t *at;                /* N + 1: the ranks' first elements, with shard_dim in front */
    int64_t start, rows;        /* this rank's part of shard_dim */
    int64_t shard_count;        /* elements: rows * row */
    size_t full_at, partial_at; /* byte offsets in the unit's full memory, and in its partial sums */
    char *shard, *grad;         /* within the unit's blocks; NULL when empty */
    char *accumulated;          /* unsharded gradients that were not synced; kept for the next time */
    int32_t accumulating;       /* it holds some */
    int32_t stale;              /* the sharded gradient counts as zeros, whatever is there: see grads_clear */
    atomic_int used;            /* some rank gave one to what was reduced since it was zeros; written by reductions */
    int32_t partial_used;       /* HYBRID: the same of the partial sums */
};

/* One that the host gave; two may be the same parameter (tied). */
struct entry {
    char *name;
    uint64_t id;
    int32_t param; /* index in params */
};

enum dtype param_wide(enum dtype type); /* what gradients of this dtype are summed in */
/* Views of memory that holds the whole parameter: all of it, and this rank's part. */
void param_whole(const struct param *p, void *data, enum dtype type, struct tensor *out);
void param_part(const struct param *p, void *data, enum dtype type, struct tensor *out);
/* This rank's shard, contiguous in `data`. */
void param_shard(const struct param *p, void *data, enum dtype type, struct tensor *out);

/* ---- slots */

/* Memory for the full parameters of one unit at a time: one for all ranks of `group` that is shared, or this rank's
 * own. Changed by the host's thread only. */
struct slot {
    struct slot *next;
    int64_t number;    /* in the model, in the order of making: the same on all ranks */
    fsdp_group *group; /* that shares it; NULL: this rank's own */
    struct region region;
    int64_t holder;  /* number + 1 of the unit that has it; 0: free */
    int64_t content; /* the publication that lies in it; 0: none */
};

/* A slot for the unit, which it holds from then on; may make one (collective over the unit's ranks). */
fsdp_status slot_take(fsdp_unit *unit);
void slot_leave(fsdp_unit *unit);
struct slot *slot_of(const fsdp_unit *unit); /* taken last, held or not; NULL: none */
void slots_free(fsdp_model *model);          /* none is held, or of use for backward: all units are sharded */
void slots_release(fsdp_model *model);       /* at the model's end */

/* ---- models */

struct event { /* a step of an iteration */
    int64_t unit;
    fsdp_phase phase;
};

/* The order of pre_forward and pre_backward calls: of the last whole iteration, and of this one so far. */
struct schedule {
    struct event *known, *now;
    int32_t n_known, n_now, room_known, room_now;
    int32_t pass;       /* of this one: where the forward pass under way begins; before it, one that may be another */
    int32_t known_pass; /* of the last: the same, where that was for evaluation; 0: there was none */
    int32_t at;         /* how far this iteration has followed `known`; -1: it has left it */
    int32_t told;       /* a change of order has been reported */
    int32_t learnt;     /* `known` is of a whole iteration (1), or of a forward pass that was repeated (2) */
    int32_t guessed_wrong; /* the latter was tried, and led astray */
};

struct small_group { /* of reshard_after_forward n */
    struct small_group *next;
    fsdp_group *of, *group;
    int32_t n;
};

struct fsdp_model {
    struct ref ref;
    fsdp_group *group;     /* all ranks of the model */
    fsdp_group *shard;     /* HYBRID: the dimension that is sharded over, or NULL */
    fsdp_group *replicate; /* and the one of replicas */
    char name[GROUP_NAME];
    fsdp_strategy strategy;
    int32_t reshard_after_forward, private_unshard, sync_module_states;
    struct precision precision;
    double divisor;
    int32_t sync, all_reduce; /* of units made later */
    int32_t forward_prefetch, prefetch_limit;
    fsdp_backward_prefetch backward_prefetch;
    char *offload_dir;
    int64_t units_made, slots_made, publications;
    struct slot *slots;
    struct small_group *small;
    struct schedule schedule;
    int32_t in_callback; /* of the host: no unit may change meanwhile */
    fsdp_unit
        *awaiting; /* whose gradients are to be replicated next; held, so that it lives on all ranks alike: until the
                             end of backward, a reset, or the host's last handle on the model goes. Or NULL */
    atomic_int handles;   /* the host's */
    pthread_mutex_t lock; /* of the list and of the counts */
    fsdp_unit *units;     /* not held: a unit takes itself out when it goes */
    int64_t shards_peak, gradients_peak, unsharded, unsharded_peak, host_unsharded, host_unsharded_peak;
    int64_t published_bytes, reduced_bytes, replicated_bytes; /* of units that have gone */
};

int model_is(const fsdp_model *model);
int strategy_is_hybrid(fsdp_strategy strategy);
/* Its group is, and no callback of the host's is running, which may not change a unit. */
fsdp_status model_usable(fsdp_model *model);
fsdp_status model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **out);
fsdp_status model_create_on_mesh(fsdp_mesh *mesh, const fsdp_model_options *options, fsdp_model **out);
void model_retain(fsdp_model *model);
void model_release(fsdp_model *model);
void model_forget_awaiting(fsdp_model *model);
fsdp_status model_set_gradient_sync(fsdp_model *model, int32_t sync);
fsdp_status model_set_all_reduce(fsdp_model *model, int32_t all_reduce);
fsdp_status model_set_gradient_divisor(fsdp_model *model, double divisor);
fsdp_status unit_set_gradient_sync(fsdp_unit *unit, int32_t sync);
fsdp_status unit_set_all_reduce(fsdp_unit *unit, int32_t all_reduce);
fsdp_status unit_set_gradient_divisor(fsdp_unit *unit, double divisor);
fsdp_status model_finish_backward(fsdp_model *model);
fsdp_status model_zero_grad(fsdp_model *model);
fsdp_status model_reset(fsdp_model *model);
void model_memory(fsdp_model *model, fsdp_memory_info *info);
void memory_count(fsdp_model *model, int64_t unsharded, int64_t host_unsharded); /* changes */
void memory_peaks(fsdp_model *model); /* after shards or gradients have grown */
fsdp_status model_broadcast(fsdp_model *model, const DLTensor *const *tensors, int32_t n);

/* The model's units, each held, so that what follows needs no lock. units_drop frees the array, also after a
 * failure. In the order of their making. */
struct units {
    fsdp_unit **at;
    int32_t n;
    uint64_t hash; /* which ones they are; also when there was no memory for the list */
};
fsdp_status units_hold(fsdp_model *model, struct units *out);
void units_drop(struct units *units);
/* The unit of that number, held; NULL: gone. */
fsdp_unit *units_find(fsdp_model *model, int64_t number);

/* ---- units */

struct prefetch { /* the host's list; numbers, so that it holds nobody */
    int32_t n;
    int64_t *units;
};

struct fsdp_unit {
    struct ref ref;
    fsdp_model *model;
    fsdp_unit *next;
    char name[CALL_LABEL];
    int64_t number; /* in the model: the same on all ranks */
    uint64_t hash;  /* of all that the ranks must agree on and that never changes */
    fsdp_strategy strategy;
    int32_t reshard_after_forward; /* NEVER, ALWAYS or n */
    int32_t keep_after_backward;
    struct precision precision;
    fsdp_group *shard_group;     /* NULL: not sharded */
    fsdp_group *replicate_group; /* NULL: no replicas */
    int32_t n_params, n_entries;
    struct param *params;
    struct entry *entries;

    char *shards, *grads; /* one block each for all parameters */
    size_t shard_bytes, grad_bytes;
    int shards_fd, grads_fd; /* with offload_dir: the files that they lie in; else -1 */
    char *partials;          /* HYBRID: sums over the shard dimension that wait for the other; made when first needed */
    size_t partial_bytes;
    int32_t has_partials; /* they hold some: on all ranks alike */
    int32_t stale_grads;  /* some parameter's `stale` is set */

    char *full;        /* view of the slot last taken; one address for life. NULL: empty, or aliased */
    size_t full_bytes; /* of all parameters with their alignment */
    size_t full_mapped;
    int64_t full_data, shard_data; /* without alignment: all, and this rank's part in full_type */
    int32_t aliased;               /* the full parameters are the shards */
    int64_t viewed;                /* number + 1 of the slot that `full` shows: the one taken last; 0: none */
    int32_t populated;             /* the view's pages are mapped: no faults in the steady state */
    int32_t unseen;                /* nobody has looked for edits since it was last unsharded */
    int64_t faults;                /* page faults of this process when the view was last looked through for edits */
    int64_t publication;           /* of its content, if the slot still has it */
    char *chunk;                   /* reshard over n ranks: this rank's n-th part, where memory isn't shared */
    size_t chunk_mapped;
    int64_t chunked; /* the publication it is of; 0: none */

    fsdp_unit_state state;
    int32_t counts;      /* the unshard under way moves data */
    int32_t current;     /* what was last published is what the shards hold, for all that we were told */
    int32_t in_backward; /* pre_backward was called, post_backward not yet */
    int32_t ahead;       /* it was unsharded by prefetch and not asked for since */
    int32_t accumulates; /* gradients await a reduction: on all ranks, since sync is set alike */
    int32_t sync, all_reduce;
    double divisor;
    fsdp_work *unsharding; /* while UNSHARDING */
    fsdp_work *reducing;   /* asynchronous reduction under way */
    fsdp_work *replicating;
    fsdp_error_info lost;        /* a reduction that failed: the gradients are not to be used. status FSDP_OK: none */
    struct prefetch prefetch[2]; /* by phase */
    fsdp_unit_fn valid, invalid;
    void *callback_user;
    int64_t publications, published_bytes, reduced_bytes, replicated_bytes;
};

int unit_is(const fsdp_unit *unit);
int unit_shard_rank(const fsdp_unit *unit);
int unit_shard_size(const fsdp_unit *unit);
int unit_replicas(const fsdp_unit *unit);

/* params: n structs of this library's size, with their tensors imported. */
fsdp_status unit_create(fsdp_model *model, const char *name, const fsdp_param *params, const struct tensor *fulls,
                        int32_t n, const fsdp_unit_options *options, fsdp_unit **out);
void unit_retain(fsdp_unit *unit);
void unit_release(fsdp_unit *unit);
void unit_let_go(void *unit); /* unit_release, for deleters and works */
/* param.c: layout of one parameter, before there is memory; and its memory. */
fsdp_status param_lay_out(fsdp_unit *unit, struct param *p, const fsdp_param *given, const struct tensor *full);
fsdp_status unit_memory(fsdp_unit *unit);
enum unit_tensor { UNIT_SHARD, UNIT_FULL, UNIT_GRAD };
fsdp_status unit_tensor(fsdp_unit *unit, int32_t index, enum unit_tensor which, DLManagedTensorVersioned **out);
fsdp_status unit_param_query(fsdp_unit *unit, int32_t index, fsdp_param_info *info);
fsdp_status unit_used(const fsdp_unit *unit, int32_t *used, int32_t n);
void unit_query(fsdp_unit *unit, fsdp_unit_info *info);
fsdp_status unit_check_index(const fsdp_unit *unit, int32_t index);
fsdp_status unit_set_frozen(fsdp_unit *unit, int32_t index, int32_t frozen);
fsdp_status unit_set_reshard_after_forward(fsdp_unit *unit, int32_t value);
fsdp_status reshard_check(int32_t value, int32_t shard_size);

/* values.c */
void unit_take_values(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls); /* each rank its own */
/* Rank 0's to all: works made beforehand, so that nothing fails for want of memory while peers wait. */
fsdp_status unit_sync_prepare(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls,
                              fsdp_work *works[2]);
fsdp_status unit_sync_values(fsdp_work *works[2]);
fsdp_status unit_write_back(fsdp_unit *unit);
fsdp_status unit_gather_param(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **out);
fsdp_status unit_load_param(fsdp_unit *unit, int32_t index, const struct tensor *full);
fsdp_status unit_cast(fsdp_unit *unit, fsdp_cast_kind kind, const struct tensor *input, DLManagedTensorVersioned **out);
/* Whether its shards may be written now: STATE while it is unsharded. `param` is what for. What prefetch brought is let
 * go of. */
fsdp_status unit_loadable(fsdp_unit *unit, const char *param);

/* The piece of a gather of one parameter: from the ranks' shards, as `type`, to all of it in `data`. */
fsdp_status param_gather(fsdp_work *work, struct op *op, const struct param *p, void *data, enum dtype type,
                         struct piece *piece);
void unit_drop_chunk(fsdp_unit *unit); /* the n-th part that reshard to n ranks kept */

/* Have a work keep the unit until it is complete. */
fsdp_status unit_keep(fsdp_unit *unit, fsdp_work *work);
/* A work with nothing to do, for calls that had none. handle NULL: nothing is made. */
fsdp_status unit_nothing(fsdp_unit *unit, fsdp_work **handle);
/* reuse: what was last published will do, if nothing was said to have changed. */
fsdp_status unit_unshard(fsdp_unit *unit, int reuse, fsdp_work **handle);
/* Begin it without a handle for the host. */
fsdp_status unit_unshard_ahead(fsdp_unit *unit, int reuse);
/* Wait for an asynchronous unshard, if one is under way: UNSHARDED, or SHARDED when it failed. */
fsdp_status unit_unshard_end(fsdp_unit *unit);
fsdp_unit_state unit_query_state(const fsdp_unit *unit);
/* RELEASE gives the slot up; AFTER_FORWARD as reshard_after_forward says (n: the n-th part is kept, or the slot). */
enum reshard { RESHARD_RELEASE, RESHARD_AFTER_FORWARD };
fsdp_status unit_reshard(fsdp_unit *unit, enum reshard how);

/* schedule.c */
fsdp_status unit_pre_forward(fsdp_unit *unit);
fsdp_status unit_post_forward(fsdp_unit *unit);
fsdp_status unit_pre_backward(fsdp_unit *unit);
fsdp_status unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle);
fsdp_status unit_set_prefetch(fsdp_unit *unit, fsdp_phase phase, fsdp_unit *const *units, int32_t n);
void schedule_end(fsdp_model *model); /* of an iteration: what it did is what is expected of the next */
void schedule_forget(fsdp_model *model);
void schedule_free(fsdp_model *model);

/* reduce.c */
fsdp_status unit_reduce(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle);
/* Wait for an asynchronous reduction, if one is under way. */
fsdp_status unit_settle(fsdp_unit *unit);
fsdp_status model_replicate(fsdp_model *model); /* begin what waits for its turn */
/* The sharded gradient of one parameter, -1: of all, counts as zeros; what was accumulated stays. */
fsdp_status unit_zero_grad(fsdp_unit *unit, int32_t index);
/* All sharded gradients count as zeros, and what was accumulated is dropped. */
void grads_drop(fsdp_unit *unit);
/* Gradients that count as zeros become zeros, before anyone reads or adds to them. Clearing is put off since most are
 * overwritten by the first reduction. */
void grads_clear(fsdp_unit *unit);
void unit_free_gradients(fsdp_unit *unit); /* buffers of gradients that were not synced */

/* ---- clip.c: norms, and what they share with the scaler */

/* Wait for the reductions of all units. STATE when the gradients of one are not to be used. */
fsdp_status units_settle(const struct units *units);
/* Every rank gives a number, or its failure (which is then everyone's); all get all ranks' numbers. `all` has room for
 * GROUP_MAX_RANKS. `what` begins the message of another rank's failure. */
fsdp_status ranks_tell(fsdp_group *group, fsdp_op_kind kind, uint64_t hash, const char *what, fsdp_status status,
                       double mine, double *all);
void units_scale(const struct units *units, double factor); /* sharded gradients, each rounded once */
fsdp_status model_grad_norm(fsdp_model *model, double p, double *norm);
fsdp_status model_clip_grad_norm(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite,
                                 double *norm);

/* ---- scaler.c */

struct fsdp_scaler {
    struct ref ref;
    fsdp_group *group;
    double growth_factor, backoff_factor;
    int32_t growth_interval, disabled;
    double scale; /* a float32's value: losses may be of that dtype */
    int32_t growth_tracker;
    int32_t stage; /* where it is between unscale, step and update */
    int32_t found_inf;
    int64_t steps, skipped;
};

int scaler_is(const fsdp_scaler *scaler);
fsdp_status scaler_create(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **out);
void scaler_release(fsdp_scaler *scaler);
void scaler_query(const fsdp_scaler *scaler, fsdp_scaler_info *info);
fsdp_status scaler_unscale(fsdp_scaler *scaler, fsdp_model *model);
/* n tensors; count -1: no gradient. Each to be written. */
fsdp_status scaler_unscale_tensors(fsdp_scaler *scaler, const struct tensor *grads, int32_t n);
fsdp_status scaler_step(fsdp_scaler *scaler, int32_t *should_step);
fsdp_status scaler_update(fsdp_scaler *scaler);
fsdp_status scaler_save(const fsdp_scaler *scaler, fsdp_scaler_state *state);
fsdp_status scaler_load(fsdp_scaler *scaler, const fsdp_scaler_state *state);

#endif
