/* Point to point over shared memory.
 *
 * Each ordered pair of ranks has a channel: a few entries, one for each send under way. The sender fills a free entry
 * and posts it; the receiver looks for the oldest posted entry of its tag, so tags don't block each other. Then, by
 * size and by what the kernel allows, the receiver
 *   - copies the bytes out of the entry,
 *   - reads them from the sender's memory, or
 *   - takes the entry, and both move it through the pair's lane in half-lane steps, one message at a time.
 * At the end the receiver marks the entry done (or refused, when dtype or count differ) and the sender frees it.
 *
 * Nothing here blocks: the group's point-to-point lane steps all its messages in turn and sleeps on the rank's bell
 * when none advanced. Every word has one writer at a time, by the entry's state: FREE is the sender's, POSTED the
 * receiver's, TAKEN the receiver's (with lane counts each way), DONE and REFUSED the sender's.
 */
#include "transport/shm/shm.h"

#include <string.h>

#define ALONE_NS 500000000

enum { STAGE_NEW, STAGE_POSTED, STAGE_MATCHED, STAGE_FLOWING };

static struct channel *channel_of(struct shm *t, int from, int to)
{
    return &t->channels[from * t->base.size + to];
}

static char *lane_of(struct shm *t, int from, int to)
{
    return t->lanes + (size_t)(from * t->base.size + to) * t->lane_bytes;
}

static void ring(struct shm *t, int rank)
{
    struct word *bell = WORD(t, rank, bell);
    atomic_fetch_add_explicit(&bell->value, 1, memory_order_seq_cst);
    shm_wake(bell);
}

static void set_state(struct entry *entry, uint32_t state)
{
    atomic_store_explicit(&entry->state, state, memory_order_release);
}

static uint32_t state_of(struct entry *entry)
{
    return atomic_load_explicit(&entry->state, memory_order_acquire);
}

static fsdp_status mismatch(const struct message *m, int rank_a, int rank_b, enum dtype type, int64_t count)
{
    const char *other = type < DTYPE_COUNT ? dtype_name(type) : "unknown";
    err(FSDP_ERR_MISMATCH, "%s with rank %d, tag %d: this rank gives %lld elements of %s, rank %d %lld of %s",
        m->sending ? "send" : "recv", rank_b, m->tag, (long long)m->count, dtype_name(m->type), rank_b,
        (long long)count, other);
    err_operation(m->sending ? FSDP_OP_SEND : FSDP_OP_RECV, 0, rank_a, rank_b);
    return FSDP_ERR_MISMATCH;
}

/* ---- sending */

static int send_post(struct shm *t, struct message *m)
{
    struct channel *channel = channel_of(t, t->base.rank, m->peer);
    for (int i = 0; i < SHM_MESSAGES; i++) {
        struct entry *entry = &channel->entries[i];
        if (state_of(entry) != ENTRY_FREE) continue;
        entry->tag = m->tag;
        entry->type = (int32_t)m->type;
        entry->count = m->count;
        entry->order = t->orders[m->peer]++;
        entry->address = (uintptr_t)m->data;
        if (m->bytes && m->bytes <= SHM_EAGER) memcpy(entry->eager, m->data, m->bytes);
        set_state(entry, ENTRY_POSTED);
        m->slot = i;
        m->stage = STAGE_POSTED;
        ring(t, m->peer);
        return 1;
    }
    return 0;
}

/* Fill free halves of the lane. */
static int send_flow(struct shm *t, struct message *m, struct channel *channel)
{
    size_t half = t->lane_bytes / 2;
    char *lane = lane_of(t, t->base.rank, m->peer);
    size_t moved = 0;
    uint32_t filled = atomic_load_explicit(&channel->filled.value, memory_order_relaxed);
    while (m->done < m->bytes && filled - atomic_load_explicit(&channel->drained.value, memory_order_acquire) < 2) {
        size_t now = m->bytes - m->done < half ? m->bytes - m->done : half;
        memcpy(lane + filled % 2 * half, m->data + m->done, now);
        m->done += now;
        shm_publish(&channel->filled, ++filled);
        moved += now;
    }
    if (moved) {
        atomic_fetch_add_explicit(&t->base.bytes_moved, moved, memory_order_relaxed);
        ring(t, m->peer);
    }
    return moved > 0;
}

