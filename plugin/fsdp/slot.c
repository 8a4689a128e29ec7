/* Slots: the memory of full parameters, which units take in turn. See fsdp.h.
 *
 * A slot is a range of a shared segment of the ranks that a unit is sharded over, mapped by all of them, or a segment
 * of this rank's own. A unit shows its slot through a private view at the unit's own address, so several units' views
 * may show one slot, each mapped once; it is mapped anew only when a unit gets another slot than the time before.
 *
 * Which slot a unit gets follows from the calls alone: its last one when that is free, else the smallest free one that
 * is large enough, else a new one, in place of the largest free one if there is any. So there are as many as units
 * were full at the same time, and once the order of an iteration repeats, none is made or mapped any more.
 *
 * A shared slot's content is changed by the next publication only, which begins when all ranks have called for it: each
 * has then resharded what it had before. A unit that goes while it holds a slot leaves it taken until the end of
 * backward, or a reset: it may go at other times on other ranks, and they must still choose alike.
 */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- making one: together with the ranks that the unit is sharded over */

struct report { /* what the ranks tell each other; begins with the label that mismatch messages show */
    char label[CALL_LABEL];
    fsdp_status status;
    int32_t cell;
    uint64_t offset, bytes;
    char message[256];
};

/* Every rank says how it fared; the first failure is everyone's. */
static fsdp_status agree(fsdp_unit *unit, fsdp_work **prepared, fsdp_status status, struct region *region)
{
    fsdp_group *group = unit->shard_group;
    struct report mine = {.status = status, .cell = region->cell, .offset = region->offset, .bytes = region->bytes};
    fsdp_error_info failure;
    err_save(&failure);
    memcpy(mine.label, unit->name, sizeof mine.label);
    if (status != FSDP_OK) snprintf(mine.message, sizeof mine.message, "%.250s", failure.message);
    struct report all[GROUP_MAX_RANKS];
    uint64_t hash = hash_number(unit->hash, (uint64_t)unit->model->slots_made);
    TRY(group_exchange_prepared(group, prepared, FSDP_OP_CREATE_SLOT, hash, &mine, sizeof mine, all));
    for (int r = 0; r < group->size; r++) {
        if (all[r].status == FSDP_OK) continue;
        all[r].message[sizeof all[r].message - 1] = 0;
        return r == group->rank
                   ? err_restore(&failure)
                   : err(all[r].status, "memory for unit '%s': rank %d reported: %s", unit->name, r, all[r].message);
    }
    if (group->rank != 0) {
        region->cell = all[0].cell;
        region->offset = all[0].offset;
        region->bytes = all[0].bytes;
    }
    return FSDP_OK;
}

static fsdp_status own_region(size_t bytes, struct region *region)
{
    void *at;
    TRY(os_segment_create("fsdp-full", bytes, &region->fd));
    fsdp_status status = os_map_shared(region->fd, 0, bytes, &at);
    if (status != FSDP_OK) {
        os_close(&region->fd);
        return status;
    }
    region->shared = at;
    region->bytes = bytes;
    return FSDP_OK;
}

/* Its memory is given back also where views of units that had it before still show it: they are sharded, so what they
 * show is of no meaning, and will be mapped anew. */
static void region_drop(const fsdp_model *model, fsdp_group *group, struct region *region)
{
    fsdp_error_info failure;
    err_save(&failure);
    if (group) {
        group->transport->ops->region_release(group->transport, region);
    } else {
        os_unmap(region->shared, region->bytes);
        region->shared = NULL;
        if (!ref_forked(&model->ref)) os_segment_discard(region->fd, 0, region->bytes); /* the parent's, too */
        os_close(&region->fd);
    }
    if (failure.status != FSDP_OK) (void)err_restore(&failure);
}

static fsdp_status map_checked(const fsdp_unit *unit, struct transport *t, struct region *region)
{
    if (region->bytes < unit->full_mapped)
        return err(FSDP_ERR_INTERNAL, "rank 0 reserved %zu bytes for unit '%s', not %zu", region->bytes, unit->name,
                   unit->full_mapped);
    return t->ops->region_map(t, region);
}

static fsdp_status shared_region(fsdp_unit *unit, fsdp_work **prepared, struct region *region)
{
    struct transport *t = unit->shard_group->transport;
    fsdp_status status = FSDP_OK;
    if (t->rank == 0) status = t->ops->region_reserve(t, unit->full_mapped, region);
    int reserved = t->rank == 0 && status == FSDP_OK;
    status = agree(unit, &prepared[0], status, region);
    if (status == FSDP_OK) {
        status = map_checked(unit, t, region);
        status = agree(unit, &prepared[1], status, region);
    }
    if (status != FSDP_OK && (reserved || region->shared)) region_drop(unit->model, unit->shard_group, region);
    return status;
}

