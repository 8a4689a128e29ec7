/* Fully sharded data parallelism: models, units and parameters, as its files see them.
 *
 *   model.c   the root: units, gradient sync, end of backward, reset, memory
 *   unit.c    making a unit, its tensors, the hooks
 *   gather.c  unshard and reshard        reduce.c  gradients to the shards
 *   clip.c    norm and clipping          scaler.c  loss scaling
 *
 * Ownership: a unit holds its model, a model its group; tensors handed out hold their unit. So memory that a
 * host still sees is never unmapped. Threads: one at a time for a model (the host's), but for the bodies of
 * operations, which may run on the group's progress thread and touch only what is named there, and for a
 * unit's end, which comes on whatever thread drops the last reference: what both touch is under the model's
 * lock.
 */
#ifndef FSDP_FSDP_FSDP_H
#define FSDP_FSDP_FSDP_H

#include "group/group.h"

/* Rows of a dimension for each rank: chunks of ceil(rows / size), trailing ranks shorter or empty. */
void shard_extent(int64_t rows, int rank, int size, int64_t *start, int64_t *length);

#define PARAM_ALIGN 64 /* of a parameter within its unit's full memory, in bytes */

struct param {
    char *name;
    enum dtype type;
    int32_t ndim, frozen;
    int64_t shape[TENSOR_MAX_DIMS];
    int64_t count, row;          /* elements in all, and in one row of dimension 0 */
    int64_t *at;                 /* N + 1: the ranks' first elements (ceil rows each, trailing ranks shorter) */
    int64_t rows;                /* of this rank's shard */
    size_t full_at;              /* byte offset in the unit's full memory */
    char *shard, *grad;          /* within the unit's blocks; NULL when empty (or frozen) */
    char *accumulated;           /* unsharded gradients that were not synced, or NULL */
    enum dtype accumulated_type; /* f32 for narrower floats */
};

struct fsdp_model {
    struct ref ref;
    fsdp_group *group;
    char name[GROUP_NAME];
    int32_t no_reshard_after_forward, private_unshard;
    double divisor;
    int32_t sync;
    int64_t units_made;
    pthread_mutex_t lock; /* of the list and of the counts of unsharded bytes */
    fsdp_unit *units;     /* not held: a unit takes itself out when it goes */
    int64_t unsharded, unsharded_peak;
    int64_t reduced_bytes, published_bytes;
};

struct fsdp_unit {
    struct ref ref;
    fsdp_model *model;
    fsdp_unit *next;
    char name[CALL_LABEL];
    int64_t number; /* in the model: the same on all ranks */
    uint64_t hash;  /* of all that the ranks must agree on: names, shapes, dtypes, the model's options */
    int32_t n_params;
    struct param *params;

    char *shards, *grads; /* one block each for all parameters */
    size_t shard_bytes, grad_bytes;
    size_t full_bytes;             /* of all parameters with their alignment */
    int64_t full_data, shard_data; /* the same without it, and of this rank's rows: for the counters */
    char *full;                    /* private view of the region, or private memory; one address for life */
    size_t full_mapped;
    struct region region; /* mapped unless the model unshards privately */
    int32_t has_region;
    int32_t populated; /* the view's pages are mapped: no faults in the steady state */

    fsdp_unit_state state;
    int32_t current;       /* what was last published is what the shards hold, for all that we were told */
    int32_t accumulates;   /* gradients await a reduction: on all ranks, since sync is set alike */
    fsdp_work *unsharding; /* while UNSHARDING */
    fsdp_work *reducing;   /* asynchronous reduction under way */
    fsdp_error_info lost;  /* a reduction that failed: the gradients are not to be used. status FSDP_OK: none */
};

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

int model_is(const fsdp_model *model);
int unit_is(const fsdp_unit *unit);

fsdp_status model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **out);
void model_retain(fsdp_model *model);
void model_release(fsdp_model *model);
fsdp_status model_set_gradient_sync(fsdp_model *model, int32_t sync);
fsdp_status model_finish_backward(fsdp_model *model);
fsdp_status model_zero_grad(fsdp_model *model);
fsdp_status model_reset(fsdp_model *model);
void model_memory(fsdp_model *model, fsdp_memory_info *info);
/* Full parameters held by this process: for the counters. */
void model_count_unsharded(fsdp_model *model, int64_t change);

/* The model's units, each held, so that what follows needs no lock. units_drop frees the array, also after a
 * failure. */
struct units {
    fsdp_unit **at;
    int32_t n;
};
fsdp_status units_hold(fsdp_model *model, struct units *out);
void units_drop(struct units *units);

/* params: n structs of this library's size, with their tensors imported. */
fsdp_status unit_create(fsdp_model *model, const char *name, const fsdp_param *params, const struct tensor *fulls,
                        int32_t n, fsdp_unit **out);
void unit_retain(fsdp_unit *unit);
void unit_release(fsdp_unit *unit);
enum unit_tensor { UNIT_SHARD, UNIT_FULL, UNIT_GRAD };
fsdp_status unit_tensor(fsdp_unit *unit, int32_t index, enum unit_tensor which, DLManagedTensorVersioned **out);

/* Have a work keep the unit until it is complete. */
fsdp_status unit_keep(fsdp_unit *unit, fsdp_work *work);
/* A work with nothing to do, for calls that had none. handle NULL: nothing is made. */
fsdp_status unit_nothing(fsdp_unit *unit, fsdp_work **handle);
/* reuse: what was last published will do, if nothing was said to have changed. */
fsdp_status unit_unshard(fsdp_unit *unit, int reuse, fsdp_work **handle);
/* Wait for an asynchronous unshard, if one is under way: UNSHARDED, or SHARDED when it failed. */
fsdp_status unit_unshard_end(fsdp_unit *unit);
fsdp_unit_state unit_query_state(const fsdp_unit *unit);
fsdp_status unit_reshard(fsdp_unit *unit);
fsdp_status unit_post_forward(fsdp_unit *unit);
fsdp_status unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle);
/* Wait for an asynchronous reduction, if one is under way. */
fsdp_status unit_settle(fsdp_unit *unit);
void unit_zero_grad(fsdp_unit *unit);
void unit_drop_accumulated(fsdp_unit *unit);

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

/* scaler.c */
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
