/* What the ranks of a group hold of each entry: found out together, by which whole tensors are put together from parts
 * (gather.c) and taken apart again (scatter.c). See state.h.
 *
 * The ranks first compare their dicts by a hash; where those differ, exchanges of hashes of ever shorter runs of
 * entries find the first that does, so that the message has its name. Then each tells all where its parts lie. From
 * there on every rank knows what every other will do.
 *
 * A rank's failure must reach all: each exchange carries how the rank fared so far, and what it needs is taken one
 * exchange ahead, or more. So after a failure all ranks stop at the same place.
 */
#include "state/layout.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

#define NARROWINGS 3 /* exchanges that find one entry in RUNS^3 */

/* ---- steps */

/* What each rank told, then the move, unless one failed. */
static fsdp_status step_body(fsdp_group *group, struct op *op, struct deadline deadline)
{
    struct step *step = op->user;
    struct transport *t = group->transport;
    for (int r = 0; r < group->size; r++) {
        memcpy(step->failed, t->ops->payload_of(t, r), SHORT_REPORT);
        if (step->failed->status != FSDP_OK) {
            step->failed_rank = r;
            return FSDP_OK;
        }
        if (r == step->root) step->absent = step->failed->absent;
    }
    return step->moves && !step->absent ? t->ops->move(t, &op->transfer, deadline) : FSDP_OK;
}

void layout_step_free(struct step *step)
{
    if (step) work_release(step->work);
    mem_free(step);
}

static fsdp_status step_make(struct state_layout *layout)
{
    fsdp_group *group = layout->group;
    if (!group) return FSDP_OK;
    struct step *step = mem_alloc(sizeof *step);
    if (!step) return mem_none("an exchange", sizeof *step);
    fsdp_status status = work_create(group, &group->collectives, 1, 0, &step->work);
    if (status == FSDP_OK) {
        step->piece = work_memory(step->work, sizeof *step->piece);
        step->at = work_memory(step->work, ((size_t)group->size + 1) * sizeof *step->at);
        step->mine = work_memory(step->work, SHORT_REPORT);
        if (!step->piece || !step->at || !step->mine) status = FSDP_ERR_NOMEM;
    }
    if (status != FSDP_OK) {
        layout_step_free(step);
        return status;
    }
    step->failed = &layout->failed;
    step->next = layout->steps;
    layout->steps = step;
    layout->n_steps++;
    return FSDP_OK;
}

static void report_status(struct report *report, fsdp_status status, const fsdp_error_info *failure)
{
    report->status = status;
    if (status != FSDP_OK) snprintf(report->text, sizeof report->text, "%.490s", failure->message);
}

/* The failure of rank r as everyone's. */
static fsdp_status report_failure(const struct state_layout *layout, int r, struct report *report,
                                  const fsdp_error_info *mine)
{
    char rank[GROUP_RANK_TEXT];
    if (r == layout->rank) return err_restore(mine);
    report->text[sizeof report->text - 1] = 0;
    err(report->status, "%s: %s reported: %s", call_kind_name(layout->kind), group_rank_text(layout->group, r, rank),
        report->text);
    err_operation(layout->kind, layout->group->sequence, r, -1);
    return report->status;
}

struct step *layout_step_begin(struct state_layout *layout, int64_t number, fsdp_status status,
                               fsdp_error_info *failure)
{
    struct step *step = layout->steps;
    layout->steps = step->next;
    fsdp_status next = --layout->n_steps ? FSDP_OK : step_make(layout);
    if (status == FSDP_OK) status = next;
    err_save(failure);
    report_status(step->mine, status, failure);
    step->failed_rank = step->root = -1;
    struct op *op =
        op_init(step->work, 0, layout->kind, hash_number(HASH_START, (uint64_t)number), step->mine, SHORT_REPORT);
    op->body = step_body;
    op->user = step;
    op->transfer.reader = -1;
    op->transfer.pieces = step->piece;
    return step;
}