static fsdp_status send_step(struct shm *t, struct message *m, int *done, int *moved)
{
    if (m->stage == STAGE_NEW) {
        *moved = send_post(t, m);
        return FSDP_OK;
    }
    struct channel *channel = channel_of(t, t->base.rank, m->peer);
    struct entry *entry = &channel->entries[m->slot];
    switch (state_of(entry)) {
    case ENTRY_TAKEN:
        *moved = send_flow(t, m, channel);
        return FSDP_OK;
    case ENTRY_DONE:
        set_state(entry, ENTRY_FREE);
        *done = *moved = 1;
        return FSDP_OK;
    case ENTRY_REFUSED: {
        enum dtype type = (enum dtype)entry->refused_type;
        int64_t count = entry->refused_count;
        set_state(entry, ENTRY_FREE);
        *done = *moved = 1;
        return mismatch(m, t->base.rank, m->peer, type, count);
    }
    default:
        return FSDP_OK;
    }
}

/* ---- receiving */

/* The oldest send of `tag` that no message here is matched with yet. All receives of one round see the same sends: one
 * that is posted between the steps of two receives must not go to the second. */
static struct entry *oldest_posted(struct shm *t, int source, int32_t tag, int *slot)
{
    struct channel *channel = channel_of(t, source, t->base.rank);
    if (t->looked[source] != t->round) {
        t->looked[source] = t->round;
        t->posted[source] = 0;
        for (int i = 0; i < SHM_MESSAGES; i++)
            if (state_of(&channel->entries[i]) == ENTRY_POSTED) t->posted[source] |= 1u << i;
    }
    struct entry *best = NULL;
    for (uint32_t left = t->posted[source] & ~t->matched[source]; left; left &= left - 1) {
        int i = __builtin_ctz(left);
        struct entry *entry = &channel->entries[i];
        if (entry->tag != tag) continue;
        if (best && (int32_t)(entry->order - best->order) >= 0) continue;
        best = entry;
        *slot = i;
    }
    return best;
}

static fsdp_status recv_finish(struct shm *t, struct message *m, struct entry *entry, uint32_t state, int *done,
                               int *moved)
{
    set_state(entry, state);
    ring(t, m->source);
    *done = *moved = 1;
    return FSDP_OK;
}

static fsdp_status recv_take(struct shm *t, struct message *m, struct entry *entry, int *done, int *moved)
{
    t->posted[m->source] &= ~(1u << m->slot); /* the sender may free it and use it again within the round */
    /* Read once: the sender's bytes decide nothing but equality, and the copy below is of this rank's size. */
    int32_t type = entry->type;
    int64_t count = entry->count;
    if (type != (int32_t)m->type || count != m->count) {
        entry->refused_type = (int32_t)m->type;
        entry->refused_count = m->count;
        (void)recv_finish(t, m, entry, ENTRY_REFUSED, done, moved);
        return mismatch(m, t->base.rank, m->source, (enum dtype)type, count);
    }
    if (m->bytes <= SHM_EAGER) {
        if (m->bytes) memcpy(m->data, entry->eager, m->bytes);
        return recv_finish(t, m, entry, ENTRY_DONE, done, moved);
    }
    if (t->base.direct_read) {
        int failed = os_read_peer(t->pids[m->source], entry->address, m->data, m->bytes);
        if (failed == 0) {
            TRY(shm_status(&t->base)); /* a sender whose group failed may have used its memory anew */
            struct deadline doing = {.doing = "recv", .kind = FSDP_OP_RECV};
            if (os_is_dead(t->liveness[m->source])) return shm_check(t, m->source, NULL, 0, doing);
            atomic_fetch_add_explicit(&t->base.bytes_moved, m->bytes, memory_order_relaxed);
            return recv_finish(t, m, entry, ENTRY_DONE, done, moved);
        }
        struct deadline doing = {.doing = "recv", .kind = FSDP_OP_RECV};
        TRY(shm_check_unreadable(t, doing));
        err_sys(FSDP_ERR_SYSTEM, failed, "reading %zu bytes of rank %d's memory in recv", m->bytes, m->source);
        return shm_fail_now(t, FSDP_ERR_SYSTEM);
    }
    /* One message at a time goes through a pair's lane; others keep the entry they were matched with. */
    if (t->receiving[m->source]) {
        *moved = m->stage != STAGE_MATCHED;
        t->matched[m->source] |= 1u << m->slot;
        m->stage = STAGE_MATCHED;
        return FSDP_OK;
    }
    t->matched[m->source] &= ~(1u << m->slot);
    t->receiving[m->source] = 1;
    m->stage = STAGE_FLOWING;
    set_state(entry, ENTRY_TAKEN);
    ring(t, m->source);
    *moved = 1;
    return FSDP_OK;
}

