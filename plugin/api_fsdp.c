/* The exported functions of meshes, models, units and scalers: check the arguments, call the module, return. See
 * api.c. */
#include "api.h"

#include <stdio.h>

/* ---- meshes */

fsdp_status fsdp_mesh_create(fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names,
                             fsdp_mesh **mesh)
{
    CHECK_GROUP(group);
    CHECK_ARG(sizes, "sizes is NULL: a mesh needs one for each dimension");
    CHECK_ARG(names, "names is NULL: a mesh needs one for each dimension");
    CHECK_OUT(mesh);
    return mesh_create(group, ndim, sizes, names, mesh);
}

fsdp_status fsdp_mesh_retain(fsdp_mesh *mesh)
{
    CHECK_MESH(mesh);
    ref_get(&mesh->ref);
    return FSDP_OK;
}

void fsdp_mesh_release(fsdp_mesh *mesh)
{
    if (mesh_is(mesh)) mesh_release(mesh);
}

fsdp_status fsdp_mesh_query(fsdp_mesh *mesh, fsdp_mesh_info *info)
{
    CHECK_MESH(mesh);
    TRY(ABI_WRITE_CHECK(fsdp_mesh_info, info));
    fsdp_mesh_info now;
    mesh_query(mesh, &now);
    return ABI_WRITE(fsdp_mesh_info, info, &now);
}

fsdp_status fsdp_mesh_group(fsdp_mesh *mesh, const char *name, fsdp_group **group)
{
    CHECK_MESH(mesh);
    CHECK_OUT(group);
    return mesh_group(mesh, name, group);
}

/* ---- models */

fsdp_status fsdp_model_options_init(fsdp_model_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_model_options, options, struct_size);
}

/* Options with the precision that they point to, of this library's sizes. */
static fsdp_status read_model_options(const fsdp_model_options *options, fsdp_model_options *known,
                                      fsdp_precision *precision)
{
    TRY(ABI_READ(fsdp_model_options, options, known));
    if (!known->precision) return FSDP_OK;
    TRY(ABI_READ(fsdp_precision, known->precision, precision));
    known->precision = precision;
    return FSDP_OK;
}

fsdp_status fsdp_model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **model)
{
    CHECK_GROUP(group);
    CHECK_OUT(model);
    fsdp_model_options known;
    fsdp_precision precision;
    TRY(read_model_options(options, &known, &precision));
    return model_create(group, &known, model);
}

fsdp_status fsdp_model_create_on_mesh(fsdp_mesh *mesh, const fsdp_model_options *options, fsdp_model **model)
{
    CHECK_MESH(mesh);
    CHECK_OUT(model);
    fsdp_model_options known;
    fsdp_precision precision;
    TRY(read_model_options(options, &known, &precision));
    return model_create_on_mesh(mesh, &known, model);
}

fsdp_status fsdp_model_retain(fsdp_model *model)
{
    CHECK_MODEL(model);
    model_retain(model);
    atomic_fetch_add_explicit(&model->handles, 1, memory_order_relaxed);
    return FSDP_OK;
}

void fsdp_model_release(fsdp_model *model)
{
    if (!model_is(model)) return;
    /* Nobody can end this iteration any more. */
    if (atomic_fetch_sub_explicit(&model->handles, 1, memory_order_acq_rel) == 1) model_forget_awaiting(model);
    model_release(model);
}

fsdp_status fsdp_model_set_gradient_sync(fsdp_model *model, int32_t sync)
{
    CHECK_MODEL(model);
    return model_set_gradient_sync(model, sync);
}

fsdp_status fsdp_model_set_all_reduce(fsdp_model *model, int32_t all_reduce)
{
    CHECK_MODEL(model);
    return model_set_all_reduce(model, all_reduce);
}

fsdp_status fsdp_model_set_gradient_divisor(fsdp_model *model, double divisor)
{
    CHECK_MODEL(model);
    return model_set_gradient_divisor(model, divisor);
}

fsdp_status fsdp_model_finish_backward(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_finish_backward(model);
}

fsdp_status fsdp_model_zero_grad(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_zero_grad(model);
}

fsdp_status fsdp_model_reset(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_reset(model);
}

