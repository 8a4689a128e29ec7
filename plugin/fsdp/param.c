/* Parameters: how one lies on the ranks and in its unit's memory, and the tensors that show it. See fsdp.h.
 *
 * A shard is this rank's part of shard_dim, contiguous, in the parameter's own dtype. The unit's shards lie in one
 * block, its sharded gradients in another: so each is one mapping for life. Gradients of frozen parameters have their
 * place too, so that a parameter can be frozen and thawed; it is never touched while they are frozen, and costs
 * addresses only.
 *
 * Reductions and gathers see a parameter with shard_dim moved to the front: there every rank's part is one run of
 * elements, given by `at`. For shard_dim 0 that is how it lies.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <string.h>

/* ---- precision */

static fsdp_status read_dtype(DLDataType given, const char *name, enum dtype *out)
{
    *out = PRECISION_NONE;
    if (given.code == 0 && given.bits == 0 && given.lanes == 0) return FSDP_OK;
    TRY(dtype_from_dl(given, name, out));
    CHECK_ARG(dtype_is_float(*out), "%s is %s: a float dtype, or {0, 0, 0} for none", name, dtype_name(*out));
    return FSDP_OK;
}

fsdp_status precision_read(const fsdp_precision *given, struct precision *out)
{
    TRY(read_dtype(given->param_dtype, "precision.param_dtype", &out->param));
    TRY(read_dtype(given->reduce_dtype, "precision.reduce_dtype", &out->reduce));
    TRY(read_dtype(given->output_dtype, "precision.output_dtype", &out->output));
    TRY(read_dtype(given->buffer_dtype, "precision.buffer_dtype", &out->buffer));
    CHECK_ARG((given->keep_low_precision_grads | 1) == 1, "precision.keep_low_precision_grads is %d: 0 or 1",
              given->keep_low_precision_grads);
    CHECK_ARG((given->keep_inputs | 1) == 1, "precision.keep_inputs is %d: 0 or 1", given->keep_inputs);
    out->keep_low_precision_grads = given->keep_low_precision_grads != 0;
    out->keep_inputs = given->keep_inputs != 0;
    return FSDP_OK;
}

enum dtype param_wide(enum dtype type)
{
    return type == DTYPE_F64 ? DTYPE_F64 : DTYPE_F32;
}

/* ---- layout */

static fsdp_status place(const fsdp_unit *unit, size_t *end, int64_t count, enum dtype type, size_t *at)
{
    size_t bytes;
    *at = *end;
    if (__builtin_mul_overflow((size_t)count, dtype_size(type), &bytes) ||
        __builtin_add_overflow(bytes, PARAM_ALIGN - 1, &bytes) ||
        __builtin_add_overflow(*end, bytes & ~(size_t)(PARAM_ALIGN - 1), end) || *end > PTRDIFF_MAX)
        return err(FSDP_ERR_NOMEM, "unit '%s' is larger than the address space", unit->name);
    return FSDP_OK;
}

fsdp_status param_lay_out(fsdp_unit *unit, struct param *p, const fsdp_param *given, const struct tensor *full)
{
    const struct precision *precision = &unit->precision;
    int size = unit_shard_size(unit), rank = unit_shard_rank(unit);
    p->name = mem_strdup(given->name);
    p->at = mem_array((size_t)size + 1, sizeof *p->at);
    if (!p->name || !p->at) return mem_none("a parameter", (size_t)size * sizeof *p->at);
    p->type = full->type;
    p->full_type = precision->param != PRECISION_NONE ? precision->param : p->type;
    p->grad_type = p->type;
    if (precision->keep_low_precision_grads)
        p->grad_type = precision->reduce != PRECISION_NONE ? precision->reduce : p->full_type;
    p->ndim = full->ndim;
    p->frozen = given->frozen != 0;
    p->shard_dim = unit->shard_group ? given->shard_dim : 0;
    memcpy(p->shape, full->shape, (size_t)full->ndim * sizeof *p->shape);
    p->count = full->count;
    p->row = full->count ? full->count / full->shape[p->shard_dim] : 0;
    for (int r = 0; r < size; r++) {
        int64_t start, length;
        shard_extent(p->shape[p->shard_dim], r, size, &start, &length);
        p->at[r + 1] = (start + length) * p->row;
        if (r != rank) continue;
        p->start = start;
        p->rows = length;
    }
    p->shard_count = p->rows * p->row;
    memcpy(p->extent, p->shape, sizeof p->extent);
    p->corner[p->shard_dim] = p->start;
    p->extent[p->shard_dim] = p->rows;
    TRY(place(unit, &unit->full_bytes, p->count, p->full_type, &p->full_at));
    TRY(place(unit, &unit->partial_bytes, p->shard_count, param_wide(p->full_type), &p->partial_at));
    unit->full_data += p->count * (int64_t)dtype_size(p->full_type);
    unit->shard_data += p->shard_count * (int64_t)dtype_size(p->full_type);
    return FSDP_OK;
}

