/* See tape_host.h. The tape reads f32 parameters where libfsdp keeps them; others are converted whenever a hook has
 * made them valid. Outside of their calls parameters are not to be read: the tape ends the test if they are. */
#include "tape_host.h"

#include <math.h>

/* ---- making the model */

static DLDataType format_dl(enum format f)
{
    static const DLDataType types[FORMATS] = {[FORMAT_F32] = {kDLFloat, 32, 1},
                                              [FORMAT_F64] = {kDLFloat, 64, 1},
                                              [FORMAT_BF16] = {kDLBfloat, 16, 1},
                                              [FORMAT_F16] = {kDLFloat, 16, 1}};
    return types[f];
}

static fsdp_precision precision_of(const struct plan *plan)
{
    return (fsdp_precision){.struct_size = sizeof(fsdp_precision),
                            .param_dtype = format_dl(plan->param_type),
                            .reduce_dtype = format_dl(plan->reduce_type),
                            .output_dtype = format_dl(plan->output_type),
                            .keep_low_precision_grads = plan->keep_low_precision_grads};
}

static int mesh_dims(const struct plan *plan)
{
    return plan->replicas == 0 ? 0 : plan->strategy >= FSDP_HYBRID_SHARD ? 2 : 1;
}

static void make_model(struct tape_host *h)
{
    const struct plan *plan = h->plan;
    fsdp_precision precision = precision_of(plan);
    fsdp_model_options options;
    OK(fsdp_model_options_init(&options, sizeof options));
    options.strategy = plan->strategy;
    options.reshard_after_forward = plan->reshard_after_forward;
    options.private_unshard = plan->private_unshard;
    options.sync_module_states = plan->initial == 1;
    options.gradient_divisor = plan->divisor;
    options.precision = &precision;
    options.forward_prefetch = plan->forward_prefetch;
    options.backward_prefetch = plan->backward_prefetch;
    options.prefetch_limit = plan->prefetch_limit;
    options.offload_dir = plan->offload ? "/tmp" : NULL;
    h->group = rank_group(h->r, ANY_ROUTE, 0);
    if (!mesh_dims(plan)) {
        OK(fsdp_model_create(h->group, &options, &h->fsdp));
        return;
    }
    static const char *const names[] = {"replicate", "shard"};
    int64_t two[] = {plan->replicas, h->r->size / plan->replicas}, one[] = {h->r->size};
    int two_dims = mesh_dims(plan) == 2;
    OK(fsdp_mesh_create(h->group, two_dims ? 2 : 1, two_dims ? two : one, two_dims ? names : names + 1, &h->mesh));
    OK(fsdp_model_create_on_mesh(h->mesh, &options, &h->fsdp));
}

static void on_valid(fsdp_unit *unit, void *user)
{
    *(int *)user = 1;
}

static void on_invalid(fsdp_unit *unit, void *user)
{
    *(int *)user = 0;
}

/* A model's parameter as the call that makes its unit wants it; `values` is its memory. */
static fsdp_param describe(struct tape_host *h, int p, DLTensor *t, void *values)
{
    const struct model_param *info = &h->model.params[p];
    int home = info->tied_to >= 0 ? info->tied_to : p;
    *t = (DLTensor){.data = values,
                    .device = {kDLCPU, 0},
                    .ndim = info->ndim,
                    .dtype = format_dl(master_format(h->plan, home)),
                    .shape = (int64_t *)(uintptr_t)info->shape};
    return (fsdp_param){.struct_size = sizeof(fsdp_param),
                        .name = info->name,
                        .full = t,
                        .frozen = h->plan->frozen[home],
                        .shard_dim = h->plan->shard_dim[home] < info->ndim ? h->plan->shard_dim[home] : 0,
                        .meta = h->plan->initial == 2,
                        /* values at the same place are one parameter; without values it takes a number to say so */
                        .id = h->plan->initial == 2 ? (uint64_t)home + 1 : 0};
}

