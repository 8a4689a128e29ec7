/* The store object: opens the backend that a URL or the environment names, and stands in front of it.
 *
 * Every call passes through enter(), which refuses a forked child and a malformed key and counts the calls
 * that are running; the backend serialises what it must. Reference counted; the last release closes the
 * backend on the calling thread. In a forked child the last release only abandons it: no thread of the parent
 * exists there, and its locks and half-done changes are frozen as they were at fork(), which is what the
 * count of running calls is for. */
#include "store/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "store/address.h"

#define DEFAULT_TIMEOUT_MS 300000

/* ---- Opening ------------------------------------------------------------------------------------------ */

static fsdp_status config_init(struct store_config *config, const fsdp_store_options *options)
{
    memset(config, 0, sizeof *config);
    config->timeout_ms = options->timeout_ms ? options->timeout_ms : DEFAULT_TIMEOUT_MS;
    CHECK_ARG(config->timeout_ms > 0, "options->timeout_ms is %" PRId64 ": expected milliseconds, or 0 for the default",
              config->timeout_ms);

    const char *key = options->job_key;
    const char *from = "options->job_key";
    if (!key) {
        key = getenv("FSDP_JOB_KEY");
        from = "the environment variable FSDP_JOB_KEY";
    }
    if (key) {
        size_t length = strlen(key);
        CHECK_ARG(length <= STORE_KEY_MAX, "%s has %zu bytes, at most %d are allowed", from, length, STORE_KEY_MAX);
        memcpy(config->job_key, key, length + 1);
    }
    if (options->world_size == 0) return FSDP_OK;
    CHECK_ARG(options->world_size > 0 && options->world_size <= STORE_WORLD_MAX,
              "options->world_size is %" PRId32 ": expected 1 to %d, or 0 to take it from the URL or the environment",
              options->world_size, STORE_WORLD_MAX);
    CHECK_ARG(options->rank >= 0 && options->rank < options->world_size,
              "options->rank %" PRId32 " is out of range: world_size %" PRId32 " has ranks 0 to %" PRId32,
              options->rank, options->world_size, options->world_size - 1);
    config->rank = options->rank;
    config->world_size = options->world_size;
    return FSDP_OK;
}

/* The URL's rank and world size must be those already known, if both are. */
static fsdp_status identity_from_url(struct store_config *config, const struct store_address *address, const char *from)
{
    if (address->world_size == 0) return FSDP_OK;
    CHECK_ARG(config->world_size == 0 || (config->rank == address->rank && config->world_size == address->world_size),
              "the URL says rank %" PRId32 " of %" PRId32 " but %s rank %" PRId32 " of %" PRId32
              ": give it in one place",
              address->rank, address->world_size, from, config->rank, config->world_size);
    config->rank = address->rank;
    config->world_size = address->world_size;
    return FSDP_OK;
}

/* What `url` comes to: config gets rank and world size, address a place to meet. STORE_ENV is left for one
 * rank that needs none. */
static fsdp_status resolve(const char *url, struct store_config *config, struct store_address *address)
{
    TRY(store_url_parse(url, address));
    TRY(identity_from_url(config, address, "options says"));

    enum store_launcher launcher = LAUNCHER_NONE;
    int given = config->world_size != 0;
    if (!given || address->scheme == STORE_ENV) {
        int32_t rank, world_size;
        fsdp_status status = store_env_identity(&launcher, &rank, &world_size);
        if (given) {
            if (status != FSDP_OK) launcher = LAUNCHER_NONE; /* the caller knows better than broken variables */
        } else {
            TRY(status);
            CHECK_ARG(launcher != LAUNCHER_NONE || address->scheme == STORE_ENV,
                      "nothing says which rank this is: add ?rank=R&world_size=N to url '%s', or set options->rank "
                      "and world_size, or start the job with a launcher that sets RANK and WORLD_SIZE",
                      url);
            config->rank = rank;
            config->world_size = launcher == LAUNCHER_NONE ? 0 : world_size;
        }
    }
    if (address->scheme != STORE_ENV) return FSDP_OK;

    /* Without a launcher a rank may still be named by the URL in FSDP_STORE; else it is alone. */
    if (config->world_size != 0 || store_env_has_url()) {
        if (config->world_size == 1) return FSDP_OK;
        TRY(store_env_address(launcher, config->world_size, address));
        TRY(identity_from_url(config, address, "the launcher or options say"));
    }
    if (config->world_size == 0) {
        config->world_size = 1;
        address->scheme = STORE_ENV;
    }
    return FSDP_OK;
}

static fsdp_status open_backend(const struct store_config *config, const struct store_address *address,
                                struct store_backend **out)
{
    switch (address->scheme) {
    case STORE_TCP:
        return store_tcp_open(&address->endpoint, config, out);
    case STORE_FILE:
        return store_file_open(address->path, config, out);
    case STORE_ENV:
        break;
    }
    return store_local_open(config, out);
}

static fsdp_store *store_new(const struct store_config *config)
{
    fsdp_store *store = mem_alloc(sizeof *store);
    if (!store) return NULL;
    ref_init(&store->ref, REF_STORE);
    store->rank = config->rank;
    store->world_size = config->world_size;
    store->timeout_ms = config->timeout_ms;
    return store;
}

