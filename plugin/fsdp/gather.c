/* Unshard and reshard: gather by publication.
 *
 * The unit's full parameters lie once on the host, in a slot that all ranks map. To unshard, the ranks meet (which says
 * that each has resharded what lay in the slot before), each writes its own part to its place through its shared
 * mapping, in the compute dtype, and they meet again. The host sees them through a private, copy-on-write view at an
 * address that never changes; what it edits there stays its own and is dropped when the unit is unsharded again.
 *
 * Every unshard publishes anew, since the host may have changed its shards at any time; only the one before backward
 * does not: it wants what forward used, and if the slot still holds that, it costs nothing. All ranks know that alike,
 * since they make the same calls.
 *
 * With private unsharding (by option) the slot is this rank's own and filled by an all-gather. Where nothing is sharded
 * the full parameters are the shards themselves, or a cast of them that this rank makes for itself.
 *
 * Reshard to n ranks (reshard_after_forward n) keeps a shared slot for backward; of one of its own a rank keeps the
 * n-th part, which backward gathers from n ranks.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"
#include "tensor/kernel.h"

#include <string.h>

/* ---- this rank's part into the slot */

/* Cast or copy the shards to their place in `base`, the unit's full memory. */
static void write_part(const fsdp_unit *unit, char *base)
{
    int stream = unit->full_bytes >= KERNEL_STREAM_BYTES;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (!p->shard_count) continue;
        if (p->shard_dim == 0) {
            char *to = base + p->full_at + (size_t)(p->start * p->row) * dtype_size(p->full_type);
            size_t n = (size_t)p->shard_count;
            if (p->type == p->full_type)
                kernel_copy(to, p->shard, n * dtype_size(p->type), stream);
            else
                kernel_cast(p->full_type, to, p->type, p->shard, n, stream);
        } else {
            struct tensor part, shard;
            param_part(p, base + p->full_at, p->full_type, &part);
            param_shard(p, p->shard, p->type, &shard);
            tensor_copy(&part, &shard);
        }
    }
    os_file_release(unit->shards_fd, unit->shards, os_page_round(unit->shard_bytes));
}

static fsdp_status publish(fsdp_group *group, struct op *op, struct deadline deadline)
{
    fsdp_unit *unit = op->user;
    struct transport *t = group->transport;
    write_part(unit, op->target);
    atomic_fetch_add_explicit(&t->bytes_moved, (uint64_t)unit->shard_data, memory_order_relaxed);
    return t->ops->sync(t, deadline);
}

/* ---- all parts into a slot of this rank's own */

fsdp_status param_gather(fsdp_work *work, struct op *op, const struct param *p, void *data, enum dtype type,
                         struct piece *piece)
{
    struct tensor shard, whole;
    char *in, *out;
    param_shard(p, p->shard, p->type, &shard);
    param_whole(p, data, type, &whole);
    tensor_first(&shard, p->shard_dim);
    tensor_first(&whole, p->shard_dim);
    TRY(work_pack(work, &op->packed, &shard, type, PACK_IN, &in));
    TRY(work_pack(work, &op->packed, &whole, type, PACK_OUT, &out));
    *piece = (struct piece){.in = in,
                            .out = out,
                            .type = type,
                            .out_type = type,
                            .in_split = {.only = -1},
                            .out_split = {.count = p->count, .at = p->at, .only = -1}};
    return FSDP_OK;
}

static fsdp_status pieces_gather(fsdp_work *work, fsdp_unit *unit, char *base)
{
    struct op *op = &work->ops[0];
    struct transfer *transfer = &op->transfer;
    transfer->shape = TRANSFER_SPREAD;
    transfer->reader = -1;
    transfer->pieces = work_memory(work, (size_t)unit->n_params * sizeof(struct piece));
    if (!transfer->pieces) return FSDP_ERR_NOMEM;
    transfer->n_pieces = unit->n_params;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        TRY(param_gather(work, op, p, base + p->full_at, p->full_type, &transfer->pieces[i]));
    }
    return work_addresses(work, transfer);
}

/* ---- reshard over n ranks, in private memory */

static size_t chunk_bytes(const fsdp_unit *unit)
{
    size_t n = (size_t)unit->reshard_after_forward;
    return ((unit->full_bytes + n - 1) / n + PARAM_ALIGN - 1) & ~(size_t)(PARAM_ALIGN - 1);
}

static void chunk_count(const fsdp_unit *unit, int sign)
{
    int64_t bytes = sign * (int64_t)unit->chunk_mapped;
    memory_count(unit->model, bytes, bytes * unit->model->group->size);
}

static fsdp_status chunk_make(fsdp_unit *unit)
{
    void *chunk;
    if (unit->chunk) return FSDP_OK;
    unit->chunk_mapped = os_page_round(chunk_bytes(unit));
    TRY(os_map_anonymous(unit->chunk_mapped, &chunk));
    unit->chunk = chunk;
    chunk_count(unit, 1);
    return FSDP_OK;
}

