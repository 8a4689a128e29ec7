/* Values: whole parameters into shards and out of them. See fsdp.h.
 *
 * All on the host's thread; what talks to other ranks says so. */
#include "fsdp/fsdp.h"

#include "base/mem.h"
#include "tensor/kernel.h"

#include <string.h>

/* ---- at creation */

/* The entry that gave a parameter first. */
static int32_t first_entry(const fsdp_unit *unit, int32_t param)
{
    int32_t k = 0;
    while (unit->entries[k].param != param) k++;
    return k;
}

void unit_take_values(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls)
{
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        int32_t k = first_entry(unit, i);
        if (params[k].meta || !p->shard_count) continue;
        struct tensor part = fulls[k], shard;
        tensor_narrow(&part, p->shard_dim, p->start, p->rows);
        param_shard(p, p->shard, p->type, &shard);
        tensor_copy(&shard, &part);
    }
}

/* The shard dimension's first rank sends each of its ranks their part. */
static fsdp_status scatter_prepare(fsdp_unit *unit, const struct tensor *fulls, fsdp_work **out)
{
    fsdp_group *group = unit->shard_group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    *out = work;
    struct op *op = op_init(work, 0, FSDP_OP_SYNC_STATES, unit->hash, unit->name, sizeof unit->name);
    struct transfer *transfer = &op->transfer;
    transfer->shape = TRANSFER_EXCHANGE;
    transfer->reader = -1;
    transfer->pieces = work_memory(work, (size_t)unit->n_params * sizeof(struct piece));
    fsdp_status status = transfer->pieces ? FSDP_OK : FSDP_ERR_NOMEM;
    for (int32_t i = 0; i < unit->n_params && status == FSDP_OK; i++) {
        const struct param *p = &unit->params[i];
        struct tensor whole = fulls[first_entry(unit, i)], shard;
        char *from = NULL, *to = NULL;
        tensor_first(&whole, p->shard_dim);
        if (group->rank == 0) status = work_pack(work, &op->packed, &whole, p->type, PACK_IN, &from);
        param_shard(p, p->shard, p->type, &shard);
        tensor_first(&shard, p->shard_dim);
        if (status == FSDP_OK) status = work_pack(work, &op->packed, &shard, p->type, PACK_OUT, &to);
        transfer->pieces[transfer->n_pieces++] =
            (struct piece){.in = from,
                           .out = to,
                           .type = p->type,
                           .out_type = p->type,
                           .in_split = {.count = p->count, .at = p->at, .only = -1},
                           .out_split = {.count = p->shard_count, .only = 0}};
    }
    return status == FSDP_OK ? work_addresses(work, transfer) : status;
}

/* The first replica's shards to all. */
static fsdp_status replicate_prepare(fsdp_unit *unit, fsdp_work **out)
{
    fsdp_group *group = unit->replicate_group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    *out = work;
    struct op *op = op_init(work, 0, FSDP_OP_SYNC_STATES, unit->hash, unit->name, sizeof unit->name);
    struct transfer *transfer = &op->transfer;
    transfer->shape = TRANSFER_SPREAD;
    transfer->reader = -1;
    transfer->pieces = work_memory(work, sizeof(struct piece));
    if (!transfer->pieces) return FSDP_ERR_NOMEM;
    transfer->n_pieces = 1; /* the whole block: equal ranks of equal units have equal ones */
    transfer->pieces[0] = (struct piece){.in = group->rank == 0 ? unit->shards : NULL,
                                         .out = group->rank == 0 ? NULL : unit->shards,
                                         .type = DTYPE_U8,
                                         .out_type = DTYPE_U8,
                                         .in_split = {.only = -1},
                                         .out_split = {.count = (int64_t)unit->shard_bytes, .only = 0}};
    return FSDP_OK;
}

fsdp_status unit_sync_prepare(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls,
                              fsdp_work *works[2])
{
    if (!unit->shard_group && unit->replicate_group->rank == 0) unit_take_values(unit, params, fulls);
    if (unit->shard_group && (!unit->replicate_group || unit->replicate_group->rank == 0))
        TRY(scatter_prepare(unit, fulls, &works[0]));
    return unit->replicate_group ? replicate_prepare(unit, &works[1]) : FSDP_OK;
}

fsdp_status unit_sync_values(fsdp_work *works[2])
{
    for (int i = 0; i < 2; i++) {
        fsdp_work *work = works[i];
        works[i] = NULL;
        if (work) TRY(lane_submit(work, NULL));
    }
    return FSDP_OK;
}

/* ---- edits of the full views */

#define BLOCK 1024

/* shard[i] = full[i] where that is not what shard[i] rounds to. */
static void take_edits(char *shard, enum dtype type, const char *full, enum dtype full_type, int64_t n)
{
    size_t size = dtype_size(type), full_size = dtype_size(full_type);
    char rounded[BLOCK * 8];
    for (int64_t at = 0; at < n; at += BLOCK) {
        size_t now = (size_t)(n - at < BLOCK ? n - at : BLOCK);
        char *own = shard + (size_t)at * size;
        const char *seen = full + (size_t)at * full_size;
        kernel_cast(full_type, rounded, type, own, now, 0);
        if (memcmp(rounded, seen, now * full_size) == 0) continue;
        for (size_t i = 0; i < now; i++)
            if (memcmp(rounded + i * full_size, seen + i * full_size, full_size) != 0)
                kernel_cast(type, own + i * size, full_type, seen + i * full_size, 1, 0);
    }
}

