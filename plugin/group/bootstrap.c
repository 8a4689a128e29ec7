/* Meeting to make a group: an all-gather of small blobs, before there is any transport, through a store or through the
 * parent group. */
#include "group/bootstrap.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

fsdp_status bootstrap_store(void *context, const void *in, size_t bytes, void *out)
{
    struct bootstrap *b = context;
    char key[96];
    snprintf(key, sizeof key, "fsdp/group%lld/%d/%d", (long long)b->number, b->round, b->rank);
    TRY(store_set(b->store, key, in, bytes));
    for (int r = 0; r < b->size; r++) {
        char *to = (char *)out + (size_t)r * bytes;
        if (r == b->rank) {
            memcpy(to, in, bytes);
            continue;
        }
        snprintf(key, sizeof key, "fsdp/group%lld/%d/%d", (long long)b->number, b->round, r);
        size_t got = 0;
        int64_t left = (b->deadline_ns - os_now_ns()) / 1000000;
        fsdp_status status = store_get_within(b->store, key, to, bytes, &got, left > 0 ? left : 0);
        if (status != FSDP_OK) return err_prefix(status, "making group '%s', waiting for rank %d: ", b->name, r);
        if (got != bytes)
            return err(FSDP_ERR_RENDEZVOUS,
                       "group '%s': rank %d sent %zu bytes, not %zu: do all ranks load the same libfsdp?", b->name, r,
                       got, bytes);
    }
    b->round++;
    return FSDP_OK;
}

/* All ranks of the parent exchange; those of this rank's colour are picked, in the new order. */
fsdp_status bootstrap_parent(void *context, const void *in, size_t bytes, void *out)
{
    struct bootstrap *b = context;
    if (bytes > BOOTSTRAP_BYTES) return err(FSDP_ERR_INTERNAL, "%zu bytes to meet with", bytes);
    fsdp_status status =
        group_exchange_prepared(b->parent, &b->exchange, FSDP_OP_SPLIT, SPLIT_MEETING, in, bytes, b->all);
    for (int r = 0; status == FSDP_OK && r < b->size; r++)
        memcpy((char *)out + (size_t)r * bytes, b->all + (size_t)b->parent_ranks[r] * bytes, bytes);
    b->round++;
    return status;
}