fsdp_status layout_step_run(struct state_layout *layout, struct step *step, const fsdp_error_info *failure)
{
    fsdp_work *work = step->work;
    if (step->moves) {
        work->ops[0].header.count = step->moves;
        work->ops[0].transfer.n_pieces = 1;
    } else {
        work->ops[0].transfer.shape = TRANSFER_NONE;
    }
    step->work = NULL;
    fsdp_status status = lane_submit(work, NULL);
    if (status == FSDP_OK && step->failed_rank >= 0)
        status = report_failure(layout, step->failed_rank, step->failed, failure);
    return status;
}

fsdp_status state_layout_tell(struct state_layout *layout, fsdp_status status)
{
    fsdp_error_info failure;
    if (!layout->group) return status;
    struct step *step = layout_step_begin(layout, -1, status, &failure);
    status = layout_step_run(layout, step, &failure);
    layout_step_free(step);
    return status;
}

fsdp_status layout_steps_reserve(struct state_layout *layout, int64_t n, fsdp_status status)
{
    while (status == FSDP_OK && layout->group && layout->n_steps <= n) status = step_make(layout); /* one to tell in */
    return state_layout_tell(layout, status);
}

/* ---- agreement */

/* What this takes before the ranks meet. Without the first work and the reports nothing can be told: the call is not
 * made. */
struct agreement {
    fsdp_work *works[NARROWINGS + 2];
    struct report *mine, *all;
};

static fsdp_status agreement_make(fsdp_group *group, struct agreement *a)
{
    size_t bytes = ((size_t)group->size + 1) * sizeof *a->mine;
    a->mine = mem_alloc(bytes);
    if (!a->mine) return mem_none("comparing state dicts", bytes);
    a->all = a->mine + 1;
    return group_prepare(group, &a->works[0]);
}

static fsdp_status agreement_more(fsdp_group *group, struct agreement *a)
{
    for (int i = 1; i < NARROWINGS + 2; i++) TRY(group_prepare(group, &a->works[i]));
    return FSDP_OK;
}

static void agreement_free(struct agreement *a)
{
    for (int i = 0; i < NARROWINGS + 2; i++) work_release(a->works[i]);
    mem_free(a->mine);
}

/* Of entries `from` to `to`, those of ranks not counted. */
static uint64_t hash_run(const fsdp_state_dict *dict, int64_t from, int64_t to)
{
    uint64_t hash = HASH_START;
    for (int64_t i = 0, k = 0; i < dict->n_entries && k < to; i++) {
        if (dict->entries[i]->kind != FSDP_ENTRY_TENSOR) continue;
        if (k++ >= from) hash = hash_number(hash, state_entry_hash(dict, i));
    }
    return hash;
}

static void entry_text(const fsdp_state_dict *dict, int64_t number, char *text, size_t bytes)
{
    snprintf(text, bytes, "no such entry");
    for (int64_t i = 0, k = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        if (entry->kind != FSDP_ENTRY_TENSOR || k++ != number) continue;
        struct tensor whole;
        char shape[TENSOR_TEXT];
        tensor_make(&whole, NULL, entry->type, entry->whole.ndim, entry->whole.size);
        snprintf(text, bytes, "'%.120s' %s%s%.120s%s", entry->name, tensor_text(&whole, shape),
                 entry->tied_to < 0 ? "" : " tied to '", entry->tied_to < 0 ? "" : dict->entries[entry->tied_to]->name,
                 entry->tied_to < 0 ? "" : "'");
        return;
    }
}

/* The first run whose hashes differ, or RUNS. */
static int64_t run_that_differs(const struct report *all, int size)
{
    int64_t k = 0;
    for (; k < RUNS; k++)
        for (int r = 1; r < size; r++)
            if (all[r].runs[k] != all[0].runs[k]) return k;
    return k;
}

