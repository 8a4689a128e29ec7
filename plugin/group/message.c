/* Point to point: the lane that advances all of a rank's sends and receives together.
 *
 * The thread that holds the lane steps each message in the order of submission, completes works whose messages are all
 * done, and when nothing moved sleeps until something may have. Messages of one pair and tag keep their order: a
 * receive is matched before later ones are looked at, and where a send finds no room, later ones to that rank wait
 * behind it. Messages of a rank to itself are matched here, for every transport.
 */
#include "group/group.h"

#include <stdio.h>
#include <string.h>

#define CHECK_NS 20000000

static fsdp_status self_mismatch(const struct message *m, const struct message *other)
{
    err(FSDP_ERR_MISMATCH, "%s to this rank itself, tag %d: %lld elements of %s, but the matching %s has %lld of %s",
        m->sending ? "send" : "recv", m->tag, (long long)m->count, dtype_name(m->type),
        other->sending ? "send" : "recv", (long long)other->count, dtype_name(other->type));
    return FSDP_ERR_MISMATCH;
}

static void transit_finish(fsdp_work *work, struct transit *transit, fsdp_status status)
{
    transit->done = 1;
    if (status == FSDP_OK) {
        packed_store(transit->packed);
    } else if (work->failure.status == FSDP_OK) {
        err_save(&work->failure);
    }
}

static fsdp_work *next_of(struct lane *lane, fsdp_work *work)
{
    pthread_mutex_lock(&lane->lock);
    fsdp_work *next = work ? work->next : lane->head;
    pthread_mutex_unlock(&lane->lock);
    return next;
}

static const fsdp_work *last_of(struct lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    const fsdp_work *last = lane->tail;
    pthread_mutex_unlock(&lane->lock);
    return last;
}

/* A receive from this rank itself takes the oldest send of its tag, among works up to `last`: all receives of one round
 * see the same sends. */
static int take_own(struct lane *lane, fsdp_work *work, struct transit *transit, const fsdp_work *last)
{
    struct message *m = &transit->message;
    for (fsdp_work *other = next_of(lane, NULL); other; other = other == last ? NULL : next_of(lane, other))
        for (int32_t i = 0; i < other->n_transits; i++) {
            struct transit *sender = &other->transits[i];
            struct message *s = &sender->message;
            if (sender->done || !s->sending || s->peer != lane->group->rank || s->tag != m->tag) continue;
            fsdp_status status = FSDP_OK;
            if (s->type != m->type || s->count != m->count)
                status = self_mismatch(s, m);
            else if (m->bytes)
                memmove(m->data, s->data, m->bytes);
            transit_finish(other, sender, status);
            if (status != FSDP_OK) (void)self_mismatch(m, s);
            m->source = lane->group->rank;
            transit_finish(work, transit, status);
            return 1;
        }
    return 0;
}

/* One step of every message of a work; 1 when anything moved. */
static int step_work(struct lane *lane, fsdp_work *work, const fsdp_work *last, char *stalled)
{
    fsdp_group *group = lane->group;
    struct transport *t = group->transport;
    int any = 0;
    for (int32_t i = 0; i < work->n_transits; i++) {
        struct transit *transit = &work->transits[i];
        struct message *m = &transit->message;
        if (transit->done) continue;
        int to_self = m->peer == group->rank;
        if (!m->sending && (to_self || m->peer == FSDP_ANY_RANK) && m->stage == 0 &&
            take_own(lane, work, transit, last)) {
            any = 1;
            continue;
        }
        if (to_self || (m->sending && m->stage == 0 && stalled[m->peer])) continue;
        int done = 0, moved = 0;
        fsdp_status status = t->ops->message_step(t, m, &done, &moved);
        any |= moved;
        if (done || status != FSDP_OK) {
            transit_finish(work, transit, status);
            any = 1;
        } else if (m->sending && m->stage == 0) {
            stalled[m->peer] = 1;
        }
    }
    return any;
}

static int is_complete(const fsdp_work *work)
{
    for (int32_t i = 0; i < work->n_transits; i++)
        if (!work->transits[i].done) return 0;
    return 1;
}

static void unlink_work(struct lane *lane, fsdp_work *work)
{
    pthread_mutex_lock(&lane->lock);
    fsdp_work **at = &lane->head, *last = NULL;
    while (*at != work) {
        last = *at;
        at = &(*at)->next;
    }
    *at = work->next;
    if (lane->tail == work) lane->tail = last;
    pthread_mutex_unlock(&lane->lock);
}

/* Find what would keep a work from ever going on. Its failure is the group's. */
static void check_work(struct lane *lane, fsdp_work *work, int64_t now)
{
    struct transport *t = lane->group->transport;
    for (int32_t i = 0; i < work->n_transits; i++) {
        struct transit *transit = &work->transits[i];
        struct message *m = &transit->message;
        if (transit->done) continue;
        struct deadline deadline = work->deadline;
        deadline.kind = m->sending ? FSDP_OP_SEND : FSDP_OP_RECV;
        deadline.doing = call_kind_name(deadline.kind);
        fsdp_status status = t->ops->message_check(t, m, deadline);
        if (status == FSDP_OK && now >= deadline.at_ns) {
            char peer[24] = "any rank";
            if (m->source >= 0) snprintf(peer, sizeof peer, "rank %d", m->source);
            status = err(FSDP_ERR_TIMEOUT, "group '%s': timed out after %lld ms in %s %s %s, tag %d, on rank %d: %s",
                         lane->group->name, (long long)deadline.timeout_ms, deadline.doing, m->sending ? "to" : "from",
                         peer, m->tag, t->rank,
                         m->sending ? "the other side has not called recv, or did not go on"
                         : m->stage ? "the other side did not go on"
                                    : "the other side has not called send");
            err_operation(deadline.kind, 0, m->source, -1);
            fsdp_error_info failure;
            err_save(&failure);
            transport_fail(t, &failure);
        }
        if (status != FSDP_OK) transit_finish(work, transit, status);
    }
}

void messages_nudge(struct lane *lane)
{
    lane->group->transport->ops->message_nudge(lane->group->transport);
}

void messages_advance(struct lane *lane, fsdp_work *until)
{
    struct transport *t = lane->group->transport;
    for (;;) {
        char stalled[GROUP_MAX_RANKS] = {0};
        uint32_t ticket = t->ops->message_ticket(t);
        int moved = 0, pending = 0;
        const fsdp_work *last = last_of(lane);
        for (fsdp_work *work = next_of(lane, NULL); work; work = work == last ? NULL : next_of(lane, work))
            moved |= step_work(lane, work, last, stalled);
        /* By the clock, not when nothing moves: one message may be stuck while others flow. */
        int64_t now = os_now_ns();
        int failed = atomic_load_explicit(&t->failed, memory_order_acquire) == 1;
        if (failed || now - lane->checked_ns >= CHECK_NS) {
            for (fsdp_work *work = next_of(lane, NULL); work; work = next_of(lane, work)) check_work(lane, work, now);
            lane->checked_ns = now;
        }
        for (fsdp_work *work = next_of(lane, NULL), *next; work; work = next) {
            next = next_of(lane, work);
            if (!is_complete(work)) {
                pending = 1;
                continue;
            }
            unlink_work(lane, work);
            int ours = work == until;
            work_complete(work, work->failure.status == FSDP_OK ? FSDP_OK : err_restore(&work->failure));
            if (ours) return;
        }
        if (!pending) return;
        if (!moved) t->ops->message_wait(t, ticket, CHECK_NS);
    }
}
