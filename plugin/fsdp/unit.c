/* Units: making one, and its end. See fsdp.h.
 *
 * Making is collective over the model's ranks and all-or-nothing: each rank does its own part (checks, memory, its
 * values), then the ranks tell each other how that went and what they made, and compare.
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

int unit_shard_rank(const fsdp_unit *unit)
{
    return unit->shard_group ? unit->shard_group->rank : 0;
}

int unit_shard_size(const fsdp_unit *unit)
{
    return unit->shard_group ? unit->shard_group->size : 1;
}

int unit_replicas(const fsdp_unit *unit)
{
    return unit->replicate_group ? unit->replicate_group->size : 1;
}

/* ---- the end */

void unit_let_go(void *unit)
{
    unit_release(unit);
}

fsdp_status unit_keep(fsdp_unit *unit, fsdp_work *work)
{
    unit_retain(unit);
    fsdp_status status = work_keep(work, unit_let_go, unit);
    if (status != FSDP_OK) unit_release(unit);
    return status;
}

/* With the model's lock held: out of the list, its counts into the model's. */
static void unlink_unit(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    fsdp_unit **at = &model->units;
    while (*at && *at != unit) at = &(*at)->next;
    if (!*at) return;
    *at = unit->next;
    model->published_bytes += unit->published_bytes;
    model->reduced_bytes += unit->reduced_bytes;
    model->replicated_bytes += unit->replicated_bytes;
}

static void unit_free(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    work_release(unit->unsharding);
    work_release(unit->reducing);
    work_release(unit->replicating);
    unit_free_gradients(unit);
    unit_drop_chunk(unit);
    os_unmap(unit->full, unit->full_mapped);
    os_unmap(unit->shards, os_page_round(unit->shard_bytes));
    os_unmap(unit->grads, os_page_round(unit->grad_bytes));
    os_close(&unit->shards_fd);
    os_close(&unit->grads_fd);
    for (int32_t i = 0; unit->params && i < unit->n_params; i++) {
        mem_free(unit->params[i].name);
        mem_free(unit->params[i].at);
    }
    for (int32_t k = 0; unit->entries && k < unit->n_entries; k++) mem_free(unit->entries[k].name);
    mem_free(unit->params);
    mem_free(unit->entries);
    mem_free(unit->prefetch[FSDP_FORWARD].units);
    mem_free(unit->prefetch[FSDP_BACKWARD].units);
    mem_free(unit);
    model_release(model);
}

void unit_release(fsdp_unit *unit)
{
    if (!unit || !ref_put(&unit->ref)) return;
    if (!ref_forked(&unit->ref)) { /* a forked child may have the lock as another thread of its parent held it */
        pthread_mutex_lock(&unit->model->lock);
        unlink_unit(unit);
        pthread_mutex_unlock(&unit->model->lock);
    }
    unit_free(unit);
}

/* ---- making: what is asked for */

static fsdp_status check_unmanaged(fsdp_model *model, const fsdp_param *given, int32_t index)
{
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&model->lock);
    for (fsdp_unit *unit = model->units; unit && status == FSDP_OK; unit = unit->next)
        for (int32_t k = 0; k < unit->n_entries && status == FSDP_OK; k++) {
            const struct entry *entry = &unit->entries[k];
            if (strcmp(entry->name, given->name) == 0)
                status = err(FSDP_ERR_INVALID,
                             "params[%d]: '%s' is managed by unit '%s' of model '%s' already: put modules that share a "
                             "parameter into one unit; another parameter needs another name, until that unit and all "
                             "its tensors are released",
                             index, given->name, unit->name, model->name);
            else if (given->id && given->id == entry->id)
                status = err(FSDP_ERR_INVALID,
                             "params[%d]: '%s' is the same parameter as '%s' of unit '%s': put modules that share a "
                             "parameter into one unit",
                             index, given->name, entry->name, unit->name);
        }
    pthread_mutex_unlock(&model->lock);
    return status;
}

