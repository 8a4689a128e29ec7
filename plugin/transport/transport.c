/* What all transports share: the record of the failure that ended a group. See transport.h. */
#include "transport/transport.h"

#include <pthread.h>

static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;

void transport_fail(struct transport *t, const fsdp_error_info *info)
{
    pthread_mutex_lock(&failure_lock);
    int first = !atomic_load_explicit(&t->failed, memory_order_relaxed);
    if (first) {
        t->failure = *info;
        atomic_store_explicit(&t->failed, 1, memory_order_release);
    }
    pthread_mutex_unlock(&failure_lock);
    if (first && t->ops->fail) t->ops->fail(t);
}

fsdp_status transport_status(struct transport *t)
{
    if (!atomic_load_explicit(&t->failed, memory_order_acquire)) return FSDP_OK;
    return err_restore(&t->failure);
}

const char *call_kind_name(fsdp_op_kind kind)
{
    static const char *const names[] = {
        "no operation", "all_gather",  "reduce_scatter", "all_reduce", "reduce",         "broadcast", "gather",
        "scatter",      "all_to_all",  "send",           "recv",       "barrier",        "split",     "unshard",
        "reduce_grads", "create_unit", "reset",          "grad_norm",  "clip_grad_norm", "unscale"};
    return kind >= 0 && kind < (int)(sizeof names / sizeof *names) ? names[kind] : "an unknown operation";
}