void unit_drop_chunk(fsdp_unit *unit)
{
    if (unit->chunk) chunk_count(unit, -1);
    os_unmap(unit->chunk, unit->chunk_mapped);
    unit->chunk = NULL;
    unit->chunked = 0;
}

/* The ranks of a chunk's group, made the first time: collective over the unit's ranks. */
static fsdp_status chunk_group(fsdp_unit *unit, fsdp_group **out)
{
    fsdp_model *model = unit->model;
    int32_t n = unit->reshard_after_forward;
    for (struct small_group *small = model->small; small; small = small->next)
        if (small->of == unit->shard_group && small->n == n) {
            *out = small->group;
            return FSDP_OK;
        }
    struct small_group *small = mem_alloc(sizeof *small);
    if (!small) return mem_none("a group to reshard to", sizeof *small);
    fsdp_status status =
        group_split(unit->shard_group, unit->shard_group->rank / n, unit->shard_group->rank, NULL, &small->group);
    if (status != FSDP_OK) {
        mem_free(small);
        return status;
    }
    group_adopt(unit->shard_group, small->group);
    small->of = unit->shard_group;
    small->n = n;
    small->next = model->small;
    model->small = small;
    *out = small->group;
    return FSDP_OK;
}

/* This rank's n-th part of what was published, before the slot is given up. What the host wrote to its view is not in
 * it. */
static void chunk_keep(fsdp_unit *unit, const struct slot *slot)
{
    size_t bytes = chunk_bytes(unit), from = bytes * (size_t)(unit_shard_rank(unit) % unit->reshard_after_forward);
    if (from >= unit->full_bytes) from = bytes = 0;
    if (from + bytes > unit->full_bytes) bytes = unit->full_bytes - from;
    unit->chunked = slot->content;
    kernel_copy(unit->chunk, slot->region.shared + from, bytes, bytes >= KERNEL_STREAM_BYTES);
}

static fsdp_status pieces_chunks(fsdp_work *work, fsdp_unit *unit, char *base)
{
    struct transfer *transfer = &work->ops[0].transfer;
    transfer->shape = TRANSFER_SPREAD;
    transfer->reader = -1;
    transfer->pieces = work_memory(work, sizeof(struct piece));
    if (!transfer->pieces) return FSDP_ERR_NOMEM;
    transfer->n_pieces = 1;
    transfer->pieces[0] = (struct piece){
        .in = unit->chunk,
        .out = base,
        .type = DTYPE_U8,
        .out_type = DTYPE_U8,
        .in_split = {.only = -1},
        .out_split = {.count = (int64_t)unit->full_bytes, .step = (int64_t)chunk_bytes(unit), .only = -1}};
    return work_addresses(work, transfer);
}

static int is_chunked(const fsdp_unit *unit)
{
    return unit->reshard_after_forward > 1 && unit->shard_group && unit->model->private_unshard;
}

/* ---- unshard */

fsdp_status unit_nothing(fsdp_unit *unit, fsdp_work **handle)
{
    if (!handle) return FSDP_OK;
    fsdp_group *group = unit->model->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 0, 0, &work));
    return lane_submit(work, handle);
}

/* chunks: from the n-th parts of n ranks. */
static fsdp_status unshard_begin(fsdp_unit *unit, int chunks, fsdp_work **handle)
{
    fsdp_group *group = unit->shard_group;
    const struct slot *slot = slot_of(unit);
    fsdp_work *work;
    if (!group) {
        write_part(unit, slot->region.shared);
        return unit_nothing(unit, handle);
    }
    if (chunks) TRY(chunk_group(unit, &group));
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    uint64_t hash = hash_number(unit->hash, (uint64_t)slot->number * 2 + (uint64_t)chunks);
    struct op *op =
        op_init(work, 0, FSDP_OP_UNSHARD, hash, unit->name, sizeof unit->name); /* the work keeps the unit */
    fsdp_status status = FSDP_OK;
    if (chunks) {
        status = pieces_chunks(work, unit, slot->region.shared);
    } else if (slot->group) {
        op->body = publish;
        op->user = unit;
        op->target = slot->region.shared;
    } else {
        status = pieces_gather(work, unit, slot->region.shared);
    }
    if (status == FSDP_OK) status = unit_keep(unit, work);
    if (status != FSDP_OK) {
        work_release(work);
        return status;
    }
    return lane_submit(work, handle);
}

/* What the host wrote to the view. Looked for before it would be seen again: once forward is over (so that backward
 * need not), and before the slot is filled or taken again. A page can't have been copied if the process had no fault
 * since it was last looked for. */
static void drop_edits(fsdp_unit *unit)
{
    unit->unseen = 0;
    if (!unit->populated) return;
    int64_t faults = os_page_faults();
    if (faults < 0 || faults != unit->faults) os_drop_copies(unit->full, unit->full_mapped);
    unit->faults = faults;
}

static void call_back(fsdp_unit *unit, fsdp_unit_fn fn)
{
    if (!fn) return;
    unit->model->in_callback++;
    fn(unit, unit->callback_user); /* which may let go of the unit: whoever called holds it, see api_fsdp.c */
    unit->model->in_callback--;
}

