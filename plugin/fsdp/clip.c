/* Norm and clipping of a model's sharded gradients.
 *
 * Each rank sums |g|^p over its own rows of every gradient, in f64; the ranks then tell each other these numbers in one
 * exchange, and each adds them up in rank order. So all come to the same bits, and scale by the same coefficient,
 * without another message. Of replicas the first one counts, so no element is counted twice; a rank whose shards are
 * all empty tells 0.
 *
 * What is wrong on one rank (a reduction that failed there) travels in the same exchange: no rank is left waiting, and
 * none changes its gradients unless all do.
 */
#include "fsdp/fsdp.h"

#include "tensor/kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- what norms and the scaler share */

fsdp_status units_settle(const struct units *units)
{
    for (int32_t i = 0; i < units->n; i++) (void)unit_settle(units->at[i]); /* a failure is kept in `lost` */
    for (int32_t i = 0; i < units->n; i++) {
        fsdp_unit *unit = units->at[i];
        grads_clear(unit);
        if (unit->lost.status == FSDP_OK) continue;
        return err(
            FSDP_ERR_STATE,
            "the gradients of unit '%s' are not to be used until fsdp_model_zero_grad or fsdp_model_reset, since "
            "their reduction failed: %.400s",
            unit->name, unit->lost.message);
    }
    return FSDP_OK;
}

struct told {
    double number;
    fsdp_status status;
    char message[500];
};
_Static_assert(sizeof(struct told) <= TRANSPORT_PAYLOAD, "what a rank tells must fit into an exchange");

fsdp_status ranks_tell(fsdp_group *group, fsdp_op_kind kind, uint64_t hash, const char *what, fsdp_status status,
                       double mine, double *all)
{
    struct told told = {.number = mine, .status = status};
    fsdp_error_info failure;
    err_save(&failure);
    if (status != FSDP_OK) snprintf(told.message, sizeof told.message, "%.490s", failure.message);
    struct told others[GROUP_MAX_RANKS]; /* no allocation that could fail here while the peers wait */
    TRY(group_exchange(group, kind, hash, &told, sizeof told, others));
    for (int r = 0; r < group->size; r++) {
        if (others[r].status != FSDP_OK) {
            others[r].message[sizeof others[r].message - 1] = 0;
            return r == group->rank ? err_restore(&failure)
                                    : err(others[r].status, "%s: rank %d reported: %s", what, r, others[r].message);
        }
        all[r] = others[r].number;
    }
    return FSDP_OK;
}

/* ---- norm */

/* What the ranks must agree on. A unit that only some ranks still have would be counted on those alone. */
static uint64_t units_hash(const struct units *units, double p)
{
    return hash_bytes(units->hash, &p, sizeof p);
}

/* The next term of a norm's sum, or of its maximum. */
static double norm_add(double total, double term, double p)
{
    if (!isinf(p)) return total + term;
    return isnan(total) || total > term ? total : term;
}

static double norm_here(const struct units *units, double p)
{
    double total = 0;
    for (int32_t i = 0; i < units->n; i++) {
        const fsdp_group *replicas = units->at[i]->replicate_group;
        if (replicas && replicas->rank != 0) continue; /* the first one counts them */
        for (int32_t k = 0; k < units->at[i]->n_params; k++) {
            const struct param *param = &units->at[i]->params[k];
            if (!param->grad || param->frozen) continue;
            total = norm_add(total, kernel_norm(param->grad_type, param->grad, (size_t)param->shard_count, p), p);
        }
    }
    return total;
}

static double norm_everywhere(const double *terms, int size, double p)
{
    double total = 0;
    for (int r = 0; r < size; r++) total = norm_add(total, terms[r], p);
    if (isnan(total)) return NAN;
    if (p == 2) return sqrt(total);
    return p == 1 || isinf(p) ? total : pow(total, 1 / p);
}

/* status: how this rank came here; the others hear of it. */
static fsdp_status units_norm(fsdp_model *model, const struct units *units, fsdp_op_kind kind, uint64_t hash, double p,
                              fsdp_status status, double *norm)
{
    if (status == FSDP_OK) status = units_settle(units);
    double mine = status == FSDP_OK ? norm_here(units, p) : 0, all[GROUP_MAX_RANKS];
    TRY(ranks_tell(model->group, kind, hash, "the norm of the gradients", status, mine, all));
    *norm = norm_everywhere(all, model->group->size, p);
    return FSDP_OK;
}

static fsdp_status check_p(double p)
{
    CHECK_ARG(p > 0, "p is %g: the order of a norm is above 0, or infinity", p);
    return FSDP_OK;
}

fsdp_status model_grad_norm(fsdp_model *model, double p, double *norm)
{
    TRY(check_p(p));
    TRY(model_usable(model));
    struct units units;
    fsdp_status status = units_hold(model, &units);
    status = units_norm(model, &units, FSDP_OP_GRAD_NORM, units_hash(&units, p), p, status, norm);
    units_drop(&units);
    return status;
}

/* ---- clipping */

void units_scale(const struct units *units, double factor)
{
    for (int32_t i = 0; i < units->n; i++)
        for (int32_t k = 0; k < units->at[i]->n_params; k++) {
            const struct param *param = &units->at[i]->params[k];
            if (param->grad && !param->frozen)
                kernel_scale(param->grad_type, param->grad, (size_t)param->shard_count, factor);
        }
}

fsdp_status model_clip_grad_norm(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite, double *norm)
{
    CHECK_ARG(max_norm >= 0, "max_norm is %g: 0 or more", max_norm);
    TRY(check_p(p));
    CHECK_ARG(error_if_nonfinite == 0 || error_if_nonfinite == 1, "error_if_nonfinite is %d: 0 or 1",
              error_if_nonfinite);
    TRY(model_usable(model));
    struct units units;
    double total;
    fsdp_status status = units_hold(model, &units);
    uint64_t hash = hash_number(units_hash(&units, p), (uint64_t)error_if_nonfinite);
    hash = hash_bytes(hash, &max_norm, sizeof max_norm);
    status = units_norm(model, &units, FSDP_OP_CLIP_GRAD_NORM, hash, p, status, &total);
    if (status == FSDP_OK && error_if_nonfinite && !isfinite(total))
        status =
            err(FSDP_ERR_STATE,
                "the total norm of order %g of the gradients of model '%s' is %g, so they can't be clipped: skip this "
                "step, or clip with error_if_nonfinite 0",
                p, model->name, total);
    if (status == FSDP_OK) {
        double coefficient = max_norm / (total + 1e-6);
        units_scale(&units, coefficient > 1 ? 1 : coefficient); /* NaN stays NaN */
        *norm = total;
    }
    units_drop(&units);
    return status;
}
