/* Models: the root of a set of units. See fsdp.h. */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define PREFETCH_LIMIT 4

int model_is(const fsdp_model *model)
{
    return model && ref_is(&model->ref, REF_MODEL);
}

fsdp_status model_usable(fsdp_model *model)
{
    TRY(group_usable(model->group));
    if (!model->in_callback) return FSDP_OK;
    return err(FSDP_ERR_STATE,
               "model '%s': a call that may change a unit inside one of its units' callbacks, which only look",
               model->name);
}

void shard_extent(int64_t rows, int rank, int size, int64_t *start, int64_t *length)
{
    int64_t chunk = rows / size + (rows % size != 0);
    *start = chunk && rank > rows / chunk ? rows : chunk * rank;
    if (*start > rows) *start = rows;
    *length = rows - *start < chunk ? rows - *start : chunk;
}

/* ---- making */

static fsdp_status check_divisor(const char *name, double divisor)
{
    CHECK_ARG(isfinite(divisor) && divisor >= 0, "%s is %g: a positive number, or 0 for the number of ranks", name,
              divisor);
    return FSDP_OK;
}

int strategy_is_hybrid(fsdp_strategy strategy)
{
    return strategy == FSDP_HYBRID_SHARD || strategy == FSDP_HYBRID_SHARD_GRAD_OP;
}

static fsdp_status check_options(const fsdp_model_options *o)
{
    TRY(check_divisor("options.gradient_divisor", o->gradient_divisor));
    CHECK_ARG(o->strategy >= FSDP_STRATEGY_DEFAULT && o->strategy <= FSDP_HYBRID_SHARD_GRAD_OP,
              "options.strategy is %d: FSDP_FULL_SHARD (1) to FSDP_HYBRID_SHARD_GRAD_OP (5), or 0", o->strategy);
    CHECK_ARG(o->reshard_after_forward >= FSDP_RESHARD_NEVER,
              "options.reshard_after_forward is %d: FSDP_RESHARD_NEVER (-1), _DEFAULT (0), _ALWAYS (1), or a number of "
              "ranks",
              o->reshard_after_forward);
    int keeps = o->strategy == FSDP_SHARD_GRAD_OP || o->strategy == FSDP_HYBRID_SHARD_GRAD_OP;
    CHECK_ARG(!keeps || o->reshard_after_forward <= FSDP_RESHARD_DEFAULT,
              "options: strategy %d keeps parameters full after forward, but reshard_after_forward is %d", o->strategy,
              o->reshard_after_forward);
    CHECK_ARG(o->strategy != FSDP_NO_SHARD || o->reshard_after_forward < 2,
              "options: reshard_after_forward is %d, but with FSDP_NO_SHARD nothing is sharded",
              o->reshard_after_forward);
    CHECK_ARG(o->forward_prefetch >= 0, "options.forward_prefetch is %d: a number of units, or 0", o->forward_prefetch);
    CHECK_ARG(o->backward_prefetch >= FSDP_BACKWARD_NONE && o->backward_prefetch <= FSDP_BACKWARD_POST,
              "options.backward_prefetch is %d: FSDP_BACKWARD_NONE (0), _PRE (1) or _POST (2)", o->backward_prefetch);
    CHECK_ARG(o->prefetch_limit >= 0, "options.prefetch_limit is %d: a number of units, or 0 for the default",
              o->prefetch_limit);
    CHECK_ARG(o->reserved == 0, "options.reserved is %d: it must be 0", o->reserved);
    return FSDP_OK;
}