static fsdp_status check_param(fsdp_model *model, const fsdp_param *params, const struct tensor *fulls, int32_t index)
{
    const fsdp_param *given = &params[index];
    const struct tensor *full = &fulls[index];
    CHECK_ARG(given->name && *given->name, "params[%d].name is empty: each parameter needs a name, unique in the model",
              index);
    CHECK_ARG(given->reserved == 0, "params[%d].reserved is %d: it must be 0", index, given->reserved);
    CHECK_ARG(full->ndim >= 1, "params[%d] '%s' is 0-dim: it has no rows to shard; give it one dimension, (1,)", index,
              given->name);
    CHECK_ARG(given->shard_dim >= 0 && given->shard_dim < full->ndim,
              "params[%d] '%s': shard_dim is %d, but it has dimensions 0 to %d", index, given->name, given->shard_dim,
              full->ndim - 1);
    CHECK_ARG(given->frozen == 0 || given->frozen == 1, "params[%d] '%s': frozen is %d: 0 or 1", index, given->name,
              given->frozen);
    CHECK_ARG(given->meta == 0 || given->meta == 1, "params[%d] '%s': meta is %d: 0 or 1", index, given->name,
              given->meta);
    if (!dtype_is_float(full->type))
        return err(FSDP_ERR_UNSUPPORTED, "params[%d] '%s' is %s: parameters have a float dtype", index, given->name,
                   dtype_name(full->type));
    for (int32_t other = 0; other < index; other++)
        CHECK_ARG(strcmp(params[other].name, given->name) != 0, "params[%d] and params[%d] are both named '%s'", other,
                  index, given->name);
    return check_unmanaged(model, given, index);
}

/* The earlier entry that is the same parameter, or -1. */
static fsdp_status find_tied(const fsdp_param *params, const struct tensor *fulls, int32_t index, int32_t *tied)
{
    const fsdp_param *given = &params[index];
    *tied = -1;
    for (int32_t other = 0; other < index; other++) {
        const fsdp_param *before = &params[other];
        int real = !given->meta && !before->meta && fulls[index].count && fulls[other].count;
        int same = (given->id && given->id == before->id) || (real && tensor_same_place(&fulls[index], &fulls[other]));
        if (!same) continue;
        CHECK_ARG(
            tensor_same_shape(&fulls[index], &fulls[other]) && fulls[index].type == fulls[other].type &&
                given->shard_dim == before->shard_dim && !given->frozen == !before->frozen &&
                given->meta == before->meta,
            "params[%d] '%s' and params[%d] '%s' are one parameter, but differ in shape, dtype, shard_dim, frozen "
            "or meta",
            other, before->name, index, given->name);
        if (*tied < 0) *tied = other;
    }
    return FSDP_OK;
}

/* ---- settings */

fsdp_status reshard_check(int32_t value, int32_t shard_size)
{
    CHECK_ARG(value >= FSDP_RESHARD_NEVER,
              "reshard_after_forward is %d: FSDP_RESHARD_NEVER (-1), _DEFAULT (0), _ALWAYS (1), or a number of ranks",
              value);
    CHECK_ARG(value < 2 || shard_size % value == 0,
              "reshard_after_forward is %d, which does not divide the %d ranks that parameters are sharded over", value,
              shard_size);
    return FSDP_OK;
}

static int keeps_full(fsdp_strategy strategy)
{
    return strategy == FSDP_SHARD_GRAD_OP || strategy == FSDP_HYBRID_SHARD_GRAD_OP || strategy == FSDP_NO_SHARD;
}

fsdp_status unit_set_reshard_after_forward(fsdp_unit *unit, int32_t value)
{
    TRY(reshard_check(value, unit_shard_size(unit)));
    if (value == FSDP_RESHARD_DEFAULT) value = keeps_full(unit->strategy) ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    if (value > 1 && value == unit_shard_size(unit)) value = FSDP_RESHARD_ALWAYS;
    if (value != unit->reshard_after_forward) { /* parts for another number of ranks are of no use */
        TRY(unit_unshard_end(unit));
        unit_drop_chunk(unit);
    }
    unit->reshard_after_forward = value;
    return FSDP_OK;
}

