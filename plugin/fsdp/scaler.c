/* Loss scaling that all ranks of a group do alike.
 *
 * The ranks agree once for each step, in unscale: whether anyone found an infinity or NaN. All else follows from that
 * on each rank by itself, by the same arithmetic, so scale and counters stay equal; that they are is part of what the
 * agreement compares. An infinity is looked for before anything is written, so that a call that fails changes nothing.
 *
 * A scaler goes round: READY, unscale, UNSCALED, step, STEPPED, update, READY; step may be left out. Threads: one at a
 * time. It holds its group.
 */
#include "fsdp/fsdp.h"

#include "base/log.h"
#include "base/mem.h"
#include "tensor/kernel.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { READY, UNSCALED, STEPPED };

int scaler_is(const fsdp_scaler *scaler)
{
    return scaler && ref_is(&scaler->ref, REF_SCALER);
}

void scaler_release(fsdp_scaler *scaler)
{
    if (!ref_put(&scaler->ref)) return;
    group_release(scaler->group);
    mem_free(scaler);
}

/* ---- numbers that a scaler may have */

static int is_scale(double scale)
{
    return scale >= (double)FLT_MIN && scale <= (double)FLT_MAX;
}

/* `of` names where they come from, `scale_name` the scale's field there. */
static fsdp_status check_numbers(const char *of, const char *scale_name, double scale, double growth_factor,
                                 double backoff_factor, int32_t growth_interval)
{
    CHECK_ARG(is_scale(scale), "%s.%s is %g: a positive number in float32's normal range", of, scale_name, scale);
    CHECK_ARG(growth_factor > 1 && isfinite(growth_factor), "%s.growth_factor is %g: a number above 1", of,
              growth_factor);
    CHECK_ARG(backoff_factor > 0 && backoff_factor < 1, "%s.backoff_factor is %g: a number between 0 and 1", of,
              backoff_factor);
    CHECK_ARG(growth_interval > 0, "%s.growth_interval is %d: at least 1", of, growth_interval);
    return FSDP_OK;
}

fsdp_status scaler_create(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **out)
{
    double scale = options->init_scale != 0 ? options->init_scale : 65536;
    double growth_factor = options->growth_factor != 0 ? options->growth_factor : 2;
    double backoff_factor = options->backoff_factor != 0 ? options->backoff_factor : 0.5;
    int32_t growth_interval = options->growth_interval ? options->growth_interval : 2000;
    TRY(check_numbers("options", "init_scale", scale, growth_factor, backoff_factor, growth_interval));
    CHECK_ARG(options->disabled == 0 || options->disabled == 1, "options.disabled is %d: 0 or 1", options->disabled);
    TRY(group_usable(group));
    fsdp_scaler *scaler = mem_alloc(sizeof *scaler);
    if (!scaler) return mem_none("a scaler", sizeof *scaler);
    ref_init(&scaler->ref, REF_SCALER);
    group_retain(group);
    scaler->group = group;
    scaler->scale = (double)(float)scale;
    scaler->growth_factor = growth_factor;
    scaler->backoff_factor = backoff_factor;
    scaler->growth_interval = growth_interval;
    scaler->disabled = options->disabled;
    *out = scaler;
    return FSDP_OK;
}

void scaler_query(const fsdp_scaler *scaler, fsdp_scaler_info *info)
{
    *info = (fsdp_scaler_info){.struct_size = sizeof *info,
                               .scale = scaler->disabled ? 1 : scaler->scale,
                               .growth_tracker = scaler->growth_tracker,
                               .found_inf = scaler->found_inf,
                               .steps = scaler->steps,
                               .skipped = scaler->skipped};
}

/* ---- unscale */

static fsdp_status check_ready(const fsdp_scaler *scaler)
{
    if (scaler->stage == READY) return FSDP_OK;
    return err(FSDP_ERR_STATE, scaler->stage == UNSCALED
                                   ? "unscale has already been called on this scaler since the last update: call "
                                     "fsdp_scaler_step and fsdp_scaler_update first"
                                   : "unscale is being called after step: call fsdp_scaler_update first");
}

/* What the ranks must agree on. */
static uint64_t scaler_hash(const fsdp_scaler *scaler)
{
    const double numbers[] = {scaler->scale, scaler->growth_factor, scaler->backoff_factor};
    uint64_t hash = hash_bytes(HASH_START, numbers, sizeof numbers);
    hash = hash_number(hash, (uint64_t)scaler->growth_interval);
    return hash_number(hash, (uint64_t)scaler->growth_tracker);
}