fsdp_status store_open(const char *url, const fsdp_store_options *options, fsdp_store **out)
{
    struct store_config config;
    struct store_address address;
    TRY(config_init(&config, options));
    TRY(resolve(url, &config, &address));

    fsdp_store *store = store_new(&config);
    if (!store) return mem_none("a store", sizeof *store);
    fsdp_status status = open_backend(&config, &address, &store->backend);
    if (status != FSDP_OK) {
        mem_free(store);
        return status;
    }
    LOG(FSDP_LOG_INFO, "store: rank %" PRId32 " of %" PRId32 " has met the others (%s)", store->rank, store->world_size,
        store->backend->ops->name);
    *out = store;
    return FSDP_OK;
}

fsdp_status store_from_callbacks(const fsdp_store_callbacks *callbacks, const fsdp_store_options *options,
                                 fsdp_store **out)
{
    struct store_config config;
    TRY(config_init(&config, options));
    CHECK_ARG(config.world_size > 0, "options->rank and options->world_size are required for a store over callbacks");
    fsdp_store *store = store_new(&config);
    if (!store) return mem_none("a store", sizeof *store);
    fsdp_status status = store_callback_open(callbacks, &config, &store->backend);
    if (status != FSDP_OK) {
        mem_free(store);
        return status;
    }
    *out = store;
    return FSDP_OK;
}

/* ---- Calls -------------------------------------------------------------------------------------------- */

static fsdp_status enter(fsdp_store *store, const char *key)
{
    if (ref_forked(&store->ref))
        return err(FSDP_ERR_FORKED, "the store was opened before fork() and this is a forked child: open one here");
    CHECK_ARG(*key, "key is empty: a store key has 1 to %d bytes", STORE_KEY_MAX);
    size_t length = strnlen(key, STORE_KEY_MAX + 1);
    CHECK_ARG(length <= STORE_KEY_MAX, "key '%.40s...' is too long: a store key has 1 to %d bytes", key, STORE_KEY_MAX);
    atomic_fetch_add(&store->calls, 1);
    return FSDP_OK;
}

static fsdp_status leave(fsdp_store *store, fsdp_status status)
{
    atomic_fetch_sub(&store->calls, 1);
    return status;
}

fsdp_status store_set(fsdp_store *store, const char *key, const void *value, size_t bytes)
{
    CHECK_ARG(bytes <= STORE_VALUE_MAX, "value has %zu bytes, a store takes at most %d: tensors go through a group",
              bytes, STORE_VALUE_MAX);
    TRY(enter(store, key));
    return leave(store, store->backend->ops->set(store->backend, key, value, bytes));
}

fsdp_status store_get(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes)
{
    return store_get_within(store, key, buffer, capacity, bytes, store->timeout_ms);
}

fsdp_status store_get_within(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes,
                             int64_t timeout_ms)
{
    if (timeout_ms > store->timeout_ms) timeout_ms = store->timeout_ms;
    TRY(enter(store, key));
    return leave(store, store->backend->ops->get(store->backend, key, buffer, capacity, bytes, timeout_ms));
}

fsdp_status store_add(fsdp_store *store, const char *key, int64_t amount, int64_t *result)
{
    TRY(enter(store, key));
    return leave(store, store->backend->ops->add(store->backend, key, amount, result));
}

fsdp_status store_wait(fsdp_store *store, const char *key)
{
    TRY(enter(store, key));
    return leave(store, store->backend->ops->wait(store->backend, key));
}

int store_is(const fsdp_store *store)
{
    return store && ref_is(&store->ref, REF_STORE);
}

int32_t store_rank(const fsdp_store *store)
{
    return store->rank;
}

int32_t store_world_size(const fsdp_store *store)
{
    return store->world_size;
}

int64_t store_next_group(fsdp_store *store)
{
    return atomic_fetch_add(&store->groups, 1);
}

void store_retain(fsdp_store *store)
{
    ref_get(&store->ref);
}

void store_release(fsdp_store *store)
{
    if (!store || !ref_put(&store->ref)) return;
    if (ref_forked(&store->ref))
        store->backend->ops->abandon(store->backend, atomic_load(&store->calls) != 0);
    else
        store->backend->ops->close(store->backend);
    mem_free(store);
}

/* ---- What backends share ------------------------------------------------------------------------------ */

fsdp_status store_err_key_timeout(const char *key, int64_t timeout_ms)
{
    return err(FSDP_ERR_TIMEOUT,
               "store key '%s' was not set within %" PRId64
               " ms: the rank that sets it is late, has failed, or does not make the same calls; see its "
               "output, or raise timeout_ms",
               key, timeout_ms);
}

fsdp_status store_err_too_large(const char *key, size_t bytes, size_t capacity)
{
    return err(FSDP_ERR_INVALID, "the value of store key '%s' has %zu bytes but capacity is %zu: pass a larger buffer",
               key, bytes, capacity);
}

void store_list_ranks(char *text, size_t size, int32_t world_size, int (*is_missing)(const void *ctx, int32_t rank),
                      const void *ctx)
{
    size_t used = 0;
    text[0] = 0;
    for (int32_t first = 0, next; first < world_size; first = next) {
        next = first + 1;
        if (!is_missing(ctx, first)) continue;
        while (next < world_size && is_missing(ctx, next)) next++;
        if (used + 32 > size) {
            snprintf(text + used, size - used, ", ...");
            return;
        }
        const char *comma = used ? ", " : "";
        int wrote = next - first == 1
                        ? snprintf(text + used, size - used, "%s%" PRId32, comma, first)
                        : snprintf(text + used, size - used, "%s%" PRId32 "-%" PRId32, comma, first, next - 1);
        used += (size_t)wrote;
    }
    if (used == 0) snprintf(text, size, "none, but some came and gave up before others");
}
