/* The one way to wait in the shared-memory transport.
 *
 * A waiter spins for a while; not when there are more ranks than processors, nor when the one it waits for was last
 * seen on this very processor: then it yields a few times instead, for the peer needs the processor. Then it sleeps on
 * the word's futex in slices. After each slice it looks at what else could end the wait: a failure recorded here (abort
 * from another thread), a fault that a peer published, a peer's process that has ended, the deadline. So no watchdog
 * thread is needed: whoever waits, watches.
 *
 * Publishing: the value is stored and the sleeper count read in one total order (both sequentially consistent), as
 * the waiter raises the count and then re-reads the value. One of the two sees the other, so no wake-up is lost.
 */
#include "transport/shm/shm.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SLICE_FIRST_NS 2000000
#define SLICE_MAX_NS 50000000
#define SPIN_CHECK_NS 5000000
#define UNREADABLE_MS 300 /* a process gives up its memory before it counts as ended */
#define YIELDS 8

void shm_wake(struct word *word)
{
    if (atomic_load_explicit(&word->sleepers, memory_order_seq_cst) > 0) os_futex_wake(&word->value);
}

void shm_publish(struct word *word, uint32_t value)
{
    atomic_store_explicit(&word->processor, os_processor() + 1, memory_order_relaxed);
    atomic_store_explicit(&word->value, value, memory_order_seq_cst);
    shm_wake(word);
}

int shm_reached(struct word *word, uint32_t target)
{
    return (int32_t)(atomic_load_explicit(&word->value, memory_order_acquire) - target) >= 0;
}

fsdp_status shm_fail_now(struct shm *t, fsdp_status status)
{
    fsdp_error_info info;
    err_save(&info);
    transport_fail(&t->base, &info);
    return status;
}

/* A fault published by a peer becomes this rank's failure too. */
static fsdp_status adopt_fault(struct shm *t)
{
    for (int r = 0; r < t->base.size; r++) {
        struct rank_area *area = &t->areas[r];
        if (r == t->base.rank || !atomic_load_explicit(&area->fault_set, memory_order_acquire)) continue;
        fsdp_error_info info = area->fault;
        info.message[sizeof info.message - 1] = 0;
        int32_t culprit = info.status == FSDP_ERR_PEER_LOST || info.status == FSDP_ERR_TIMEOUT ? info.rank_a : r;
        if (info.status == FSDP_OK) info.status = FSDP_ERR_INTERNAL;
        int passed_on = strncmp(info.message, "rank ", 5) == 0; /* r has it from another rank */
        if (passed_on)
            err(info.status, "%s", info.message);
        else
            err(info.status, "rank %d reported: %s", r, info.message);
        err_operation(info.operation, info.sequence, culprit, -1);
        return shm_fail_now(t, info.status);
    }
    return FSDP_OK;
}

fsdp_status shm_status(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    TRY(transport_status(base));
    return atomic_load_explicit(&t->segment->faulted, memory_order_acquire) ? adopt_fault(t) : FSDP_OK;
}

static fsdp_status lost(struct shm *t, int rank, const char *how, struct deadline deadline)
{
    TRY(shm_status(&t->base)); /* what it said before it went counts for more */
    err(FSDP_ERR_PEER_LOST, "group '%s': rank %d (process %d) %s while rank %d was in %s (operation %llu)", t->name,
        rank, (int)t->pids[rank], how, t->base.rank, deadline.doing, (unsigned long long)deadline.sequence);
    err_operation(deadline.kind, deadline.sequence, rank, -1);
    return shm_fail_now(t, FSDP_ERR_PEER_LOST);
}

fsdp_status shm_lost_to_release(struct shm *t, int rank, struct deadline deadline)
{
    return lost(t, rank, "released the group", deadline);
}