static fsdp_status settle_options(fsdp_unit *unit, const fsdp_unit_options *options)
{
    fsdp_model *model = unit->model;
    fsdp_strategy strategy = options->strategy ? options->strategy : model->strategy;
    CHECK_ARG(strategy >= FSDP_FULL_SHARD && strategy <= FSDP_HYBRID_SHARD_GRAD_OP,
              "options.strategy is %d: FSDP_FULL_SHARD (1) to FSDP_HYBRID_SHARD_GRAD_OP (5)", strategy);
    int hybrid = strategy_is_hybrid(strategy);
    CHECK_ARG(!hybrid || model->shard,
              "unit '%s' asks for hybrid sharding, which needs a model made with it by fsdp_model_create_on_mesh",
              unit->name);
    unit->strategy = strategy;
    unit->shard_group = hybrid ? model->shard : strategy == FSDP_NO_SHARD ? NULL : model->group;
    unit->replicate_group = hybrid ? model->replicate : strategy == FSDP_NO_SHARD ? model->group : NULL;
    unit->precision = model->precision;
    if (options->precision) TRY(precision_read(options->precision, &unit->precision));
    int32_t reshard = options->reshard_after_forward;
    if (!reshard && strategy == model->strategy) reshard = model->reshard_after_forward;
    CHECK_ARG(reshard < FSDP_RESHARD_ALWAYS || !keeps_full(strategy) || strategy == FSDP_NO_SHARD,
              "unit '%s': a strategy that keeps parameters full after forward and reshard_after_forward ALWAYS "
              "contradict each other",
              unit->name);
    unit->sync = model->sync;
    unit->all_reduce = model->all_reduce;
    unit->divisor = model->divisor;
    return unit_set_reshard_after_forward(unit, reshard);
}

static uint64_t options_hash(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    const uint64_t numbers[] = {(uint64_t)unit->number,
                                (uint64_t)unit->strategy,
                                (uint64_t)(unit->reshard_after_forward + 1),
                                (uint64_t)model->private_unshard,
                                (uint64_t)model->sync_module_states,
                                (uint64_t)unit->precision.param,
                                (uint64_t)unit->precision.reduce,
                                (uint64_t)unit->precision.keep_low_precision_grads,
                                (uint64_t)model->forward_prefetch,
                                (uint64_t)model->backward_prefetch,
                                (uint64_t)model->prefetch_limit};
    uint64_t h = hash_bytes(HASH_START, unit->name, sizeof unit->name);
    h = hash_bytes(h, numbers, sizeof numbers);
    return hash_bytes(h, &model->divisor, sizeof model->divisor);
}

static uint64_t param_hash(const fsdp_model *model, const fsdp_param *given, const struct tensor *full, int32_t tied)
{
    uint64_t h = hash_bytes(HASH_START, given->name, strlen(given->name) + 1);
    h = hash_number(h, (uint64_t)full->type * 2 + (uint64_t)(given->frozen != 0));
    h = hash_number(h, (uint64_t)(tied + 1));
    h = hash_number(h, (uint64_t)given->shard_dim);
    if (!model->sync_module_states) h = hash_number(h, (uint64_t)given->meta);
    h = hash_number(h, (uint64_t)full->ndim);
    return hash_bytes(h, full->shape, (size_t)full->ndim * sizeof *full->shape);
}

/* ---- making: together */

#define COMPARED 384 /* parameters that a difference can be told for by name */

struct report { /* what the ranks tell each other; begins with the label that mismatch messages show */
    char label[CALL_LABEL];
    fsdp_status status;
    int32_t n;
    uint64_t hash; /* of all below and more */
    uint64_t options;
    char message[256];
    uint32_t params[COMPARED];
};
_Static_assert(sizeof(struct report) <= TRANSPORT_PAYLOAD, "what a rank tells must fit into an exchange");

