/* The shared-memory transport: the object, exchange, failure and leaving. shm.h describes the segment.
 *
 * Ownership: a rank owns its mapping and descriptors; the segment lives as long as any rank maps it, and vanishes
 * with the last, however that one ends.
 */
#include "transport/shm/shm.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

static void shm_destroy(struct transport *base);

static fsdp_status shm_create(const struct transport_setup *setup, struct transport **out)
{
    struct shm *t = mem_alloc(sizeof *t);
    if (!t) return mem_none("a group's transport", sizeof *t);
    t->base.ops = &transport_shm;
    t->base.rank = setup->rank;
    t->base.process = os_process();
    t->base.size = setup->size;
    t->fd = t->liveness_keep = -1;
    for (int r = 0; r < SHM_MAX_RANKS; r++) t->liveness[r] = -1;
    snprintf(t->name, sizeof t->name, "%s", setup->name);

    pthread_mutex_init(&t->places_lock, NULL);
    void *scratch; /* costs address space until it is used */
    fsdp_status status = os_map_anonymous(SHM_DIRECT_CHUNK * (size_t)setup->size, &scratch);
    if (status == FSDP_OK) {
        t->scratch = scratch;
        status = shm_join(t, setup);
    }
    if (status != FSDP_OK) {
        shm_destroy(&t->base);
        return status;
    }
    /* Spinning pays when every rank has a processor of its own; otherwise the peer may need this one. */
    t->spin_ns = setup->spin_us > 0 ? (int64_t)setup->spin_us * 1000 : setup->spin_us < 0 || t->crowded ? 0 : 100000;
    LOG(FSDP_LOG_INFO, "group '%s': rank %d of %d over shared memory, direct reads %s, %s", t->name, setup->rank,
        setup->size, t->base.direct_read ? "allowed" : "not used",
        t->crowded ? "more ranks than processors" : "a processor each");
    *out = &t->base;
    return FSDP_OK;
}

/* ---- leaving and failing */

static void wake_all(struct shm *t)
{
    /* Sleepers on this rank's words, and those who wait for a third rank, this process's threads among them. */
    for (int r = 0; r < t->base.size; r++) {
        struct rank_area *area = &t->areas[r];
        struct word *words[] = {&area->joined,  &area->posted,   &area->staged,
                                &area->reduced, &area->consumed, &area->done};
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) shm_wake(words[i]);
        atomic_fetch_add_explicit(&t->areas[r].bell.value, 1, memory_order_seq_cst);
        shm_wake(&t->areas[r].bell);
    }
}

static void shm_destroy(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    if (t->segment) {
        if (base->process == os_process()) {
            atomic_store_explicit(&t->areas[base->rank].left, 1, memory_order_seq_cst);
            wake_all(t);
        }
        os_unmap(t->segment, t->mapped);
    }
    for (int r = 0; r < SHM_MAX_RANKS; r++) os_close(&t->liveness[r]);
    os_close(&t->liveness_keep);
    os_close(&t->fd);
    mem_free(t->places);
    os_unmap(t->scratch, SHM_DIRECT_CHUNK * (size_t)base->size);
    pthread_mutex_destroy(&t->places_lock);
    mem_free(t);
}

static void shm_tell_failure(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    if (!t->segment) return;
    struct rank_area *area = &t->areas[base->rank];
    /* Once for a group's life: transport_fail calls this for the first failure only. */
    area->fault = base->failure;
    atomic_store_explicit(&area->fault_set, 1, memory_order_release);
    atomic_store_explicit(&t->segment->faulted, 1, memory_order_seq_cst);
    wake_all(t);
}

/* ---- exchange */

static fsdp_status shm_exchange(struct transport *base, const struct call_header *mine, const void *payload,
                                size_t bytes, const struct transfer *transfer, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    TRY(shm_status(base));
    t->route = shm_route(t, transfer);
    uint32_t number = t->sequence + 1;
    struct rank_area *area = &t->areas[base->rank];
    struct slot *slot = &area->slots[number % 2];
    slot->header = *mine;
    slot->longest = 0;
    if (bytes)
        memcpy(slot->payload, payload, bytes);
    else
        memset(slot->payload, 0, 64); /* took part, has nothing: not what an earlier exchange left */
    switch (t->route) {
    case ROUTE_INLINE:
        shm_inline_fill(t, slot, transfer);
        break;
    case ROUTE_STAGE:
        slot->longest = shm_stage_longest(t, transfer);
        TRY(shm_stage_first(t, transfer, deadline));
        break;
    case ROUTE_DIRECT:
        shm_direct_offer(slot, transfer);
        break;
    default:
        break;
    }
    t->sequence = number;
    shm_publish(&area->posted, number);
    for (int step = 0; step < base->size; step++) {
        int r = (base->rank + step) % base->size;
        if (r != base->rank) TRY(shm_wait(t, WORD(t, r, posted), number, r, deadline));
        t->seen[r] = &t->areas[r].slots[number % 2];
    }
    return FSDP_OK;
}

static const struct call_header *shm_header_of(struct transport *base, int rank)
{
    return &((struct shm *)base)->seen[rank]->header;
}

static const void *shm_payload_of(struct transport *base, int rank)
{
    return ((struct shm *)base)->seen[rank]->payload;
}

static fsdp_status shm_move(struct transport *base, const struct transfer *transfer, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    switch (t->route) {
    case ROUTE_INLINE:
        shm_inline_move(t, transfer);
        return FSDP_OK;
    case ROUTE_STAGE:
        return shm_stage_move(t, transfer, deadline);
    case ROUTE_DIRECT:
        return shm_direct_move(t, transfer, deadline);
    default:
        return FSDP_OK;
    }
}

static fsdp_status shm_sync(struct transport *base, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    shm_publish(WORD(t, base->rank, done), ++t->dones);
    for (int r = 0; r < base->size; r++)
        if (r != base->rank) TRY(shm_wait(t, WORD(t, r, done), t->dones, r, deadline));
    return FSDP_OK;
}

const struct transport_ops transport_shm = {
    .name = "shm",
    .create = shm_create,
    .destroy = shm_destroy,
    .exchange = shm_exchange,
    .header_of = shm_header_of,
    .payload_of = shm_payload_of,
    .move = shm_move,
    .sync = shm_sync,
    .message_step = shm_message_step,
    .message_ticket = shm_message_ticket,
    .message_nudge = shm_message_nudge,
    .message_wait = shm_message_wait,
    .message_check = shm_message_check,
    .region_reserve = shm_region_reserve,
    .region_map = shm_region_map,
    .region_release = shm_region_release,
    .status = shm_status,
    .fail = shm_tell_failure,
};
