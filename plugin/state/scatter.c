/* Whole tensors of rank 0 to all ranks' parts. See state.h.
 *
 * Names, shapes, dtypes and memory are checked, and what the transfers take is had, on all ranks before the first
 * tensor is sent: what can end it in the middle is a rank that is lost, or the host's own word.
 */
#include "state/layout.h"

#include "base/mem.h"

#include <string.h>

/* Root: the parts of those with this copy number, to where they travel from. */
static fsdp_status read_parts(const struct state_layout *layout, int64_t index, int32_t copy,
                              const struct source *source, int64_t from)
{
    char *to = layout->scratch;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        struct tensor view;
        layout_part(layout, r, index, &part);
        if (part.copy != copy || !box_count(&part.box)) continue;
        tensor_make(&view, to, layout->dict->entries[index]->type, part.box.ndim, part.box.size);
        TRY(source->read(source, from, &part.box, &view));
        to += view.bytes;
    }
    return FSDP_OK;
}

static int32_t most_copies(const struct state_layout *layout, int64_t index, int *all_whole)
{
    int32_t most = 1;
    *all_whole = 1;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        layout_part(layout, r, index, &part);
        if (part.copies > most) most = part.copies;
        *all_whole &= box_same(&part.box, &layout->dict->entries[index]->whole);
    }
    return most;
}

/* One of its rounds: to the ranks with this copy number, or, with -1, the whole to all. */
static fsdp_status scatter_round(struct state_layout *layout, int64_t index, int32_t copy, fsdp_status status,
                                 const struct source *source, int64_t from, int32_t *moved)
{
    const struct state_entry *entry = layout->dict->entries[index];
    int root = layout->rank == layout->root;
    fsdp_error_info failure;
    if (status == FSDP_OK && root && from >= 0) status = read_parts(layout, index, copy < 0 ? 0 : copy, source, from);
    struct step *step = layout_step_begin(layout, layout->place[index], status, &failure);
    struct transfer *transfer = &step->work->ops[0].transfer;
    step->root = layout->root;
    step->mine->absent = root && from < 0;
    struct piece *piece = step->piece;
    *piece = (struct piece){.in = root ? layout->scratch : NULL, .type = entry->type, .out_type = entry->type};
    if (copy < 0) {
        transfer->shape = TRANSFER_SPREAD;
        piece->out = root ? NULL : entry->data.data;
        piece->in_split = (struct split){.only = -1};
        piece->out_split = (struct split){.count = box_count(&entry->whole), .only = layout->root};
        step->moves = piece->out_split.count;
    } else {
        transfer->shape = TRANSFER_EXCHANGE;
        int64_t count = layout_cut(layout, index, copy, step->at);
        int64_t mine = step->at[layout->rank + 1] - step->at[layout->rank];
        piece->out = mine ? entry->data.data : NULL;
        piece->in_split = (struct split){.count = count, .at = step->at, .only = -1};
        piece->out_split = (struct split){.count = mine, .only = layout->root};
        step->moves = count;
    }
    status = layout_step_run(layout, step, &failure);
    *moved = status == FSDP_OK && !step->absent;
    layout_step_free(step);
    if (*moved && root && copy < 0) {
        struct tensor packed;
        tensor_make(&packed, layout->scratch, entry->type, entry->data.ndim, entry->data.shape);
        tensor_copy(&entry->data, &packed);
    }
    return status;
}

/* Root's source to all ranks' parts, which are contiguous and of the dtype in files. from -1: root has nothing for this
 * entry. `source` and `from` are looked at on root only; *moved on all. */
static fsdp_status scatter_entry(struct state_layout *layout, int64_t index, fsdp_status status,
                                 const struct source *source, int64_t from, int32_t *moved)
{
    int all_whole;
    int32_t rounds = most_copies(layout, index, &all_whole);
    if (all_whole && layout->size > 1) return scatter_round(layout, index, -1, status, source, from, moved);
    *moved = 1;
    for (int32_t copy = 0; copy < rounds && *moved; copy++) {
        fsdp_status sent = scatter_round(layout, index, copy, status, source, from, moved);
        if (sent != FSDP_OK) return sent;
    }
    return FSDP_OK;
}

/* How many transfers it takes at most. */
static int64_t count_rounds(const struct state_layout *layout)
{
    int64_t n = 0;
    for (int64_t i = 0; i < layout->dict->n_entries; i++) {
        int all_whole;
        if (state_has_values(layout->dict->entries[i])) n += most_copies(layout, i, &all_whole);
    }
    return n;
}

static fsdp_status scatter_all(struct state_layout *layout, const struct source *source, const struct state_plan *plan,
                               const fsdp_load_options *options)
{
    int root = layout->rank == layout->root;
    int64_t done = 0;
    /* And one to tell in at the end, and one more, so that none is made there. */
    fsdp_status status = layout_steps_reserve(layout, count_rounds(layout) + 2, FSDP_OK),
                mine = status == FSDP_OK && root ? state_progress(options, 0, plan->bytes) : FSDP_OK;
    for (int64_t i = 0; i < layout->dict->n_entries && status == FSDP_OK; i++) {
        const struct state_entry *entry = layout->dict->entries[i];
        int32_t moved;
        if (entry->tied_to >= 0) continue;
        status = scatter_entry(layout, i, mine, source, root ? plan->from[i] : -1, &moved);
        if (status != FSDP_OK || !root || !moved || !box_count(&entry->whole)) continue;
        done += box_count(&entry->whole) * (int64_t)dtype_size(entry->type);
        mine = state_progress(options, done, plan->bytes);
    }
    return status == FSDP_OK ? state_layout_tell(layout, mine) : status;
}

fsdp_status state_load_from_rank0(const struct source *source, const fsdp_state_dict *into, fsdp_group *group,
                                  const fsdp_load_options *options, fsdp_status status)
{
    struct state_plan plan = {0};
    struct state_layout *layout = NULL;
    if (status == FSDP_OK && group->rank == 0) status = state_plan_make(source, into, options, 1, &plan);
    status = state_layout_make(into, group, FSDP_OP_LOAD_STATE, 0, (uint64_t)options->partial, NULL, status, &layout);
    if (status == FSDP_OK) status = scatter_all(layout, source, &plan, options);
    fsdp_error_info failure;
    err_save(&failure);
    state_layout_free(layout);
    state_plan_free(&plan);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}