static fsdp_status compare(const fsdp_unit *unit, const struct report *all, const fsdp_param *params, int32_t n)
{
    fsdp_group *group = unit->model->group;
    const struct report *first = &all[0];
    for (int r = 1; r < group->size; r++) {
        const struct report *other = &all[r];
        if (other->hash == first->hash) continue;
        char what[256], a[CALL_LABEL], b[CALL_LABEL];
        memcpy(a, first->label, sizeof a);
        memcpy(b, other->label, sizeof b);
        a[sizeof a - 1] = b[sizeof b - 1] = 0;
        int32_t k = 0;
        while (k < first->n && k < other->n && k < COMPARED && first->params[k] == other->params[k]) k++;
        if (strcmp(a, b) != 0)
            snprintf(what, sizeof what, "they are two different units");
        else if (first->n != other->n)
            snprintf(what, sizeof what, "they have %d and %d parameters", first->n, other->n);
        else if (first->options != other->options)
            snprintf(what, sizeof what,
                     "they differ in options (strategy, precision, reshard_after_forward, the "
                     "model's), or in how many units were made before");
        else
            snprintf(what, sizeof what,
                     "parameter %d (here '%.100s') differs in name, shape, dtype, shard_dim, frozen flag, meta or what "
                     "it is tied to",
                     k, k < n ? params[k].name : "none");
        uint64_t sequence = group->sequence;
        err(FSDP_ERR_MISMATCH,
            "group '%s', operation %llu: rank 0 called create_unit of unit '%s', rank %d called create_unit of unit "
            "'%s': %s; all ranks must make the same units in the same order",
            group->name, (unsigned long long)sequence, a, r, b, what);
        err_operation(FSDP_OP_CREATE_UNIT, sequence, 0, r);
        return FSDP_ERR_MISMATCH;
    }
    return FSDP_OK;
}

/* Every rank says how it fared and what it made; the first failure is everyone's. */
static fsdp_status agree(fsdp_unit *unit, fsdp_work **prepared, fsdp_status status, struct report *mine,
                         struct report *all, const fsdp_param *params, int32_t n)
{
    fsdp_group *group = unit->model->group;
    fsdp_error_info failure;
    err_save(&failure);
    memcpy(mine->label, unit->name, sizeof mine->label);
    mine->status = status;
    if (status != FSDP_OK) snprintf(mine->message, sizeof mine->message, "%.250s", failure.message);
    TRY(group_exchange_prepared(group, prepared, FSDP_OP_CREATE_UNIT, HASH_START, mine, sizeof *mine, all));
    for (int r = 0; r < group->size; r++) { /* first: one that failed may not know what it would have made */
        if (all[r].status == FSDP_OK) continue;
        all[r].message[sizeof all[r].message - 1] = 0;
        return r == group->rank
                   ? err_restore(&failure)
                   : err(all[r].status, "making unit '%s': rank %d reported: %s", unit->name, r, all[r].message);
    }
    return compare(unit, all, params, n);
}

static fsdp_status entries_make(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls, int32_t n,
                                struct report *mine)
{
    unit->hash = mine->options = options_hash(unit);
    unit->params = mem_array((size_t)n, sizeof *unit->params);
    unit->entries = mem_array((size_t)n, sizeof *unit->entries);
    if (!unit->params || !unit->entries) return mem_none("a unit's parameters", (size_t)n * sizeof *unit->params);
    fsdp_status status = FSDP_OK;
    mine->n = n;
    for (int32_t k = 0; k < n; k++) {
        int32_t tied;
        fsdp_status found = find_tied(params, fulls, k, &tied);
        if (found != FSDP_OK) return found;
        uint64_t hash = param_hash(unit->model, &params[k], &fulls[k], tied);
        unit->hash = hash_number(unit->hash, hash);
        if (k < COMPARED) mine->params[k] = (uint32_t)(hash ^ hash >> 32);
        struct entry *entry = &unit->entries[unit->n_entries++];
        entry->id = params[k].id;
        entry->param = tied >= 0 ? unit->entries[tied].param : unit->n_params;
        if (status == FSDP_OK && !(entry->name = mem_strdup(params[k].name))) status = mem_none("a name", 1);
        if (tied < 0) {
            struct param *p = &unit->params[unit->n_params++];
            if (status == FSDP_OK) status = param_lay_out(unit, p, &params[k], &fulls[k]);
        }
    }
    mine->hash = unit->hash;
    return status;
}

/* What a unit takes before the ranks meet: from there on nothing fails on one of them alone, for want of memory. */
struct making {
    fsdp_work *exchange, *values[2];
    struct report *all;
};

static fsdp_status check_meta(const fsdp_model *model, const fsdp_param *params, int32_t n)
{
    for (int32_t k = 0; k < n && model->sync_module_states && model->group->rank == 0; k++)
        CHECK_ARG(!params[k].meta, "params[%d] '%s' is meta on rank 0, whose values sync_module_states gives to all", k,
                  params[k].name);
    return FSDP_OK;
}

