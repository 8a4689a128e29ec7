/* Regions: ranges at the end of the segment's file that hold units' full parameters.
 *
 * Rank 0 alone hands them out, from a table of its own: a range is reserved (so that touching it can't fail), then
 * mapped by every rank. Rank 0 holds it from the reservation on, the others from their mapping. Each gives its hold
 * back in its own time, on any thread; the last one returns the pages to the kernel, and
 * rank 0 may use the range again. A rank that is killed keeps its holds, but then the group has ended too.
 */
#include "transport/shm/shm.h"

#include "base/mem.h"

#include <string.h>

static fsdp_status place_new(struct shm *t, size_t bytes, uint32_t *index)
{
    if (t->n_places == SHM_REGIONS)
        return err(FSDP_ERR_NOMEM, "a group holds at most %d units' shared memory: put more parameters into a unit",
                   SHM_REGIONS);
    if (t->n_places == t->room_for_places) {
        uint32_t room = t->room_for_places ? 2 * t->room_for_places : 16;
        struct place *more = mem_array(room, sizeof *more);
        if (!more) return mem_none("a table of regions", room * sizeof *more);
        if (t->n_places) memcpy(more, t->places, t->n_places * sizeof *more);
        mem_free(t->places);
        t->places = more;
        t->room_for_places = room;
    }
    TRY(os_segment_reserve(t->fd, t->regions_at, bytes));
    *index = t->n_places++;
    t->places[*index] = (struct place){t->regions_at, bytes};
    t->regions_at += bytes;
    return FSDP_OK;
}

static fsdp_status reserve(struct shm *t, size_t bytes, struct region *out)
{
    size_t want = os_page_round(bytes ? bytes : 1);
    uint32_t n = t->n_places, index = n;
    for (uint32_t i = 0; i < n; i++) { /* the smallest free range that is large enough */
        if (atomic_load_explicit(&t->segment->holders[i], memory_order_acquire) != 0 || t->places[i].bytes < want)
            continue;
        if (index == n || t->places[i].bytes < t->places[index].bytes) index = i;
    }
    if (index < n)
        TRY(os_segment_reserve(t->fd, t->places[index].offset, want));
    else
        TRY(place_new(t, want, &index));
    atomic_store_explicit(&t->segment->holders[index], 1,
                          memory_order_release); /* this rank; the others when they map */
    *out = (struct region){.offset = t->places[index].offset, .bytes = want, .fd = t->fd, .cell = (int32_t)index};
    return FSDP_OK;
}

fsdp_status shm_region_reserve(struct transport *base, size_t bytes, struct region *out)
{
    struct shm *t = (struct shm *)base;
    pthread_mutex_lock(&t->places_lock);
    fsdp_status status = reserve(t, bytes, out);
    pthread_mutex_unlock(&t->places_lock);
    return status;
}

fsdp_status shm_region_map(struct transport *base, struct region *region)
{
    struct shm *t = (struct shm *)base;
    size_t size;
    TRY(os_segment_size(t->fd, &size));
    if (region->bytes > size || region->offset > size - region->bytes || region->cell < 0 ||
        region->cell >= SHM_REGIONS)
        return err(FSDP_ERR_INTERNAL, "region of %zu bytes at %zu lies outside a segment of %zu", region->bytes,
                   region->offset, size);
    region->fd = t->fd;
    void *at;
    TRY(os_map_shared(t->fd, region->offset, region->bytes, &at));
    region->shared = at;
    if (base->rank != 0) atomic_fetch_add_explicit(&t->segment->holders[region->cell], 1, memory_order_acq_rel);
    return FSDP_OK;
}

void shm_region_release(struct transport *base, struct region *region)
{
    struct shm *t = (struct shm *)base;
    if (!region->shared && base->rank != 0)
        return; /* never mapped, so never held: nothing that rank 0 said was taken */
    os_unmap(region->shared, region->bytes);
    region->shared = NULL;
    if (base->process != os_process()) return;
    /* The last holder empties the range before it marks it free: rank 0 may use it again at once. */
    _Atomic uint32_t *word = &t->segment->holders[region->cell];
    uint32_t holders = atomic_load_explicit(word, memory_order_acquire);
    while (holders > 1 && !atomic_compare_exchange_weak_explicit(word, &holders, holders - 1, memory_order_acq_rel,
                                                                 memory_order_acquire)) {
    }
    if (holders != 1) return;
    os_segment_discard(t->fd, region->offset, region->bytes);
    atomic_store_explicit(word, 0, memory_order_release);
}
