/* Reduction of a unit's gradients to the sharded ones. See fsdp.h.
 *
 * Each rank owns its part of every parameter and reduces all ranks' gradients for it, in rank order, into what its
 * sharded gradient already holds: sum, divided, added, rounded once. A parameter without a gradient on some rank counts
 * as zeros there, so ranks may differ in what they used; with each reduction they tell each other, so that all know
 * which parameters any of them used. Frozen parameters take no part.
 *
 * Replicas. Where nothing is sharded, every replica reduces a slice of each gradient into its own, and then all send
 * their slices to the others: so the result is rounded once, and the same bits on all. With both dimensions (hybrid) a
 * rank's part is summed over the shard dimension first, in float32 (float64), and kept; over the replicas that sum goes
 * as above. It does so when the next unit's gradients have been submitted, or at the end of backward: a fixed place in
 * the order of calls, at which it has usually arrived and nobody waits.
 *
 * Without sync the gradients are added to a full-size buffer of this rank (float32 for narrower floats, so that many
 * small steps don't vanish); the next synced reduction sends that buffer instead, with the last gradients added.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"
#include "tensor/kernel.h"

#include <stdio.h>
#include <string.h>

/* ---- buffers */

static size_t accumulated_bytes(const struct param *p)
{
    return (size_t)p->count * dtype_size(param_wide(p->full_type));
}

static void drop_accumulated(fsdp_unit *unit)
{
    for (int32_t i = 0; i < unit->n_params; i++) unit->params[i].accumulating = 0;
    unit->accumulates = 0;
}

void unit_free_gradients(fsdp_unit *unit)
{
    drop_accumulated(unit);
    unit->has_partials = 0;
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        os_unmap(p->accumulated, accumulated_bytes(p));
        p->accumulated = NULL;
    }
    os_unmap(unit->partials, os_page_round(unit->partial_bytes));
    unit->partials = NULL;
}

/* ---- gradients that count as zeros */

static void grads_mark(fsdp_unit *unit, int32_t stale)
{
    unit->stale_grads = stale;
    for (int32_t i = 0; i < unit->n_params; i++) unit->params[i].stale = stale;
}

void grads_clear(fsdp_unit *unit)
{
    if (!unit->stale_grads) return;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (p->stale && !p->frozen && p->grad) memset(p->grad, 0, (size_t)p->shard_count * dtype_size(p->grad_type));
    }
    grads_mark(unit, 0);
}

/* Whether the reduction that comes now adds to the sharded gradients, which then are there: it overwrites them where
 * all count as zeros, and then they do so until it is on its way. */
static int32_t grads_add(fsdp_unit *unit)
{
    int32_t add = 0;
    for (int32_t i = 0; i < unit->n_params; i++) add |= !unit->params[i].frozen && !unit->params[i].stale;
    if (add) grads_clear(unit);
    return add;
}

/* The host is done with them for this step. */
static void grads_forget(fsdp_unit *unit)
{
    grads_mark(unit, 1);
    for (int32_t i = 0; i < unit->n_params; i++) atomic_store_explicit(&unit->params[i].used, 0, memory_order_relaxed);
    os_file_release(unit->grads_fd, unit->grads, os_page_round(unit->grad_bytes));
    os_file_release(unit->shards_fd, unit->shards, os_page_round(unit->shard_bytes)); /* the optimizer has been here */
}

static void partials_drop(fsdp_unit *unit)
{
    unit->has_partials = 0;
    for (int32_t i = 0; i < unit->n_params; i++) unit->params[i].partial_used = 0;
}

void grads_drop(fsdp_unit *unit)
{
    grads_forget(unit);
    unit->lost.status = FSDP_OK;
    partials_drop(unit);
    drop_accumulated(unit);
}

fsdp_status unit_zero_grad(fsdp_unit *unit, int32_t index)
{
    if (index != -1) TRY(unit_check_index(unit, index));
    TRY(model_usable(unit->model));
    fsdp_status status = unit_settle(unit);
    if (unit->reducing || unit->replicating) return status; /* inside a callback */
    if (index == -1) {
        grads_forget(unit);
        return status;
    }
    struct param *p = &unit->params[unit->entries[index].param];
    p->stale = unit->stale_grads = 1;
    atomic_store_explicit(&p->used, 0, memory_order_relaxed);
    return status;
}