static void fill(struct tape_host *h, int p, void *values, int garbage)
{
    long n = h->model.params[p].count;
    double *numbers = malloc((size_t)(n + 1) * sizeof *numbers);
    model_initial(&h->model, p, numbers);
    for (long k = 0; k < n; k++) format_set(master_format(h->plan, p), values, k, garbage ? NAN : numbers[k]);
    free(numbers);
}

static void make_unit(struct tape_host *h, int u)
{
    const struct plan *plan = h->plan;
    fsdp_param params[PARAMS];
    DLTensor tensors[PARAMS];
    void *values[PARAMS];
    int n = 0, members[PARAMS];
    for (int p = 0; p < h->model.n_params; p++) {
        const struct model_param *info = &h->model.params[p];
        if (info->unit != u) continue;
        int tie = info->tied_to;
        if (tie >= 0) CHECK(h->model.params[tie].unit == u, "plan: %s is tied across units", info->name);
        values[n] = tie >= 0 ? values[h->model.params[tie].index] : malloc((size_t)info->count * 8 + 8);
        fill(h, p, values[n], plan->initial == 2 || (plan->initial == 1 && h->r->rank != 0));
        members[n] = p;
        params[n] = describe(h, p, &tensors[n], values[n]);
        n++;
    }
    fsdp_unit_options options;
    OK(fsdp_unit_options_init(&options, sizeof options));
    options.strategy = plan->unit_strategy[u];
    OK(fsdp_unit_create(h->fsdp, NULL, params, n, &options, &h->units[u]));
    for (int i = 0; i < n; i++) {
        if (plan->initial == 2 && h->model.params[members[i]].tied_to < 0) {
            fill(h, members[i], values[i], 0);
            OK(fsdp_unit_load_param(h->units[u], i, &tensors[i]));
        }
    }
    for (int i = 0; i < n; i++)
        if (h->model.params[members[i]].tied_to < 0) free(values[i]);
    if (plan->callbacks) OK(fsdp_unit_set_callbacks(h->units[u], on_valid, on_invalid, &h->valid[u]));
    h->infos[u] = tape_host_unit(h, u);
}

static int64_t shard_count(const struct host_param *param)
{
    return elements(&param->shard->dl_tensor);
}

static void take_param(struct tape_host *h, int p)
{
    const struct model_param *info = &h->model.params[p];
    struct host_param *param = &h->params[p];
    fsdp_unit *unit = h->units[info->unit];
    int home = info->tied_to >= 0 ? info->tied_to : p;
    param->master = master_format(h->plan, home);
    param->wide = full_format(h->plan, home);
    param->low = grad_format(h->plan, home);
    param->info.struct_size = sizeof param->info;
    OK(fsdp_unit_param_query(unit, info->index, &param->info));
    OK(fsdp_unit_param_full(unit, info->index, &param->full));
    OK(fsdp_unit_param_shard(unit, info->index, &param->shard));
    if (!h->plan->frozen[home]) OK(fsdp_unit_param_grad(unit, info->index, &param->grad));
    CHECK(tensor_bytes(&param->full->dl_tensor) == (size_t)info->count * format_size(param->wide),
          "%s: full view of another size or dtype", info->name);
    CHECK(param->info.tied_to == (info->tied_to >= 0 ? h->model.params[home].index : -1), "%s: tied to %d", info->name,
          param->info.tied_to);
    const fsdp_unit_info *of = &h->infos[info->unit];
    int dim = param->info.shard_dim, begin, length;
    rows_of((int)info->shape[dim], of->shard_rank, of->shard_size, &begin, &length);
    CHECK(param->info.shard_length == length && (!length || param->info.shard_start == begin),
          "%s: rank %d has rows %lld to %lld of %lld", info->name, h->r->rank, (long long)param->info.shard_start,
          (long long)(param->info.shard_start + param->info.shard_length), (long long)info->shape[dim]);
    param->values = malloc((size_t)(info->count + 1) * sizeof(float));
    param->first = calloc((size_t)shard_count(param) + 1, sizeof(double));
    param->second = calloc((size_t)shard_count(param) + 1, sizeof(double));
    h->trainer.params[p].frozen = frozen_at(h->plan, home, 0);
}

