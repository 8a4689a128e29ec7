/* Units: making one, its tensors, its end. See fsdp.h.
 *
 * Making is collective and all-or-nothing: each rank does its own part (checks, memory, its rows), then the
 * ranks tell each other how that went; rank 0 reserves the shared region; all map it and tell again.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

int unit_is(const fsdp_unit *unit)
{
    return unit && ref_is(&unit->ref, REF_UNIT);
}

void unit_retain(fsdp_unit *unit)
{
    ref_get(&unit->ref);
}

/* ---- the end */

static void let_go(void *unit)
{
    unit_release(unit);
}

fsdp_status unit_keep(fsdp_unit *unit, fsdp_work *work)
{
    unit_retain(unit);
    fsdp_status status = work_keep(work, let_go, unit);
    if (status != FSDP_OK) unit_release(unit);
    return status;
}

static void unit_unlink(fsdp_unit *unit)
{
    fsdp_unit **at = &unit->model->units;
    while (*at && *at != unit) at = &(*at)->next;
    if (*at) *at = unit->next;
}

static void unit_free(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    struct transport *t = model->group->transport;
    work_release(unit->unsharding);
    work_release(unit->reducing);
    unit_drop_accumulated(unit);
    if (unit->full) {
        if (unit->has_region || unit->state != FSDP_UNIT_SHARDED) model_count_unsharded(model, -unit->full_data);
        os_unmap(unit->full, unit->full_mapped);
    }
    if (unit->has_region) t->ops->region_release(t, &unit->region);
    os_unmap(unit->shards, os_page_round(unit->shard_bytes));
    os_unmap(unit->grads, os_page_round(unit->grad_bytes));
    for (int32_t i = 0; unit->params && i < unit->n_params; i++) {
        mem_free(unit->params[i].name);
        mem_free(unit->params[i].at);
    }
    mem_free(unit->params);
    mem_free(unit);
    model_release(model);
}

void unit_release(fsdp_unit *unit)
{
    if (!unit || !ref_put(&unit->ref)) return;
    if (!ref_forked(&unit->ref)) { /* a forked child may have the lock as another thread of its parent held it */
        pthread_mutex_lock(&unit->model->lock);
        unit_unlink(unit);
        pthread_mutex_unlock(&unit->model->lock);
    }
    unit_free(unit);
}

/* ---- making: this rank's part */

static fsdp_status check_param(fsdp_model *model, const fsdp_param *params, const struct tensor *fulls, int32_t index)
{
    const fsdp_param *given = &params[index];
    const struct tensor *full = &fulls[index];
    CHECK_ARG(given->name && *given->name, "params[%d].name is empty: each parameter needs a name, unique in the model",
              index);
    CHECK_ARG(given->reserved == 0, "params[%d].reserved is %d: it must be 0", index, given->reserved);
    CHECK_ARG(full->ndim >= 1, "params[%d] '%s' is 0-dim: it has no rows to shard; give it one dimension, (1,)", index,
              given->name);
    if (!dtype_is_float(full->type))
        return err(FSDP_ERR_UNSUPPORTED, "params[%d] '%s' is %s: parameters have a float dtype", index, given->name,
                   dtype_name(full->type));
    for (int32_t other = 0; other < index; other++)
        CHECK_ARG(strcmp(params[other].name, given->name) != 0, "params[%d] and params[%d] are both named '%s'", other,
                  index, given->name);
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&model->lock);
    for (fsdp_unit *unit = model->units; unit && status == FSDP_OK; unit = unit->next)
        for (int32_t i = 0; i < unit->n_params && status == FSDP_OK; i++)
            if (strcmp(unit->params[i].name, given->name) == 0)
                status = err(FSDP_ERR_INVALID,
                             "params[%d]: '%s' is managed by unit '%s' of model '%s' already: put modules that share a "
                             "parameter into one unit",
                             index, given->name, unit->name, model->name);
    pthread_mutex_unlock(&model->lock);
    return status;
}