static fsdp_status differ(const struct state_layout *layout, struct agreement *a, int r)
{
    fsdp_group *group = layout->group;
    int64_t from = 0, to = 1;
    char one[GROUP_RANK_TEXT], two[GROUP_RANK_TEXT];
    for (int i = 0; i < group->size; i++)
        if (a->all[i].n > to) to = a->all[i].n;
    for (int i = 0; i < NARROWINGS && to - from > 1; i++) {
        int64_t step = (to - from + RUNS - 1) / RUNS;
        for (int64_t k = 0; k < RUNS; k++) {
            uint64_t hash = hash_run(layout->dict, from + k * step, from + (k + 1) * step);
            a->mine->runs[k] = (uint32_t)(hash ^ hash >> 32);
        }
        TRY(group_exchange_prepared(group, &a->works[1 + i], layout->kind, HASH_START, a->mine, sizeof *a->mine,
                                    a->all));
        int64_t k = run_that_differs(a->all, group->size);
        from += (k < RUNS ? k : 0) * step;
        to = from + step;
    }
    entry_text(layout->dict, from, a->mine->text, sizeof a->mine->text);
    TRY(group_exchange_prepared(group, &a->works[NARROWINGS + 1], layout->kind, HASH_START, a->mine, sizeof *a->mine,
                                a->all));
    for (int i = 0; i < group->size; i++) a->all[i].text[TOLD_TEXT - 1] = 0;
    for (int i = 1; i < group->size; i++) /* the entry tells which rank it is, if several differ */
        if (strcmp(a->all[i].text, a->all[0].text) != 0) {
            r = i;
            break;
        }
    err(FSDP_ERR_MISMATCH,
        "group '%s', operation %llu: entry %lld of %s's state dict is %.330s, of %s's %.330s: all ranks give the same "
        "names, dtypes, shapes and ties in the same order",
        group->name, (unsigned long long)group->sequence, (long long)from, group_rank_text(group, 0, one),
        a->all[0].text, group_rank_text(group, r, two), a->all[r].text);
    err_operation(layout->kind, group->sequence, 0, r);
    return FSDP_ERR_MISMATCH;
}

static fsdp_status differ_in_path(const struct state_layout *layout, const struct agreement *a, int r)
{
    fsdp_group *group = layout->group;
    char one[GROUP_RANK_TEXT], two[GROUP_RANK_TEXT];
    err(FSDP_ERR_MISMATCH,
        "group '%s', operation %llu: %s gave %s the path '%.300s', but %s '%.300s': all ranks give the same path, on a "
        "file system that all of them see",
        group->name, (unsigned long long)group->sequence, group_rank_text(group, 0, one), call_kind_name(layout->kind),
        a->all[0].text, group_rank_text(group, r, two), a->all[r].text);
    err_operation(layout->kind, group->sequence, 0, r);
    return FSDP_ERR_MISMATCH;
}

static fsdp_status agree(const struct state_layout *layout, struct agreement *a, uint64_t options, const char *path,
                         fsdp_status status)
{
    fsdp_group *group = layout->group;
    fsdp_error_info failure;
    err_save(&failure);
    report_status(a->mine, status, &failure);
    a->mine->options = options;
    a->mine->path = path ? hash_bytes(HASH_START, path, strlen(path)) : 0;
    if (status == FSDP_OK) {
        snprintf(a->mine->text, sizeof a->mine->text, "%.490s", path ? path : "");
        for (int64_t i = 0; i < layout->dict->n_entries; i++)
            a->mine->n += layout->dict->entries[i]->kind == FSDP_ENTRY_TENSOR;
        a->mine->hash = hash_run(layout->dict, 0, INT64_MAX);
    }
    TRY(group_exchange_prepared(group, &a->works[0], layout->kind, HASH_START, a->mine, sizeof *a->mine, a->all));
    for (int r = 0; r < group->size; r++)
        if (a->all[r].status != FSDP_OK) return report_failure(layout, r, &a->all[r], &failure);
    for (int r = 1; r < group->size; r++) {
        a->all[0].text[TOLD_TEXT - 1] = a->all[r].text[TOLD_TEXT - 1] = 0;
        if (a->all[r].path != a->all[0].path) return differ_in_path(layout, a, r);
        if (a->all[r].options != a->all[0].options) {
            char one[GROUP_RANK_TEXT], two[GROUP_RANK_TEXT];
            err(FSDP_ERR_MISMATCH, "group '%s', operation %llu: %s and %s called %s with different options",
                group->name, (unsigned long long)group->sequence, group_rank_text(group, 0, one),
                group_rank_text(group, r, two), call_kind_name(layout->kind));
            err_operation(layout->kind, group->sequence, 0, r);
            return FSDP_ERR_MISMATCH;
        }
        if (a->all[r].hash != a->all[0].hash || a->all[r].n != a->all[0].n) return differ(layout, a, r);
    }
    return FSDP_OK;
}