/* All buffers that these gradients need, before anything is added to one. */
static fsdp_status buffers_make(fsdp_unit *unit, const struct tensor *grads)
{
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->frozen || grads[i].count <= 0 || p->accumulated) continue;
        void *buffer;
        TRY(os_map_anonymous(accumulated_bytes(p), &buffer));
        p->accumulated = buffer;
    }
    return FSDP_OK;
}

static fsdp_status partials_make(fsdp_unit *unit)
{
    void *block;
    if (unit->partials || !unit->partial_bytes) return FSDP_OK;
    TRY(os_map_anonymous(os_page_round(unit->partial_bytes), &block));
    unit->partials = block;
    memory_peaks(unit->model);
    return FSDP_OK;
}

/* ---- what the host gives */

/* Checked: shape and dtype of the full parameter. Count -1: none. Of tied entries with a gradient each, the sum, in
 * memory of the work. */
static fsdp_status grads_import(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, struct tensor *out)
{
    CHECK_ARG(n == unit->n_entries, "n is %d, but unit '%s' has %d parameters: give an entry for each, NULL for none",
              n, unit->name, unit->n_entries);
    for (int32_t k = 0; k < n; k++) {
        const struct entry *entry = &unit->entries[k];
        const struct param *p = &unit->params[entry->param];
        if (!grads[k] || p->frozen) continue;
        char name[96], text[TENSOR_TEXT], want[TENSOR_TEXT];
        struct tensor full, grad;
        snprintf(name, sizeof name, "grads[%d] (of '%.48s')", k, entry->name);
        TRY(tensor_import(grads[k], name, &grad));
        tensor_make(&full, NULL, p->full_type, p->ndim, p->shape);
        CHECK_ARG(grad.type == p->full_type && tensor_same_shape(&grad, &full),
                  "%s is %s: it must be as the full parameter, %s", name, tensor_text(&grad, text),
                  tensor_text(&full, want));
        out[k] = grad;
    }
    return FSDP_OK;
}

/* a += b, in memory of the work. */
static fsdp_status tie(fsdp_work *work, struct tensor *a, struct tensor *b)
{
    TRY(work_copy(work, &work->ops[0].packed, a));
    TRY(work_copy(work, &work->ops[0].packed, b));
    struct kernel_reduce how = {
        .op = FSDP_SUM, .src_type = a->type, .dst_type = a->type, .n_src = 2, .scale = 1, .divisor = 1};
    const void *sources[] = {a->data, b->data};
    kernel_reduce(&how, a->data, sources, (size_t)a->count);
    return FSDP_OK;
}

/* By parameter, from those by entry. */
static fsdp_status grads_tie(fsdp_work *work, fsdp_unit *unit, struct tensor *given, struct tensor *out)
{
    for (int32_t i = 0; i < unit->n_params; i++) out[i].count = -1;
    for (int32_t k = 0; k < unit->n_entries; k++) {
        struct tensor *grad = &out[unit->entries[k].param];
        if (given[k].count < 0) continue;
        if (grad->count < 0)
            *grad = given[k];
        else
            TRY(tie(work, grad, &given[k]));
    }
    return FSDP_OK;
}

/* ---- accumulation */

/* Gradients that are to be added to what a buffer holds must be dense. */
static fsdp_status grads_dense(fsdp_work *work, const fsdp_unit *unit, struct tensor *grads)
{
    for (int32_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].accumulating && grads[i].count >= 0 && !grads[i].contiguous)
            TRY(work_copy(work, &work->ops[0].packed, &grads[i]));
    return FSDP_OK;
}

static void accumulate(fsdp_unit *unit, const struct tensor *grads)
{
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->frozen || grads[i].count < 0) continue;
        struct tensor sum;
        param_whole(p, p->accumulated, param_wide(p->full_type), &sum);
        struct kernel_reduce how = {.op = FSDP_SUM,
                                    .src_type = p->full_type,
                                    .dst_type = sum.type,
                                    .n_src = 1,
                                    .scale = 1,
                                    .divisor = 1,
                                    .accumulate = 1};
        const void *from = grads[i].data;
        if (p->accumulating)
            kernel_reduce(&how, sum.data, &from, (size_t)p->count);
        else
            tensor_copy(&sum, &grads[i]);
        p->accumulating = 1;
    }
    unit->accumulates = 1;
}

