/* Gradients: from each rank's full gradients to the sharded ones, in one operation for a unit.
 *
 * Each rank owns its rows of every parameter and reduces all ranks' gradients for them, in rank order, into what its
 * sharded gradient already holds: sum, divided, added, rounded once. A parameter without a gradient on some rank counts as
 * zeros there, so ranks may differ in what they used. Frozen parameters take no part.
 *
 * Without sync the gradients are added to a full-size buffer of this rank (float32 for narrower floats, so that many small
 * steps don't vanish); the next synced reduction sends that buffer instead, with the last gradients added.
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

static fsdp_status accumulate(fsdp_unit *unit, int32_t index, const char *grad)
{
    struct param *p = &unit->params[index];
    if (!p->count) return FSDP_OK;
    if (!p->accumulated) {
        void *buffer;
        p->accumulated_type = wide(p->type);
        TRY(os_map_anonymous((size_t)p->count * dtype_size(p->accumulated_type), &buffer));
        p->accumulated = buffer;
    }
    const void *source = grad;
    struct kernel_reduce how = {.op = FSDP_SUM,
                                .src_type = p->type,
                                .dst_type = p->accumulated_type,
                                .n_src = 1,
                                .scale = 1,
                                .divisor = 1,
                                .accumulate = 1};
    kernel_reduce(&how, p->accumulated, &source, (size_t)p->count);
    return FSDP_OK;
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
        CHECK_ARG(out[i].type == p->type && tensor_same_shape(&out[i], &full), "%s is %s: it must be as the parameter, %s", name,
                  tensor_text(&out[i], text), tensor_text(&full, want));
    }
    return FSDP_OK;
}

static fsdp_status accumulate_all(fsdp_unit *unit, struct op *op)
{
    /* op holds packed copies: this is the synchronous part of the call, so they can be filled here. */
    for (int32_t k = 0; k < op->transfer.n_pieces; k++) {
        struct piece *piece = &op->transfer.pieces[k];
        if (!piece->in) continue;
        for (struct packed *packed = op->packed; packed; packed = packed->next)
            if (packed->copy == piece->in) tensor_pack(packed->copy, &packed->tensor);
        TRY(accumulate(unit, (int32_t)piece->out_split.step, piece->in));
    }
    return FSDP_OK;
}

static void let_go(void *unit)
{
    unit_release(unit);
}

/* A buffer of accumulated gradients, given to the work that sends it. */
struct buffer {
    void *at;
    size_t bytes;
};

static void buffer_free(void *owner)
{
    struct buffer *buffer = owner;
    os_unmap(buffer->at, buffer->bytes);
    mem_free(buffer);
}

/* Pieces for the trainable parameters; out_split.step keeps the parameter's index for accumulate_all. */
static fsdp_status pieces_reduce(fsdp_work *work, fsdp_unit *unit, const struct tensor *grads)
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
        transfer->pieces[transfer->n_pieces++] = (struct piece){.in = in,
                                                                .out = p->grad,
                                                                .type = p->type,
                                                                .out_type = p->type,
                                                                .in_split = {.count = p->count, .at = p->at, .only = -1},
                                                                .out_split = {.only = -1, .step = i}};
        op->header.count += p->count;
    }
    return FSDP_OK;
}

/* Send the accumulated buffers, with these gradients added, instead of the gradients. */
static fsdp_status send_accumulated(fsdp_work *work, fsdp_unit *unit)
{
    struct op *op = &work->ops[0];
    TRY(accumulate_all(unit, op));
    for (int32_t k = 0; k < op->transfer.n_pieces; k++) {
        struct piece *piece = &op->transfer.pieces[k];
        struct param *p = &unit->params[piece->out_split.step];
        piece->type = wide(p->type);
        piece->in = p->accumulated;
        if (!p->accumulated) continue;
        struct buffer *buffer = mem_alloc(sizeof *buffer);
        if (!buffer) return mem_none("accumulated gradients", sizeof *buffer);
        *buffer = (struct buffer){p->accumulated, (size_t)p->count * dtype_size(p->accumulated_type)};
        fsdp_status status = work_keep(work, buffer_free, buffer);
        if (status != FSDP_OK) {
            mem_free(buffer);
            return status;
        }
        p->accumulated = NULL; /* the work's now */
    }
    op->header.hash = hash_number(op->header.hash, 1);
    unit->accumulates = 0;
    return FSDP_OK;
}

static fsdp_status reduce(fsdp_unit *unit, const struct tensor *grads, fsdp_work **handle)
{
    fsdp_model *model = unit->model;
    fsdp_group *group = model->group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    struct op *op = &work->ops[0];
    op->kind = FSDP_OP_REDUCE_GRADS;
    op->header = (struct call_header){.kind = FSDP_OP_REDUCE_GRADS, .type = -1, .root = -1, .hash = unit->hash};
    op->payload = unit->name;
    op->payload_bytes = sizeof unit->name;
    fsdp_status status = pieces_reduce(work, unit, grads);
    int trainable = op->transfer.n_pieces > 0;
    if (status == FSDP_OK && trainable && !model->sync) {
        status = accumulate_all(unit, op);
        if (status == FSDP_OK) unit->accumulates = 1;
    }
    if (status != FSDP_OK || !trainable || !model->sync) {
        work_release(work);
        return status == FSDP_OK ? unit_nothing(unit, handle) : status;
    }
    if (unit->accumulates) status = send_accumulated(work, unit);
    unit_retain(unit);
    if (status == FSDP_OK) status = work_keep(work, let_go, unit);
    if (status != FSDP_OK) {
        unit_release(unit);
        work_release(work);
        return status;
    }
    for (int32_t k = 0; k < op->transfer.n_pieces; k++)
        model->reduced_bytes += op->transfer.pieces[k].in_split.count * (int64_t)dtype_size(op->transfer.pieces[k].type);
    return lane_submit(work, handle);
}

fsdp_status unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle)
{
    TRY(group_usable(unit->model->group));
    struct tensor *checked = mem_array((size_t)unit->n_params, sizeof *checked);
    if (!checked) return mem_none("gradients", (size_t)unit->n_params * sizeof *checked);
    fsdp_work *work = NULL;
    fsdp_status status = grads_import(unit, grads, n, checked);
    if (status == FSDP_OK) status = unit_settle(unit); /* one reduction of a unit at a time: the next adds to its result */
    if (status == FSDP_OK) status = reduce(unit, checked, handle ? &work : NULL);
    mem_free(checked);
    TRY(status);
    if (handle) {
        ref_get(&work->ref);
        unit->reducing = work;
        *handle = work;
    }
    return unit_reshard(unit);
}
