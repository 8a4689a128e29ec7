/* Work handles: memory, completion and waiting. See group.h.
 *
 * A work has one reference for its queue (dropped on completion) and one for its user. It also holds its group's
 * memory, so that a handle may outlive the group. */
#include "group/group.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

int work_is(const fsdp_work *work)
{
    return work && ref_is(&work->ref, REF_WORK);
}

struct block {
    struct block *next;
    _Alignas(16) char data[];
};

void *work_memory(fsdp_work *work, size_t bytes)
{
    struct block *block = mem_alloc(sizeof *block + bytes);
    if (!block) {
        mem_none("an operation", bytes);
        return NULL;
    }
    block->next = work->blocks;
    work->blocks = block;
    return block->data;
}

/* The calling thread's, see work_set_thread_timeout. A work takes it, or its group's, when it is made, on the thread
 * that makes the call: what another thread sets meanwhile is no concern of it. */
static _Thread_local int64_t thread_timeout_ms;

fsdp_status work_set_thread_timeout(int64_t timeout_ms)
{
    CHECK_ARG(timeout_ms >= 0, "timeout_ms is %lld: give milliseconds, or 0 for the group's", (long long)timeout_ms);
    thread_timeout_ms = timeout_ms < GROUP_TIMEOUT_MOST_MS ? timeout_ms : GROUP_TIMEOUT_MOST_MS;
    return FSDP_OK;
}

struct deadline work_deadline(const fsdp_work *work, fsdp_op_kind kind, uint64_t sequence)
{
    return (struct deadline){.at_ns = work->end_ns ? work->end_ns : os_now_ns() + work->timeout_ms * 1000000,
                             .timeout_ms = work->timeout_ms,
                             .doing = call_kind_name(kind),
                             .kind = kind,
                             .sequence = sequence};
}

fsdp_status work_create(fsdp_group *group, struct lane *lane, int32_t n_ops, int32_t n_transits, fsdp_work **out)
{
    /* One block: most works have one operation. */
    size_t ops_at = (sizeof(fsdp_work) + 15) & ~(size_t)15, transits_at = ops_at + (size_t)n_ops * sizeof(struct op);
    size_t bytes = transits_at + (size_t)n_transits * sizeof(struct transit);
    char *block = mem_alloc(bytes);
    if (!block) return mem_none("an operation", bytes);
    fsdp_work *work = (fsdp_work *)block;
    ref_init(&work->ref, REF_WORK);
    work->group = group;
    work->lane = lane;
    work->own_timeout = thread_timeout_ms > 0;
    work->timeout_ms = work->own_timeout ? thread_timeout_ms : atomic_load(&group->timeout_ms);
    work->n_ops = n_ops;
    work->ops = (struct op *)(block + ops_at);
    work->n_transits = n_transits;
    work->transits = (struct transit *)(block + transits_at);
    group_hold(group);
    *out = work;
    return FSDP_OK;
}

static void keeps_release(struct keep *keep)
{
    while (keep) {
        struct keep *next = keep->next;
        keep->release(keep->owner);
        mem_free(keep);
        keep = next;
    }
}

static void free_packed(fsdp_group *group, struct packed *list)
{
    for (; list; list = list->next) {
        if (!list->bytes) continue;
        if (ref_forked(&group->ref)) /* the pool's lock may be another thread's of the parent */
            os_unmap(list->copy.data, list->bytes);
        else
            pool_give(&group->pool, list->copy.data, list->bytes);
    }
}

/* Once the operations are over; a handle may be kept for long after. */
static void packed_free_all(fsdp_work *work)
{
    for (int32_t i = 0; i < work->n_ops; i++) {
        free_packed(work->group, work->ops[i].packed);
        work->ops[i].packed = NULL;
    }
    for (int32_t i = 0; i < work->n_transits; i++) {
        free_packed(work->group, work->transits[i].packed);
        work->transits[i].packed = NULL;
    }
}

void work_release(fsdp_work *work)
{
    if (!work || !ref_put(&work->ref)) return;
    packed_free_all(work);
    /* Keeps of a work that was never submitted: their owners were told that keeping succeeded. */
    keeps_release(work->keeps);
    for (struct block *block = work->blocks; block;) {
        struct block *next = block->next;
        mem_free(block);
        block = next;
    }
    group_unhold(work->group);
    mem_free(work);
}

fsdp_status work_pack(fsdp_work *work, struct packed **list, const struct tensor *tensor, enum dtype type,
                      enum pack_way way, char **data)
{
    if ((tensor->contiguous && tensor->type == type) || !tensor->count) {
        *data = tensor->data;
        return FSDP_OK;
    }
    struct packed *packed = work_memory(work, sizeof *packed);
    void *copy;
    if (!packed) return FSDP_ERR_NOMEM;
    size_t bytes = os_page_round((size_t)tensor->count * dtype_size(type));
    TRY(pool_take(&work->group->pool, bytes, &copy));
    packed->bytes = bytes;
    packed->tensor = *tensor;
    tensor_make(&packed->copy, copy, type, tensor->ndim, tensor->shape);
    packed->way = way;
    packed->next = *list;
    *list = packed;
    *data = copy;
    return FSDP_OK;
}