/* ---- parts */

static const int64_t *part_numbers(const struct state_layout *layout, int r, int64_t index)
{
    return layout->numbers + r * layout->place[layout->dict->n_entries] + layout->place[index];
}

void layout_part(const struct state_layout *layout, int r, int64_t index, struct part *out)
{
    const int64_t *numbers = part_numbers(layout, r, index);
    int32_t ndim = layout->dict->entries[index]->whole.ndim;
    out->copies = (int32_t)numbers[0];
    out->copy = (int32_t)numbers[1];
    box_make(&out->box, ndim, numbers + 2, numbers + 2 + ndim);
}

static fsdp_status numbers_make(struct state_layout *layout)
{
    const fsdp_state_dict *dict = layout->dict;
    layout->place = mem_array((size_t)dict->n_entries + 1, sizeof *layout->place);
    if (!layout->place) return mem_none("the layout of tensors", (size_t)dict->n_entries * sizeof *layout->place);
    for (int64_t i = 0; i < dict->n_entries; i++)
        layout->place[i + 1] =
            layout->place[i] + (state_has_values(dict->entries[i]) ? 2 + 2 * dict->entries[i]->whole.ndim : 0);
    int64_t each = layout->place[dict->n_entries];
    size_t size = (size_t)layout->size;
    layout->numbers = mem_array(size * (size_t)each, sizeof *layout->numbers);
    layout->boxes = mem_array(size, sizeof *layout->boxes);
    layout->list = mem_array(size, sizeof *layout->list);
    if (!layout->numbers || !layout->boxes || !layout->list)
        return mem_none("the layout of tensors", size * (size_t)each * sizeof *layout->numbers);
    for (int64_t i = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        if (!state_has_values(entry)) continue;
        int64_t *numbers = layout->numbers + layout->rank * each + layout->place[i];
        size_t bytes = (size_t)entry->whole.ndim * sizeof *numbers;
        numbers[0] = entry->copies;
        numbers[1] = entry->copy;
        memcpy(numbers + 2, entry->part.at, bytes);
        memcpy(numbers + 2 + entry->whole.ndim, entry->part.size, bytes);
    }
    return FSDP_OK;
}

static fsdp_status numbers_work(struct state_layout *layout, fsdp_work **out)
{
    fsdp_group *group = layout->group;
    int64_t each = layout->place[layout->dict->n_entries];
    if (!group || !each) return FSDP_OK;
    TRY(work_create(group, &group->collectives, 1, 0, out));
    struct op *op = op_init(*out, 0, layout->kind, hash_number(HASH_START, (uint64_t)each), NULL, 0);
    op->transfer.shape = TRANSFER_SPREAD;
    op->transfer.reader = -1;
    op->transfer.n_pieces = 1;
    op->transfer.pieces = work_memory(*out, sizeof *op->transfer.pieces);
    if (!op->transfer.pieces) return FSDP_ERR_NOMEM;
    *op->transfer.pieces = (struct piece){.in = (char *)(layout->numbers + layout->rank * each),
                                          .out = (char *)layout->numbers,
                                          .type = DTYPE_I64,
                                          .out_type = DTYPE_I64,
                                          .in_split = {.only = -1},
                                          .out_split = {.count = layout->size * each, .step = each, .only = -1}};
    return FSDP_OK;
}