/* The model without its groups. */
static fsdp_status make(const fsdp_model_options *o, fsdp_model **out)
{
    struct precision precision;
    fsdp_precision none = {.struct_size = sizeof none};
    TRY(precision_read(o->precision ? o->precision : &none, &precision));
    fsdp_model *model = mem_alloc(sizeof *model);
    if (!model) return mem_none("a model", sizeof *model);
    if (o->offload_dir && !(model->offload_dir = mem_strdup(o->offload_dir))) {
        mem_free(model);
        return mem_none("a model", strlen(o->offload_dir));
    }
    ref_init(&model->ref, REF_MODEL);
    atomic_init(&model->handles, 1);
    pthread_mutex_init(&model->lock, NULL);
    snprintf(model->name, sizeof model->name, "%s", o->name ? o->name : "model");
    model->strategy = o->strategy ? o->strategy : FSDP_FULL_SHARD;
    model->reshard_after_forward = o->reshard_after_forward;
    model->private_unshard = o->private_unshard != 0;
    model->sync_module_states = o->sync_module_states != 0;
    model->precision = precision;
    model->sync = model->all_reduce = 1;
    model->forward_prefetch = o->forward_prefetch;
    model->backward_prefetch = o->backward_prefetch;
    model->prefetch_limit = o->prefetch_limit ? o->prefetch_limit : PREFETCH_LIMIT;
    *out = model;
    return FSDP_OK;
}

/* With its groups: what could not be checked before. */
static fsdp_status complete(fsdp_model *model, const fsdp_model_options *o)
{
    const fsdp_group *sharded = model->shard ? model->shard : model->group;
    model->divisor = o->gradient_divisor != 0 ? o->gradient_divisor : model->group->size;
    return reshard_check(model->reshard_after_forward, sharded->size);
}

static fsdp_status finish(fsdp_model *model, fsdp_status status, fsdp_model **out)
{
    if (status == FSDP_OK) {
        *out = model;
        return FSDP_OK;
    }
    fsdp_error_info failure;
    err_save(&failure);
    model_release(model);
    return err_restore(&failure);
}

fsdp_status model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **out)
{
    fsdp_model *model;
    TRY(group_usable(group));
    TRY(check_options(options));
    CHECK_ARG(!strategy_is_hybrid(options->strategy),
              "options.strategy is %d, hybrid sharding, which needs a mesh: use fsdp_model_create_on_mesh",
              options->strategy);
    CHECK_ARG(!options->shard_dim && !options->replicate_dim,
              "options.%s is '%.40s', but a group has no dimensions: use fsdp_model_create_on_mesh",
              options->shard_dim ? "shard_dim" : "replicate_dim",
              options->shard_dim ? options->shard_dim : options->replicate_dim);
    TRY(make(options, &model));
    group_retain(group);
    model->group = group;
    return finish(model, complete(model, options), out);
}

/* Which dimensions the options mean; -1: all of the mesh. */
static fsdp_status dimensions(const fsdp_mesh *mesh, const fsdp_model_options *o, int32_t *shard, int32_t *replicate)
{
    *shard = *replicate = -1;
    if (o->shard_dim && (*shard = mesh_find(mesh, o->shard_dim)) < 0) return FSDP_ERR_INVALID;
    if (o->replicate_dim && (*replicate = mesh_find(mesh, o->replicate_dim)) < 0) return FSDP_ERR_INVALID;
    if (!strategy_is_hybrid(o->strategy)) {
        int none = o->strategy == FSDP_NO_SHARD;
        CHECK_ARG(none ? !o->shard_dim : !o->replicate_dim, "options.%s is '%.40s', which strategy %d does not use",
                  none ? "shard_dim" : "replicate_dim", none ? o->shard_dim : o->replicate_dim,
                  o->strategy ? o->strategy : FSDP_FULL_SHARD);
        return FSDP_OK;
    }
    CHECK_ARG(mesh->ndim >= 2,
              "options.strategy is %d, hybrid sharding, which needs a mesh of two dimensions: this one "
              "has '%s' only",
              o->strategy, mesh->names[0]);
    if (*shard < 0) *shard = *replicate == mesh->ndim - 1 ? mesh->ndim - 2 : mesh->ndim - 1;
    if (*replicate < 0) *replicate = *shard == mesh->ndim - 2 ? mesh->ndim - 1 : mesh->ndim - 2;
    CHECK_ARG(*shard != *replicate, "options.shard_dim and options.replicate_dim are both '%s'", mesh->names[*shard]);
    return FSDP_OK;
}

