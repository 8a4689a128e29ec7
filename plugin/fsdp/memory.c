/* Counting a model's memory: what its units, slots and groups hold, now and at most. See fsdp.h.
 *
 * Slots are counted when they are made and given up. Shards and gradients follow from the units, so they are added up
 * when someone asks, and where they may have grown, for the peak. Counts are under the model's lock: a unit may end on
 * any thread. */
#include "fsdp/fsdp.h"

#include <string.h>

/* Of this rank (or, with `all`, of all ranks that hold a unit together). */
static void add_unit(const fsdp_unit *unit, int64_t *shards, int64_t *gradients, int64_t *host_shards)
{
    const fsdp_group *group = unit->model->group;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        int64_t size = (int64_t)dtype_size(p->type);
        *shards += p->shard_count * size;
        *host_shards += p->count * size * (group->size / unit_shard_size(unit));
        if (p->accumulated) *gradients += p->count * (int64_t)dtype_size(param_wide(p->full_type));
        if (p->frozen) continue;
        *gradients += p->shard_count * (int64_t)dtype_size(p->grad_type);
        if (unit->partials) *gradients += p->shard_count * (int64_t)dtype_size(param_wide(p->full_type));
    }
}

/* With the lock held. */
static void add_up(fsdp_model *model, int64_t *shards, int64_t *gradients, int64_t *host_shards)
{
    *shards = *gradients = *host_shards = 0;
    for (const fsdp_unit *unit = model->units; unit; unit = unit->next) add_unit(unit, shards, gradients, host_shards);
    if (*shards > model->shards_peak) model->shards_peak = *shards;
    if (*gradients > model->gradients_peak) model->gradients_peak = *gradients;
}

void memory_peaks(fsdp_model *model)
{
    int64_t shards, gradients, host_shards;
    pthread_mutex_lock(&model->lock);
    add_up(model, &shards, &gradients, &host_shards);
    pthread_mutex_unlock(&model->lock);
}

void memory_count(fsdp_model *model, int64_t unsharded, int64_t host_unsharded)
{
    if (ref_forked(&model->ref)) return;
    pthread_mutex_lock(&model->lock);
    model->unsharded += unsharded;
    model->host_unsharded += host_unsharded;
    if (model->unsharded > model->unsharded_peak) model->unsharded_peak = model->unsharded;
    if (model->host_unsharded > model->host_unsharded_peak) model->host_unsharded_peak = model->host_unsharded;
    pthread_mutex_unlock(&model->lock);
}

void model_memory(fsdp_model *model, fsdp_memory_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
    pthread_mutex_lock(&model->lock);
    add_up(model, &info->shards, &info->gradients, &info->host_shards);
    info->shards_peak = model->shards_peak;
    info->gradients_peak = model->gradients_peak;
    info->published_bytes = model->published_bytes;
    info->reduced_bytes = model->reduced_bytes;
    info->replicated_bytes = model->replicated_bytes;
    for (const fsdp_unit *unit = model->units; unit; unit = unit->next) {
        for (int32_t i = 0; i < unit->n_params; i++)
            info->total_parameters += unit->params[i].count * (int64_t)dtype_size(unit->params[i].type);
        if (unit->full_data > info->largest_unit) info->largest_unit = unit->full_data;
        info->published_bytes += unit->published_bytes;
        if (unit->counts && unit_query_state(unit) == FSDP_UNIT_UNSHARDED) info->published_bytes += unit->shard_data;
        info->reduced_bytes += unit->reduced_bytes;
        info->replicated_bytes += unit->replicated_bytes;
    }
    info->unsharded = model->unsharded;
    info->unsharded_peak = model->unsharded_peak;
    info->host_unsharded = model->host_unsharded;
    info->host_unsharded_peak = model->host_unsharded_peak;
    pthread_mutex_unlock(&model->lock);
    info->host_gradients = info->gradients * model->group->size;
    const fsdp_group *groups[] = {model->group, model->shard, model->replicate};
    for (int i = 0; i < 3; i++)
        if (groups[i]) info->staging += groups[i]->transport->segment_bytes;
    for (const struct small_group *small = model->small; small; small = small->next)
        info->staging += small->group->transport->segment_bytes;
    for (const struct slot *slot = model->slots; slot; slot = slot->next) info->slots++;
}