fsdp_status fsdp_model_broadcast(fsdp_model *model, const DLTensor *const *tensors, int32_t n)
{
    CHECK_MODEL(model);
    CHECK_ARG(n >= 0, "n is %d: it can't be negative", n);
    CHECK_ARG(tensors || n == 0, "tensors is NULL, but n is %d", n);
    for (int32_t i = 0; i < n; i++) CHECK_ARG(tensors[i], "tensors[%d] is NULL: every rank gives each tensor", i);
    return model_broadcast(model, tensors, n);
}

fsdp_status fsdp_model_memory(fsdp_model *model, fsdp_memory_info *info)
{
    CHECK_MODEL(model);
    TRY(ABI_WRITE_CHECK(fsdp_memory_info, info));
    fsdp_memory_info now;
    model_memory(model, &now);
    return ABI_WRITE(fsdp_memory_info, info, &now);
}

fsdp_status fsdp_model_grad_norm(fsdp_model *model, double p, double *norm)
{
    CHECK_MODEL(model);
    CHECK_OUT(norm);
    return model_grad_norm(model, p, norm);
}

fsdp_status fsdp_model_clip_grad_norm(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite,
                                      double *norm)
{
    CHECK_MODEL(model);
    CHECK_OUT(norm);
    return model_clip_grad_norm(model, max_norm, p, error_if_nonfinite, norm);
}

/* ---- units */

/* Calls in which the host may be called back hold the unit meanwhile: its callback may let go of the last reference. */
static fsdp_status let_go(fsdp_unit *unit, fsdp_status status)
{
    fsdp_error_info failure;
    err_save(&failure);
    unit_release(unit);
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

#define HOLDING(unit, call) (unit_retain(unit), let_go(unit, call))

fsdp_status fsdp_unit_options_init(fsdp_unit_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_unit_options, options, struct_size);
}

/* A parameter's tensor; of a meta one, shape and dtype only. */
static fsdp_status read_full(const fsdp_param *param, int32_t index, struct tensor *out)
{
    char name[64];
    snprintf(name, sizeof name, "params[%d].full", index);
    if (!param->meta || !param->full) return tensor_import(param->full, name, out);
    DLTensor shape = *param->full;
    int64_t somewhere; /* never read */
    shape.data = &somewhere;
    shape.byte_offset = 0;
    shape.strides = NULL;
    shape.device = (DLDevice){kDLCPU, 0};
    TRY(tensor_import(&shape, name, out));
    out->data = NULL;
    return FSDP_OK;
}

fsdp_status fsdp_unit_create(fsdp_model *model, const char *name, const fsdp_param *params, int32_t n,
                             const fsdp_unit_options *options, fsdp_unit **unit)
{
    CHECK_MODEL(model);
    CHECK_ARG(params, "params is NULL: a unit has at least one parameter");
    CHECK_ARG(n > 0, "n is %d: a unit has at least one parameter", n);
    CHECK_OUT(unit);
    fsdp_unit_options wanted;
    fsdp_precision precision;
    TRY(ABI_READ(fsdp_unit_options, options, &wanted));
    if (wanted.precision) {
        TRY(ABI_READ(fsdp_precision, wanted.precision, &precision));
        wanted.precision = &precision;
    }
    fsdp_param *known = mem_array((size_t)n, sizeof *known);
    struct tensor *fulls = mem_array((size_t)n, sizeof *fulls);
    fsdp_status status = known && fulls ? FSDP_OK : mem_none("a unit's parameters", (size_t)n * sizeof *fulls);
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) {
        status = ABI_READ_ELEMENT(fsdp_param, params, i, &known[i]);
        if (status == FSDP_OK) status = read_full(&known[i], i, &fulls[i]);
    }
    if (status == FSDP_OK) status = unit_create(model, name, known, fulls, n, &wanted, unit);
    mem_free(known);
    mem_free(fulls);
    return status;
}

fsdp_status fsdp_unit_retain(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    unit_retain(unit);
    return FSDP_OK;
}

void fsdp_unit_release(fsdp_unit *unit)
{
    if (unit_is(unit)) unit_release(unit);
}

fsdp_status fsdp_unit_param_shard(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_SHARD, tensor);
}

fsdp_status fsdp_unit_param_full(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_FULL, tensor);
}

