/* Gradients: from each rank's full gradients to the sharded ones, in one operation for a unit.
 *
 * Each rank owns its rows of every parameter and reduces all ranks' gradients for them, in rank order, into
 * what its sharded gradient already holds: sum, divided, added, rounded once. A parameter without a gradient
 * on some rank counts as zeros there, so ranks may differ in what they used. Frozen parameters take no part.
 *
 * Without sync the gradients are added to a full-size buffer of this rank (float32 for narrower floats, so
 * that many small steps don't vanish); the next synced reduction sends that buffer instead, with the last
 * gradients added.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"
#include "tensor/kernel.h"

#include <stdio.h>
#include <string.h>

static enum dtype wide(enum dtype type)
{
    return type == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
}

void unit_drop_accumulated(fsdp_unit *unit)
{
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->accumulated) os_unmap(p->accumulated, (size_t)p->count * dtype_size(p->accumulated_type));
        p->accumulated = NULL;
    }
    unit->accumulates = 0;
}

void unit_zero_grad(fsdp_unit *unit)
{
    if (unit->grads) memset(unit->grads, 0, unit->grad_bytes);
    unit->lost.status = FSDP_OK;
    unit_drop_accumulated(unit);
}

/* Checked gradients: shape and dtype of the parameter. */
static fsdp_status grads_import(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, struct tensor *out)
{
    CHECK_ARG(n == unit->n_params, "n is %d, but unit '%s' has %d parameters: give an entry for each, NULL for none", n,
              unit->name, unit->n_params);
    for (int32_t i = 0; i < n; i++) {
        const struct param *p = &unit->params[i];
        out[i].count = -1;
        if (!grads[i] || p->frozen) continue;
        char name[96], text[TENSOR_TEXT], want[TENSOR_TEXT];
        snprintf(name, sizeof name, "grads[%d] (of '%.48s')", i, p->name);
        TRY(tensor_import(grads[i], name, &out[i]));
        struct tensor full;
        tensor_make(&full, NULL, p->type, p->ndim, p->shape);
        CHECK_ARG(out[i].type == p->type && tensor_same_shape(&out[i], &full),
                  "%s is %s: it must be as the parameter, %s", name, tensor_text(&out[i], text),
                  tensor_text(&full, want));
    }
    return FSDP_OK;
}

/* A piece for each trainable parameter, in their order, with a packed copy where a gradient needs one. */
static fsdp_status pieces_make(fsdp_work *work, fsdp_unit *unit, const struct tensor *grads)
{
    struct op *op = &work->ops[0];
    struct transfer *transfer = &op->transfer;
    transfer->shape = TRANSFER_REDUCE;
    transfer->reader = -1;
    transfer->op = FSDP_SUM;
    transfer->divisor = unit->model->divisor;
    transfer->accumulate = 1;
    transfer->pieces = work_memory(work, (size_t)unit->n_params * sizeof(struct piece));
    if (!transfer->pieces) return FSDP_ERR_NOMEM;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (p->frozen) continue;
        char *in = NULL;
        if (grads[i].count >= 0) TRY(work_pack(work, &op->packed, &grads[i], 0, &in));
        transfer->pieces[transfer->n_pieces++] =
            (struct piece){.in = in,
                           .out = p->grad,
                           .type = p->type,
                           .out_type = p->type,
                           .in_split = {.count = p->count, .at = p->at, .only = -1},
                           .out_split = {.only = -1}};
        op->header.count += p->count;
    }
    return work_addresses(work, transfer);
}

/* ---- accumulation */

/* All buffers that these gradients need, before anything is added to one. */
static fsdp_status buffers_make(fsdp_unit *unit, const struct transfer *transfer)
{
    for (int32_t i = 0, k = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->frozen || !transfer->pieces[k++].in || p->accumulated) continue;
        void *buffer;
        p->accumulated_type = wide(p->type);
        TRY(os_map_anonymous((size_t)p->count * dtype_size(p->accumulated_type), &buffer));
        p->accumulated = buffer;
    }
    return FSDP_OK;
}