/* Each part is there in as many copies as it says, once each. */
static fsdp_status check_copies(const struct state_layout *layout, int64_t index)
{
    const struct state_entry *entry = layout->dict->entries[index];
    int counted = 0, filled = 0;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        uint64_t seen[GROUP_MAX_RANKS / 64] = {0};
        int32_t n = 0;
        layout_part(layout, r, index, &part);
        if (!box_count(&part.box)) continue;
        filled++;
        if (part.copy) continue;
        counted += part.copies;
        for (int other = 0; other < layout->size && part.copies > 1; other++) {
            struct part twin;
            layout_part(layout, other, index, &twin);
            if (twin.copies != part.copies || !box_same(&twin.box, &part.box) || twin.copy >= GROUP_MAX_RANKS) continue;
            uint64_t bit = UINT64_C(1) << (twin.copy % 64);
            n += !(seen[twin.copy / 64] & bit);
            seen[twin.copy / 64] |= bit;
        }
        CHECK_ARG(
            part.copies == 1 || n == part.copies,
            "entry '%.200s': rank %d says that %d ranks hold its very part, each with a `copy` of its own, but %d "
            "do: copies and copy must say who holds what",
            entry->name, r, part.copies, n);
    }
    CHECK_ARG(counted == filled,
              "entry '%.200s': %d ranks have parts, but by copies and copy it would be %d: one rank of each copy is 0",
              entry->name, filled, counted);
    return FSDP_OK;
}

static fsdp_status check_parts(struct state_layout *layout, int64_t index)
{
    const struct state_entry *entry = layout->dict->entries[index];
    int64_t n = 0, a, b;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        const int64_t *numbers = part_numbers(layout, r, index);
        layout_part(layout, r, index, &part);
        CHECK_ARG(numbers[0] > 0 && numbers[0] <= INT32_MAX && numbers[1] >= 0 && numbers[1] < numbers[0] &&
                      box_fits(&part.box, entry->whole.size),
                  "entry '%.200s': rank %d has a part that does not lie in the whole", entry->name, r);
        if (part.copy) continue;
        layout->boxes[r] = part.box;
        layout->list[n++] = &layout->boxes[r];
    }
    enum box_cover cover = box_cover(layout->list, n, entry->whole.ndim, entry->whole.size, &a, &b);
    CHECK_ARG(cover != BOX_OVERLAP,
              "entry '%.200s': ranks %d and %d have parts that overlap: if they hold the same one, set copies and copy",
              entry->name, (int)(layout->list[a] - layout->boxes), (int)(layout->list[b] - layout->boxes));
    TRY(check_copies(layout, index));
    CHECK_ARG(cover == BOX_WHOLE, "entry '%.200s': the ranks' parts leave gaps: some of its elements are on no rank",
              entry->name);
    return FSDP_OK;
}

/* ---- making one */

int64_t layout_cut(const struct state_layout *layout, int64_t index, int32_t copy, int64_t *at)
{
    int64_t sum = 0;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        layout_part(layout, r, index, &part);
        if (at) at[r] = sum;
        if (part.copy == copy) sum += box_count(&part.box);
    }
    if (at) at[layout->size] = sum;
    return sum;
}

/* Whether the first copies, one after the other, are the whole as it lies: each begins where those before it end. That
 * will do, as they make up the whole: the first element that a part passed over would be in no part that begins there
 * or before. */
int layout_in_order(const struct state_layout *layout, int64_t index)
{
    const struct box *whole = &layout->dict->entries[index]->whole;
    int64_t sum = 0;
    for (int r = 0; r < layout->size; r++) {
        struct part part;
        layout_part(layout, r, index, &part);
        int64_t count = box_count(&part.box), row = 1, at = 0;
        if (part.copy || !count) continue;
        for (int32_t d = whole->ndim - 1; d >= 0; d--) {
            at += part.box.at[d] * row;
            row *= whole->size[d];
        }
        if (at != sum) return 0;
        sum += count;
    }
    return 1;
}

static int is_scatter(const struct state_layout *layout)
{
    return layout->kind == FSDP_OP_LOAD_STATE;
}