fsdp_status fsdp_unit_param_grad(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_GRAD, tensor);
}

fsdp_status fsdp_unit_param_query(fsdp_unit *unit, int32_t index, fsdp_param_info *info)
{
    CHECK_UNIT(unit);
    TRY(ABI_WRITE_CHECK(fsdp_param_info, info));
    fsdp_param_info now;
    TRY(unit_param_query(unit, index, &now));
    return ABI_WRITE(fsdp_param_info, info, &now);
}

fsdp_status fsdp_unit_used(fsdp_unit *unit, int32_t *used, int32_t n)
{
    CHECK_UNIT(unit);
    CHECK_OUT(used);
    return unit_used(unit, used, n);
}

fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_pre_forward(unit));
}

fsdp_status fsdp_unit_post_forward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_post_forward(unit));
}

fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_pre_backward(unit));
}

fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **work)
{
    CHECK_UNIT(unit);
    CHECK_ARG(grads, "grads is NULL: an array with an entry for each parameter, NULL for none");
    return HOLDING(unit, unit_post_backward(unit, grads, n, work));
}

fsdp_status fsdp_unit_unshard(fsdp_unit *unit, fsdp_work **work)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_unshard(unit, 0, work));
}

fsdp_status fsdp_unit_reshard(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    TRY(model_usable(unit->model));
    return HOLDING(unit, unit_reshard(unit, RESHARD_RELEASE));
}

fsdp_status fsdp_unit_write_back(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_write_back(unit));
}

fsdp_status fsdp_unit_gather_param(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **full)
{
    CHECK_UNIT(unit);
    CHECK_OUT(full);
    return unit_gather_param(unit, index, full);
}

fsdp_status fsdp_unit_load_param(fsdp_unit *unit, int32_t index, const DLTensor *full)
{
    CHECK_UNIT(unit);
    struct tensor whole;
    TRY(tensor_import(full, "full", &whole));
    return HOLDING(unit, unit_load_param(unit, index, &whole));
}

fsdp_status fsdp_unit_query_state(fsdp_unit *unit, fsdp_unit_state *state)
{
    CHECK_UNIT(unit);
    CHECK_OUT(state);
    *state = unit_query_state(unit);
    return FSDP_OK;
}

fsdp_status fsdp_unit_query(fsdp_unit *unit, fsdp_unit_info *info)
{
    CHECK_UNIT(unit);
    TRY(ABI_WRITE_CHECK(fsdp_unit_info, info));
    fsdp_unit_info now;
    unit_query(unit, &now);
    return ABI_WRITE(fsdp_unit_info, info, &now);
}

fsdp_status fsdp_unit_shard_changed(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    unit->current = 0;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_frozen(fsdp_unit *unit, int32_t index, int32_t frozen)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_set_frozen(unit, index, frozen));
}

fsdp_status fsdp_unit_set_reshard_after_forward(fsdp_unit *unit, int32_t reshard_after_forward)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_set_reshard_after_forward(unit, reshard_after_forward));
}

fsdp_status fsdp_unit_set_reshard_after_backward(fsdp_unit *unit, int32_t reshard)
{
    CHECK_UNIT(unit);
    CHECK_ARG(reshard == 0 || reshard == 1, "reshard is %d: 0 or 1", reshard);
    unit->keep_after_backward = !reshard;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_gradient_sync(fsdp_unit *unit, int32_t sync)
{
    CHECK_UNIT(unit);
    return unit_set_gradient_sync(unit, sync);
}

fsdp_status fsdp_unit_set_all_reduce(fsdp_unit *unit, int32_t all_reduce)
{
    CHECK_UNIT(unit);
    return unit_set_all_reduce(unit, all_reduce);
}

fsdp_status fsdp_unit_set_gradient_divisor(fsdp_unit *unit, double divisor)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_set_gradient_divisor(unit, divisor));
}

fsdp_status fsdp_unit_zero_grad(fsdp_unit *unit, int32_t index)
{
    CHECK_UNIT(unit);
    return HOLDING(unit, unit_zero_grad(unit, index));
}