static fsdp_status region_make(fsdp_unit *unit, int shared, struct region *region)
{
    if (!unit->shard_group) return own_region(unit->full_mapped, region);
    /* What is needed once peers may wait for this rank is made before. */
    fsdp_work *prepared[2] = {NULL, NULL};
    fsdp_status status = group_prepare(unit->shard_group, &prepared[0]);
    if (status == FSDP_OK) status = group_prepare(unit->shard_group, &prepared[1]);
    if (status == FSDP_OK && shared) {
        status = shared_region(unit, prepared, region);
    } else if (status == FSDP_OK) {
        status = own_region(unit->full_mapped, region);
        struct region unused = {.fd = -1};
        fsdp_status all = agree(unit, &prepared[0], status, &unused);
        if (status == FSDP_OK && all != FSDP_OK) region_drop(unit->model, NULL, region);
        status = all;
    }
    work_release(prepared[0]);
    work_release(prepared[1]);
    return status;
}

static void count(fsdp_model *model, const struct slot *slot, int sign)
{
    int64_t bytes = sign * (int64_t)slot->region.bytes, ranks = model->group->size;
    /* A shared one counts once for each group that shares one: every rank has one of its own group's. */
    memory_count(model, bytes, bytes * (slot->group ? ranks / slot->group->size : ranks));
}

static fsdp_status slot_make(fsdp_unit *unit, int shared, struct slot **out)
{
    fsdp_model *model = unit->model;
    struct slot *slot = mem_alloc(sizeof *slot);
    if (!slot) return mem_none("a slot", sizeof *slot);
    slot->region.fd = -1;
    slot->group = shared ? unit->shard_group : NULL;
    fsdp_status status = region_make(unit, shared, &slot->region);
    if (status != FSDP_OK) {
        mem_free(slot);
        return status;
    }
    slot->number = model->slots_made++;
    slot->next = model->slots;
    model->slots = slot;
    count(model, slot, 1);
    *out = slot;
    return FSDP_OK;
}

static void slot_free(fsdp_model *model, struct slot *slot)
{
    struct slot **at = &model->slots;
    while (*at != slot) at = &(*at)->next;
    *at = slot->next;
    count(model, slot, -1);
    region_drop(model, slot->group, &slot->region);
    mem_free(slot);
}

/* ---- choosing one */

/* The slot that the unit took last, unless it has gone since. */
struct slot *slot_of(const fsdp_unit *unit)
{
    struct slot *slot = unit->model->slots;
    while (slot && slot->number + 1 != unit->viewed) slot = slot->next;
    return slot;
}

static struct slot *choose(const fsdp_unit *unit, fsdp_group *group, struct slot **largest)
{
    struct slot *last = slot_of(unit), *best = NULL;
    *largest = NULL;
    if (last && !last->holder) return last;
    for (struct slot *slot = unit->model->slots; slot; slot = slot->next) {
        size_t bytes = slot->region.bytes;
        if (slot->holder || slot->group != group) continue;
        if (bytes < unit->full_mapped) {
            if (!*largest || bytes > (*largest)->region.bytes) *largest = slot;
        } else if (!best || bytes < best->region.bytes ||
                   (bytes == best->region.bytes && slot->number < best->number)) {
            best = slot;
        }
    }
    return best;
}

static fsdp_status view(fsdp_unit *unit, struct slot *slot)
{
    if (unit->viewed == slot->number + 1) return FSDP_OK;
    void *at;
    unit->viewed = 0;
    unit->populated = 0;
    TRY(os_map_private(slot->region.fd, slot->region.offset, unit->full_mapped, unit->full, &at));
    unit->viewed = slot->number + 1;
    return FSDP_OK;
}

fsdp_status slot_take(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    int shared = unit->shard_group && !model->private_unshard;
    struct slot *slot = slot_of(unit), *largest;
    if (slot && slot->holder == unit->number + 1) return FSDP_OK; /* kept since forward */
    slot = choose(unit, shared ? unit->shard_group : NULL, &largest);
    if (!slot) {
        if (largest) slot_free(model, largest); /* first, so that there are never both; a peer that uses it keeps it */
        TRY(slot_make(unit, shared, &slot));
    }
    TRY(view(unit, slot));
    slot->holder = unit->number + 1;
    return FSDP_OK;
}

void slot_leave(fsdp_unit *unit)
{
    struct slot *slot = slot_of(unit);
    if (slot && slot->holder == unit->number + 1) slot->holder = 0;
}

void slots_free(fsdp_model *model)
{
    for (struct slot *slot = model->slots; slot; slot = slot->next) slot->holder = slot->content = 0;
}

void slots_release(fsdp_model *model)
{
    while (model->slots) slot_free(model, model->slots);
}
