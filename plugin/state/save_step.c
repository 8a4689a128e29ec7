/* The steps of a save: each rank does its part, and all tell each other how they fare until all are through, or one is
 * not. A failure on one rank so ends the save on all, and nobody waits for one that has gone another way.
 *
 * A disk may take any time for one call, a sync above all, while the others would take a rank for dead of which they
 * hear nothing for longer than the group's timeout. So a rank's part is done by a thread of the save's, the writer,
 * while the save's own thread takes part in round after round, in which each tells whether it is through. There are as
 * many as it takes: the operation of the next one is prepared while there is still one to tell in that it could not be.
 *
 * Threads: one job at a time is handed over under the writer's lock; what it uses of the save is the writer's until it
 * is through. Only the save's thread uses the group.
 */
#include "state/save.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define ROUND_NS ((int64_t)1000000000) /* at most until a rank that writes hears that another has failed */

/* ---- the writer */

static void *write_on(void *argument)
{
    fsdp_save *save = argument;
    struct save_writer *w = &save->writer;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->job && !w->quit) pthread_cond_wait(&w->changed, &w->lock);
        if (!w->job) break;
        fsdp_status (*job)(fsdp_save *) = w->job;
        pthread_mutex_unlock(&w->lock);
        fsdp_status status = job(save);
        if (status != FSDP_OK) err_save(&w->failure);
        pthread_mutex_lock(&w->lock);
        w->status = status;
        w->job = NULL;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

fsdp_status save_writer_start(fsdp_save *save)
{
    int failed = os_thread_start(&save->writer.thread, write_on, save);
    if (failed) return err_sys(FSDP_ERR_NOMEM, failed, "a thread for writing");
    save->writer.started = 1;
    return FSDP_OK;
}

void save_writer_stop(fsdp_save *save)
{
    struct save_writer *w = &save->writer;
    if (!w->started) return;
    pthread_mutex_lock(&w->lock);
    w->quit = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    w->started = 0;
}

static void job_begin(struct save_writer *w, fsdp_status (*job)(fsdp_save *))
{
    pthread_mutex_lock(&w->lock);
    w->job = job;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Wait for it, for so long (< 0: to its end). 1: it is through, and *status is its. */
static int job_ended(struct save_writer *w, int64_t ns, fsdp_status *status)
{
    int late = 0;
    int64_t end = os_now_ns() + ns;
    struct timespec at = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    pthread_mutex_lock(&w->lock);
    while (w->job && !late)
        late = ns < 0 ? pthread_cond_wait(&w->changed, &w->lock) : pthread_cond_timedwait(&w->changed, &w->lock, &at);
    int ended = !w->job;
    pthread_mutex_unlock(&w->lock);
    if (!ended) return 0;
    *status = w->status;
    if (w->status != FSDP_OK) err_restore(&w->failure);
    return 1;
}

fsdp_status save_goes_on(void *user)
{
    fsdp_save *save = user;
    return atomic_load_explicit(&save->writer.stop, memory_order_relaxed)
               ? err(FSDP_ERR_ABORTED, "saving to '%.200s' has ended on another rank", save->path)
               : FSDP_OK;
}

/* ---- steps */

/* All ranks' `mine`; an error is the first one that any rank tells, on all ranks alike. */
static fsdp_status round_of_all(fsdp_save *save, enum save_step which, fsdp_status status, int *heard)
{
    fsdp_error_info failure;
    fsdp_work *next = NULL;
    if (status == FSDP_OK && save->group) status = group_prepare(save->group, &next);
    err_save(&failure);
    save->mine.status = status;
    if (status != FSDP_OK) snprintf(save->mine.message, sizeof save->mine.message, "%.490s", failure.message);
    *heard = 0;
    fsdp_status told = FSDP_OK;
    if (!save->group)
        save->all[0] = save->mine;
    else
        told = group_exchange_prepared(save->group, &save->round, FSDP_OP_SAVE_STATE, HASH_START + (uint64_t)which,
                                       &save->mine, sizeof save->mine, save->all);
    work_release(save->round);
    save->round = next;
    TRY(told);
    *heard = 1;
    for (int r = 0; r < save->size; r++) {
        struct told *other = &save->all[r];
        if (other->status == FSDP_OK) continue;
        if (r == save->rank) return err_restore(&failure);
        other->message[sizeof other->message - 1] = 0;
        return err(other->status, "saving to '%.200s': rank %d reported: %s", save->path, r, other->message);
    }
    return FSDP_OK;
}

fsdp_status save_step(fsdp_save *save, enum save_step which, fsdp_status status, fsdp_status (*job)(fsdp_save *),
                      int *heard)
{
    struct save_writer *w = &save->writer;
    int works = status == FSDP_OK && job && w->started, all_through;
    if (status == FSDP_OK && job && !works) status = job(save);
    save->mine = (struct told){0};
    if (works) job_begin(w, job);
    do {
        if (works) works = !job_ended(w, save->round_ns, &status);
        if (!works) {
            save->mine.through = 1;
            save->mine.committed = save->committed;
            memcpy(save->mine.number, save->number, sizeof save->number);
        }
        status = round_of_all(save, which, status, heard);
        all_through = 1;
        for (int r = 0; r < save->size && status == FSDP_OK; r++) all_through &= save->all[r].through;
    } while (status == FSDP_OK && !all_through);
    if (!works) return status;
    fsdp_error_info failure;
    err_save(&failure);
    atomic_store(&w->stop, 1);
    (void)job_ended(w, -1, &status);
    return err_restore(&failure);
}

void save_rounds_set(fsdp_save *save, int64_t timeout_ns)
{
    save->round_ns = timeout_ns / 4 < ROUND_NS ? timeout_ns / 4 : ROUND_NS;
}