static fsdp_status block_make(const fsdp_unit *unit, size_t bytes, int *fd, char **out)
{
    void *block;
    if (!bytes) return FSDP_OK;
    if (unit->model->offload_dir)
        TRY(os_map_file(unit->model->offload_dir, os_page_round(bytes), fd, &block));
    else
        TRY(os_map_anonymous(os_page_round(bytes), &block));
    *out = block;
    return FSDP_OK;
}

fsdp_status unit_memory(fsdp_unit *unit)
{
    unit->aliased = !unit->shard_group;
    for (int32_t i = 0; i < unit->n_params; i++) {
        size_t at;
        struct param *p = &unit->params[i];
        TRY(place(unit, &unit->shard_bytes, p->shard_count, p->type, &at));
        TRY(place(unit, &unit->grad_bytes, p->shard_count, p->grad_type, &at));
        if (p->full_type != p->type) unit->aliased = 0;
    }
    TRY(block_make(unit, unit->shard_bytes, &unit->shards_fd, &unit->shards));
    TRY(block_make(unit, unit->grad_bytes, &unit->grads_fd, &unit->grads));
    size_t shard_end = 0, grad_end = 0;
    for (int32_t i = 0; i < unit->n_params; i++) {
        size_t shard_at, grad_at;
        struct param *p = &unit->params[i];
        TRY(place(unit, &shard_end, p->shard_count, p->type, &shard_at));
        TRY(place(unit, &grad_end, p->shard_count, p->grad_type, &grad_at));
        if (!p->shard_count) continue;
        p->shard = unit->shards + shard_at;
        p->grad = unit->grads + grad_at;
    }
    if (unit->aliased || !unit->full_bytes) return FSDP_OK;
    void *full; /* addresses; slots are mapped over it */
    TRY(os_map_anonymous(os_page_round(unit->full_bytes), &full));
    unit->full_mapped = os_page_round(unit->full_bytes);
    unit->full = full;
    return FSDP_OK;
}

/* ---- views */

void param_whole(const struct param *p, void *data, enum dtype type, struct tensor *out)
{
    tensor_make(out, p->count ? data : NULL, type, p->ndim, p->shape);
}

void param_part(const struct param *p, void *data, enum dtype type, struct tensor *out)
{
    param_whole(p, data, type, out);
    tensor_narrow(out, p->shard_dim, p->start, p->rows);
}

void param_shard(const struct param *p, void *data, enum dtype type, struct tensor *out)
{
    int64_t shape[TENSOR_MAX_DIMS];
    memcpy(shape, p->shape, (size_t)p->ndim * sizeof *shape);
    shape[p->shard_dim] = p->rows;
    tensor_make(out, p->shard_count ? data : NULL, type, p->ndim, shape);
}

/* ---- tensors for the host */

fsdp_status unit_check_index(const fsdp_unit *unit, int32_t index)
{
    CHECK_ARG(index >= 0 && index < unit->n_entries, "index is %d: unit '%s' has parameters 0 to %d", index, unit->name,
              unit->n_entries - 1);
    return FSDP_OK;
}