/* This rank's part. */
static fsdp_status make_alone(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls, int32_t n,
                              const fsdp_unit_options *options, struct making *making, struct report *mine)
{
    fsdp_model *model = unit->model;
    TRY(settle_options(unit, options));
    for (int32_t i = 0; i < n; i++) TRY(check_param(model, params, fulls, i));
    TRY(check_meta(model, params, n));
    TRY(entries_make(unit, params, fulls, n, mine));
    TRY(unit_memory(unit));
    if (model->sync_module_states) return unit_sync_prepare(unit, params, fulls, making->values);
    unit_take_values(unit, params, fulls);
    return FSDP_OK;
}

static fsdp_status make(fsdp_unit *unit, const fsdp_param *params, const struct tensor *fulls, int32_t n,
                        const fsdp_unit_options *options, struct making *making)
{
    fsdp_model *model = unit->model;
    struct report mine = {.n = n};
    fsdp_status status = make_alone(unit, params, fulls, n, options, making, &mine);
    TRY(agree(unit, &making->exchange, status, &mine, making->all, params, n));
    TRY(unit_sync_values(making->values));
    model->units_made++;
    pthread_mutex_lock(&model->lock);
    fsdp_unit **end = &model->units;
    while (*end) end = &(*end)->next;
    *end = unit;
    pthread_mutex_unlock(&model->lock);
    memory_peaks(model);
    return FSDP_OK;
}

fsdp_status unit_create(fsdp_model *model, const char *name, const fsdp_param *params, const struct tensor *fulls,
                        int32_t n, const fsdp_unit_options *options, fsdp_unit **out)
{
    TRY(model_usable(model));
    fsdp_unit *unit = mem_alloc(sizeof *unit);
    if (!unit) return mem_none("a unit", sizeof *unit);
    ref_init(&unit->ref, REF_UNIT);
    unit->model = model;
    unit->shards_fd = unit->grads_fd = -1;
    model_retain(model);
    unit->number = model->units_made; /* counted when it has succeeded: so on all ranks alike */
    if (name)
        snprintf(unit->name, sizeof unit->name, "%s", name);
    else
        snprintf(unit->name, sizeof unit->name, "unit%lld", (long long)unit->number);
    struct making making = {.all = mem_array((size_t)model->group->size, sizeof *making.all)};
    fsdp_status status = making.all ? group_prepare(model->group, &making.exchange)
                                    : mem_none("comparing units", (size_t)model->group->size * sizeof *making.all);
    if (status == FSDP_OK) status = make(unit, params, fulls, n, options, &making);
    fsdp_error_info failure;
    err_save(&failure);
    work_release(making.exchange);
    work_release(making.values[0]);
    work_release(making.values[1]);
    mem_free(making.all);
    if (status == FSDP_OK) {
        *out = unit;
        return FSDP_OK;
    }
    unit_free(unit);
    return err_restore(&failure);
}

void unit_query(fsdp_unit *unit, fsdp_unit_info *info)
{
    *info = (fsdp_unit_info){.struct_size = sizeof *info,
                             .state = unit_query_state(unit),
                             .n_params = unit->n_entries,
                             .strategy = unit->strategy,
                             .reshard_after_forward = unit->reshard_after_forward,
                             .shard_rank = unit_shard_rank(unit),
                             .shard_size = unit_shard_size(unit),
                             .replicate_rank = unit->replicate_group ? unit->replicate_group->rank : 0,
                             .replicate_size = unit_replicas(unit),
                             .full_bytes = unit->full_data,
                             .publications = unit->publications,
                             .published_bytes = unit->published_bytes,
                             .reduced_bytes = unit->reduced_bytes,
                             .replicated_bytes = unit->replicated_bytes,
                             .gradient_sync = unit->sync,
                             .all_reduce = unit->all_reduce,
                             .gradient_divisor = unit->divisor};
    for (int32_t i = 0; i < unit->n_params; i++)
        info->shard_bytes += unit->params[i].shard_count * (int64_t)dtype_size(unit->params[i].type);
    if (unit->counts && info->state == FSDP_UNIT_UNSHARDED) { /* complete, though no call has taken note of it yet */
        info->publications++;
        info->published_bytes += unit->shard_data;
    }
    memcpy(info->name, unit->name, sizeof info->name);
}