/* Tell whether this rank found an infinity (or its failure), and hear whether anyone did. */
static fsdp_status agree(fsdp_scaler *scaler, fsdp_status status, int found)
{
    double all[GROUP_MAX_RANKS];
    TRY(ranks_tell(scaler->group, FSDP_OP_UNSCALE, scaler_hash(scaler), "unscaling gradients", status, found, all));
    scaler->found_inf = 0;
    for (int r = 0; r < scaler->group->size; r++) scaler->found_inf |= all[r] != 0;
    scaler->stage = UNSCALED;
    return FSDP_OK;
}

static int units_finite(const struct units *units)
{
    int finite = 1;
    for (int32_t i = 0; i < units->n && finite; i++)
        for (int32_t k = 0; k < units->at[i]->n_params && finite; k++) {
            const struct param *p = &units->at[i]->params[k];
            if (p->grad && !p->frozen) finite = kernel_all_finite(p->grad_type, p->grad, (size_t)p->shard_count);
        }
    return finite;
}

fsdp_status scaler_unscale(fsdp_scaler *scaler, fsdp_model *model)
{
    if (scaler->disabled) return FSDP_OK;
    TRY(group_usable(scaler->group));
    TRY(check_ready(scaler));
    CHECK_ARG(
        scaler->group->size >= model->group->size,
        "the scaler's group '%s' has %d ranks, but model '%s' has %d: it must hold all of the model's ranks, or they "
        "would not skip steps together",
        scaler->group->name, scaler->group->size, model->name, model->group->size);
    struct units units;
    fsdp_status status = units_hold(model, &units);
    if (status == FSDP_OK) status = units_settle(&units);
    status = agree(scaler, status, status == FSDP_OK && !units_finite(&units));
    if (status == FSDP_OK) units_scale(&units, 1 / scaler->scale);
    units_drop(&units);
    return status;
}

/* ---- unscale of the host's own gradients */

struct extent {
    int32_t index;
    uintptr_t low, high;
};

static int by_address(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;
    return x->low < y->low ? -1 : x->low > y->low;
}

/* An element that two tensors share would be divided twice. */
static fsdp_status check_apart(const struct tensor *grads, int32_t n)
{
    struct extent *extents = mem_array((size_t)n, sizeof *extents);
    if (!extents) return mem_none("a list of gradients", (size_t)n * sizeof *extents);
    fsdp_status status = FSDP_OK;
    int32_t m = 0;
    for (int32_t i = 0; i < n; i++) {
        if (grads[i].count <= 0) continue;
        extents[m].index = i;
        tensor_range(&grads[i], &extents[m].low, &extents[m].high);
        m++;
    }
    if (m) qsort(extents, (size_t)m, sizeof *extents, by_address);
    for (int32_t i = 0; i < m && status == FSDP_OK; i++)
        for (int32_t j = i + 1; j < m && extents[j].low < extents[i].high && status == FSDP_OK; j++) {
            int32_t a = extents[i].index, b = extents[j].index;
            if (tensor_overlap(&grads[a], &grads[b]))
                status = err(FSDP_ERR_INVALID, "grads[%d] and grads[%d] overlap: give each gradient once",
                             a < b ? a : b, a < b ? b : a);
        }
    mem_free(extents);
    return status;
}

/* Kernels want contiguous memory: where a gradient isn't, a copy of it, in `scratch`. */
static void *contiguous(const struct tensor *grad, void *scratch)
{
    if (grad->contiguous) return grad->data;
    tensor_pack(scratch, grad);
    return scratch;
}

static void tensors_scale(const struct tensor *grads, int32_t n, double factor, void *scratch)
{
    for (int32_t i = 0; i < n; i++) {
        if (grads[i].count <= 0) continue;
        void *values = contiguous(&grads[i], scratch);
        kernel_scale(grads[i].type, values, (size_t)grads[i].count, factor);
        if (values == scratch) tensor_unpack(&grads[i], scratch);
    }
}

fsdp_status scaler_unscale_tensors(fsdp_scaler *scaler, const struct tensor *grads, int32_t n)
{
    size_t scratch_bytes = 0;
    for (int32_t i = 0; i < n; i++) {
        if (grads[i].count < 0) continue;
        if (!dtype_is_float(grads[i].type) && !dtype_is_complex(grads[i].type))
            return err(FSDP_ERR_UNSUPPORTED, "grads[%d] is %s: gradients have a float or complex dtype", i,
                       dtype_name(grads[i].type));
        if (!grads[i].contiguous && grads[i].bytes > scratch_bytes) scratch_bytes = grads[i].bytes;
    }
    TRY(check_apart(grads, n));
    if (scaler->disabled) return FSDP_OK;
    TRY(group_usable(scaler->group));
    TRY(check_ready(scaler));
    void *scratch = NULL;
    scratch_bytes = os_page_round(scratch_bytes);
    if (scratch_bytes) TRY(os_map_anonymous(scratch_bytes, &scratch));
    int finite = 1;
    for (int32_t i = 0; i < n && finite; i++)
        if (grads[i].count > 0)
            finite = kernel_all_finite(grads[i].type, contiguous(&grads[i], scratch), (size_t)grads[i].count);
    fsdp_status status = agree(scaler, FSDP_OK, !finite);
    if (status == FSDP_OK) tensors_scale(grads, n, 1 / scaler->scale, scratch);
    if (scratch) os_unmap(scratch, scratch_bytes);
    return status;
}

