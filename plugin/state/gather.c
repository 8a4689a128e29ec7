/* Parts to whole tensors. See state.h.
 *
 * A whole tensor is put together from the parts of those ranks that are the first of their copies, one after the other
 * in rank order: one transfer. Where that is how the elements lie (slices of rows), it writes to the result directly,
 * else to a scratch buffer of the size of the largest tensor that needs it.
 */
#include "state/layout.h"

#include "base/mem.h"

#include <string.h>

/* ---- one whole tensor */

/* Between the whole and its parts with this copy number as they lie one after the other in `packed`. */
static void unpack(const struct state_layout *layout, int64_t index, char *packed, const struct tensor *whole)
{
    const struct state_entry *entry = layout->dict->entries[index];
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        struct tensor from, to = *whole;
        layout_part(layout, r, index, &part);
        if (part.copy || !box_count(&part.box)) continue;
        tensor_make(&from, packed, entry->type, part.box.ndim, part.box.size);
        box_narrow(&to, &entry->whole, &part.box);
        tensor_copy(&to, &from);
        packed += from.bytes;
    }
}

/* This rank's part as it travels: where it lies, or packed to `to`. */
static const char *part_travels(const struct state_entry *entry, char *to)
{
    if (layout_as_it_travels(entry)) return entry->data.data;
    struct tensor packed;
    tensor_make(&packed, to, entry->type, entry->data.ndim, entry->data.shape);
    tensor_copy(&packed, &entry->data);
    return to;
}

fsdp_status state_gather_entry(struct state_layout *layout, int64_t index, fsdp_status status, const struct tensor *out)
{
    const struct state_entry *entry = layout->dict->entries[index];
    if (!layout->group) {
        if (status == FSDP_OK) tensor_copy(out, &entry->data);
        return status;
    }
    fsdp_error_info failure;
    struct step *step = layout_step_begin(layout, layout->place[index], status, &failure);
    int64_t size = (int64_t)dtype_size(entry->type), count = layout_cut(layout, index, 0, step->at);
    int gets = layout_gets_whole(layout), direct = layout_in_order(layout, index);
    char *whole = !gets ? NULL : direct ? out->data : layout->scratch;
    const char *in = NULL;
    if (step->at[layout->rank] < step->at[layout->rank + 1])
        in = part_travels(entry, gets ? whole + step->at[layout->rank] * size : layout->scratch);
    *step->piece = (struct piece){.in = in,
                                  .out = whole,
                                  .type = entry->type,
                                  .out_type = entry->type,
                                  .in_split = {.only = -1},
                                  .out_split = {.count = count, .at = step->at, .only = -1}};
    step->work->ops[0].transfer.shape = TRANSFER_SPREAD;
    step->work->ops[0].transfer.reader = layout->root;
    step->moves = count;
    status = layout_step_run(layout, step, &failure);
    layout_step_free(step);
    if (status == FSDP_OK && gets && !direct) unpack(layout, index, whole, out);
    return status;
}

/* ---- all of a dict */

static char *prefixed(const char *prefix, const char *name)
{
    size_t prefix_bytes = prefix ? strlen(prefix) : 0, bytes = strlen(name) + 1;
    char *out = mem_alloc(prefix_bytes + bytes);
    if (!out) return NULL;
    if (prefix_bytes) memcpy(out, prefix, prefix_bytes);
    memcpy(out + prefix_bytes, name, bytes);
    return out;
}

fsdp_status state_add_prefixed(fsdp_state_dict *dict, const char *prefix, const fsdp_entry *entry,
                               DLManagedTensorVersioned *tensor)
{
    fsdp_entry given = *entry;
    char *name = prefixed(prefix, entry->name), *tied_to = entry->tied_to ? prefixed(prefix, entry->tied_to) : NULL;
    given.name = name;
    given.tied_to = tied_to;
    fsdp_status status = name && (tied_to || !entry->tied_to) ? state_dict_add(dict, &given, tensor)
                                                              : mem_none("a name", strlen(entry->name) + 1);
    fsdp_error_info failure;
    err_save(&failure);
    if (status != FSDP_OK) managed_delete(tensor);
    mem_free(name);
    mem_free(tied_to);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

static fsdp_status json_copy(const fsdp_state_dict *dict, const char *prefix, fsdp_state_dict *full)
{
    for (int64_t i = 0; i < dict->n_json; i++) {
        struct state_json copy = {prefixed(prefix, dict->json[i].name), mem_strdup(dict->json[i].text)};
        fsdp_status status = copy.name && copy.text ? state_json_room(full, 1)
                                                    : mem_none("a JSON value", strlen(dict->json[i].text) + 1);
        if (status == FSDP_OK) state_json_put(full, &copy);
        mem_free(copy.name);
        mem_free(copy.text);
        TRY(status);
    }
    return FSDP_OK;
}

/* Entries with memory for the whole tensors. */
static fsdp_status fulls_make(const fsdp_state_dict *dict, const char *prefix, fsdp_state_dict *full)
{
    for (int64_t i = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        if (entry->kind != FSDP_ENTRY_TENSOR) continue;
        DLDataType type = dtype_to_dl(entry->type);
        fsdp_entry given = {.struct_size = sizeof given,
                            .name = entry->name,
                            .ndim = entry->whole.ndim,
                            .shape = entry->whole.size,
                            .tied_to = entry->tied_to < 0 ? NULL : dict->entries[entry->tied_to]->name};
        DLManagedTensorVersioned *tensor = NULL;
        if (state_has_values(entry)) TRY(managed_empty(&type, entry->whole.ndim, entry->whole.size, &tensor));
        TRY(state_add_prefixed(full, prefix, &given, tensor));
    }
    return json_copy(dict, prefix, full);
}

static fsdp_status gather_all(const fsdp_state_dict *dict, struct state_layout *layout, const fsdp_state_dict *full)
{
    for (int64_t i = 0, k = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        if (entry->kind != FSDP_ENTRY_TENSOR) continue;
        const struct tensor *out = layout_gets_whole(layout) ? &full->entries[k++]->data : NULL;
        if (state_has_values(entry)) TRY(state_gather_entry(layout, i, FSDP_OK, out));
    }
    return FSDP_OK;
}

fsdp_status state_gather(const fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                         fsdp_status status, fsdp_state_dict **out)
{
    int gets = !options->rank0_only || group->rank == 0;
    struct state_layout *layout = NULL;
    fsdp_state_dict *full = NULL;
    if (status == FSDP_OK) status = state_dict_create(&full);
    if (status == FSDP_OK && gets) status = fulls_make(dict, options->prefix, full);
    status = state_layout_make(dict, group, FSDP_OP_GATHER_STATE, options->rank0_only ? 0 : STATE_ROOT_ALL,
                               (uint64_t)options->rank0_only, NULL, status, &layout);
    if (status == FSDP_OK) status = gather_all(dict, layout, full);
    fsdp_error_info failure;
    err_save(&failure);
    state_layout_free(layout);
    if (status == FSDP_OK) {
        *out = full;
        return FSDP_OK;
    }
    state_dict_release(full);
    return err_restore(&failure);
}

fsdp_status state_dict_gather(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                              fsdp_state_dict **out)
{
    return state_gather(dict, group, options, FSDP_OK, out);
}