static const char *name_of(const fsdp_mesh *mesh, int32_t dim)
{
    return dim >= 0 && dim < mesh->ndim ? mesh->names[dim] : "none";
}

/* Ranks that mean different dimensions would come to groups that don't fit together. */
static fsdp_status dimensions_agree(fsdp_mesh *mesh, const fsdp_model *model, int32_t shard, int32_t replicate)
{
    fsdp_group *group = mesh->group;
    struct said {
        int32_t strategy, shard, replicate;
    } mine = {model->strategy, shard, replicate}, all[GROUP_MAX_RANKS];
    TRY(group_exchange(group, FSDP_OP_CREATE_MESH, hash_number(HASH_START, 1), &mine, sizeof mine, all));
    for (int r = 1; r < group->size; r++) {
        if (memcmp(&all[r], &all[0], sizeof mine) == 0) continue;
        err(FSDP_ERR_MISMATCH,
            "group '%s', operation %llu: rank 0 makes model '%.40s' with strategy %d, shard_dim %s and replicate_dim "
            "%s, "
            "rank %d with strategy %d, %s and %s: all ranks must give the same",
            group->name, (unsigned long long)group->sequence, model->name, all[0].strategy, name_of(mesh, all[0].shard),
            name_of(mesh, all[0].replicate), r, all[r].strategy, name_of(mesh, all[r].shard),
            name_of(mesh, all[r].replicate));
        err_operation(FSDP_OP_CREATE_MESH, group->sequence, 0, r);
        return FSDP_ERR_MISMATCH;
    }
    return FSDP_OK;
}

/* The model's own groups, so that its operations keep their order whatever the host does with the mesh's. */
static fsdp_status groups_make(fsdp_model *model, fsdp_mesh *mesh, int32_t shard, int32_t replicate)
{
    char name[GROUP_NAME];
    TRY(dimensions_agree(mesh, model, shard, replicate));
    uint32_t along = (shard >= 0 ? 1u << shard : 0) | (replicate >= 0 ? 1u << replicate : 0);
    uint32_t all = (1u << mesh->ndim) - 1;
    if (along == 0 || along == all) {
        group_retain(mesh->group);
        model->group = mesh->group;
    } else {
        snprintf(name, sizeof name, "%.40s", model->name);
        TRY(mesh_split(mesh, along, name, &model->group));
    }
    if (!strategy_is_hybrid(model->strategy)) return FSDP_OK;
    snprintf(name, sizeof name, "%.30s/%.30s", model->name, mesh->names[shard]);
    TRY(mesh_split(mesh, 1u << shard, name, &model->shard));
    snprintf(name, sizeof name, "%.30s/%.30s", model->name, mesh->names[replicate]);
    return mesh_split(mesh, 1u << replicate, name, &model->replicate);
}

fsdp_status model_create_on_mesh(fsdp_mesh *mesh, const fsdp_model_options *options, fsdp_model **out)
{
    fsdp_model *model;
    int32_t shard, replicate;
    TRY(group_usable(mesh->group));
    TRY(check_options(options));
    TRY(dimensions(mesh, options, &shard, &replicate));
    int64_t sharded = shard >= 0 ? mesh->sizes[shard] : mesh->group->size;
    TRY(reshard_check(options->reshard_after_forward, (int32_t)sharded)); /* before anyone waits */
    TRY(make(options, &model));
    fsdp_status status = groups_make(model, mesh, shard, replicate);
    if (status == FSDP_OK) status = complete(model, options);
    return finish(model, status, out);
}

void model_retain(fsdp_model *model)
{
    ref_get(&model->ref);
}