fsdp_status work_copy(fsdp_work *work, struct packed **list, struct tensor *t)
{
    struct packed *packed = work_memory(work, sizeof *packed);
    size_t bytes = os_page_round(t->bytes);
    void *copy;
    if (!packed) return FSDP_ERR_NOMEM;
    if (!t->count) return FSDP_OK;
    TRY(pool_take(&work->group->pool, bytes, &copy));
    packed->next = *list;
    packed->bytes = bytes;
    tensor_make(&packed->copy, copy, t->type, t->ndim, t->shape);
    *list = packed;
    tensor_copy(&packed->copy, t);
    *t = packed->copy;
    return FSDP_OK;
}

void packed_fill(const struct packed *list)
{
    for (; list; list = list->next)
        if (list->way & PACK_IN) tensor_copy(&list->copy, &list->tensor);
}

void packed_store(const struct packed *list)
{
    for (; list; list = list->next)
        if (list->way & PACK_OUT) tensor_copy(&list->tensor, &list->copy);
}

fsdp_status work_addresses(fsdp_work *work, struct transfer *transfer)
{
    if (!work->group->transport->direct_read || transfer->n_pieces <= 1) return FSDP_OK;
    size_t n = 2 * (size_t)transfer->n_pieces * ((size_t)work->group->size + 1);
    transfer->addresses = work_memory(work, n * sizeof *transfer->addresses);
    return transfer->addresses ? FSDP_OK : FSDP_ERR_NOMEM;
}

/* ---- completion */

void work_complete(fsdp_work *work, fsdp_status status)
{
    struct lane *lane = work->lane;
    if (status != FSDP_OK) err_save(&work->failure);
    packed_free_all(work);
    pthread_mutex_lock(&lane->lock);
    work->completing = 1; /* a keep that comes from here on is served by its caller */
    struct keep *keeps = work->keeps;
    work->keeps = NULL;
    pthread_mutex_unlock(&lane->lock);

    keeps_release(keeps);

    pthread_mutex_lock(&lane->lock);
    atomic_store_explicit(&work->done, 1, memory_order_release); /* so is a callback from here on */
    fsdp_done_fn fn = work->on_done;
    void *user = work->on_done_user;
    if (lane->waiting) pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
    if (fn) fn(work_status(work), user);
    work_release(work);
}

fsdp_status work_status(fsdp_work *work)
{
    return work->failure.status == FSDP_OK ? FSDP_OK : err_restore(&work->failure);
}

fsdp_status work_source(fsdp_work *work, int32_t *rank)
{
    if (work->n_transits != 1 || work->transits[0].message.sending)
        return err(FSDP_ERR_STATE, "this work is not that of one recv: only a recv has a source");
    if (!atomic_load_explicit(&work->done, memory_order_acquire))
        return err(FSDP_ERR_STATE, "the recv is not complete: wait for it first");
    TRY(work_status(work));
    *rank = work->transits[0].message.source;
    return FSDP_OK;
}

fsdp_status work_keep(fsdp_work *work, void (*release)(void *owner), void *owner)
{
    struct keep *keep = NULL;
    struct lane *lane = work->lane;
    if (!atomic_load_explicit(&work->done, memory_order_acquire)) {
        keep = mem_alloc(sizeof *keep);
        if (!keep) return mem_none("keeping a tensor", sizeof *keep);
        *keep = (struct keep){.release = release, .owner = owner};
        pthread_mutex_lock(&lane->lock);
        int late = work->completing;
        if (!late) {
            keep->next = work->keeps;
            work->keeps = keep;
        }
        pthread_mutex_unlock(&lane->lock);
        if (!late) return FSDP_OK;
        mem_free(keep);
    }
    release(owner);
    return FSDP_OK;
}

fsdp_status work_on_done(fsdp_work *work, fsdp_done_fn fn, void *user)
{
    struct lane *lane = work->lane;
    pthread_mutex_lock(&lane->lock);
    int taken = work->on_done != NULL;
    int late = atomic_load_explicit(&work->done, memory_order_relaxed);
    if (!taken) {
        work->on_done = fn;
        work->on_done_user = user;
    }
    pthread_mutex_unlock(&lane->lock);
    if (taken) return err(FSDP_ERR_STATE, "this work has a callback already: one for each handle");
    if (late) fn(work_status(work), user);
    return FSDP_OK;
}

fsdp_status work_wait(fsdp_work *work, int64_t timeout_ms)
{
    if (!atomic_load_explicit(&work->done, memory_order_acquire) && !lane_wait(work, timeout_ms))
        return lane_is_advanced_here(work->lane)
                   ? err(FSDP_ERR_STATE,
                         "waiting for group '%s' inside one of its completion callbacks: it can't go on "
                         "until the callback returns",
                         work->group->name)
                   : err(FSDP_ERR_PENDING, "not complete after %lld ms: the operation goes on", (long long)timeout_ms);
    return work_status(work);
}