static fsdp_status recv_flow(struct shm *t, struct message *m, int *done, int *moved)
{
    struct channel *channel = channel_of(t, m->source, t->base.rank);
    size_t half = t->lane_bytes / 2;
    const char *lane = lane_of(t, m->source, t->base.rank);
    uint32_t drained = atomic_load_explicit(&channel->drained.value, memory_order_relaxed);
    while (m->done < m->bytes && atomic_load_explicit(&channel->filled.value, memory_order_acquire) != drained) {
        size_t now = m->bytes - m->done < half ? m->bytes - m->done : half;
        memcpy(m->data + m->done, lane + drained % 2 * half, now);
        m->done += now;
        shm_publish(&channel->drained, ++drained);
        *moved = 1;
    }
    if (m->done < m->bytes) {
        if (*moved) ring(t, m->source);
        return FSDP_OK;
    }
    t->receiving[m->source] = 0;
    atomic_fetch_add_explicit(&t->base.bytes_moved, m->bytes, memory_order_relaxed);
    return recv_finish(t, m, &channel->entries[m->slot], ENTRY_DONE, done, moved);
}

static fsdp_status recv_step(struct shm *t, struct message *m, int *done, int *moved)
{
    if (m->stage == STAGE_FLOWING) return recv_flow(t, m, done, moved);
    if (m->stage == STAGE_MATCHED)
        return recv_take(t, m, &channel_of(t, m->source, t->base.rank)->entries[m->slot], done, moved);
    for (int r = 0; r < t->base.size; r++) {
        if (r == t->base.rank || (m->peer != FSDP_ANY_RANK && m->peer != r)) continue;
        int slot = 0;
        struct entry *entry = oldest_posted(t, r, m->tag, &slot);
        if (!entry) continue;
        m->source = r;
        m->slot = slot;
        return recv_take(t, m, entry, done, moved);
    }
    return FSDP_OK;
}

/* ---- the vtable's functions */

fsdp_status shm_message_step(struct transport *base, struct message *m, int *done, int *moved)
{
    struct shm *t = (struct shm *)base;
    *done = *moved = 0;
    return m->sending ? send_step(t, m, done, moved) : recv_step(t, m, done, moved);
}

uint32_t shm_message_ticket(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    t->round++;
    return atomic_load_explicit(&t->areas[base->rank].bell.value, memory_order_seq_cst);
}

void shm_message_nudge(struct transport *base)
{
    ring((struct shm *)base, base->rank);
}

void shm_message_wait(struct transport *base, uint32_t ticket, int64_t most_ns)
{
    struct shm *t = (struct shm *)base;
    struct word *bell = WORD(t, base->rank, bell);
    for (int64_t until = os_now_ns() + (t->spin_ns < most_ns ? t->spin_ns : most_ns); os_now_ns() < until;)
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&bell->value, memory_order_acquire) != ticket) return;
            os_relax();
        }
    atomic_fetch_add_explicit(&bell->sleepers, 1, memory_order_seq_cst);
    os_futex_wait(&bell->value, ticket, most_ns);
    atomic_fetch_sub_explicit(&bell->sleepers, 1, memory_order_relaxed);
}

fsdp_status shm_message_check(struct transport *base, const struct message *m, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    int gone = -1;
    for (int r = 0; r < base->size; r++) {
        if (r == base->rank || (m->source >= 0 && m->source != r)) continue;
        gone = r;
        if (!atomic_load_explicit(&t->areas[r].left, memory_order_acquire)) return shm_check(t, -1, NULL, 0, deadline);
    }
    if (gone < 0) return shm_status(base);
    /* This rank itself may still send what a receive from any rank waits for: give it a moment. */
    int64_t begun_ns = deadline.at_ns - deadline.timeout_ms * 1000000;
    if (m->source < 0 && os_now_ns() - begun_ns < ALONE_NS) return shm_status(base);
    /* Whoever could serve it has released the group, which takes a rank to the end of its own messages first. */
    if (m->sending && m->stage != STAGE_NEW) {
        uint32_t state = state_of(&channel_of(t, base->rank, m->peer)->entries[m->slot]);
        if (state == ENTRY_DONE || state == ENTRY_REFUSED) return FSDP_OK; /* the next step sees it */
    }
    return shm_lost_to_release(t, gone, deadline);
}
