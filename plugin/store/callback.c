/* A store over the host's own key-value service. The callbacks run on the thread that makes the library call,
 * with no lock held, and so several at once when the host calls from several threads: serialising them, where
 * its service needs that, is the host's part. No meeting is done here; creating a group finds out who is
 * there. */
#include <inttypes.h>

#include "base/mem.h"
#include "store/store_backend.h"

struct callback {
    struct store_backend base;
    int64_t timeout_ms;
    fsdp_store_callbacks host; /* never changes */
};

static fsdp_status outcome(int64_t timeout_ms, int32_t code, const char *function, const char *key)
{
    if (code == 0) return FSDP_OK;
    if (code == 1)
        return err(FSDP_ERR_TIMEOUT,
                   "the host's store callback %s('%s') reported that its time is up (it was given %" PRId64
                   " ms): a rank may be missing",
                   function, key, timeout_ms);
    return err(FSDP_ERR_CALLBACK,
               "the host's store callback %s('%s') failed with %" PRId32 ": look at the host's own log", function, key,
               code);
}

static fsdp_status callback_set(struct store_backend *base, const char *key, const void *value, size_t bytes)
{
    struct callback *self = (struct callback *)base;
    return outcome(self->timeout_ms, self->host.set(self->host.user, key, value, bytes), "set", key);
}

static fsdp_status callback_get(struct store_backend *base, const char *key, void *buffer, size_t capacity,
                                size_t *bytes, int64_t timeout_ms)
{
    struct callback *self = (struct callback *)base;
    size_t have = 0;
    int32_t code = self->host.get(self->host.user, key, buffer, capacity, &have, timeout_ms);
    if (code != 1 && have > capacity) {
        if (code == 0)
            return err(FSDP_ERR_CALLBACK,
                       "the host's store callback get('%s') reported success with %zu bytes in a buffer of "
                       "%zu: it must fail when the value does not fit",
                       key, have, capacity);
        *bytes = have;
        return store_err_too_large(key, have, capacity);
    }
    TRY(outcome(timeout_ms, code, "get", key));
    *bytes = have;
    return FSDP_OK;
}

static fsdp_status callback_add(struct store_backend *base, const char *key, int64_t amount, int64_t *result)
{
    struct callback *self = (struct callback *)base;
    int64_t sum = 0;
    TRY(outcome(self->timeout_ms, self->host.add(self->host.user, key, amount, &sum), "add", key));
    *result = sum;
    return FSDP_OK;
}

static fsdp_status callback_wait(struct store_backend *base, const char *key)
{
    struct callback *self = (struct callback *)base;
    return outcome(self->timeout_ms, self->host.wait(self->host.user, key, self->timeout_ms), "wait", key);
}

static void callback_close(struct store_backend *base)
{
    struct callback *self = (struct callback *)base;
    if (self->host.release) self->host.release(self->host.user);
    mem_free(self);
}

/* The host's service belongs to the parent: `release` is not called in a child. */
static void callback_abandon(struct store_backend *base, int torn)
{
    (void)torn;
    mem_free(base);
}

static const struct store_backend_ops callback_ops = {
    .name = "callbacks",
    .set = callback_set,
    .get = callback_get,
    .add = callback_add,
    .wait = callback_wait,
    .close = callback_close,
    .abandon = callback_abandon,
};

fsdp_status store_callback_open(const fsdp_store_callbacks *callbacks, const struct store_config *config,
                                struct store_backend **out)
{
    struct callback *self = mem_alloc(sizeof *self);
    if (!self) return mem_none("a store", sizeof *self);
    self->base.ops = &callback_ops;
    self->timeout_ms = config->timeout_ms;
    self->host = *callbacks;
    *out = &self->base;
    return FSDP_OK;
}
