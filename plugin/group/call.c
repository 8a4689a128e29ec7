/* Calls: what the ranks of a collective must agree on, and how a difference is told.
 *
 * Every exchange carries each rank's call_header. All ranks see the same headers, compare each with rank 0's, and so
 * come to the same verdict in the same words. The payload of unit calls begins with the unit's name (CALL_LABEL bytes).
 */
#include "group/group.h"

#include <stdio.h>
#include <string.h>

static const char *reduce_name(int32_t op)
{
    static const char *const names[] = {"sum", "avg", "prod", "min", "max", "band", "bor", "bxor"};
    return op >= 0 && op < (int)(sizeof names / sizeof *names) ? names[op] : "?";
}

/* Whether a payload begins with a unit's name. */
static int is_unit_call(fsdp_op_kind kind)
{
    return (kind >= FSDP_OP_UNSHARD && kind <= FSDP_OP_CREATE_UNIT) || kind == FSDP_OP_CREATE_SLOT ||
           kind == FSDP_OP_REPLICATE_GRADS || kind == FSDP_OP_SYNC_STATES || kind == FSDP_OP_GATHER_PARAM;
}

#define CALL_TEXT 192

static void call_text(const struct call_header *h, const char *payload, char text[CALL_TEXT])
{
    size_t used = (size_t)snprintf(text, CALL_TEXT, "%s", call_kind_name(h->kind));
    int reduces = h->kind == FSDP_OP_REDUCE_SCATTER || h->kind == FSDP_OP_ALL_REDUCE || h->kind == FSDP_OP_REDUCE;
    if (reduces) used += (size_t)snprintf(text + used, CALL_TEXT - used, "(%s)", reduce_name(h->op));
    if (is_unit_call(h->kind)) {
        char label[CALL_LABEL];
        memcpy(label, payload, sizeof label);
        label[sizeof label - 1] = 0;
        used += (size_t)snprintf(text + used, CALL_TEXT - used, " of unit '%s'", label);
    }
    if (h->type >= 0 && h->type < DTYPE_COUNT)
        used += (size_t)snprintf(text + used, CALL_TEXT - used, " of %lld %s", (long long)h->count,
                                 dtype_name((enum dtype)h->type));
    if (h->n_pieces > 1)
        used += (size_t)snprintf(text + used, CALL_TEXT - used, " in %lld tensors", (long long)h->n_pieces);
    if (h->root >= 0) snprintf(text + used, CALL_TEXT - used, ", root %d", h->root);
}

fsdp_status call_compare(fsdp_group *group)
{
    struct transport *t = group->transport;
    const struct call_header *mine = t->ops->header_of(t, group->rank);
    for (int r = 1; r < group->size; r++) {
        /* Copies: a peer gone wild must not change between a check and a use. */
        struct call_header first = *t->ops->header_of(t, 0), other = *t->ops->header_of(t, r);
        if (memcmp(&first, &other, sizeof first) == 0) continue;
        char a[CALL_TEXT], b[CALL_TEXT], one[GROUP_RANK_TEXT], two[GROUP_RANK_TEXT];
        call_text(&first, t->ops->payload_of(t, 0), a);
        call_text(&other, t->ops->payload_of(t, r), b);
        int unit = is_unit_call(first.kind);
        const char *why = strcmp(a, b) != 0                    ? ""
                          : first.kind == FSDP_OP_GATHER_PARAM ? " (they differ in index)"
                          : unit ? " (they differ in frozen flags, gradient sync, divisor, reshard or prefetch "
                                   "settings, or called for units in another order before)"
                          : first.kind == FSDP_OP_GRAD_NORM || first.kind == FSDP_OP_CLIP_GRAD_NORM
                              ? " (they differ in p, max_norm or error_if_nonfinite, or in the model's units)"
                          : first.kind == FSDP_OP_CREATE_MESH ? " (they differ in sizes or names)"
                          : first.kind == FSDP_OP_UNSCALE
                              ? " (their scalers differ in scale, growth tracker or options)"
                              : " (they differ in shapes or rows)";
        err(FSDP_ERR_MISMATCH, "group '%s', operation %llu: %s called %s, %s called %s%s: %s", group->name,
            (unsigned long long)mine->sequence, group_rank_text(group, 0, one), a, group_rank_text(group, r, two), b,
            why,
            first.kind == FSDP_OP_RESET || other.kind == FSDP_OP_RESET
                ? "the iteration was broken off there: call fsdp_model_reset on this rank too"
                : "all ranks must make the same calls in the same order");
        err_operation(mine->kind, mine->sequence, 0, r);
        return FSDP_ERR_MISMATCH;
    }
    return FSDP_OK;
}
