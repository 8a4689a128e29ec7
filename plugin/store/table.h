/* Keys and values in memory: what the tcp server serves, what a file's log is replayed into, and all that the
 * local backend has. No locking: the owner of a table serialises its use. Keys are bytes with a length, since
 * they may come off a wire. */
#ifndef FSDP_STORE_TABLE_H
#define FSDP_STORE_TABLE_H

#include "store/store_backend.h"

struct store_table {
    struct table_entry **buckets;
    size_t n_buckets, n_entries;
};

/* All zero is an empty table. A failure leaves the table as it was. */
fsdp_status store_table_set(struct store_table *table, const void *key, size_t key_bytes, const void *value,
                            size_t value_bytes);
/* 1 and the value, owned by the table and valid until the key is set again; or 0. */
int store_table_get(const struct store_table *table, const void *key, size_t key_bytes, const void **value,
                    size_t *value_bytes);
fsdp_status store_table_add(struct store_table *table, const void *key, size_t key_bytes, int64_t amount,
                            int64_t *result);
/* What `add` would give, without changing the table. */
fsdp_status store_table_sum(const struct store_table *table, const void *key, size_t key_bytes, int64_t amount,
                            int64_t *result);
void store_table_free(struct store_table *table);

#endif
