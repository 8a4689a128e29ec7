/* Lanes: the order of a group's works, and who advances them. See group.h.
 *
 * A synchronous call on an idle lane takes the busy mark and runs on its own thread, with no hand-off. Otherwise works
 * queue up, and whoever needs one advances the lane if nobody else does: a thread that waits without limit, or the
 * progress thread. A thread that waits with a limit only sleeps, since running an operation can't be cut short. */
#include "group/group.h"

#include "base/mem.h"

#include <errno.h>
#include <time.h>

void lane_init(struct lane *lane, fsdp_group *group, void (*advance)(struct lane *, fsdp_work *),
               void (*nudge)(struct lane *))
{
    lane->group = group;
    lane->advance = advance;
    lane->nudge = nudge;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void lane_destroy(struct lane *lane)
{
    pthread_cond_destroy(&lane->changed);
    pthread_mutex_destroy(&lane->lock);
}

int lane_is_advanced_here(struct lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    int own = lane->busy && pthread_equal(lane->advancing, pthread_self());
    pthread_mutex_unlock(&lane->lock);
    return own;
}

/* With the lock held: advance without it. */
static void advance(struct lane *lane, fsdp_work *until)
{
    lane->busy = 1;
    lane->advancing = pthread_self();
    pthread_mutex_unlock(&lane->lock);
    lane->advance(lane, until);
    pthread_mutex_lock(&lane->lock);
    lane->busy = 0;
    if (lane->waiting) pthread_cond_broadcast(&lane->changed);
}

static void sleep_on(struct lane *lane, const struct timespec *until)
{
    lane->waiting++;
    if (until)
        pthread_cond_timedwait(&lane->changed, &lane->lock, until);
    else
        pthread_cond_wait(&lane->changed, &lane->lock);
    lane->waiting--;
}

static void *progress(void *argument)
{
    struct lane *lane = argument;
    pthread_mutex_lock(&lane->lock);
    while (lane->head || !lane->stopping) {
        if (lane->head && !lane->busy)
            advance(lane, NULL);
        else
            sleep_on(lane, NULL);
    }
    pthread_mutex_unlock(&lane->lock);
    return NULL;
}

/* With the lock held. */
static fsdp_status start_thread(struct lane *lane)
{
    if (lane->has_thread) return FSDP_OK;
    int failed = os_thread_start(&lane->thread, progress, lane);
    if (failed)
        return err_sys(FSDP_ERR_SYSTEM, failed, "starting the progress thread of group '%s'", lane->group->name);
    lane->has_thread = 1;
    return FSDP_OK;
}

static void append(struct lane *lane, fsdp_work *work)
{
    work->next = NULL;
    if (lane->tail)
        lane->tail->next = work;
    else
        lane->head = work;
    lane->tail = work;
    ref_get(&work->ref); /* the queue's */
}

/* The thread of a synchronous work with a timeout of its own: when that passes before its turn has come, the group
 * ends, and with it what runs before. Once it runs, its own deadline ends it. */
static void wait_turn(fsdp_work *work)
{
    struct lane *lane = work->lane;
    fsdp_group *group = work->group;
    int64_t left_ns = work->end_ns - os_now_ns();
    for (int64_t ms = left_ns > 0 ? left_ns / 1000000 + 1 : 0; !lane_wait(work, ms); ms = 10) {
        pthread_mutex_lock(&lane->lock);
        fsdp_work *first = lane->head;
        fsdp_op_kind earlier = first && first != work && first->n_ops ? first->ops[0].kind : FSDP_OP_NONE;
        pthread_mutex_unlock(&lane->lock);
        if (earlier == FSDP_OP_NONE) continue;
        fsdp_error_info failure;
        err(FSDP_ERR_TIMEOUT,
            "group '%s': timed out after %lld ms in %s on rank %d: its turn did not come, as an earlier %s of this "
            "rank still waits for other ranks",
            group->name, (long long)work->timeout_ms, call_kind_name(work->ops[0].kind), group->rank,
            call_kind_name(earlier));
        err_operation(work->ops[0].kind, 0, group->rank, -1);
        err_save(&failure);
        transport_fail(group->transport, &failure);
        group->transport->ops->message_nudge(group->transport);
        lane_wait(work, -1);
        return;
    }
}

fsdp_status lane_submit(fsdp_work *work, fsdp_work **handle)
{
    struct lane *lane = work->lane;
    if (handle && !work->n_ops && !work->n_transits) { /* nothing to do is done at once */
        ref_get(&work->ref);
        *handle = work;
        work_complete(work, FSDP_OK);
        return FSDP_OK;
    }
    int bounded = !handle && work->own_timeout && work->n_ops;
    if (bounded) work->end_ns = os_now_ns() + work->timeout_ms * 1000000;
    pthread_mutex_lock(&lane->lock);
    int queues = bounded && (lane->head || lane->busy); /* then others run it: this thread looks at the clock */
    fsdp_status status = handle || queues ? start_thread(lane) : FSDP_OK;
    if (status != FSDP_OK) {
        pthread_mutex_unlock(&lane->lock);
        work_release(work);
        return status;
    }
    if (!handle && lane->busy && pthread_equal(lane->advancing, pthread_self())) {
        pthread_mutex_unlock(&lane->lock);
        work_release(work);
        return err(FSDP_ERR_STATE,
                   "a call that waits for group '%s' inside one of its completion callbacks: take a work handle",
                   lane->group->name);
    }
    append(lane, work);
    if (lane->busy && lane->nudge) lane->nudge(lane);
    if (!handle && !lane->busy && !queues) advance(lane, work);
    if (lane->waiting) pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
    if (handle) {
        *handle = work;
        return FSDP_OK;
    }
    if (queues)
        wait_turn(work);
    else if (!atomic_load_explicit(&work->done, memory_order_acquire))
        lane_wait(work, -1);
    status = work_status(work);
    work_release(work);
    return status;
}

int lane_wait(fsdp_work *work, int64_t timeout_ms)
{
    struct lane *lane = work->lane;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&lane->lock);
    while (!atomic_load_explicit(&work->done, memory_order_acquire)) {
        if (lane->busy && pthread_equal(lane->advancing, pthread_self()))
            break; /* only this thread could complete it */
        if (timeout_ms < 0 && lane->head && !lane->busy) {
            advance(lane, work);
            continue;
        }
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (timeout_ms >= 0 &&
            (now.tv_sec > until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec >= until.tv_nsec)))
            break;
        sleep_on(lane, timeout_ms < 0 ? NULL : &until);
    }
    int done = atomic_load_explicit(&work->done, memory_order_acquire);
    pthread_mutex_unlock(&lane->lock);
    return done;
}

void lane_stop(struct lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    lane->stopping = 1;
    while (lane->head || lane->busy) {
        if (!lane->busy)
            advance(lane, NULL);
        else
            sleep_on(lane, NULL);
    }
    int joinable = lane->has_thread;
    pthread_t thread = lane->thread;
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
    if (joinable) pthread_join(thread, NULL);
}

/* ---- collectives */

void collectives_advance(struct lane *lane, fsdp_work *until)
{
    for (;;) {
        pthread_mutex_lock(&lane->lock);
        fsdp_work *work = lane->head;
        pthread_mutex_unlock(&lane->lock);
        if (!work) return;
        fsdp_status status = FSDP_OK;
        for (int32_t i = 0; i < work->n_ops && status == FSDP_OK; i++) status = op_run(work, &work->ops[i]);

        pthread_mutex_lock(&lane->lock);
        lane->head = work->next;
        if (!lane->head) lane->tail = NULL;
        pthread_mutex_unlock(&lane->lock);
        work_complete(work, status);
        if (work == until || !until) return; /* between works, let others look at the lane */
    }
}
