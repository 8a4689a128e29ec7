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
    static const char *const names[] = {
        [FSDP_OP_NONE] = "no operation",
        [FSDP_OP_ALL_GATHER] = "all_gather",
        [FSDP_OP_REDUCE_SCATTER] = "reduce_scatter",
        [FSDP_OP_ALL_REDUCE] = "all_reduce",
        [FSDP_OP_REDUCE] = "reduce",
        [FSDP_OP_BROADCAST] = "broadcast",
        [FSDP_OP_GATHER] = "gather",
        [FSDP_OP_SCATTER] = "scatter",
        [FSDP_OP_ALL_TO_ALL] = "all_to_all",
        [FSDP_OP_SEND] = "send",
        [FSDP_OP_RECV] = "recv",
        [FSDP_OP_BARRIER] = "barrier",
        [FSDP_OP_SPLIT] = "split",
        [FSDP_OP_UNSHARD] = "unshard",
        [FSDP_OP_REDUCE_GRADS] = "reduce_grads",
        [FSDP_OP_CREATE_UNIT] = "create_unit",
        [FSDP_OP_RESET] = "reset",
        [FSDP_OP_GRAD_NORM] = "grad_norm",
        [FSDP_OP_CLIP_GRAD_NORM] = "clip_grad_norm",
        [FSDP_OP_UNSCALE] = "unscale",
        [FSDP_OP_CREATE_MESH] = "create_mesh",
        [FSDP_OP_CREATE_SLOT] = "unshard", /* the first one that needs a slot makes it */
        [FSDP_OP_REPLICATE_GRADS] = "replicate_grads",
        [FSDP_OP_SYNC_STATES] = "sync_module_states",
        [FSDP_OP_GATHER_PARAM] = "gather_param",
        [FSDP_OP_GATHER_STATE] = "gather_state",
        [FSDP_OP_LOAD_STATE] = "load_state_dict",
        [FSDP_OP_SAVE_STATE] = "checkpoint_save",
    };
    return kind >= 0 && kind < (int)(sizeof names / sizeof *names) ? names[kind] : "an unknown operation";
}
