/* Unshard and reshard: gather by publication.
 *
 * The unit's full parameters lie once on the host, in a region that all ranks map. To unshard, the ranks meet (which
 * says that each has resharded what was published before), each writes its own rows to their place through its shared
 * mapping, and they meet again. The host sees them through a private, copy-on-write view at an address that never changes;
 * what it edits there stays its own and is dropped on reshard.
 *
 * While the shards have not changed since (from the unshard in forward to the end of backward), unsharding again costs
 * nothing: the region still holds them. All ranks know that alike, since they make the same calls.
 *
 * With private unsharding (by option) the full parameters are this rank's own memory, filled by an all-gather and given
 * back to the kernel on reshard.
 */
#include "fsdp/fsdp.h"

#include "tensor/kernel.h"

#include <string.h>

#define STREAM_STORE_BYTES ((size_t)1 << 20)

static fsdp_status publish(fsdp_group *group, struct op *op, struct deadline deadline)
{
    fsdp_unit *unit = op->user;
    struct transport *t = group->transport;
    int stream = unit->full_bytes >= STREAM_STORE_BYTES;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        size_t size = dtype_size(p->type);
        size_t bytes = (size_t)(p->at[group->rank + 1] - p->at[group->rank]) * size;
        if (bytes) kernel_copy(unit->region.shared + p->full_at + (size_t)p->at[group->rank] * size, p->shard, bytes, stream);
    }
    atomic_fetch_add_explicit(&t->bytes_moved, unit->shard_bytes, memory_order_relaxed);
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
                                             .out = unit->full + p->full_at,
                                             .type = p->type,
                                             .out_type = p->type,
                                             .in_split = {.only = -1},
                                             .out_split = {.count = p->count, .at = p->at, .only = -1}};
    }
    return FSDP_OK;
}

static void let_go(void *unit)
{
    unit_release(unit);
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
    struct op *op = &work->ops[0];
    op->kind = FSDP_OP_UNSHARD;
    op->header = (struct call_header){.kind = FSDP_OP_UNSHARD, .type = -1, .root = -1, .hash = unit->hash};
    op->payload = unit->name; /* lives as long as the unit, which the work keeps */
    op->payload_bytes = sizeof unit->name;
    fsdp_status status = FSDP_OK;
    if (unit->has_region) {
        op->body = publish;
        op->user = unit;
    } else {
        status = pieces_gather(work, unit);
    }
    unit_retain(unit);
    if (status == FSDP_OK) status = work_keep(work, let_go, unit);
    if (status != FSDP_OK) {
        unit_release(unit);
        work_release(work);
        return status;
    }
    return lane_submit(work, handle);
}

static void unsharded(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    if (!unit->has_region) model_count_unsharded(model, (int64_t)unit->full_bytes);
    model->published_bytes += (int64_t)unit->shard_bytes;
    if (unit->has_region && !unit->populated) {
        os_populate_read(unit->full, unit->full_mapped);
        unit->populated = 1;
    }
    unit->current = 1;
    unit->state = FSDP_UNIT_UNSHARDED;
}

/* Take an asynchronous unshard to its end. */
static fsdp_status unshard_end(fsdp_unit *unit)
{
    if (unit->state != FSDP_UNIT_UNSHARDING) return FSDP_OK;
    fsdp_status status = work_wait(unit->unsharding, -1);
    work_release(unit->unsharding);
    unit->unsharding = NULL;
    unit->state = FSDP_UNIT_SHARDED;
    if (status == FSDP_OK) unsharded(unit);
    return status;
}

fsdp_status unit_unshard(fsdp_unit *unit, fsdp_work **handle)
{
    TRY(group_usable(unit->model->group));
    if (unit->state == FSDP_UNIT_UNSHARDING && handle) {
        ref_get(&unit->unsharding->ref);
        *handle = unit->unsharding;
        return FSDP_OK;
    }
    TRY(unshard_end(unit));
    if (unit->state == FSDP_UNIT_UNSHARDED) return unit_nothing(unit, handle);
    if (unit->current) {
        TRY(unit_nothing(unit, handle));
        unit->state = FSDP_UNIT_UNSHARDED;
        return FSDP_OK;
    }
    if (!handle) {
        TRY(unshard_begin(unit, NULL));
        unsharded(unit);
        return FSDP_OK;
    }
    TRY(unshard_begin(unit, handle));
    ref_get(&(*handle)->ref);
    unit->unsharding = *handle;
    unit->state = FSDP_UNIT_UNSHARDING;
    return FSDP_OK;
}

fsdp_status unit_reshard(fsdp_unit *unit)
{
    TRY(unshard_end(unit));
    if (unit->state == FSDP_UNIT_SHARDED) return FSDP_OK;
    unit->state = FSDP_UNIT_SHARDED;
    if (!unit->full_bytes) return FSDP_OK;
    if (unit->has_region) {
        os_drop_copies(unit->full, unit->full_mapped);
    } else {
        os_discard(unit->full, unit->full_mapped);
        model_count_unsharded(unit->model, -(int64_t)unit->full_bytes);
        unit->current = 0;
    }
    return FSDP_OK;
}