void model_forget_awaiting(fsdp_model *model)
{
    fsdp_unit *held = model->awaiting;
    model->awaiting = NULL;
    unit_release(held);
}

void model_release(fsdp_model *model)
{
    if (!model || !ref_put(&model->ref)) return;
    slots_release(model);
    schedule_free(model);
    while (model->small) {
        struct small_group *small = model->small;
        model->small = small->next;
        group_release(small->group);
        mem_free(small);
    }
    group_release(model->replicate);
    group_release(model->shard);
    group_release(model->group);
    pthread_mutex_destroy(&model->lock);
    mem_free(model->offload_dir);
    mem_free(model);
}

/* ---- the list of units */

fsdp_status units_hold(fsdp_model *model, struct units *out)
{
    fsdp_status status = FSDP_OK;
    int32_t n = 0;
    *out = (struct units){.hash = HASH_START};
    pthread_mutex_lock(&model->lock);
    for (fsdp_unit *unit = model->units; unit; unit = unit->next) {
        if (atomic_load_explicit(&unit->ref.count, memory_order_relaxed) <= 0) continue; /* it is about to go */
        out->hash = hash_number(out->hash, unit->hash);
        n++;
    }
    if (n && !(out->at = mem_array((size_t)n, sizeof *out->at)))
        status = mem_none("a list of units", (size_t)n * sizeof *out->at);
    for (fsdp_unit *unit = model->units; unit && out->n < n && status == FSDP_OK; unit = unit->next)
        if (ref_try_get(&unit->ref)) out->at[out->n++] = unit;
    pthread_mutex_unlock(&model->lock);
    return status;
}

void units_drop(struct units *units)
{
    for (int32_t i = 0; i < units->n; i++) unit_release(units->at[i]);
    mem_free(units->at);
}

fsdp_unit *units_find(fsdp_model *model, int64_t number)
{
    pthread_mutex_lock(&model->lock);
    fsdp_unit *unit = model->units;
    while (unit && unit->number != number) unit = unit->next;
    if (unit && !ref_try_get(&unit->ref)) unit = NULL;
    pthread_mutex_unlock(&model->lock);
    return unit;
}

/* ---- settings of gradients: of one unit, and of all */

fsdp_status unit_set_gradient_sync(fsdp_unit *unit, int32_t sync)
{
    CHECK_ARG(sync == 0 || sync == 1, "sync is %d: 0 or 1", sync);
    unit->sync = sync;
    return FSDP_OK;
}

fsdp_status unit_set_all_reduce(fsdp_unit *unit, int32_t all_reduce)
{
    CHECK_ARG(all_reduce == 0 || all_reduce == 1, "all_reduce is %d: 0 or 1", all_reduce);
    unit->all_reduce = all_reduce;
    return FSDP_OK;
}

fsdp_status unit_set_gradient_divisor(fsdp_unit *unit, double divisor)
{
    fsdp_model *model = unit->model;
    TRY(check_divisor("divisor", divisor));
    if (model->awaiting == unit) (void)model_replicate(model); /* as in model_set_gradient_divisor */
    unit->divisor = divisor != 0 ? divisor : model->group->size;
    return FSDP_OK;
}

fsdp_status model_set_gradient_sync(fsdp_model *model, int32_t sync)
{
    CHECK_ARG(sync == 0 || sync == 1, "sync is %d: 0 or 1", sync);
    struct units units;
    TRY(units_hold(model, &units));
    model->sync = sync;
    for (int32_t i = 0; i < units.n; i++) units.at[i]->sync = sync;
    units_drop(&units);
    return FSDP_OK;
}

fsdp_status model_set_all_reduce(fsdp_model *model, int32_t all_reduce)
{
    CHECK_ARG(all_reduce == 0 || all_reduce == 1, "all_reduce is %d: 0 or 1", all_reduce);
    struct units units;
    TRY(units_hold(model, &units));
    model->all_reduce = all_reduce;
    for (int32_t i = 0; i < units.n; i++) units.at[i]->all_reduce = all_reduce;
    units_drop(&units);
    return FSDP_OK;
}

