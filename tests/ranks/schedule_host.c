/* See schedule_host.h. */
#include "schedule_host.h"

#include <math.h>

const int64_t sizes[UNITS] = {600, 3000, 40, 1501, 2000, 7};

/* ---- values */

static float value(int u, int64_t version, int64_t k)
{
    return (float)((version % VERSIONS * 8 + u) * 2048 + k % 2047); /* exact */
}

int64_t shown(const struct host *h, int u)
{
    const float *full = h->full[u]->dl_tensor.data;
    int64_t version = (int64_t)full[0] / 2048 / 8;
    for (int64_t k = 0; k < sizes[u]; k++)
        if (full[k] != value(u, version, k)) return -1;
    return version;
}

void full_values(int u, int64_t version, float *out)
{
    for (int64_t k = 0; k < sizes[u]; k++) out[k] = value(u, version, k);
}

void set_version(struct host *h, int u, int64_t version)
{
    fsdp_param_info info = {.struct_size = sizeof info};
    float *shard = h->shard[u]->dl_tensor.data;
    OK(fsdp_unit_param_query(h->unit[u], 0, &info));
    for (int64_t k = 0; k < info.shard_length; k++) shard[k] = value(u, version, info.shard_start + k);
    h->version[u] = version % VERSIONS;
}

/* ---- making */

void host_make(struct rank *r, const struct plan *plan, struct host *h)
{
    static const char *const dims[] = {"replicate", "shard"};
    *h = (struct host){.r = r, .plan = plan, .group = group_make(r, 0, 0)};
    fsdp_model_options options = plan->options;
    options.struct_size = sizeof options;
    if (plan->mesh[0]) {
        OK(fsdp_mesh_create(h->group, 2, plan->mesh, dims, &h->mesh));
        OK(fsdp_model_create_on_mesh(h->mesh, &options, &h->model));
    } else {
        OK(fsdp_model_create(h->group, &options, &h->model));
    }
    for (int u = 0; u < plan->units; u++) {
        char name[16];
        float *values = malloc((size_t)sizes[u] * sizeof *values);
        DLTensor full = view(values, DTYPE_F32, 1, &sizes[u]);
        fsdp_unit_options unit = {
            .struct_size = sizeof unit, .strategy = plan->strategy[u], .reshard_after_forward = plan->reshard[u]};
        full_values(u, 0, values);
        snprintf(name, sizeof name, "u%d", u);
        fsdp_param param = {.struct_size = sizeof param, .name = name, .full = &full};
        OK(fsdp_unit_create(h->model, name, &param, 1, &unit, &h->unit[u]));
        OK(fsdp_unit_param_full(h->unit[u], 0, &h->full[u]));
        OK(fsdp_unit_param_shard(h->unit[u], 0, &h->shard[u]));
        OK(fsdp_unit_param_grad(h->unit[u], 0, &h->grad[u]));
        free(values);
    }
}

void unit_drop(struct host *h, int u)
{
    if (!h->unit[u]) return;
    h->full[u]->deleter(h->full[u]);
    h->shard[u]->deleter(h->shard[u]);
    h->grad[u]->deleter(h->grad[u]);
    fsdp_unit_release(h->unit[u]);
    h->unit[u] = NULL;
}

void forget_gradients(struct host *h)
{
    while (h->n_held) free(h->held[--h->n_held]);
}

void host_drop(struct host *h)
{
    for (int u = 0; u < h->plan->units; u++) unit_drop(h, u);
    fsdp_model_release(h->model);
    fsdp_mesh_release(h->mesh);
    fsdp_group_release(h->group);
    forget_gradients(h);
}

/* ---- hooks */

fsdp_unit_state state(const struct host *h, int u)
{
    fsdp_unit_state s;
    OK(fsdp_unit_query_state(h->unit[u], &s));
    return s;
}

int ahead(const struct host *h, int u)
{
    return state(h, u) != FSDP_UNIT_SHARDED;
}

void expect_version(const struct host *h, int u, const char *when)
{
    CHECK(state(h, u) == FSDP_UNIT_UNSHARDED, "%s: unit %d is not full", when, u);
    CHECK(shown(h, u) == h->version[u], "%s: unit %d shows version %lld, not %lld", when, u, (long long)shown(h, u),
          (long long)h->version[u]);
}

fsdp_status post_backward(struct host *h, int u, int size)
{
    float *g = h->held[h->n_held++] = malloc((size_t)sizes[u] * sizeof *g);
    CHECK(h->n_held < (int)(sizeof h->held / sizeof *h->held), "too many gradients");
    for (int64_t k = 0; k < sizes[u]; k++) g[k] = (float)(size * (h->r->rank + 1));
    DLTensor grad = view(g, DTYPE_F32, 1, &sizes[u]);
    const DLTensor *grads[] = {&grad};
    fsdp_work *work = NULL;
    fsdp_status status = fsdp_unit_post_backward(h->unit[u], grads, 1, h->async ? &work : NULL);
    fsdp_work_release(work);
    if (status == FSDP_OK) h->sum[u] += size * (h->r->size + 1) / 2.0;
    return status;
}

void expect_gradients(const struct host *h, const char *when)
{
    for (int u = 0; u < h->plan->units; u++) {
        if (!h->unit[u]) continue;
        const DLTensor *grad = &h->grad[u]->dl_tensor;
        const float *g = grad->data;
        for (int64_t k = 0; k < elements(grad); k++)
            CHECK(fabs(g[k] - h->sum[u]) <= 1e-5 * h->sum[u], "%s: gradient of unit %d at %lld is %g, not %g", when, u,
                  (long long)k, (double)g[k], h->sum[u]);
    }
}

void zero(struct host *h)
{
    OK(fsdp_model_zero_grad(h->model));
    memset(h->sum, 0, sizeof h->sum);
}

fsdp_status hook(struct host *h, const char *step)
{
    int u = step[0] == 'e' ? 0 : step[1] - '0';
    fsdp_unit *unit = h->unit[u];
    return step[0] == 'f'   ? fsdp_unit_pre_forward(unit)
           : step[0] == 'g' ? fsdp_unit_post_forward(unit)
           : step[0] == 'b' ? fsdp_unit_pre_backward(unit)
           : step[0] == 'p' ? post_backward(h, u, 1 + u)
                            : fsdp_model_finish_backward(h->model);
}

const char *next(const char *step)
{
    return step + (step[0] == 'e' ? 1 : 2);
}

void play(struct host *h, const char *script)
{
    for (const char *step = script; *step; step = next(step)) {
        OK(hook(h, step));
        if (*step == 'f' || *step == 'b') expect_version(h, step[1] - '0', step);
        if (*step == 'e') forget_gradients(h);
    }
}

void step_all(struct host *h, const char *when)
{
    expect_gradients(h, when);
    zero(h);
    for (int u = 0; u < h->plan->units; u++)
        if (h->unit[u]) set_version(h, u, h->version[u] + 1);
}