fsdp_status shm_check(struct shm *t, int rank, struct word *word, uint32_t target, struct deadline deadline)
{
    TRY(shm_status(&t->base));
    /* What the owner published before it left or ended still counts: look at the word after the mark. */
    if (rank >= 0 && rank != t->base.rank && atomic_load_explicit(&t->areas[rank].left, memory_order_acquire))
        return word && shm_reached(word, target) ? FSDP_OK : shm_lost_to_release(t, rank, deadline);

    struct pollfd polls[SHM_MAX_RANKS];
    for (int r = 0; r < t->base.size; r++)
        polls[r] = (struct pollfd){.fd = r == t->base.rank ? -1 : t->liveness[r], .events = POLLIN};
    if (poll(polls, (nfds_t)t->base.size, 0) <= 0) return FSDP_OK;
    for (int r = 0; r < t->base.size; r++) {
        /* A rank that left in good order may end: that concerns only who waits for it. */
        if (!polls[r].revents || atomic_load_explicit(&t->areas[r].left, memory_order_acquire)) continue;
        /* The others may be through, and r one that ended after it: then what is waited for is there by now. */
        if (word && shm_reached(word, target)) return FSDP_OK;
        return lost(t, r, "has ended", deadline);
    }
    return FSDP_OK;
}

fsdp_status shm_check_unreadable(struct shm *t, struct deadline deadline)
{
    for (int ms = 0; ms < UNREADABLE_MS; ms++) {
        TRY(shm_check(t, -1, NULL, 0, deadline));
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return FSDP_OK;
}

static fsdp_status timed_out(struct shm *t, struct word *word, uint32_t target, int rank, struct deadline deadline)
{
    struct rank_area *area = &t->areas[rank];
    if (word == &area->posted) {
        char missing[256] = "";
        size_t used = 0;
        for (int r = 0; r < t->base.size && used < sizeof missing - 16; r++)
            if (!shm_reached(WORD(t, r, posted), target))
                used += (size_t)snprintf(missing + used, sizeof missing - used, used ? ", %d" : "%d", r);
        if (!used) snprintf(missing, sizeof missing, "%d (until just now)", rank);
        err(FSDP_ERR_TIMEOUT,
            "group '%s': timed out after %lld ms in %s (operation %llu) on rank %d: not called by rank %s; it is busy "
            "elsewhere, stopped, or made fewer calls",
            t->name, (long long)deadline.timeout_ms, deadline.doing, (unsigned long long)deadline.sequence,
            t->base.rank, missing);
    } else {
        err(FSDP_ERR_TIMEOUT,
            "group '%s': timed out after %lld ms in %s (operation %llu) on rank %d: rank %d began it but did not go "
            "on; is "
            "it stopped?",
            t->name, (long long)deadline.timeout_ms, deadline.doing, (unsigned long long)deadline.sequence,
            t->base.rank, rank);
    }
    err_operation(deadline.kind, deadline.sequence, rank, -1);
    return shm_fail_now(t, FSDP_ERR_TIMEOUT);
}

fsdp_status shm_wait(struct shm *t, struct word *word, uint32_t target, int rank, struct deadline deadline)
{
    if (shm_reached(word, target)) return FSDP_OK;

    if (t->spin_ns > 0) {
        int64_t now = os_now_ns(), until = now + t->spin_ns, look = now + SPIN_CHECK_NS;
        do {
            if (atomic_load_explicit(&word->processor, memory_order_relaxed) == os_processor() + 1) break;
            for (int i = 0; i < 64; i++) {
                if (shm_reached(word, target)) return FSDP_OK;
                os_relax();
            }
            now = os_now_ns();
            if (now < look) continue;
            TRY(shm_check(t, rank, word, target, deadline)); /* who spins for long watches, too */
            if (now >= deadline.at_ns) return timed_out(t, word, target, rank, deadline);
            look = now + SPIN_CHECK_NS;
        } while (now < until);
    }
    for (int i = 0; i < YIELDS; i++) {
        sched_yield();
        if (shm_reached(word, target)) return FSDP_OK;
    }

    for (int64_t slice = SLICE_FIRST_NS;; slice = slice * 2 > SLICE_MAX_NS ? SLICE_MAX_NS : slice * 2) {
        int64_t left = deadline.at_ns - os_now_ns();
        atomic_fetch_add_explicit(&word->sleepers, 1, memory_order_seq_cst);
        uint32_t now = atomic_load_explicit(&word->value, memory_order_seq_cst);
        if ((int32_t)(now - target) < 0 && left > 0) os_futex_wait(&word->value, now, slice < left ? slice : left);
        atomic_fetch_sub_explicit(&word->sleepers, 1, memory_order_relaxed);
        if (shm_reached(word, target)) return FSDP_OK;

        TRY(shm_check(t, rank, word, target, deadline));
        if (os_now_ns() >= deadline.at_ns) return timed_out(t, word, target, rank, deadline);
    }
}