fsdp_status model_set_gradient_divisor(fsdp_model *model, double divisor)
{
    TRY(check_divisor("divisor", divisor));
    struct units units;
    TRY(units_hold(model, &units));
    (void)model_replicate(model); /* by the divisor that its post_backward was called with; a failure is kept there */
    model->divisor = divisor != 0 ? divisor : model->group->size;
    for (int32_t i = 0; i < units.n; i++) units.at[i]->divisor = model->divisor;
    units_drop(&units);
    return FSDP_OK;
}

/* ---- the end of an iteration */

/* What waits for all of the model's works can't be called where one of them is being run: in a callback. */
static fsdp_status check_outside(const fsdp_model *model)
{
    fsdp_group *groups[] = {model->group, model->shard, model->replicate};
    int inside = 0;
    for (int i = 0; i < 3; i++) inside |= groups[i] && lane_is_advanced_here(&groups[i]->collectives);
    for (const struct small_group *small = model->small; small; small = small->next)
        inside |= lane_is_advanced_here(&small->group->collectives);
    if (!inside) return FSDP_OK;
    return err(FSDP_ERR_STATE,
               "model '%s': this call waits for the model's operations, and was made inside a callback of one of its "
               "groups: make it after the callback has returned",
               model->name);
}

/* Every unit sharded and settled; the first failure is reported, after all have been seen to. */
static fsdp_status settle_all(const struct units *units)
{
    fsdp_status first = FSDP_OK;
    fsdp_error_info failure;
    for (int32_t i = 0; i < units->n; i++) {
        fsdp_unit *unit = units->at[i];
        fsdp_status settled = unit_settle(unit);
        fsdp_error_info why;
        err_save(&why);
        fsdp_status sharded = unit_reshard(unit, RESHARD_RELEASE);
        if (settled == FSDP_OK && sharded != FSDP_OK) err_save(&why);
        if (settled == FSDP_OK) settled = sharded;
        if (settled == FSDP_OK && unit->lost.status != FSDP_OK) {
            settled = unit->lost.status;
            why = unit->lost;
        }
        grads_clear(unit);
        os_file_release(unit->grads_fd, unit->grads, os_page_round(unit->grad_bytes));
        unit->current = 0; /* it was this iteration's */
        unit->in_backward = 0;
        if (settled == FSDP_OK || first != FSDP_OK) continue;
        first = settled;
        failure = why;
    }
    return first == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

fsdp_status model_finish_backward(fsdp_model *model)
{
    TRY(model_usable(model));
    TRY(check_outside(model));
    struct units units;
    TRY(units_hold(model, &units));
    fsdp_error_info before = {.status = FSDP_OK}; /* what has failed already is why others fail from here on */
    for (int32_t i = 0; i < units.n && before.status == FSDP_OK; i++) before = units.at[i]->lost;
    (void)model_replicate(model); /* its failure is the unit's */
    fsdp_status status = settle_all(&units);
    units_drop(&units);
    slots_free(model); /* also those of units that have gone: at one place in the order of calls */
    schedule_end(model);
    return before.status == FSDP_OK ? status : err_restore(&before);
}

fsdp_status model_zero_grad(fsdp_model *model)
{
    TRY(model_usable(model));
    TRY(check_outside(model));
    struct units units;
    TRY(units_hold(model, &units));
    fsdp_status first = FSDP_OK;
    fsdp_error_info failure;
    for (int32_t i = 0; i < units.n; i++) {
        fsdp_status status = unit_settle(units.at[i]);
        if (status != FSDP_OK && first == FSDP_OK) err_save(&failure);
        if (first == FSDP_OK) first = status;
        grads_drop(units.at[i]);
    }
    units_drop(&units);
    return first == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

/* ---- reset */

struct meeting {
    fsdp_group *group;
    fsdp_work *work; /* NULL: met */
};

static fsdp_status meeting_begin(struct meeting *meeting)
{
    fsdp_group *group = meeting->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    (void)op_init(work, 0, FSDP_OP_RESET, HASH_START, NULL, 0);
    return lane_submit(work, &meeting->work);
}

/* Meet the ranks of all the model's groups at once. Ranks that are still in calls of the broken iteration, on whichever
 * group, get MISMATCH from them, one after the other, and come here in their turn. */
static fsdp_status meet_all(struct meeting *meetings, int32_t n, int64_t deadline)
{
    while (n == 1) { /* on this thread, with no hand-off */
        fsdp_status status = group_exchange(meetings[0].group, FSDP_OP_RESET, HASH_START, NULL, 0, NULL);
        if (status != FSDP_ERR_MISMATCH || os_now_ns() > deadline) return status;
    }
    for (int32_t i = 0; i < n; i++) TRY(meeting_begin(&meetings[i]));
    for (int32_t left = n; left > 0;) {
        for (int32_t i = 0; i < n; i++) {
            struct meeting *meeting = &meetings[i];
            if (!meeting->work) continue;
            fsdp_status status = work_wait(meeting->work, left == 1 ? -1 : 1);
            if (status == FSDP_ERR_PENDING) continue;
            work_release(meeting->work);
            meeting->work = NULL;
            if (status == FSDP_OK) {
                left--;
                continue;
            }
            if (status != FSDP_ERR_MISMATCH || os_now_ns() > deadline) return status;
            TRY(meeting_begin(meeting));
        }
    }
    return FSDP_OK;
}

fsdp_status model_reset(fsdp_model *model)
{
    fsdp_group *group = model->group;
    TRY(model_usable(model));
    TRY(check_outside(model));
    struct units units;
    int32_t n = 0, room = 3;
    for (struct small_group *small = model->small; small; small = small->next) room++;
    struct meeting *meetings = mem_array((size_t)room, sizeof *meetings);
    if (!meetings) return mem_none("a reset", (size_t)room * sizeof *meetings);
    fsdp_status status = units_hold(model, &units);
    if (status != FSDP_OK) {
        mem_free(meetings);
        return status;
    }
    model_forget_awaiting(model); /* nothing new is begun */
    (void)settle_all(&units);     /* failures of the broken iteration are what reset is for */
    slots_release(model);         /* ranks may have come to hold different ones */
    model->slots_made = 0;
    schedule_forget(model);
    for (int32_t i = 0; i < units.n; i++) {
        fsdp_unit *unit = units.at[i];
        unit->viewed = unit->publication = unit->chunked = 0;
        unit_free_gradients(unit);
        grads_drop(unit);
    }
    units_drop(&units);
    meetings[n++].group = group;
    if (model->shard) meetings[n++].group = model->shard;
    if (model->replicate) meetings[n++].group = model->replicate;
    for (struct small_group *small = model->small; small; small = small->next) meetings[n++].group = small->group;
    status = meet_all(meetings, n, os_now_ns() + group->timeout_ms * 1000000);
    for (int32_t i = 0; i < n; i++) work_release(meetings[i].work);
    mem_free(meetings);
    return status;
}

fsdp_status model_broadcast(fsdp_model *model, const DLTensor *const *tensors, int32_t n)
{
    fsdp_collective *calls = mem_array((size_t)n, sizeof *calls);
    if (!calls) return mem_none("a broadcast", (size_t)n * sizeof *calls);
    for (int32_t i = 0; i < n; i++)
        calls[i] =
            (fsdp_collective){.struct_size = sizeof *calls, .kind = FSDP_OP_BROADCAST, .input = tensors[i], .peer = 0};
    fsdp_status status = group_collective(model->group, calls, n, NULL);
    mem_free(calls);
    return status;
}