fsdp_status fsdp_unit_set_callbacks(fsdp_unit *unit, fsdp_unit_fn valid, fsdp_unit_fn invalid, void *user)
{
    CHECK_UNIT(unit);
    unit->valid = valid;
    unit->invalid = invalid;
    unit->callback_user = user;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, fsdp_phase phase, fsdp_unit *const *units, int32_t n)
{
    CHECK_UNIT(unit);
    CHECK_ARG(n >= 0, "n is %d: it can't be negative", n);
    CHECK_ARG(units || n == 0, "units is NULL, but n is %d", n);
    for (int32_t i = 0; i < n; i++) CHECK_ARG(unit_is(units[i]), "units[%d] is not a live unit", i);
    return unit_set_prefetch(unit, phase, units, n);
}

fsdp_status fsdp_unit_cast(fsdp_unit *unit, fsdp_cast_kind kind, const DLTensor *input, DLManagedTensorVersioned **out)
{
    CHECK_UNIT(unit);
    CHECK_OUT(out);
    struct tensor tensor;
    TRY(tensor_import(input, "input", &tensor));
    return unit_cast(unit, kind, &tensor, out);
}

/* ---- scalers */

fsdp_status fsdp_scaler_options_init(fsdp_scaler_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_scaler_options, options, struct_size);
}

fsdp_status fsdp_scaler_create(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **scaler)
{
    CHECK_GROUP(group);
    CHECK_OUT(scaler);
    fsdp_scaler_options known;
    TRY(ABI_READ(fsdp_scaler_options, options, &known));
    return scaler_create(group, &known, scaler);
}

fsdp_status fsdp_scaler_retain(fsdp_scaler *scaler)
{
    CHECK_SCALER(scaler);
    ref_get(&scaler->ref);
    return FSDP_OK;
}

void fsdp_scaler_release(fsdp_scaler *scaler)
{
    if (scaler_is(scaler)) scaler_release(scaler);
}

fsdp_status fsdp_scaler_query(fsdp_scaler *scaler, fsdp_scaler_info *info)
{
    CHECK_SCALER(scaler);
    TRY(ABI_WRITE_CHECK(fsdp_scaler_info, info));
    fsdp_scaler_info now;
    scaler_query(scaler, &now);
    return ABI_WRITE(fsdp_scaler_info, info, &now);
}

fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_model *model)
{
    CHECK_SCALER(scaler);
    CHECK_MODEL(model);
    return scaler_unscale(scaler, model);
}

fsdp_status fsdp_scaler_unscale_tensors(fsdp_scaler *scaler, const DLTensor *const *grads, int32_t n)
{
    CHECK_SCALER(scaler);
    CHECK_ARG(n >= 0, "n is %d: it can't be negative", n);
    CHECK_ARG(grads || n == 0, "grads is NULL, but n is %d", n);
    struct tensor *checked = mem_array((size_t)n, sizeof *checked);
    if (!checked) return mem_none("gradients", (size_t)n * sizeof *checked);
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "grads[%d]", i);
        checked[i].count = -1;
        if (grads[i]) status = tensor_import_output(grads[i], name, &checked[i]);
    }
    if (status == FSDP_OK) status = scaler_unscale_tensors(scaler, checked, n);
    mem_free(checked);
    return status;
}

fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, int32_t *should_step)
{
    CHECK_SCALER(scaler);
    CHECK_OUT(should_step);
    return scaler_step(scaler, should_step);
}

fsdp_status fsdp_scaler_update(fsdp_scaler *scaler)
{
    CHECK_SCALER(scaler);
    return scaler_update(scaler);
}

fsdp_status fsdp_scaler_save(fsdp_scaler *scaler, fsdp_scaler_state *state)
{
    CHECK_SCALER(scaler);
    CHECK_OUT(state);
    TRY(ABI_WRITE_CHECK(fsdp_scaler_state, state));
    fsdp_scaler_state now;
    TRY(scaler_save(scaler, &now));
    return ABI_WRITE(fsdp_scaler_state, state, &now);
}

fsdp_status fsdp_scaler_load(fsdp_scaler *scaler, const fsdp_scaler_state *state)
{
    CHECK_SCALER(scaler);
    CHECK_ARG(state, "state is NULL: pass what fsdp_scaler_save gave");
    fsdp_scaler_state known;
    TRY(ABI_READ(fsdp_scaler_state, state, &known));
    return scaler_load(scaler, &known);
}