/* ---- operations */

static fsdp_status op_begin(fsdp_work *work, int32_t index, fsdp_op_kind kind, const fsdp_unit *unit, uint64_t flags,
                            struct op **out)
{
    uint64_t hash = hash_number(hash_number(unit->hash, flags), (uint64_t)index);
    hash = hash_bytes(hash, &unit->divisor, sizeof unit->divisor);
    for (int32_t i = 0; i < unit->n_params; i++) hash = hash_number(hash, (uint64_t)unit->params[i].frozen);
    struct op *op = op_init(work, index, kind, hash, unit->name, sizeof unit->name);
    op->transfer.pieces = work_memory(work, (size_t)unit->n_params * sizeof(struct piece));
    op->transfer.reader = -1;
    op->transfer.op = FSDP_SUM;
    *out = op;
    return op->transfer.pieces ? FSDP_OK : FSDP_ERR_NOMEM;
}

/* What a rank tells with a reduction: the unit's name, for messages, and a bit for each parameter that it has a
 * gradient of. Parameters beyond those that have a bit count as used. */
#define TOLD_BYTES (TRANSPORT_PAYLOAD - CALL_LABEL)

static size_t told_bytes(const fsdp_unit *unit)
{
    size_t bytes = ((size_t)unit->n_params + 7) / 8;
    return bytes < TOLD_BYTES ? bytes : TOLD_BYTES;
}

/* On whichever thread runs the reduction, which holds the unit: learn what the ranks told, then move. */
static fsdp_status learn(fsdp_group *group, struct op *op, struct deadline deadline)
{
    struct transport *t = group->transport;
    fsdp_unit *unit = op->user;
    int partial = op->kind == FSDP_OP_REDUCE_GRADS && unit->replicate_group;
    size_t bytes = told_bytes(unit);
    unsigned char any[TOLD_BYTES] = {0};
    for (int r = 0; r < group->size; r++) {
        const unsigned char *told = (const unsigned char *)t->ops->payload_of(t, r) + CALL_LABEL;
        for (size_t b = 0; b < bytes; b++) any[b] |= told[b];
    }
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        size_t b = (size_t)i / 8;
        if (p->frozen || (b < bytes && !(any[b] >> i % 8 & 1))) continue;
        if (partial)
            p->partial_used = 1;
        else
            atomic_store_explicit(&p->used, 1, memory_order_relaxed);
    }
    return t->ops->move(t, &op->transfer, deadline);
}

/* grads NULL: of the partial sums, which are here. */
static fsdp_status tell(fsdp_work *work, struct op *op, fsdp_unit *unit, const struct tensor *grads)
{
    size_t bytes = told_bytes(unit);
    unsigned char *told = work_memory(work, CALL_LABEL + bytes);
    if (!told) return FSDP_ERR_NOMEM;
    memcpy(told, unit->name, CALL_LABEL);
    for (size_t i = 0; i < (size_t)unit->n_params && i / 8 < bytes; i++) {
        const struct param *p = &unit->params[i];
        int gives = grads ? grads[i].count >= 0 || p->accumulating : p->partial_used;
        if (gives && !p->frozen) told[CALL_LABEL + i / 8] |= (unsigned char)(1u << i % 8);
    }
    op->payload = told;
    op->payload_bytes = CALL_LABEL + bytes;
    op->body = learn;
    op->user = unit;
    return FSDP_OK;
}

/* How many elements of a gradient each replica reduces: whole cache lines. */
static int64_t slice_of(const fsdp_unit *unit, const struct param *p, int64_t count)
{
    int64_t line = PARAM_ALIGN / (int64_t)dtype_size(p->grad_type), n = unit_replicas(unit);
    int64_t step = (count + n - 1) / n;
    return (step + line - 1) / line * line;
}

/* The sharded gradient with shard_dim in front: in place, or in a copy that is read before operation `first` and
 * written back after `last`. */
