/* Buffers for packed copies, kept from one work to the next: what an iteration needs, it needs again in the next one,
 * and fresh pages cost more than the copy that fills them. See group.h.
 *
 * A buffer goes to the next work that asks for as much. The few that are kept were all in use at one time, so they are
 * no more than the most that was ever needed at once. Taken by the thread that makes a work, given back by the one that
 * lets go of it: under a lock of its own. */
#include "group/group.h"

void pool_init(struct pool *pool)
{
    pthread_mutex_init(&pool->lock, NULL);
}

void pool_destroy(struct pool *pool)
{
    for (int i = 0; i < POOL_BUFFERS; i++) os_unmap(pool->at[i], pool->bytes[i]);
    pthread_mutex_destroy(&pool->lock);
}

fsdp_status pool_take(struct pool *pool, size_t bytes, void **out)
{
    *out = NULL;
    pthread_mutex_lock(&pool->lock);
    for (int i = 0; i < POOL_BUFFERS && !*out; i++) {
        if (!pool->at[i] || pool->bytes[i] != bytes) continue;
        *out = pool->at[i];
        pool->at[i] = NULL;
        pool->kept -= bytes;
    }
    pool->out += bytes;
    if (pool->out > pool->most) pool->most = pool->out;
    pthread_mutex_unlock(&pool->lock);
    fsdp_status status = *out ? FSDP_OK : os_map_anonymous(bytes, out);
    if (status == FSDP_OK) return FSDP_OK;
    pthread_mutex_lock(&pool->lock);
    pool->out -= bytes;
    pthread_mutex_unlock(&pool->lock);
    return status;
}

void pool_give(struct pool *pool, void *at, size_t bytes)
{
    void *old[POOL_BUFFERS + 1];
    size_t old_bytes[POOL_BUFFERS + 1];
    int n = 0;
    pthread_mutex_lock(&pool->lock);
    pool->out -= bytes;
    pool->kept += bytes;
    /* The oldest go, until what is kept was in use at one time. */
    for (unsigned k = 0; k < POOL_BUFFERS; k++) {
        unsigned i = (pool->next + k) % POOL_BUFFERS;
        if (!pool->at[i] || (pool->kept + pool->out <= pool->most && k > 0)) continue;
        old[n] = pool->at[i];
        old_bytes[n++] = pool->bytes[i];
        pool->kept -= pool->bytes[i];
        pool->at[i] = NULL;
    }
    pool->at[pool->next] = at;
    pool->bytes[pool->next] = bytes;
    pool->next = (pool->next + 1) % POOL_BUFFERS;
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < n; i++) os_unmap(old[i], old_bytes[i]);
}