/* What the ranks must agree on. */
static uint64_t unit_hash(const fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls, int32_t n)
{
    const fsdp_model *model = unit->model;
    uint64_t h = hash_bytes(HASH_START, unit->name, sizeof unit->name);
    h = hash_number(h, (uint64_t)unit->number);
    h = hash_number(h, (uint64_t)model->private_unshard * 2 + (uint64_t)model->no_reshard_after_forward);
    h = hash_bytes(h, &model->divisor, sizeof model->divisor);
    for (int32_t i = 0; i < n; i++) {
        h = hash_bytes(h, params[i].name, strlen(params[i].name) + 1);
        h = hash_number(h, (uint64_t)fulls[i].type * 2 + (uint64_t)(params[i].frozen != 0));
        h = hash_number(h, (uint64_t)fulls[i].ndim);
        h = hash_bytes(h, fulls[i].shape, (size_t)fulls[i].ndim * sizeof *fulls[i].shape);
    }
    return h;
}

/* Shape, cut and place of one parameter. */
static fsdp_status param_lay_out(fsdp_unit *unit, int32_t index, const fsdp_param *given, const struct tensor *full)
{
    int size = unit->model->group->size, rank = unit->model->group->rank;
    struct param *p = &unit->params[index];
    p->name = mem_strdup(given->name);
    p->at = mem_array((size_t)size + 1, sizeof *p->at);
    if (!p->name || !p->at) return mem_none("a parameter", (size_t)size * sizeof *p->at);
    p->type = full->type;
    p->ndim = full->ndim;
    p->frozen = given->frozen != 0;
    memcpy(p->shape, full->shape, (size_t)full->ndim * sizeof *p->shape);
    p->count = full->count;
    p->row = full->count ? tensor_row_count(full) : 0; /* (0, many, many): whose product may overflow */
    for (int r = 0; r < size; r++) {
        int64_t start, length;
        shard_extent(p->shape[0], r, size, &start, &length);
        p->at[r + 1] = (start + length) * p->row;
        if (r == rank) p->rows = length;
    }
    p->full_at = unit->full_bytes;
    size_t aligned = (full->bytes + PARAM_ALIGN - 1) & ~(size_t)(PARAM_ALIGN - 1);
    if (__builtin_add_overflow(unit->full_bytes, aligned, &unit->full_bytes) || unit->full_bytes > PTRDIFF_MAX)
        return err(FSDP_ERR_NOMEM, "unit '%s' is larger than the address space", unit->name);
    unit->full_data += (int64_t)full->bytes;
    unit->shard_data += p->rows * p->row * (int64_t)dtype_size(p->type);
    return FSDP_OK;
}

static size_t shard_size(const struct param *p)
{
    return ((size_t)(p->rows * p->row) * dtype_size(p->type) + PARAM_ALIGN - 1) & ~(size_t)(PARAM_ALIGN - 1);
}

static fsdp_status shards_fill(fsdp_unit *unit, const struct tensor *fulls)
{
    size_t shard_bytes = 0, grad_bytes = 0;
    for (int32_t i = 0; i < unit->n_params; i++) {
        shard_bytes += shard_size(&unit->params[i]);
        if (!unit->params[i].frozen) grad_bytes += shard_size(&unit->params[i]);
    }
    void *block;
    if (shard_bytes) {
        TRY(os_map_anonymous(os_page_round(shard_bytes), &block));
        unit->shards = block;
        unit->shard_bytes = shard_bytes;
    }
    if (grad_bytes) {
        TRY(os_map_anonymous(os_page_round(grad_bytes), &block));
        unit->grads = block;
        unit->grad_bytes = grad_bytes;
    }
    int rank = unit->model->group->rank;
    char *shard = unit->shards, *grad = unit->grads;
    for (int32_t i = 0; i < unit->n_params; i++) {
        struct param *p = &unit->params[i];
        if (p->rows * p->row == 0) continue;
        p->shard = shard;
        shard += shard_size(p);
        if (!p->frozen) {
            p->grad = grad;
            grad += shard_size(p);
        }
        struct tensor rows = fulls[i], to;
        rows.data += p->at[rank] / p->row * rows.strides[0] * (int64_t)dtype_size(p->type);
        rows.shape[0] = p->rows;
        rows.count = p->rows * p->row;
        tensor_make(&to, p->shard, p->type, rows.ndim, rows.shape);
        tensor_copy(&to, &rows);
    }
    return FSDP_OK;
}

