/* Models: the root of a set of units. See fsdp.h. */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int model_is(const fsdp_model *model)
{
    return model && ref_is(&model->ref, REF_MODEL);
}

fsdp_status model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **out)
{
    double divisor = options->gradient_divisor;
    CHECK_ARG(isfinite(divisor) && divisor >= 0,
              "options.gradient_divisor is %g: a positive number, or 0 for the group's size", divisor);
    TRY(group_usable(group));
    fsdp_model *model = mem_alloc(sizeof *model);
    if (!model) return mem_none("a model", sizeof *model);
    ref_init(&model->ref, REF_MODEL);
    pthread_mutex_init(&model->lock, NULL);
    group_retain(group);
    model->group = group;
    snprintf(model->name, sizeof model->name, "%s", options->name ? options->name : "model");
    model->no_reshard_after_forward = options->no_reshard_after_forward != 0;
    model->private_unshard = options->private_unshard != 0;
    model->divisor = divisor != 0 ? divisor : group->size;
    model->sync = 1;
    *out = model;
    return FSDP_OK;
}

void shard_extent(int64_t rows, int rank, int size, int64_t *start, int64_t *length)
{
    int64_t chunk = rows / size + (rows % size != 0);
    *start = chunk && rank > rows / chunk ? rows : chunk * rank;
    if (*start > rows) *start = rows;
    *length = rows - *start < chunk ? rows - *start : chunk;
}

void model_retain(fsdp_model *model)
{
    ref_get(&model->ref);
}

void model_release(fsdp_model *model)
{
    if (!model || !ref_put(&model->ref)) return;
    group_release(model->group);
    pthread_mutex_destroy(&model->lock);
    mem_free(model);
}

fsdp_status model_set_gradient_sync(fsdp_model *model, int32_t sync)
{
    CHECK_ARG(sync == 0 || sync == 1, "sync is %d: 0 or 1", sync);
    model->sync = sync;
    return FSDP_OK;
}

fsdp_status units_hold(fsdp_model *model, struct units *out)
{
    fsdp_status status = FSDP_OK;
    int32_t n = 0;
    *out = (struct units){0};
    pthread_mutex_lock(&model->lock);
    for (fsdp_unit *unit = model->units; unit; unit = unit->next) n++;
    if (n && !(out->at = mem_array((size_t)n, sizeof *out->at)))
        status = mem_none("a list of units", (size_t)n * sizeof *out->at);
    for (fsdp_unit *unit = model->units; unit && status == FSDP_OK; unit = unit->next)
        if (ref_try_get(&unit->ref)) out->at[out->n++] = unit;
    pthread_mutex_unlock(&model->lock);
    return status;
}

void units_drop(struct units *units)
{
    for (int32_t i = 0; i < units->n; i++) unit_release(units->at[i]);
    mem_free(units->at);
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
        fsdp_status sharded = unit_reshard(unit);
        if (settled == FSDP_OK && sharded != FSDP_OK) err_save(&why);
        if (settled == FSDP_OK) settled = sharded;
        if (settled == FSDP_OK && unit->lost.status != FSDP_OK) {
            settled = unit->lost.status;
            why = unit->lost;
        }
        if (settled == FSDP_OK || first != FSDP_OK) continue;
        first = settled;
        failure = why;
    }
    return first == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

fsdp_status model_finish_backward(fsdp_model *model)
{
    TRY(group_usable(model->group));
    struct units units;
    TRY(units_hold(model, &units));
    fsdp_status status = settle_all(&units);
    for (int32_t i = 0; i < units.n; i++) units.at[i]->current = 0; /* it was this iteration's */
    units_drop(&units);
    return status;
}

fsdp_status model_zero_grad(fsdp_model *model)
{
    TRY(group_usable(model->group));
    struct units units;
    TRY(units_hold(model, &units));
    fsdp_status first = FSDP_OK;
    fsdp_error_info failure;
    for (int32_t i = 0; i < units.n; i++) {
        fsdp_status status = unit_settle(units.at[i]);
        if (status != FSDP_OK && first == FSDP_OK) err_save(&failure);
        if (first == FSDP_OK) first = status;
        unit_zero_grad(units.at[i]);
    }
    units_drop(&units);
    return first == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

fsdp_status model_reset(fsdp_model *model)
{
    fsdp_group *group = model->group;
    TRY(group_usable(group));
    struct units units;
    TRY(units_hold(model, &units));
    (void)settle_all(&units); /* failures of the broken iteration are what reset is for */
    for (int32_t i = 0; i < units.n; i++) {
        units.at[i]->current = 0;
        unit_zero_grad(units.at[i]);
    }
    units_drop(&units);
    /* Ranks that are still in calls of the broken iteration get MISMATCH from them, and come here in their
     * turn. */
    int64_t deadline = os_now_ns() + group->timeout_ms * 1000000;
    for (;;) {
        fsdp_status status = group_exchange(group, FSDP_OP_RESET, HASH_START, NULL, 0, NULL);
        if (status != FSDP_ERR_MISMATCH || os_now_ns() > deadline) return status;
    }
}

/* ---- memory */

void model_count_unsharded(fsdp_model *model, int64_t change)
{
    if (ref_forked(&model->ref)) return;
    pthread_mutex_lock(&model->lock);
    model->unsharded += change;
    if (model->unsharded > model->unsharded_peak) model->unsharded_peak = model->unsharded;
    pthread_mutex_unlock(&model->lock);
}

void model_memory(fsdp_model *model, fsdp_memory_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
    pthread_mutex_lock(&model->lock);
    for (fsdp_unit *unit = model->units; unit; unit = unit->next)
        for (int32_t i = 0; i < unit->n_params; i++) {
            const struct param *p = &unit->params[i];
            int64_t size = (int64_t)dtype_size(p->type), shard = p->rows * p->row * size;
            info->shards += shard;
            if (!p->frozen) info->gradients += shard;
            if (p->accumulated) info->gradients += p->count * (int64_t)dtype_size(p->accumulated_type);
            info->total_parameters += p->count * size;
        }
    info->unsharded = model->unsharded;
    info->unsharded_peak = model->unsharded_peak;
    pthread_mutex_unlock(&model->lock);
    info->host_parameters =
        info->total_parameters + info->unsharded * (model->private_unshard ? model->group->size : 1);
    info->reduced_bytes = model->reduced_bytes;
    info->published_bytes = model->published_bytes;
}