static void accumulate(fsdp_unit *unit, const struct op *op)
{
    for (const struct packed *packed = op->packed; packed; packed = packed->next)
        tensor_pack(packed->copy, &packed->tensor);
    for (int32_t i = 0, k = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->frozen) continue;
        const void *grad = op->transfer.pieces[k++].in;
        struct kernel_reduce how = {.op = FSDP_SUM,
                                    .src_type = p->type,
                                    .dst_type = p->accumulated_type,
                                    .n_src = 1,
                                    .scale = 1,
                                    .divisor = 1,
                                    .accumulate = 1};
        if (grad) kernel_reduce(&how, p->accumulated, &grad, (size_t)p->count);
    }
    unit->accumulates = 1;
}

/* The buffers, which hold these gradients too by now, in place of them. They last until unit_settle. */
static void send_accumulated(fsdp_unit *unit, struct op *op)
{
    for (int32_t i = 0, k = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (p->frozen) continue;
        struct piece *piece = &op->transfer.pieces[k++];
        piece->type = wide(p->type);
        piece->in = p->accumulated;
    }
    op->header.hash = hash_number(op->header.hash, 1);
}

/* ---- reduction */

static fsdp_status reduce(fsdp_unit *unit, const struct tensor *grads, fsdp_work **handle)
{
    fsdp_model *model = unit->model;
    fsdp_group *group = model->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    struct op *op = op_init(work, FSDP_OP_REDUCE_GRADS, unit->hash, unit->name, sizeof unit->name);

    /* All that can fail comes first: nothing is added to a buffer unless the call goes through. */
    fsdp_status status = pieces_make(work, unit, grads);
    int trainable = op->transfer.n_pieces > 0, send = trainable && model->sync;
    int add = trainable && (!model->sync || unit->accumulates);
    if (status == FSDP_OK && add) status = buffers_make(unit, &op->transfer);
    if (status == FSDP_OK) status = send ? unit_keep(unit, work) : unit_nothing(unit, handle);
    if (status == FSDP_OK && add) accumulate(unit, op);
    if (status != FSDP_OK || !send) {
        work_release(work);
        return status;
    }
    if (add) send_accumulated(unit, op);

    int64_t bytes = 0;
    for (int32_t k = 0; k < op->transfer.n_pieces; k++)
        bytes += op->transfer.pieces[k].in_split.count * (int64_t)dtype_size(op->transfer.pieces[k].type);
    status = lane_submit(work, handle);
    if (status == FSDP_OK) model->reduced_bytes += bytes;
    if (status == FSDP_OK && handle) {
        ref_get(&work->ref);
        unit->reducing = work;
    } else {
        unit_drop_accumulated(unit);
    }
    if (status != FSDP_OK) err_save(&unit->lost);
    return status;
}

fsdp_status unit_settle(fsdp_unit *unit)
{
    if (!unit->reducing) return FSDP_OK;
    fsdp_status status = work_wait(unit->reducing, -1);
    if (!atomic_load_explicit(&unit->reducing->done, memory_order_acquire)) return status; /* inside a callback */
    work_release(unit->reducing);
    unit->reducing = NULL;
    unit_drop_accumulated(unit); /* what was sent */
    if (status != FSDP_OK) err_save(&unit->lost);
    return status;
}

fsdp_status unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle)
{
    TRY(group_usable(unit->model->group));
    struct tensor *checked = mem_array((size_t)unit->n_params, sizeof *checked);
    if (!checked) return mem_none("gradients", (size_t)unit->n_params * sizeof *checked);
    fsdp_status status = grads_import(unit, grads, n, checked);
    if (status == FSDP_OK)
        status = unit_settle(unit); /* one reduction of a unit at a time: the next adds to its result */
    if (status == FSDP_OK)
        status = unit_unshard_end(unit); /* so that resharding can't fail once the work is on its way */
    if (status == FSDP_OK) status = reduce(unit, checked, handle);
    mem_free(checked);
    return status == FSDP_OK ? unit_reshard(unit) : status;
}