static fsdp_status grad_place(fsdp_work *work, const struct param *p, struct op *first, struct op *last, char **out)
{
    struct tensor grad;
    param_shard(p, p->grad, p->grad_type, &grad);
    tensor_first(&grad, p->shard_dim);
    if (first == last) return work_pack(work, &first->packed, &grad, p->grad_type, PACK_BOTH, out);
    struct packed *before = first->packed;
    TRY(work_pack(work, &first->packed, &grad, p->grad_type, PACK_IN, out));
    if (first->packed == before) return FSDP_OK;
    struct packed *back = work_memory(work, sizeof *back);
    if (!back) return FSDP_ERR_NOMEM;
    *back = *first->packed;
    back->way = PACK_OUT;
    back->bytes = 0;
    back->next = last->packed;
    last->packed = back;
    return FSDP_OK;
}

/* Which dtype a gradient travels in. What is narrower than float32 is summed in float32 anyway, so widening it before
 * would only cost. */
static enum dtype travels_as(const fsdp_unit *unit, enum dtype type)
{
    enum dtype reduce = unit->precision.reduce;
    if (reduce == PRECISION_NONE || reduce == type) return type;
    return dtype_size(reduce) < dtype_size(type) || reduce == DTYPE_F64 || dtype_size(type) == dtype_size(reduce)
               ? reduce
               : type;
}

/* This rank's gradient of a whole parameter, or with `add` the buffer that will hold it too, as the source of a
 * piece. */
static fsdp_status source(fsdp_work *work, struct op *op, fsdp_unit *unit, const struct param *p,
                          const struct tensor *grad, int add, struct piece *piece)
{
    struct tensor from = *grad;
    char *in = NULL;
    if (add) param_whole(p, p->accumulated, param_wide(p->full_type), &from);
    piece->type = travels_as(unit, add ? param_wide(p->full_type) : p->full_type);
    if (grad->count >= 0 || (add && p->accumulating)) {
        tensor_first(&from, p->shard_dim);
        TRY(work_pack(work, &op->packed, &from, piece->type, PACK_IN, &in));
    }
    piece->in = in;
    return FSDP_OK;
}

/* Sum over the shard dimension: into the gradient, or (hybrid) into the partial sums. There `later` says that the
 * replicas' turn comes with the next unit, on which the ranks must agree. */
static fsdp_status build_scatter(fsdp_work *work, fsdp_unit *unit, const struct tensor *grads, int add, int later)
{
    struct op *op;
    int partial = unit->replicate_group != NULL;
    TRY(op_begin(work, 0, FSDP_OP_REDUCE_GRADS, unit, (uint64_t)(add + 2 * partial * (unit->has_partials + 2 * later)),
                 &op));
    op->transfer.shape = TRANSFER_REDUCE;
    op->transfer.divisor = partial ? 1 : unit->divisor;
    op->transfer.accumulate = partial ? unit->has_partials : grads_add(unit);
    TRY(tell(work, op, unit, grads));
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (p->frozen) continue;
        struct piece piece = {.out_type = partial ? param_wide(p->full_type) : p->grad_type,
                              .in_split = {.count = p->count, .at = p->at, .only = -1},
                              .out_split = {.only = -1}};
        TRY(source(work, op, unit, p, &grads[i], add, &piece));
        if (partial)
            piece.out = p->shard_count ? unit->partials + p->partial_at : NULL;
        else
            TRY(grad_place(work, p, op, op, &piece.out));
        op->transfer.pieces[op->transfer.n_pieces++] = piece;
        op->header.count += p->count;
    }
    return work_addresses(work, &op->transfer);
}

/* Sum over the replicas, a slice each, then the slices to all. Sources: the partial sums (grads NULL), else as
 * above. */
