/* A chained hash table from key to value: see table.h. Grows by doubling; an entry is one block that holds
 * its key, and a second one for the value, so that a value is replaced without touching the chain. */
#include "store/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"

struct table_entry {
    struct table_entry *next;
    uint64_t hash;
    void *value;
    size_t value_bytes, key_bytes;
    unsigned char key[];
};

static struct table_entry *find(const struct store_table *table, uint64_t hash, const void *key, size_t key_bytes)
{
    if (!table->n_buckets) return NULL;
    struct table_entry *e = table->buckets[hash & (table->n_buckets - 1)];
    while (e && !(e->hash == hash && e->key_bytes == key_bytes && memcmp(e->key, key, key_bytes) == 0)) e = e->next;
    return e;
}

/* Failure to grow is no failure while there is a table at all: chains get longer. */
static int grow(struct store_table *table)
{
    size_t n = table->n_buckets ? table->n_buckets * 2 : 64;
    struct table_entry **buckets = mem_array(n, sizeof *buckets);
    if (!buckets) return table->n_buckets != 0;
    for (size_t i = 0; i < table->n_buckets; i++)
        for (struct table_entry *e = table->buckets[i], *next; e; e = next) {
            next = e->next;
            e->next = buckets[e->hash & (n - 1)];
            buckets[e->hash & (n - 1)] = e;
        }
    mem_free(table->buckets);
    table->buckets = buckets;
    table->n_buckets = n;
    return 1;
}

fsdp_status store_table_set(struct store_table *table, const void *key, size_t key_bytes, const void *value,
                            size_t value_bytes)
{
    void *copy = mem_alloc(value_bytes);
    if (!copy) return mem_none("a store value", value_bytes);
    if (value_bytes) memcpy(copy, value, value_bytes);

    uint64_t hash = hash_bytes(HASH_START, key, key_bytes);
    struct table_entry *e = find(table, hash, key, key_bytes);
    if (!e) {
        e = mem_alloc(sizeof *e + key_bytes);
        if (!e || (table->n_entries >= table->n_buckets && !grow(table))) {
            mem_free(e);
            mem_free(copy);
            return mem_none("a store key", sizeof *e + key_bytes);
        }
        e->hash = hash;
        e->key_bytes = key_bytes;
        memcpy(e->key, key, key_bytes);
        e->next = table->buckets[hash & (table->n_buckets - 1)];
        table->buckets[hash & (table->n_buckets - 1)] = e;
        table->n_entries++;
    }
    mem_free(e->value);
    e->value = copy;
    e->value_bytes = value_bytes;
    return FSDP_OK;
}

int store_table_get(const struct store_table *table, const void *key, size_t key_bytes, const void **value,
                    size_t *value_bytes)
{
    const struct table_entry *e = find(table, hash_bytes(HASH_START, key, key_bytes), key, key_bytes);
    if (!e) return 0;
    *value = e->value;
    *value_bytes = e->value_bytes;
    return 1;
}

fsdp_status store_table_sum(const struct store_table *table, const void *key, size_t key_bytes, int64_t amount,
                            int64_t *result)
{
    const void *value;
    size_t bytes;
    int64_t now = 0;
    if (store_table_get(table, key, key_bytes, &value, &bytes)) {
        char text[32] = {0};
        char *end = text;
        if (bytes > 0 && bytes < sizeof text) {
            memcpy(text, value, bytes);
            now = strtoll(text, &end, 10);
        }
        CHECK_ARG(end != text && (size_t)(end - text) == bytes,
                  "store key '%.*s' holds %zu bytes that are not a decimal integer: add to a key of its own",
                  (int)key_bytes, (const char *)key, bytes);
    }
    CHECK_ARG(!__builtin_add_overflow(now, amount, result),
              "store key '%.*s': %" PRId64 " + %" PRId64 " does not fit in 64 bits", (int)key_bytes, (const char *)key,
              now, amount);
    return FSDP_OK;
}

fsdp_status store_table_add(struct store_table *table, const void *key, size_t key_bytes, int64_t amount,
                            int64_t *result)
{
    int64_t sum;
    TRY(store_table_sum(table, key, key_bytes, amount, &sum));
    char text[32];
    int length = snprintf(text, sizeof text, "%" PRId64, sum);
    TRY(store_table_set(table, key, key_bytes, text, (size_t)length));
    *result = sum;
    return FSDP_OK;
}

void store_table_free(struct store_table *table)
{
    for (size_t i = 0; i < table->n_buckets; i++)
        for (struct table_entry *e = table->buckets[i], *next; e; e = next) {
            next = e->next;
            mem_free(e->value);
            mem_free(e);
        }
    mem_free(table->buckets);
    memset(table, 0, sizeof *table);
}
