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
    }
    pthread_mutex_unlock(&pool->lock);
    return *out ? FSDP_OK : os_map_anonymous(bytes, out);
}

void pool_give(struct pool *pool, void *at, size_t bytes)
{
    pthread_mutex_lock(&pool->lock);
    unsigned i = 0;
    while (i < POOL_BUFFERS && pool->at[i]) i++;
    if (i == POOL_BUFFERS) i = pool->next++ % POOL_BUFFERS; /* in place of one that nobody may ask for any more */
    void *old = pool->at[i];
    size_t old_bytes = pool->bytes[i];
    pool->at[i] = at;
    pool->bytes[i] = bytes;
    pthread_mutex_unlock(&pool->lock);
    os_unmap(old, old_bytes);
}