static void make_lists(struct tape_host *h)
{
    int n = h->model.n_units;
    for (int u = 0; u < n; u++) {
        fsdp_unit *ahead[2] = {u + 1 < n ? h->units[u + 1] : NULL, u + 2 < n ? h->units[u + 2] : NULL};
        fsdp_unit *behind[2] = {u ? h->units[u - 1] : NULL, u > 1 ? h->units[u - 2] : NULL};
        OK(fsdp_unit_set_prefetch(h->units[u], FSDP_FORWARD, ahead, (ahead[0] != NULL) + (ahead[1] != NULL)));
        OK(fsdp_unit_set_prefetch(h->units[u], FSDP_BACKWARD, behind, behind[0] ? 1 : 0));
    }
}

/* ---- hooks */

static _Noreturn void raise_exception(struct tape_host *h, fsdp_status status)
{
    h->status = status;
    longjmp(h->raised, 1);
}

static void hook(struct tape_host *h, fsdp_status status, const char *name, int unit)
{
    if (h->may_fail && status == FSDP_ERR_MISMATCH) raise_exception(h, status);
    CHECK(status == FSDP_OK, "seed %llu, step %d, micro-batch %d, %s of unit %d: %s", h->plan->seed, h->step, h->micro,
          name, unit, fsdp_last_error());
}

static void event(struct tape_host *h)
{
    if (h->plan->naps && random_below(&h->own, 12) == 0) nap(random_below(&h->own, 300));
    if (h->fuse && --h->fuse == 0) raise_exception(h, FSDP_ERR_CALLBACK);
}

/* Let the tape read the unit's parameters, or no longer. */
static void set_values(struct tape_host *h, int unit, int there)
{
    if (there && h->plan->callbacks)
        CHECK(h->valid[unit], "seed %llu, step %d: unit %d was not said to be valid", h->plan->seed, h->step, unit);
    for (int p = 0; p < h->model.n_params; p++) {
        struct host_param *param = &h->params[p];
        struct tape_param *t = &h->trainer.params[p];
        if (h->model.params[p].unit != unit) continue;
        t->value = NULL;
        if (!there) continue;
        const DLTensor *full = &param->full->dl_tensor;
        t->value = param->wide == FORMAT_F32 ? full->data : param->values;
        for (long k = 0; param->wide != FORMAT_F32 && k < h->model.params[p].count; k++)
            param->values[k] = (float)format_get(param->wide, full->data, k);
    }
}

/* What a host leaves in full views is dropped when they are resharded; and whoever reads them later reads this. */
static void spoil(struct tape_host *h, int unit)
{
    if (!h->plan->edits || h->infos[unit].strategy == FSDP_NO_SHARD) return;
    for (int p = 0; p < h->model.n_params; p++) {
        DLTensor *full = &h->params[p].full->dl_tensor;
        if (h->model.params[p].unit == unit && elements(full)) memset(full->data, 0xff, tensor_bytes(full));
    }
}

static void pre_forward(struct trainer *tr, int unit)
{
    struct tape_host *h = tr->owner;
    event(h);
    hook(h, fsdp_unit_pre_forward(h->units[unit]), "pre_forward", unit);
    set_values(h, unit, 1);
}

static void post_forward(struct trainer *tr, int unit)
{
    struct tape_host *h = tr->owner;
    event(h);
    if (!h->in_backward[unit]) {
        set_values(h, unit, 0);
        if (h->infos[unit].reshard_after_forward != FSDP_RESHARD_NEVER) spoil(h, unit);
    }
    hook(h, fsdp_unit_post_forward(h->units[unit]), "post_forward", unit);
    if (h->in_backward[unit])
        CHECK(tape_host_unit(h, unit).state == FSDP_UNIT_UNSHARDED, "seed %llu: unit %d is resharded in its backward",
              h->plan->seed, unit);
}

