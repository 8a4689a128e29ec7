/* A model's parameters as a state dict, and back. See state.h.
 *
 * An entry of a dict that shares the shards keeps the parameter's unit alive. Whole tensors come from such a dict by
 * the gather that any dict has, over all ranks of the model: so replicas and every sharding are one case. Loading
 * writes to the shards; what units have published counts as old from then on, on all ranks alike, also where a rank's
 * load failed.
 *
 * On the host's thread. What talks to other ranks says so.
 */
#include "state/state.h"

#include "base/mem.h"
#include "fsdp/fsdp.h"

#include <string.h>

fsdp_status unit_param_entry(fsdp_unit *unit, int32_t index, fsdp_entry *out)
{
    TRY(unit_check_index(unit, index));
    const struct param *p = &unit->params[unit->entries[index].param];
    *out = (fsdp_entry){.struct_size = sizeof *out,
                        .name = unit->entries[index].name,
                        .kind = FSDP_ENTRY_TENSOR,
                        .ndim = p->ndim,
                        .shape = p->shape,
                        .offset = p->corner,
                        .length = p->extent,
                        .dtype = dtype_to_dl(p->type),
                        .copies = unit_replicas(unit),
                        .copy = unit->replicate_group ? unit->replicate_group->rank : 0,
                        .rank = -1};
    return FSDP_OK;
}

static fsdp_status shard_copy(const struct param *p, DLManagedTensorVersioned **out)
{
    DLDataType type = dtype_to_dl(p->type);
    TRY(managed_empty(&type, p->ndim, p->extent, out));
    struct tensor from, to;
    param_shard(p, p->shard, p->type, &from);
    param_shard(p, (*out)->dl_tensor.data, p->type, &to);
    tensor_copy(&to, &from);
    return FSDP_OK;
}

static fsdp_status home_make(struct state_entry *entry, const struct param *p)
{
    entry->home = mem_alloc(sizeof *entry->home);
    if (!entry->home) return mem_none("an entry", sizeof *entry->home);
    box_make(&entry->home->whole, p->ndim, NULL, p->shape);
    box_make(&entry->home->part, p->ndim, p->corner, p->extent);
    return FSDP_OK;
}

static fsdp_status add_param(fsdp_state_dict *dict, fsdp_unit *unit, int32_t index,
                             const fsdp_state_dict_options *options)
{
    fsdp_entry entry;
    DLManagedTensorVersioned *tensor = NULL;
    int32_t first = 0;
    while (unit->entries[first].param != unit->entries[index].param) first++;
    TRY(unit_param_entry(unit, index, &entry));
    if (options->kind == FSDP_STATE_LOCAL) {
        entry.shape = entry.length;
        entry.offset = NULL;
        entry.copies = entry.copy = 0;
    }
    if (first < index)
        entry.tied_to = unit->entries[first].name;
    else
        TRY(options->copy ? shard_copy(&unit->params[unit->entries[index].param], &tensor)
                          : unit_tensor(unit, index, UNIT_SHARD, &tensor));
    TRY(state_add_prefixed(dict, options->prefix, &entry, tensor));
    return options->kind == FSDP_STATE_LOCAL && tensor
               ? home_make(dict->entries[dict->n_entries - 1], &unit->params[unit->entries[index].param])
               : FSDP_OK;
}

/* This rank's parts of all parameters. */
static fsdp_status model_parts(const struct units *units, const fsdp_state_dict_options *options, fsdp_state_dict **out)
{
    fsdp_state_dict *dict;
    TRY(state_dict_create(&dict));
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < units->n && status == FSDP_OK; i++)
        for (int32_t k = 0; k < units->at[i]->n_entries && status == FSDP_OK; k++)
            status = add_param(dict, units->at[i], k, options);
    if (status == FSDP_OK) {
        *out = dict;
        return FSDP_OK;
    }
    fsdp_error_info failure;
    err_save(&failure);
    state_dict_release(dict);
    return err_restore(&failure);
}

fsdp_status model_state_dict(fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **out)
{
    struct units units;
    TRY(model_usable(model));
    fsdp_status status = units_hold(model, &units);
    if (options->kind != FSDP_STATE_FULL) {
        if (status == FSDP_OK) status = model_parts(&units, options, out);
        units_drop(&units);
        return status;
    }
    fsdp_state_dict *parts = NULL;
    fsdp_state_dict_options shared = {.struct_size = sizeof shared};
    if (status == FSDP_OK) status = model_parts(&units, &shared, &parts);
    status = state_gather(parts, model->group, options, status, out);
    fsdp_error_info failure;
    err_save(&failure);
    state_dict_release(parts);
    units_drop(&units);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

/* ---- loading */

/* A dict of kind LOCAL, as one that says where its parts lie; others as they are. */
static fsdp_status parts_at_home(fsdp_state_dict *from, fsdp_state_dict **out)
{
    int64_t local = 0;
    for (int64_t i = 0; i < from->n_entries && !local; i++) local = from->entries[i]->home != NULL;
    if (!local) {
        ref_get(&from->ref);
        *out = from;
        return FSDP_OK;
    }
    fsdp_state_dict *dict;
    TRY(state_dict_create(&dict));
    fsdp_status status = FSDP_OK;
    for (int64_t i = 0; i < from->n_entries && status == FSDP_OK; i++) {
        const struct state_entry *there = from->entries[i];
        DLManagedTensorVersioned *tensor = NULL;
        fsdp_entry entry;
        state_entry_tell(there, there->tied_to < 0 ? NULL : from->entries[there->tied_to]->name, &entry);
        if (entry.tied_to)
            entry.shape = NULL;
        else
            status = state_dict_tensor(from, i, &tensor);
        if (there->home) {
            entry.shape = there->home->whole.size;
            entry.offset = there->home->part.at;
        }
        if (status == FSDP_OK) status = state_add_prefixed(dict, NULL, &entry, tensor);
    }
    if (status == FSDP_OK) {
        *out = dict;
        return FSDP_OK;
    }
    fsdp_error_info failure;
    err_save(&failure);
    state_dict_release(dict);
    return err_restore(&failure);
}

static fsdp_status units_loadable(const struct units *units)
{
    for (int32_t i = 0; i < units->n; i++) TRY(unit_loadable(units->at[i], units->at[i]->entries[0].name));
    return FSDP_OK;
}

fsdp_status model_load_state_dict(fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options,
                                  fsdp_status status)
{
    struct units units;
    struct source source = {0};
    fsdp_state_dict *into = NULL, *parts = NULL;
    fsdp_state_dict_options shared = {.struct_size = sizeof shared};
    fsdp_error_info failure;
    err_save(&failure);
    TRY(model_usable(model));
    fsdp_status held = units_hold(model, &units);
    if (status != FSDP_OK) err_restore(&failure);
    if (status == FSDP_OK) status = held;
    if (status == FSDP_OK) status = units_loadable(&units);
    if (status == FSDP_OK) status = model_parts(&units, &shared, &into);
    if (status == FSDP_OK && from) status = parts_at_home(from, &parts);
    if (status == FSDP_OK && from) state_dict_source(parts, &source);
    source.n_json = 0; /* a model has none */
    if (options->from_rank0)
        status = state_load_from_rank0(&source, into, model->group, options, status);
    else if (status == FSDP_OK)
        status = state_load(&source, into, options);
    err_save(&failure);
    for (int32_t i = 0; i < units.n && held == FSDP_OK; i++) units.at[i]->current = 0;
    state_dict_release(into);
    state_dict_release(parts);
    units_drop(&units);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}