static void unshard_succeeded(fsdp_unit *unit)
{
    if (unit->counts) {
        unit->publications++;
        unit->published_bytes += unit->shard_data;
        unit->counts = 0;
    }
    if (!unit->populated && unit->full) {
        os_populate_read(unit->full, unit->full_mapped);
        unit->populated = 1;
    }
    unit->state = FSDP_UNIT_UNSHARDED;
    unit->unseen = 1;
    call_back(unit, unit->valid);
}

static void unshard_failed(fsdp_unit *unit)
{
    struct slot *slot = slot_of(unit);
    if (slot) slot->content = 0;
    slot_leave(unit);
    unit->current = 0;
    unit->chunked = 0;
    unit->counts = 0;
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

/* Whether the slot still holds what forward used, and the unit can have it. */
static int lies_there(const fsdp_unit *unit)
{
    const struct slot *slot = slot_of(unit);
    return unit->current && slot && unit->publication && slot->content == unit->publication &&
           (slot->holder == 0 || slot->holder == unit->number + 1);
}

/* With a slot taken: fill it. */
static fsdp_status fill(fsdp_unit *unit, int reuse, fsdp_work **handle)
{
    fsdp_model *model = unit->model;
    struct slot *slot = slot_of(unit);
    int chunks = reuse && unit->current && unit->chunked && unit->chunked == unit->publication && is_chunked(unit);
    if (chunks) {
        slot->content = unit->publication;
    } else {
        slot->content = unit->publication = ++model->publications;
        unit->current = 1; /* from here on: the host may say that a shard changes before the work is done */
    }
    unit->chunked = 0;
    unit->counts = !chunks;
    return unshard_begin(unit, chunks, handle);
}

static fsdp_status unshard(fsdp_unit *unit, int reuse, fsdp_work **handle, int *begun)
{
    *begun = 0;
    TRY(model_usable(unit->model));
    TRY(unit_unshard_end(unit));
    if (unit->aliased || !unit->full_bytes) {
        unit->current = 1;
    } else if (unit->state == FSDP_UNIT_UNSHARDED && unit->current) { /* so on all ranks: nothing to do */
        return unit_nothing(unit, handle);
    } else if (reuse && lies_there(unit)) {
        slot_of(unit)->holder = unit->number + 1;
        if (unit->unseen) drop_edits(unit);
    } else {
        TRY(unit_reshard(unit, RESHARD_RELEASE));    /* shards that changed while the unit was unsharded */
        if (is_chunked(unit)) TRY(chunk_make(unit)); /* before anyone waits for this rank */
        TRY(slot_take(unit));
        drop_edits(unit);
        *begun = 1;
        fsdp_status status = fill(unit, reuse, handle);
        if (status != FSDP_OK) unshard_failed(unit);
        return status;
    }
    TRY(unit_nothing(unit, handle));
    if (unit->state != FSDP_UNIT_UNSHARDED) unshard_succeeded(unit);
    return FSDP_OK;
}

fsdp_status unit_unshard(fsdp_unit *unit, int reuse, fsdp_work **handle)
{
    int begun;
    unit->ahead = 0;
    if (unit->state == FSDP_UNIT_UNSHARDING && unit->current && handle) {
        ref_get(&unit->unsharding->ref);
        *handle = unit->unsharding;
        return FSDP_OK;
    }
    TRY(unshard(unit, reuse, handle, &begun));
    if (!begun) return FSDP_OK;
    if (!handle) {
        unshard_succeeded(unit);
        return FSDP_OK;
    }
    ref_get(&(*handle)->ref);
    unit->unsharding = *handle;
    unit->state = FSDP_UNIT_UNSHARDING;
    return FSDP_OK;
}

fsdp_status unit_unshard_ahead(fsdp_unit *unit, int reuse)
{
    fsdp_work *work = NULL;
    if (unit->state != FSDP_UNIT_SHARDED) return FSDP_OK;
    if (unit->shards_fd >= 0) os_file_prefetch(unit->shards, os_page_round(unit->shard_bytes));
    TRY(unit_unshard(unit, reuse, &work));
    work_release(work);
    unit->ahead = 1;
    return FSDP_OK;
}

/* ---- reshard */

fsdp_status unit_reshard(fsdp_unit *unit, enum reshard how)
{
    TRY(unit_unshard_end(unit));
    if (unit->state == FSDP_UNIT_UNSHARDED) {
        call_back(unit, unit->invalid);
        unit->state = FSDP_UNIT_SHARDED;
        unit->ahead = 0;
        if (how == RESHARD_AFTER_FORWARD) drop_edits(unit); /* so that backward may find the slot as it was */
    }
    struct slot *slot = slot_of(unit);
    if (!slot || slot->holder != unit->number + 1) return FSDP_OK;
    if (how == RESHARD_AFTER_FORWARD && unit->reshard_after_forward > 1) {
        if (!is_chunked(unit)) return FSDP_OK; /* it keeps its slot until backward is done */
        if (unit->chunk && unit->current && slot->content == unit->publication) chunk_keep(unit, slot);
    }
    slot_leave(unit);
    return FSDP_OK;
}