fsdp_status unit_write_back(fsdp_unit *unit)
{
    TRY(unit_unshard_end(unit));
    if (unit->state != FSDP_UNIT_UNSHARDED)
        return err(FSDP_ERR_STATE,
                   "unit '%s' is not unsharded: there are no full parameters to write back; call "
                   "fsdp_unit_unshard first",
                   unit->name);
    if (unit->aliased) return FSDP_OK;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (!p->shard_count) continue;
        struct tensor part;
        param_part(p, unit->full + p->full_at, p->full_type, &part);
        int64_t outer = 1, run = p->shard_count; /* the part is `outer` runs of elements that lie together */
        for (int32_t d = 0; d < p->shard_dim; d++) outer *= p->shape[d];
        run /= outer;
        int64_t step = p->count / outer;
        for (int64_t o = 0; o < outer; o++)
            take_edits(p->shard + (size_t)(o * run) * dtype_size(p->type), p->type,
                       part.data + (size_t)(o * step) * dtype_size(p->full_type), p->full_type, run);
    }
    unit->current = 0; /* another publication would bring each owner's edits to all */
    return FSDP_OK;
}

/* ---- one parameter */

/* From the shards of all ranks to `data`. */
static fsdp_status gather(fsdp_unit *unit, int32_t index, const struct param *p, void *data)
{
    fsdp_group *group = unit->shard_group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    uint64_t hash = hash_number(unit->hash, (uint64_t)index);
    struct op *op = op_init(work, 0, FSDP_OP_GATHER_PARAM, hash, unit->name, sizeof unit->name);
    op->transfer.shape = TRANSFER_SPREAD;
    op->transfer.reader = -1;
    op->transfer.n_pieces = 1;
    op->transfer.pieces = work_memory(work, sizeof(struct piece));
    op->header.count = p->count;
    fsdp_status status =
        op->transfer.pieces ? param_gather(work, op, p, data, p->type, &op->transfer.pieces[0]) : FSDP_ERR_NOMEM;
    if (status == FSDP_OK) return lane_submit(work, NULL);
    work_release(work);
    return status;
}

fsdp_status unit_gather_param(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **out)
{
    TRY(unit_check_index(unit, index));
    TRY(model_usable(unit->model));
    const struct param *p = &unit->params[unit->entries[index].param];
    DLManagedTensorVersioned *full;
    DLDataType dtype = dtype_to_dl(p->type);
    TRY(managed_empty(&dtype, p->ndim, p->shape, &full));
    fsdp_status status = FSDP_OK;
    if (unit->shard_group) {
        status = gather(unit, index, p, full->dl_tensor.data);
    } else {
        struct tensor whole, shard;
        param_whole(p, full->dl_tensor.data, p->type, &whole);
        param_shard(p, p->shard, p->type, &shard);
        tensor_copy(&whole, &shard);
    }
    if (status != FSDP_OK) {
        fsdp_error_info failure;
        err_save(&failure);
        managed_delete(full);
        return err_restore(&failure);
    }
    *out = full;
    return FSDP_OK;
}

fsdp_status unit_loadable(fsdp_unit *unit, const char *param)
{
    TRY(unit_unshard_end(unit));
    if (unit->ahead) TRY(unit_reshard(unit, RESHARD_RELEASE)); /* by prefetch: the host did not ask for it */
    if (unit->state != FSDP_UNIT_SHARDED && !unit->aliased)
        return err(FSDP_ERR_STATE,
                   "parameter '%s' can't be loaded while its unit '%s' is unsharded: call fsdp_unit_reshard first",
                   param, unit->name);
    return FSDP_OK;
}

fsdp_status unit_load_param(fsdp_unit *unit, int32_t index, const struct tensor *full)
{
    TRY(unit_check_index(unit, index));
    const struct param *p = &unit->params[unit->entries[index].param];
    char text[TENSOR_TEXT], want[TENSOR_TEXT];
    struct tensor shard;
    param_whole(p, NULL, p->type, &shard);
    CHECK_ARG(tensor_same_shape(full, &shard), "full is %s, but parameter '%s' is %s: the shapes must be equal",
              tensor_text(full, text), unit->entries[index].name, tensor_text(&shard, want));
    CHECK_ARG(dtype_is_float(full->type), "full is %s, for parameter '%s': it must be of a float dtype",
              tensor_text(full, text), unit->entries[index].name);
    TRY(unit_loadable(unit, unit->entries[index].name));
    struct tensor part = *full;
    tensor_narrow(&part, p->shard_dim, p->start, p->rows);
    param_shard(p, p->shard, p->type, &shard);
    tensor_copy(&shard, &part);
    unit->current = 0;
    return FSDP_OK;
}

/* ---- casts */

fsdp_status unit_cast(fsdp_unit *unit, fsdp_cast_kind kind, const struct tensor *input, DLManagedTensorVersioned **out)
{
    const struct precision *precision = &unit->precision;
    CHECK_ARG(kind >= FSDP_CAST_INPUT && kind <= FSDP_CAST_BUFFER,
              "kind is %d: FSDP_CAST_INPUT (0), FSDP_CAST_OUTPUT (1) or FSDP_CAST_BUFFER (2)", kind);
    enum dtype to = kind == FSDP_CAST_OUTPUT ? precision->output : precision->buffer;
    if (kind == FSDP_CAST_INPUT) to = precision->keep_inputs ? PRECISION_NONE : precision->param;
    *out = NULL;
    if (to == PRECISION_NONE || !dtype_is_float(input->type) || input->type == to) return FSDP_OK;
    DLDataType dtype = dtype_to_dl(to);
    TRY(managed_empty(&dtype, input->ndim, input->shape, out));
    struct tensor cast;
    tensor_make(&cast, (*out)->dl_tensor.data, to, input->ndim, input->shape);
    tensor_copy(&cast, input);
    return FSDP_OK;
}