/* ---- making: together */

struct report { /* what the ranks tell each other; begins with the label that mismatch messages show */
    char label[CALL_LABEL];
    fsdp_status status;
    int32_t cell;
    uint64_t offset, bytes;
    char message[256];
};

/* Every rank says how it fared; the first failure is everyone's. */
static fsdp_status agree(fsdp_unit *unit, fsdp_work **prepared, fsdp_status status, const struct region *region,
                         struct report *first)
{
    fsdp_group *group = unit->model->group;
    struct report mine = {.status = status};
    fsdp_error_info failure;
    err_save(&failure);
    memcpy(mine.label, unit->name, sizeof mine.label);
    if (status != FSDP_OK) snprintf(mine.message, sizeof mine.message, "%.250s", failure.message);
    if (region) {
        mine.cell = region->cell;
        mine.offset = region->offset;
        mine.bytes = region->bytes;
    }
    struct report all[GROUP_MAX_RANKS];
    fsdp_status met =
        group_exchange_prepared(group, prepared, FSDP_OP_CREATE_UNIT, unit->hash, &mine, sizeof mine, all);
    if (met == FSDP_OK && first) *first = all[0];
    for (int r = 0; met == FSDP_OK && r < group->size; r++) {
        if (all[r].status == FSDP_OK) continue;
        all[r].message[sizeof all[r].message - 1] = 0;
        met = r == group->rank
                  ? err_restore(&failure)
                  : err(all[r].status, "making unit '%s': rank %d reported: %s", unit->name, r, all[r].message);
    }
    return met;
}

static fsdp_status make_private(fsdp_unit *unit)
{
    if (!unit->full_bytes) return FSDP_OK;
    void *full;
    unit->full_mapped = os_page_round(unit->full_bytes);
    TRY(os_map_anonymous(unit->full_mapped, &full));
    unit->full = full;
    return FSDP_OK;
}

static fsdp_status map_region(fsdp_unit *unit, struct region *region)
{
    struct transport *t = unit->model->group->transport;
    if (region->bytes < unit->full_bytes)
        return err(FSDP_ERR_INTERNAL, "rank 0 reserved %zu bytes for unit '%s', not %zu", region->bytes, unit->name,
                   unit->full_bytes);
    TRY(t->ops->region_map(t, region));
    void *view;
    fsdp_status status = os_map_private(region->fd, region->offset, region->bytes, NULL, &view);
    if (status != FSDP_OK) return status;
    unit->full = view;
    unit->full_mapped = region->bytes;
    unit->region = *region;
    unit->has_region = 1;
    model_count_unsharded(unit->model, unit->full_data);
    return FSDP_OK;
}

static fsdp_status make_shared(fsdp_unit *unit, fsdp_work **prepared)
{
    struct transport *t = unit->model->group->transport;
    struct region region = {.fd = -1};
    struct report first;
    fsdp_status status = FSDP_OK;
    if (t->rank == 0) status = t->ops->region_reserve(t, unit->full_bytes, &region);
    int reserved = t->rank == 0 && status == FSDP_OK;
    status = agree(unit, &prepared[0], status, &region, &first);
    if (status == FSDP_OK && t->rank != 0) {
        region.cell = first.cell;
        region.offset = first.offset;
        region.bytes = first.bytes;
    }
    if (status == FSDP_OK) {
        status = map_region(unit, &region);
        status = agree(unit, &prepared[1], status, NULL, NULL);
    }
    if (status != FSDP_OK && (reserved || region.shared) && !unit->has_region) {
        fsdp_error_info failure;
        err_save(&failure);
        t->ops->region_release(t, &region);
        (void)err_restore(&failure);
    }
    return status;
}

