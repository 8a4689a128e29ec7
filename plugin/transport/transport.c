/* What all transports share: the record of the failure that ended a group. See transport.h. */
#include "transport/transport.h"

void transport_fail(struct transport *t, const fsdp_error_info *info)
{
    int none = 0; /* no lock: a child may have been forked while another thread held it */
    if (!atomic_compare_exchange_strong(&t->failed, &none, -1)) return;
    t->failure = *info;
    atomic_store_explicit(&t->failed, 1, memory_order_release);
    if (t->ops->fail) t->ops->fail(t);
}

fsdp_status transport_status(struct transport *t)
{
    if (atomic_load_explicit(&t->failed, memory_order_acquire) != 1) return FSDP_OK;
    return err_restore(&t->failure);
}

const char *call_kind_name(fsdp_op_kind kind)
{
    static const char *const names[] = {"no operation",
                                        "all_gather",
                                        "reduce_scatter",
                                        "all_reduce",
                                        "reduce",
                                        "broadcast",
                                        "gather",
                                        "scatter",
                                        "all_to_all",
                                        "send",
                                        "recv",
                                        "barrier",
                                        "split",
                                        "unshard",
                                        "reduce_grads",
                                        "create_unit",
                                        "reset",
                                        "grad_norm",
                                        "clip_grad_norm",
                                        "unscale",
                                        "create_mesh",
                                        "unshard",
                                        "replicate_grads",
                                        "sync_module_states"}; /* a slot is made by the first unshard that needs it */
    return kind >= 0 && kind < (int)(sizeof names / sizeof *names) ? names[kind] : "an unknown operation";
}
