/* Unshard and reshard: gather by publication.
 *
 * The unit's full parameters lie once on the host, in a region that all ranks map. To unshard, the ranks meet
 * (which says that each has resharded what was published before), each writes its own rows to their place
 * through its shared mapping, and they meet again. The host sees them through a private, copy-on-write view
 * at an address that never changes; what it edits there stays its own and is dropped on reshard.
 *
 * Every unshard publishes anew, since the host may have changed its shards at any time; only the one before backward
 * does not: it wants what forward used, and the region still holds that, so it costs nothing. All ranks know that
 * alike, since they make the same calls.
 *
 * With private unsharding (by option) the full parameters are this rank's own memory, filled by an all-gather
 * and given back to the kernel on reshard.
 */
#include "fsdp/fsdp.h"

#include "tensor/kernel.h"

#include <string.h>

static fsdp_status publish(fsdp_group *group, struct op *op, struct deadline deadline)
{
    fsdp_unit *unit = op->user;
    struct transport *t = group->transport;
    int stream = unit->full_bytes >= KERNEL_STREAM_BYTES;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        size_t size = dtype_size(p->type);
        size_t bytes = (size_t)(p->at[group->rank + 1] - p->at[group->rank]) * size;
        if (bytes)
            kernel_copy(unit->region.shared + p->full_at + (size_t)p->at[group->rank] * size, p->shard, bytes, stream);
    }
    atomic_fetch_add_explicit(&t->bytes_moved, (uint64_t)unit->shard_data, memory_order_relaxed);
    return t->ops->sync(t, deadline);
}

static fsdp_status pieces_gather(fsdp_work *work, fsdp_unit *unit)
{
    struct transfer *transfer = &work->ops[0].transfer;
    transfer->shape = TRANSFER_SPREAD;
    transfer->reader = -1;
    transfer->pieces = work_memory(work, (size_t)unit->n_params * sizeof(struct piece));
    if (!transfer->pieces) return FSDP_ERR_NOMEM;
    transfer->n_pieces = unit->n_params;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        transfer->pieces[i] = (struct piece){.in = p->shard,
                                             .out = p->count ? unit->full + p->full_at : NULL,
                                             .type = p->type,
                                             .out_type = p->type,
                                             .in_split = {.only = -1},
                                             .out_split = {.count = p->count, .at = p->at, .only = -1}};
    }
    return work_addresses(work, transfer);
}

fsdp_status unit_nothing(fsdp_unit *unit, fsdp_work **handle)
{
    if (!handle) return FSDP_OK;
    fsdp_group *group = unit->model->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 0, 0, &work));
    return lane_submit(work, handle);
}

static fsdp_status unshard_begin(fsdp_unit *unit, fsdp_work **handle)
{
    fsdp_group *group = unit->model->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    struct op *op =
        op_init(work, FSDP_OP_UNSHARD, unit->hash, unit->name, sizeof unit->name); /* the work keeps the unit */
    fsdp_status status = FSDP_OK;
    if (unit->has_region) {
        op->body = publish;
        op->user = unit;
    } else {
        status = pieces_gather(work, unit);
    }
    if (status == FSDP_OK) status = unit_keep(unit, work);
    if (status != FSDP_OK) {
        work_release(work);
        return status;
    }
    return lane_submit(work, handle);
}

/* Enter an unshard in the model's books, or (sign -1) strike it out again. */
static void count_unshard(fsdp_unit *unit, int sign)
{
    fsdp_model *model = unit->model;
    if (!unit->has_region) model_count_unsharded(model, sign * unit->full_data);
    model->published_bytes += sign * unit->shard_data;
}

static void unshard_succeeded(fsdp_unit *unit)
{
    if (unit->has_region && !unit->populated) {
        os_populate_read(unit->full, unit->full_mapped);
        unit->populated = 1;
    }
    unit->state = FSDP_UNIT_UNSHARDED;
}

static void unshard_failed(fsdp_unit *unit)
{
    count_unshard(unit, -1);
    if (!unit->has_region && unit->full) os_discard(unit->full, unit->full_mapped);
    unit->current = 0;
    unit->state = FSDP_UNIT_SHARDED;
}

fsdp_status unit_unshard_end(fsdp_unit *unit)
{
    if (unit->state != FSDP_UNIT_UNSHARDING) return FSDP_OK;
    fsdp_status status = work_wait(unit->unsharding, -1);
    if (!atomic_load_explicit(&unit->unsharding->done, memory_order_acquire)) return status; /* inside a callback */
    work_release(unit->unsharding);
    unit->unsharding = NULL;
    if (status == FSDP_OK)
        unshard_succeeded(unit);
    else
        unshard_failed(unit);
    return status;
}

fsdp_unit_state unit_query_state(const fsdp_unit *unit)
{
    if (unit->state != FSDP_UNIT_UNSHARDING || !atomic_load_explicit(&unit->unsharding->done, memory_order_acquire))
        return unit->state;
    return unit->unsharding->failure.status == FSDP_OK ? FSDP_UNIT_UNSHARDED : FSDP_UNIT_SHARDED;
}

fsdp_status unit_unshard(fsdp_unit *unit, int reuse, fsdp_work **handle)
{
    TRY(group_usable(unit->model->group));
    if (unit->state == FSDP_UNIT_UNSHARDING && unit->current && handle) {
        ref_get(&unit->unsharding->ref);
        *handle = unit->unsharding;
        return FSDP_OK;
    }
    TRY(unit_unshard_end(unit));
    if (unit->current && (reuse || unit->state == FSDP_UNIT_UNSHARDED)) { /* so on all ranks: nothing to do */
        TRY(unit_nothing(unit, handle));
        unit->state = FSDP_UNIT_UNSHARDED;
        return FSDP_OK;
    }
    TRY(unit_reshard(unit)); /* shards that changed while the unit was unsharded */
    if (unit->has_region) os_drop_copies(unit->full, unit->full_mapped); /* what was written while it was sharded */
    count_unshard(unit, 1);
    unit->current = 1; /* from here on: the host may say that a shard changes before the work is done */
    fsdp_status status = unshard_begin(unit, handle);
    if (status != FSDP_OK) {
        unshard_failed(unit);
        return status;
    }
    if (!handle) {
        unshard_succeeded(unit);
        return FSDP_OK;
    }
    ref_get(&(*handle)->ref);
    unit->unsharding = *handle;
    unit->state = FSDP_UNIT_UNSHARDING;
    return FSDP_OK;
}

fsdp_status unit_reshard(fsdp_unit *unit)
{
    TRY(unit_unshard_end(unit));
    if (unit->state == FSDP_UNIT_SHARDED) return FSDP_OK;
    unit->state = FSDP_UNIT_SHARDED;
    if (!unit->full) return FSDP_OK;
    if (unit->has_region) {
        os_drop_copies(unit->full, unit->full_mapped);
    } else {
        os_discard(unit->full, unit->full_mapped);
        model_count_unsharded(unit->model, -unit->full_data);
        unit->current = 0;
    }
    return FSDP_OK;
}