static fsdp_status build_replicate(fsdp_work *work, fsdp_unit *unit, const struct tensor *grads, int add)
{
    struct op *sum, *give;
    int rank = unit->replicate_group->rank;
    TRY(op_begin(work, 0, FSDP_OP_REPLICATE_GRADS, unit, (uint64_t)add, &sum));
    TRY(op_begin(work, 1, FSDP_OP_REPLICATE_GRADS, unit, (uint64_t)add, &give));
    sum->transfer.shape = TRANSFER_REDUCE;
    sum->transfer.divisor = unit->divisor;
    sum->transfer.accumulate = grads_add(unit);
    TRY(tell(work, sum, unit, grads));
    give->transfer.shape = TRANSFER_SPREAD;
    for (int32_t i = 0; i < unit->n_params; i++) {
        const struct param *p = &unit->params[i];
        if (p->frozen) continue;
        struct split slices = {.count = p->shard_count, .step = slice_of(unit, p, p->shard_count), .only = -1};
        struct piece piece = {.out_type = p->grad_type, .in_split = slices, .out_split = {.only = -1}};
        char *grad;
        TRY(grad_place(work, p, sum, give, &grad));
        if (grads) {
            TRY(source(work, sum, unit, p, &grads[i], add, &piece));
        } else {
            piece.type = param_wide(p->full_type);
            piece.in = p->shard_count ? unit->partials + p->partial_at : NULL;
        }
        char *own = grad ? grad + (size_t)split_begin(&slices, rank) * dtype_size(p->grad_type) : NULL;
        piece.out = own;
        sum->transfer.pieces[sum->transfer.n_pieces++] = piece;
        give->transfer.pieces[give->transfer.n_pieces++] = (struct piece){.in = own,
                                                                          .out = grad,
                                                                          .type = p->grad_type,
                                                                          .out_type = p->grad_type,
                                                                          .in_split = {.only = -1},
                                                                          .out_split = slices};
        sum->header.count += p->shard_count;
        give->header.count += p->shard_count;
    }
    TRY(work_addresses(work, &sum->transfer));
    return work_addresses(work, &give->transfer);
}

static int64_t bytes_of(const struct op *op)
{
    int64_t bytes = 0;
    for (int32_t k = 0; k < op->transfer.n_pieces; k++)
        bytes += op->transfer.pieces[k].in_split.count * (int64_t)dtype_size(op->transfer.pieces[k].type);
    return bytes;
}

/* ---- replicas, in their turn */

static void lose(fsdp_unit *unit)
{
    err_save(&unit->lost);
}

/* First stage, if it goes on. */
static fsdp_status reduced(fsdp_unit *unit)
{
    if (!unit->reducing) return FSDP_OK;
    fsdp_status status = work_wait(unit->reducing, -1);
    if (!atomic_load_explicit(&unit->reducing->done, memory_order_acquire)) return status; /* inside a callback */
    work_release(unit->reducing);
    unit->reducing = NULL;
    if (status != FSDP_OK) lose(unit);
    os_file_release(unit->grads_fd, unit->grads, os_page_round(unit->grad_bytes));
    return status;
}

static fsdp_status replicate(fsdp_unit *unit, fsdp_work **handle)
{
    fsdp_group *group = unit->replicate_group;
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 2, 0, &work));
    fsdp_status status = build_replicate(work, unit, NULL, 0);
    if (status == FSDP_OK) status = unit_keep(unit, work);
    if (status != FSDP_OK) {
        work_release(work);
        return status;
    }
    int64_t bytes = bytes_of(&work->ops[0]);
    partials_drop(unit);
    grads_mark(unit, 0);
    status = lane_submit(work, handle);
    if (status == FSDP_OK) unit->replicated_bytes += bytes;
    return status;
}