/* What the entries need of scratch memory on this rank; for wholes, on those that have them. */
static size_t scratch_need(const struct state_layout *layout, int whole)
{
    size_t most = 0;
    for (int64_t i = 0; i < layout->dict->n_entries; i++) {
        const struct state_entry *entry = layout->dict->entries[i];
        if (!state_has_values(entry) || layout->root == STATE_ROOT_NONE) continue;
        size_t size = dtype_size(entry->type), need = 0;
        if (whole && (is_scatter(layout) || !layout_in_order(layout, i)))
            need = (size_t)box_count(&entry->whole) * size;
        if (!whole && !is_scatter(layout) && !layout_as_it_travels(entry) && !entry->copy)
            need = (size_t)box_count(&entry->part) * size;
        if (need > most) most = need;
    }
    return most;
}

static fsdp_status scratch_make(struct state_layout *layout, size_t bytes)
{
    void *block;
    if (!bytes) return FSDP_OK;
    TRY(os_map_anonymous(os_page_round(bytes), &block));
    layout->scratch = block;
    layout->scratch_bytes = bytes;
    return FSDP_OK;
}

void state_layout_free(struct state_layout *layout)
{
    if (!layout) return;
    while (layout->steps) {
        struct step *step = layout->steps;
        layout->steps = step->next;
        layout_step_free(step);
    }
    if (layout->scratch) os_unmap(layout->scratch, os_page_round(layout->scratch_bytes));
    mem_free(layout->place);
    mem_free(layout->numbers);
    mem_free(layout->boxes);
    mem_free(layout->list);
    mem_free(layout);
}

static fsdp_status make_alone(struct state_layout *layout, struct agreement *agreement, fsdp_work **numbers)
{
    if (layout->group) TRY(agreement_more(layout->group, agreement));
    TRY(step_make(layout));
    TRY(numbers_make(layout));
    TRY(numbers_work(layout, numbers));
    return layout_gets_whole(layout) ? FSDP_OK : scratch_make(layout, scratch_need(layout, 0));
}

static fsdp_status make_together(struct state_layout *layout, struct agreement *agreement, fsdp_work **numbers,
                                 uint64_t options, const char *path, fsdp_status status)
{
    if (status == FSDP_OK) status = make_alone(layout, agreement, numbers);
    if (!layout->group && status != FSDP_OK) return status;
    if (layout->group) TRY(agree(layout, agreement, options, path, status));
    fsdp_work *work = *numbers;
    *numbers = NULL;
    if (work) TRY(lane_submit(work, NULL));
    for (int64_t i = 0; i < layout->dict->n_entries; i++)
        if (state_has_values(layout->dict->entries[i])) TRY(check_parts(layout, i));
    size_t need = scratch_need(layout, 1); /* alike on all ranks */
    if (!need) return FSDP_OK;
    status = layout_gets_whole(layout) ? scratch_make(layout, need) : FSDP_OK;
    return state_layout_tell(layout, status);
}

fsdp_status state_layout_make(const fsdp_state_dict *dict, fsdp_group *group, fsdp_op_kind kind, int32_t root,
                              uint64_t options, const char *path, fsdp_status status, struct state_layout **out)
{
    fsdp_error_info failure;
    err_save(&failure);
    if (group) TRY(group_usable(group));
    struct state_layout *layout = mem_alloc(sizeof *layout);
    if (!layout) return mem_none("the layout of tensors", sizeof *layout);
    struct agreement agreement = {0};
    fsdp_work *numbers = NULL;
    *layout = (struct state_layout){.dict = dict,
                                    .group = group,
                                    .kind = kind,
                                    .root = root,
                                    .rank = group ? group->rank : 0,
                                    .size = group ? group->size : 1};
    fsdp_status made = group ? agreement_make(group, &agreement) : FSDP_OK;
    if (made == FSDP_OK) {
        if (status != FSDP_OK) err_restore(&failure);
        made = make_together(layout, &agreement, &numbers, options, path, status);
    }
    err_save(&failure);
    work_release(numbers);
    agreement_free(&agreement);
    if (made == FSDP_OK) {
        *out = layout;
        return FSDP_OK;
    }
    state_layout_free(layout);
    return err_restore(&failure);
}