/* ---- step and update */

fsdp_status scaler_step(fsdp_scaler *scaler, int32_t *should_step)
{
    if (!scaler->disabled && scaler->stage != UNSCALED)
        return err(FSDP_ERR_STATE, scaler->stage == STEPPED
                                       ? "step has already been called on this scaler since the last update: call "
                                         "fsdp_scaler_update first"
                                       : "no gradients have been unscaled since the last update: call "
                                         "fsdp_scaler_unscale before fsdp_scaler_step");
    *should_step = scaler->disabled || !scaler->found_inf;
    if (!scaler->disabled) scaler->stage = STEPPED;
    scaler->steps += *should_step;
    if (*should_step) return FSDP_OK;
    scaler->skipped++;
    if (scaler->group->rank == 0)
        LOG(FSDP_LOG_WARN,
            "group '%s': a step was skipped, since gradients scaled by %g are infinite or NaN (skipped so far: "
            "%lld of %lld)",
            scaler->group->name, scaler->scale, (long long)scaler->skipped,
            (long long)(scaler->skipped + scaler->steps));
    return FSDP_OK;
}

static void scale_by(fsdp_scaler *scaler, double factor)
{
    double scale = scaler->scale * factor;
    if (is_scale(scale)) scaler->scale = (double)(float)scale;
}

fsdp_status scaler_update(fsdp_scaler *scaler)
{
    if (scaler->disabled) return FSDP_OK;
    if (scaler->stage == READY)
        return err(FSDP_ERR_STATE, "no inf checks were recorded prior to update: call fsdp_scaler_unscale first");
    scaler->stage = READY;
    if (scaler->found_inf) {
        scale_by(scaler, scaler->backoff_factor);
        scaler->growth_tracker = 0;
    } else if (++scaler->growth_tracker >= scaler->growth_interval) {
        scale_by(scaler, scaler->growth_factor);
        scaler->growth_tracker = 0;
    }
    return FSDP_OK;
}

/* ---- state */

static fsdp_status check_settled(const fsdp_scaler *scaler, const char *verb)
{
    if (scaler->stage == READY) return FSDP_OK;
    return err(FSDP_ERR_STATE, "a scaler can't be %s between unscale and update: call fsdp_scaler_update first", verb);
}

fsdp_status scaler_save(const fsdp_scaler *scaler, fsdp_scaler_state *state)
{
    TRY(check_settled(scaler, "saved"));
    *state = (fsdp_scaler_state){.struct_size = sizeof *state,
                                 .scale = scaler->scale,
                                 .growth_factor = scaler->growth_factor,
                                 .backoff_factor = scaler->backoff_factor,
                                 .growth_interval = scaler->growth_interval,
                                 .growth_tracker = scaler->growth_tracker,
                                 .steps = scaler->steps,
                                 .skipped = scaler->skipped};
    return FSDP_OK;
}

fsdp_status scaler_load(fsdp_scaler *scaler, const fsdp_scaler_state *state)
{
    TRY(check_settled(scaler, "loaded"));
    TRY(check_numbers("state", "scale", state->scale, state->growth_factor, state->backoff_factor,
                      state->growth_interval));
    CHECK_ARG(state->growth_tracker >= 0 && state->growth_tracker < state->growth_interval,
              "state.growth_tracker is %d: 0 to %d with growth_interval %d", state->growth_tracker,
              state->growth_interval - 1, state->growth_interval);
    CHECK_ARG(state->steps >= 0 && state->skipped >= 0, "state.%s is negative", state->steps < 0 ? "steps" : "skipped");
    scaler->scale = (double)(float)state->scale;
    scaler->growth_factor = state->growth_factor;
    scaler->backoff_factor = state->backoff_factor;
    scaler->growth_interval = state->growth_interval;
    scaler->growth_tracker = state->growth_tracker;
    scaler->steps = state->steps;
    scaler->skipped = state->skipped;
    return FSDP_OK;
}