fsdp_status model_replicate(fsdp_model *model)
{
    fsdp_unit *unit = model->awaiting;
    if (!unit) return FSDP_OK;
    fsdp_status status = reduced(unit);
    if (unit->reducing) return status; /* inside a callback */
    model->awaiting = NULL;
    if (status == FSDP_OK && (status = replicate(unit, &unit->replicating)) != FSDP_OK) lose(unit);
    fsdp_error_info failure;
    err_save(&failure);
    unit_release(unit);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

fsdp_status unit_settle(fsdp_unit *unit)
{
    fsdp_status first = FSDP_OK;
    if (unit->model->awaiting == unit) first = model_replicate(unit->model);
    if (first == FSDP_OK) first = reduced(unit);
    if (!unit->replicating) return first;
    fsdp_status status = work_wait(unit->replicating, -1);
    if (!atomic_load_explicit(&unit->replicating->done, memory_order_acquire)) return status; /* inside a callback */
    work_release(unit->replicating);
    unit->replicating = NULL;
    if (status != FSDP_OK) lose(unit);
    return first != FSDP_OK ? first : status;
}

/* ---- post_backward */

static fsdp_status submit(fsdp_unit *unit, fsdp_work *work, fsdp_work **handle)
{
    int64_t bytes = bytes_of(&work->ops[0]),
            *counter = unit->shard_group ? &unit->reduced_bytes : &unit->replicated_bytes;
    int hybrid = unit->shard_group && unit->replicate_group;
    if (!hybrid) grads_mark(unit, 0);
    fsdp_status status = lane_submit(work, handle);
    if (status == FSDP_OK) {
        *counter += bytes;
        if (handle) {
            ref_get(&work->ref);
            unit->reducing = work;
        }
        if (hybrid) unit->has_partials = 1;
        if (hybrid && unit->all_reduce) {
            (void)model_replicate(unit->model); /* the one before; its failure is kept there */
            if (handle) {
                unit_retain(unit);
                unit->model->awaiting = unit;
                return FSDP_OK;
            }
            status = replicate(unit, NULL);
        }
    }
    if (status != FSDP_OK) lose(unit);
    return status;
}

static fsdp_status reduce(fsdp_unit *unit, struct tensor *given, struct tensor *grads, fsdp_work **handle)
{
    fsdp_group *group = unit->shard_group ? unit->shard_group : unit->replicate_group;
    int trainable = 0;
    for (int32_t i = 0; i < unit->n_params; i++) trainable |= !unit->params[i].frozen;
    int send = trainable && unit->sync && (unit->shard_group || unit->all_reduce);
    int add = trainable && (!send || unit->accumulates);
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, unit->shard_group ? 1 : 2, 0, &work));

    /* All that can fail comes first: nothing is added to a buffer unless the call goes through. */
    fsdp_status status = grads_tie(work, unit, given, grads);
    if (status == FSDP_OK && add) status = buffers_make(unit, grads);
    if (status == FSDP_OK && add) status = grads_dense(work, unit, grads);
    if (status == FSDP_OK && send && unit->shard_group && unit->replicate_group) status = partials_make(unit);
    if (status == FSDP_OK && send)
        status = unit->shard_group ? build_scatter(work, unit, grads, add, handle != NULL)
                                   : build_replicate(work, unit, grads, add);
    if (status == FSDP_OK) status = send ? unit_keep(unit, work) : unit_nothing(unit, handle);
    if (status == FSDP_OK && add) {
        accumulate(unit, grads);
        memory_peaks(unit->model);
    }
    if (status != FSDP_OK || !send) {
        work_release(work);
        return status;
    }
    status = submit(unit, work, handle);
    drop_accumulated(unit);
    if (!handle) os_file_release(unit->grads_fd, unit->grads, os_page_round(unit->grad_bytes));
    return status;
}

fsdp_status unit_reduce(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle)
{
    TRY(model_usable(unit->model));
    size_t most = (size_t)(unit->n_entries + unit->n_params);
    struct tensor *checked = mem_array(most, sizeof *checked);
    if (!checked) return mem_none("gradients", most * sizeof *checked);
    for (int32_t k = 0; k < unit->n_entries; k++) checked[k].count = -1;
    fsdp_status status = grads_import(unit, grads, n, checked);
    if (status == FSDP_OK && unit->model->awaiting && unit->shard_group &&
        lane_is_advanced_here(&unit->shard_group->collectives))
        status =
            err(FSDP_ERR_STATE,
                "unit '%s': post_backward inside a callback of its group, while the gradients of unit '%s' wait for "
                "their replicas: call it after the callback has returned",
                unit->name, unit->model->awaiting->name);
    if (status == FSDP_OK)
        status = unit_settle(unit); /* one reduction of a unit at a time: the next adds to its result */
    if (status == FSDP_OK)
        status = unit_unshard_end(unit); /* so that resharding can't fail once the work is on its way */
    if (status == FSDP_OK) status = reduce(unit, checked, checked + unit->n_entries, handle);
    mem_free(checked);
    return status;
}