/* `exchanges`: three, made beforehand: once this rank's peers may wait for it, nothing here fails for want of
 * memory. */
static fsdp_status make(fsdp_model *model, const char *name, const fsdp_param *params, const struct tensor *fulls,
                        int32_t n, fsdp_work **exchanges, fsdp_unit **out)
{
    fsdp_unit *unit = mem_alloc(sizeof *unit);
    if (!unit) return mem_none("a unit", sizeof *unit);
    ref_init(&unit->ref, REF_UNIT);
    unit->model = model;
    model_retain(model);
    unit->number = model->units_made; /* counted when it has succeeded: so on all ranks alike */
    if (name)
        snprintf(unit->name, sizeof unit->name, "%s", name);
    else
        snprintf(unit->name, sizeof unit->name, "unit%lld", (long long)unit->number);
    unit->hash = unit_hash(unit, params, fulls, n);
    unit->params = mem_array((size_t)n, sizeof *unit->params);
    unit->n_params = unit->params ? n : 0;
    fsdp_status status = unit->params ? FSDP_OK : mem_none("a unit's parameters", (size_t)n * sizeof *unit->params);
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) status = param_lay_out(unit, i, &params[i], &fulls[i]);
    if (status == FSDP_OK) status = shards_fill(unit, fulls);
    if (status == FSDP_OK && (model->private_unshard || !unit->full_bytes)) status = make_private(unit);
    status = agree(unit, &exchanges[0], status, NULL, NULL);
    if (status == FSDP_OK && !model->private_unshard && unit->full_bytes) status = make_shared(unit, &exchanges[1]);
    if (status != FSDP_OK) {
        unit_free(unit);
        return status;
    }
    model->units_made++;
    pthread_mutex_lock(&model->lock);
    unit->next = model->units;
    model->units = unit;
    pthread_mutex_unlock(&model->lock);
    *out = unit;
    return FSDP_OK;
}

fsdp_status unit_create(fsdp_model *model, const char *name, const fsdp_param *params, const struct tensor *fulls,
                        int32_t n, fsdp_unit **out)
{
    TRY(group_usable(model->group));
    for (int32_t i = 0; i < n; i++) TRY(check_param(model, params, fulls, i));

    fsdp_work *exchanges[3] = {NULL, NULL, NULL};
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 3 && status == FSDP_OK; i++) status = group_prepare(model->group, &exchanges[i]);
    if (status == FSDP_OK) status = make(model, name, params, fulls, n, exchanges, out);
    for (int i = 0; i < 3; i++) work_release(exchanges[i]);
    return status;
}

/* ---- tensors */

fsdp_status unit_tensor(fsdp_unit *unit, int32_t index, enum unit_tensor which, DLManagedTensorVersioned **out)
{
    CHECK_ARG(index >= 0 && index < unit->n_params, "index is %d: unit '%s' has parameters 0 to %d", index, unit->name,
              unit->n_params - 1);
    struct param *p = &unit->params[index];
    if (which == UNIT_GRAD && p->frozen)
        return err(FSDP_ERR_STATE, "parameter '%s' is frozen: it has no gradient", p->name);
    int64_t shape[TENSOR_MAX_DIMS];
    memcpy(shape, p->shape, sizeof shape);
    char *data = p->count ? unit->full + p->full_at : NULL;
    if (which != UNIT_FULL) {
        shape[0] = p->rows;
        data = which == UNIT_SHARD ? p->shard : p->grad;
    }
    unit_retain(unit);
    fsdp_status status = managed_export(data, p->type, p->ndim, shape, let_go, unit, out);
    if (status != FSDP_OK) unit_release(unit);
    return status;
}

/* ---- hooks without files of their own */

fsdp_status unit_post_forward(fsdp_unit *unit)
{
    TRY(group_usable(unit->model->group));
    return unit->model->no_reshard_after_forward ? FSDP_OK : unit_reshard(unit);
}