static void pre_backward(struct trainer *tr, int unit)
{
    struct tape_host *h = tr->owner;
    event(h);
    hook(h, fsdp_unit_pre_backward(h->units[unit]), "pre_backward", unit);
    h->in_backward[unit] = 1;
    set_values(h, unit, 1);
}

/* The gradient of p as libfsdp wants it, in memory of the tape; `strides` are used when it is not contiguous. */
static void gradient_tensor(struct tape_host *h, struct tape *t, int p, DLTensor *out, int64_t strides[2])
{
    const struct model_param *info = &h->model.params[p];
    struct host_param *param = &h->params[p];
    int transposed = h->plan->strided && info->ndim == 2 && random_below(&h->own, 2);
    void *data = tape_memory(t, (size_t)info->count * 8 + 8);
    for (int r = 0; r < info->rows; r++)
        for (int c = 0; c < info->cols; c++)
            format_set(param->wide, data, transposed ? c * info->rows + r : r * info->cols + c,
                       h->trainer.params[p].grad[r * info->cols + c]);
    *out = (DLTensor){.data = data,
                      .device = {kDLCPU, 0},
                      .ndim = info->ndim,
                      .dtype = format_dl(param->wide),
                      .shape = (int64_t *)(uintptr_t)info->shape};
    if (!transposed) return;
    strides[0] = 1;
    strides[1] = info->rows;
    out->strides = strides;
}

static void post_backward(struct trainer *tr, struct tape *t, int unit)
{
    struct tape_host *h = tr->owner;
    DLTensor tensors[PARAMS];
    int64_t strides[PARAMS][2];
    const DLTensor *grads[PARAMS] = {0};
    fsdp_work *work = NULL;
    int n = 0;
    event(h);
    for (int p = 0; p < h->model.n_params; p++) {
        struct tape_param *param = &tr->params[p];
        if (h->model.params[p].unit != unit) continue;
        /* An empty gradient is as good as none. */
        if (param->used || (h->model.params[p].count == 0 && !param->frozen && random_below(&h->own, 2))) {
            gradient_tensor(h, t, p, &tensors[n], strides[n]);
            grads[n] = &tensors[n];
            memset(param->grad, 0, (size_t)h->model.params[p].count * sizeof(float));
            param->used = 0;
        }
        n++;
    }
    set_values(h, unit, 0);
    h->in_backward[unit] = 0;
    if (!h->plan->keep_full) spoil(h, unit);
    hook(h, fsdp_unit_post_backward(h->units[unit], grads, n, h->plan->asynchronous ? &work : NULL), "post_backward",
         unit);
    fsdp_work_release(work);
    int kept = h->plan->keep_full && h->micro + 1 < (int)strlen(h->plan->schedule);
    if (h->infos[unit].strategy != FSDP_NO_SHARD && h->infos[unit].full_bytes)
        CHECK((tape_host_unit(h, unit).state == FSDP_UNIT_UNSHARDED) == kept,
              "seed %llu: after its backward unit %d is %s", h->plan->seed, unit, kept ? "sharded" : "not sharded");
}

static void begin_backward(struct trainer *tr, int micro)
{
    struct tape_host *h = tr->owner;
    char letter = h->discarding ? "RN"[micro % 2] : h->plan->schedule[micro];
    int last = micro + 1 == (int)strlen(h->plan->schedule);
    h->micro = micro;
    OK(fsdp_model_set_gradient_sync(h->fsdp, letter != 'N'));
    OK(fsdp_model_set_all_reduce(h->fsdp, letter != 'R'));
    for (int u = 0; u < h->model.n_units && h->plan->keep_full; u++)
        OK(fsdp_unit_set_reshard_after_backward(h->units[u], last));
}

