/* Regions: ranges at the end of the segment's file that hold units' full parameters.
 *
 * Rank 0 alone hands them out, from a table in the segment: a range is reserved (so that touching it can't fail), then
 * mapped by every rank. Each rank gives its hold back in its own time; the last one returns the pages to the kernel, and
 * rank 0 may use the range again. A rank that is killed keeps its holds, but then the group has ended too.
 */
#include "transport/shm/shm.h"

static struct region_cell *cell_of(struct shm *t, int32_t index)
{
    return &t->segment->cells[index];
}

fsdp_status shm_region_reserve(struct transport *base, size_t bytes, struct region *out)
{
    struct shm *t = (struct shm *)base;
    uint32_t n = atomic_load_explicit(&t->segment->n_cells, memory_order_relaxed);
    size_t want = os_page_round(bytes ? bytes : 1);
    uint32_t index = n;
    for (uint32_t i = 0; i < n; i++) { /* the smallest free range that is large enough */
        struct region_cell *cell = cell_of(t, (int32_t)i);
        if (atomic_load_explicit(&cell->holders, memory_order_acquire) != 0 || cell->bytes < want) continue;
        if (index == n || cell->bytes < cell_of(t, (int32_t)index)->bytes) index = i;
    }
    if (index == SHM_REGIONS)
        return err(FSDP_ERR_NOMEM, "a group holds at most %d units' shared memory: put more parameters into a unit", SHM_REGIONS);
    struct region_cell *cell = cell_of(t, (int32_t)index);
    uint64_t offset = index < n ? cell->offset : t->segment->regions_at;
    TRY(os_segment_reserve(t->fd, offset, want));
    if (index == n) {
        cell->offset = offset;
        cell->bytes = want;
        t->segment->regions_at += want;
        atomic_store_explicit(&t->segment->n_cells, n + 1, memory_order_relaxed);
    }
    atomic_store_explicit(&cell->holders, (uint32_t)base->size, memory_order_release);
    *out = (struct region){.offset = offset, .bytes = want, .fd = t->fd, .cell = (int32_t)index};
    return FSDP_OK;
}

fsdp_status shm_region_map(struct transport *base, struct region *region)
{
    struct shm *t = (struct shm *)base;
    size_t size;
    TRY(os_segment_size(t->fd, &size));
    if (region->offset + region->bytes > size || region->cell < 0 || region->cell >= SHM_REGIONS)
        return err(FSDP_ERR_INTERNAL, "region of %zu bytes at %zu lies outside a segment of %zu", region->bytes, region->offset,
                   size);
    region->fd = t->fd;
    void *at;
    TRY(os_map_shared(t->fd, region->offset, region->bytes, &at));
    region->shared = at;
    return FSDP_OK;
}

void shm_region_release(struct transport *base, struct region *region)
{
    struct shm *t = (struct shm *)base;
    os_unmap(region->shared, region->bytes);
    region->shared = NULL;
    if (base->process != os_process()) return;
    /* The last holder empties the range before it marks it free: rank 0 may use it again at once. */
    struct region_cell *cell = cell_of(t, region->cell);
    uint32_t holders = atomic_load_explicit(&cell->holders, memory_order_acquire);
    while (holders > 1 && !atomic_compare_exchange_weak_explicit(&cell->holders, &holders, holders - 1, memory_order_acq_rel,
                                                                 memory_order_acquire)) {}
    if (holders != 1) return;
    os_segment_discard(t->fd, region->offset, region->bytes);
    atomic_store_explicit(&cell->holders, 0, memory_order_release);
}