fsdp_status unit_tensor(fsdp_unit *unit, int32_t index, enum unit_tensor which, DLManagedTensorVersioned **out)
{
    TRY(unit_check_index(unit, index));
    const struct param *p = &unit->params[unit->entries[index].param];
    if (which == UNIT_GRAD && p->frozen)
        return err(FSDP_ERR_STATE, "parameter '%s' is frozen: it has no gradient", unit->entries[index].name);
    if (which == UNIT_GRAD) grads_clear(unit);
    struct tensor t;
    if (which == UNIT_SHARD)
        param_shard(p, p->shard, p->type, &t);
    else if (which == UNIT_GRAD)
        param_shard(p, p->grad, p->grad_type, &t);
    else
        param_whole(p, unit->aliased ? p->shard : unit->full + p->full_at, p->full_type, &t);
    unit_retain(unit);
    fsdp_status status = managed_export(t.data, t.type, t.ndim, t.shape, unit_let_go, unit, out);
    if (status != FSDP_OK) unit_release(unit);
    return status;
}

fsdp_status unit_param_query(fsdp_unit *unit, int32_t index, fsdp_param_info *info)
{
    TRY(unit_check_index(unit, index));
    const struct entry *entry = &unit->entries[index];
    const struct param *p = &unit->params[entry->param];
    *info = (fsdp_param_info){.struct_size = sizeof *info,
                              .name = entry->name,
                              .ndim = p->ndim,
                              .shard_dim = p->shard_dim,
                              .shape = p->shape,
                              .shard_start = p->start,
                              .shard_length = p->rows,
                              .dtype = dtype_to_dl(p->type),
                              .full_dtype = dtype_to_dl(p->full_type),
                              .grad_dtype = dtype_to_dl(p->grad_type),
                              .frozen = p->frozen,
                              .tied_to = -1,
                              .used = atomic_load_explicit(&p->used, memory_order_relaxed)};
    for (int32_t i = 0; i < index && info->tied_to < 0; i++)
        if (unit->entries[i].param == entry->param) info->tied_to = i;
    return FSDP_OK;
}

fsdp_status unit_used(const fsdp_unit *unit, int32_t *used, int32_t n)
{
    CHECK_ARG(n == unit->n_entries, "n is %d, but unit '%s' has %d parameters: give room for each", n, unit->name,
              unit->n_entries);
    for (int32_t k = 0; k < n; k++)
        used[k] = atomic_load_explicit(&unit->params[unit->entries[k].param].used, memory_order_relaxed);
    return FSDP_OK;
}

/* ---- freezing */

/* Give back the pages that hold nothing but this gradient; zeros all the same. */
static void gradient_drop(const fsdp_unit *unit, struct param *p)
{
    size_t page = os_page_size(), bytes = (size_t)p->shard_count * dtype_size(p->grad_type);
    if (!p->grad) return;
    memset(p->grad, 0, bytes);
    uintptr_t from = ((uintptr_t)p->grad + page - 1) & ~(page - 1), to = ((uintptr_t)p->grad + bytes) & ~(page - 1);
    if (from < to && !unit->model->offload_dir) os_discard((void *)from, to - from);
}

fsdp_status unit_set_frozen(fsdp_unit *unit, int32_t index, int32_t frozen)
{
    TRY(unit_check_index(unit, index));
    CHECK_ARG(frozen == 0 || frozen == 1, "frozen is %d: 0 or 1", frozen);
    struct param *p = &unit->params[unit->entries[index].param];
    TRY(model_usable(unit->model));
    if (p->frozen == frozen) return FSDP_OK;
    if (unit->in_backward || unit->accumulates || unit->has_partials)
        return err(FSDP_ERR_STATE, "unit '%s': parameter '%s' can't be %s now: %s", unit->name,
                   unit->entries[index].name, frozen ? "frozen" : "thawed",
                   unit->in_backward ? "backward is under way; do it after fsdp_model_finish_backward"
                                     : "gradients wait for a reduction; call post_backward with gradient sync (and "
                                       "all-reduce) on, or fsdp_model_zero_grad, first");
    TRY(unit_settle(unit));
    grads_clear(unit);
    p->frozen = frozen;
    p->partial_used = 0;
    atomic_store_explicit(&p->used, 0, memory_order_relaxed);
    gradient_drop(unit, p);
    if (frozen && p->accumulated) {
        os_unmap(p->accumulated, (size_t)p->count * dtype_size(param_wide(p->full_type)));
        p->accumulated = NULL;
    }
    memory_peaks(unit->model);
    return FSDP_OK;
}