static void end_backward(struct trainer *tr, int last)
{
    struct tape_host *h = tr->owner;
    event(h);
    hook(h, fsdp_model_finish_backward(h->fsdp), "finish_backward", -1);
    for (int u = 0; u < h->model.n_units && (last || !h->plan->keep_full); u++) {
        fsdp_unit_state state;
        OK(fsdp_unit_query_state(h->units[u], &state));
        CHECK(state == FSDP_UNIT_SHARDED, "seed %llu, step %d: unit %d is not sharded after backward", h->plan->seed,
              h->step, u);
        CHECK(!h->valid[u], "seed %llu, step %d: unit %d was not said to be invalid", h->plan->seed, h->step, u);
    }
}

static void cast(struct trainer *tr, int unit, int kind, float *values, int count)
{
    struct tape_host *h = tr->owner;
    int64_t shape[] = {count};
    DLTensor input = {.data = values, .device = {kDLCPU, 0}, .ndim = 1, .dtype = format_dl(FORMAT_F32), .shape = shape};
    DLManagedTensorVersioned *out = NULL;
    OK(fsdp_unit_cast(h->units[unit], kind ? FSDP_CAST_OUTPUT : FSDP_CAST_INPUT, &input, &out));
    enum format f = kind ? h->plan->output_type : h->plan->param_type;
    CHECK((out != NULL) == (f != FORMAT_NONE && f != FORMAT_F32), "a cast that is %sneeded gives %s", out ? "not " : "",
          out ? "something" : "nothing");
    for (int i = 0; out && i < count; i++) values[i] = (float)format_get(f, out->dl_tensor.data, i);
    if (out) out->deleter(out);
}

static const struct backend backend = {pre_forward,    post_forward, pre_backward, post_backward,
                                       begin_backward, end_backward, cast};

/* ---- training */

struct tape_host *tape_host_new(struct rank *r, const struct plan *plan)
{
    struct tape_host *h = calloc(1, sizeof *h);
    CHECK(h, "memory");
    h->r = r;
    h->plan = plan;
    h->own = plan->seed * 31 + (uint64_t)r->rank;
    model_build(&h->model, plan, 1);
    trainer_init(&h->trainer, &h->model, &backend, h, r->rank, r->size);
    make_model(h);
    for (int u = 0; u < h->model.n_units; u++) make_unit(h, u);
    for (int p = 0; p < h->model.n_params; p++) take_param(h, p);
    if (plan->lists) make_lists(h);
    return h;
}

static void drop_tensor(DLManagedTensorVersioned *t)
{
    if (t) t->deleter(t);
}

void tape_host_drop(struct tape_host *h)
{
    for (int p = 0; p < h->model.n_params; p++) {
        struct host_param *param = &h->params[p];
        drop_tensor(param->full);
        drop_tensor(param->shard);
        drop_tensor(param->grad);
        free(param->values);
        free(param->first);
        free(param->second);
    }
    for (int u = 0; u < h->model.n_units; u++) fsdp_unit_release(h->units[u]);
    fsdp_model_release(h->fsdp);
    fsdp_mesh_release(h->mesh);
    fsdp_group_release(h->group);
    trainer_drop(&h->trainer);
    free(h);
}

static void toggle(struct tape_host *h)
{
    for (int p = 0; p < h->model.n_params; p++) {
        const struct model_param *info = &h->model.params[p];
        int home = info->tied_to >= 0 ? info->tied_to : p, frozen = frozen_at(h->plan, home, h->step);
        h->trainer.params[p].frozen = frozen;
        if (!h->plan->toggled[home] || h->step != h->plan->toggle_step) continue;
        if (home == p) OK(fsdp_unit_set_frozen(h->units[info->unit], info->index, frozen));
        const DLTensor *grad = h->params[p].grad ? &h->params[p].grad->dl_tensor : NULL;
        for (int64_t k = 0; frozen && grad && k < elements(grad); k++)
            CHECK(format_get(h->params[p].low, grad->data, k) == 0, "seed %llu: the gradient of frozen %s is not zeros",
                  h->plan->seed, info->name);
        if (!frozen && !h->params[p].grad)
            OK(fsdp_unit_param_grad(h->units[info->unit], info->index, &h->params[p].grad));
    }
}

static void update(struct tape_host *h)
{
    for (int p = 0; p < h->model.n_params; p++) {
        struct host_param *param = &h->params[p];
        if (h->model.params[p].tied_to >= 0 || h->trainer.params[p].frozen) continue;
        int64_t n = shard_count(param);
        double *grad = malloc((size_t)(n + 1) * sizeof *grad);
        for (int64_t k = 0; k < n; k++) grad[k] = format_get(param->low, param->grad->dl_tensor.data, k);
        optimizer_step(h->plan, h->step, param->master, param->shard->dl_tensor.data, grad, param->first, param->second,
                       n);
        free(grad);
    }
}

/* Forward alone. Units that stay full after it would keep these values: they are resharded by hand. */
static double evaluate(struct tape_host *h)
{
    double loss = trainer_evaluate(&h->trainer, h->step);
    for (int u = 0; u < h->model.n_units; u++) OK(fsdp_unit_reshard(h->units[u]));
    return loss;
}

void tape_host_step(struct tape_host *h)
{
    toggle(h);
    if (h->plan->discard) {
        h->discarding = 1;
        trainer_micros(&h->trainer, h->step);
        trainer_forget(&h->trainer);
        h->discarding = h->clean = 0;
    }
    if (!h->clean) OK(fsdp_model_zero_grad(h->fsdp));
    h->clean = 0;
    trainer_micros(&h->trainer, h->step);
    trainer_forget(&h->trainer);
    if (h->plan->clip > 0) OK(fsdp_model_clip_grad_norm(h->fsdp, h->plan->clip, h->plan->norm, 1, &h->norm));
    if (h->plan->evaluate) h->losses[0] = evaluate(h);
    update(h);
    if (h->plan->evaluate) h->losses[1] = evaluate(h);
    h->step++;
}

fsdp_status tape_host_break(struct tape_host *h, int fuse)
{
    toggle(h);
    h->status = FSDP_OK;
    h->fuse = fuse;
    h->may_fail = 1;
    if (setjmp(h->raised) == 0) trainer_micros(&h->trainer, h->step);
    h->fuse = h->may_fail = 0;
    memset(h->in_backward, 0, sizeof h->in_backward);
    return h->status;
}

void tape_host_reset(struct tape_host *h)
{
    OK(fsdp_model_reset(h->fsdp));
    trainer_forget(&h->trainer);
    h->clean = 1;
    for (int u = 0; u < h->model.n_units; u++) {
        CHECK(tape_host_unit(h, u).state == FSDP_UNIT_SHARDED, "seed %llu: unit %d unsharded after reset",
              h->plan->seed, u);
        CHECK(!h->valid[u], "seed %llu: unit %d not said to be invalid by reset", h->plan->seed, u);
    }
}

double tape_host_difference(struct tape_host *h, const struct result *r)
{
    double most = 0;
    for (int p = 0; p < h->model.n_params; p++) {
        const struct model_param *info = &h->model.params[p];
        DLManagedTensorVersioned *whole;
        OK(fsdp_unit_gather_param(h->units[info->unit], info->index, &whole));
        for (long k = 0; k < info->count; k++) {
            double d = fabs(format_get(h->params[p].master, whole->dl_tensor.data, k) - r->values[p][k]);
            if (!(d <= most)) most = d;
        }
        whole->deleter(whole);
    }
    return most;
}

fsdp_unit_info tape_host_unit(struct tape_host *h, int unit)
{
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(h->units[unit], &info));
    return info;
}

int tape_host_unit_of(struct tape_host *h, const char *param)
{
    return h->model.params[model_find(&h->model, param)].unit;
}
