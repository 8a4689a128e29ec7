/* See unit_host.h. */
#include "unit_host.h"

/* ---- parameters */

int64_t par_count(const struct par *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++) n *= p->shape[d];
    return n;
}

int64_t par_places(const struct par *p, int rank, int size, int64_t *places)
{
    int64_t rows = p->shape[p->dim], chunk = (rows + size - 1) / size, n = 0, inner = 1;
    for (int d = p->dim + 1; d < p->ndim; d++) inner *= p->shape[d];
    for (int64_t k = 0; k < par_count(p); k++)
        if (k / inner % rows / chunk == rank) places[n++] = k;
    return n;
}

/* ---- units */

static int first_of(const struct par *pars, int i)
{
    return pars[i].tied ? pars[i].tied - 1 : i;
}

double kit_value(const struct par *pars, int i, int seed, int64_t k)
{
    return value_of(pars[i].type, seed + 3 * first_of(pars, i), k);
}

fsdp_status kit_try(fsdp_model *model, const char *name, const struct par *pars, int n, int seed,
                    const fsdp_unit_options *options, fsdp_unit **unit)
{
    fsdp_param params[KIT_PARAMS] = {0};
    DLTensor tensors[KIT_PARAMS];
    for (int i = 0; i < n; i++) {
        int64_t count = par_count(&pars[i]);
        void *data = pars[i].tied   ? tensors[first_of(pars, i)].data
                     : pars[i].meta ? NULL
                                    : malloc((size_t)count * 8 + 8);
        tensors[i] = view(data, pars[i].type, pars[i].ndim, pars[i].shape);
        double *values = malloc((size_t)(count + 1) * sizeof *values);
        for (int64_t k = 0; k < count; k++) values[k] = kit_value(pars, i, seed, k);
        if (data) set_doubles(&tensors[i], values);
        free(values);
        params[i] = (fsdp_param){.struct_size = sizeof *params,
                                 .name = pars[i].name,
                                 .full = &tensors[i],
                                 .frozen = pars[i].frozen,
                                 .shard_dim = pars[i].dim,
                                 .meta = pars[i].meta,
                                 .id = pars[i].id};
    }
    fsdp_status status = fsdp_unit_create(model, name, params, n, options, unit);
    for (int i = 0; i < n; i++)
        if (!pars[i].tied) free(tensors[i].data);
    return status;
}

void kit_make(fsdp_model *model, const char *name, const struct par *pars, int n, int seed,
              const fsdp_unit_options *options, struct kit *kit)
{
    *kit = (struct kit){.pars = pars, .n = n};
    OK(kit_try(model, name, pars, n, seed, options, &kit->unit));
    fsdp_unit_info info = kit_query(kit);
    kit->rank = info.shard_rank;
    kit->size = info.shard_size;
    for (int i = 0; i < n; i++) {
        OK(fsdp_unit_param_full(kit->unit, i, &kit->full[i]));
        OK(fsdp_unit_param_shard(kit->unit, i, &kit->shard[i]));
        if (!pars[i].frozen) OK(fsdp_unit_param_grad(kit->unit, i, &kit->grad[i]));
    }
}

void kit_drop(struct kit *kit)
{
    for (int i = 0; i < kit->n; i++) {
        kit->full[i]->deleter(kit->full[i]);
        kit->shard[i]->deleter(kit->shard[i]);
        if (kit->grad[i]) kit->grad[i]->deleter(kit->grad[i]);
    }
    fsdp_unit_release(kit->unit);
}

fsdp_unit_info kit_query(const struct kit *kit)
{
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(kit->unit, &info));
    return info;
}

fsdp_param_info kit_param(const struct kit *kit, int i)
{
    fsdp_param_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_param_query(kit->unit, i, &info));
    return info;
}

fsdp_unit_state kit_state(const struct kit *kit)
{
    fsdp_unit_state state;
    OK(fsdp_unit_query_state(kit->unit, &state));
    return state;
}

/* ---- values */

void kit_expect_full(const struct kit *kit, int seed, const char *when)
{
    for (int i = 0; i < kit->n; i++) {
        int64_t count = par_count(&kit->pars[i]);
        double *got = malloc((size_t)(count + 1) * sizeof *got);
        get_doubles(&kit->full[i]->dl_tensor, got);
        for (int64_t k = 0; k < count; k++)
            CHECK(got[k] == kit_value(kit->pars, i, seed, k), "%s: '%s' at %lld is %g, not %g", when, kit->pars[i].name,
                  (long long)k, got[k], kit_value(kit->pars, i, seed, k));
        free(got);
    }
}

void kit_expect_shards(const struct kit *kit, int seed, const char *when)
{
    for (int i = 0; i < kit->n; i++) {
        const struct par *p = &kit->pars[i];
        size_t room = (size_t)par_count(p) + 1;
        int64_t *places = malloc(room * sizeof *places), n = par_places(p, kit->rank, kit->size, places);
        double *got = malloc(room * sizeof *got);
        CHECK(elements(&kit->shard[i]->dl_tensor) == n, "%s: the shard of '%s' has %lld elements, not %lld", when,
              p->name, (long long)elements(&kit->shard[i]->dl_tensor), (long long)n);
        get_doubles(&kit->shard[i]->dl_tensor, got);
        for (int64_t j = 0; j < n; j++)
            CHECK(got[j] == kit_value(kit->pars, i, seed, places[j]), "%s: the shard of '%s' at %lld is %g, not %g",
                  when, p->name, (long long)j, got[j], kit_value(kit->pars, i, seed, places[j]));
        free(places);
        free(got);
    }
}

void kit_set_shards(const struct kit *kit, int seed)
{
    for (int i = 0; i < kit->n; i++) {
        size_t room = (size_t)par_count(&kit->pars[i]) + 1;
        int64_t *places = malloc(room * sizeof *places), n = par_places(&kit->pars[i], kit->rank, kit->size, places);
        double *values = malloc(room * sizeof *values);
        for (int64_t j = 0; j < n; j++) values[j] = kit_value(kit->pars, i, seed, places[j]);
        set_doubles(&kit->shard[i]->dl_tensor, values);
        free(places);
        free(values);
    }
}

/* ---- gradients */

double kit_gradient(int r, int i, int64_t k)
{
    return (double)((r * 5 + i * 3 + k * 2) % 7) - 2;
}

fsdp_status kit_give(const struct kit *kit, int r, unsigned mask, fsdp_work **work)
{
    DLTensor tensors[KIT_PARAMS];
    const DLTensor *grads[KIT_PARAMS] = {0};
    fsdp_work *kept = NULL;
    for (int i = 0; i < kit->n; i++) {
        if (!(mask >> i & 1)) continue;
        DLTensor like = kit->full[i]->dl_tensor;
        int64_t count = elements(&like);
        double *values = malloc((size_t)(count + 1) * sizeof *values);
        for (int64_t k = 0; k < count; k++) values[k] = kit_gradient(r, i, k);
        tensors[i] = like;
        tensors[i].strides = NULL;
        tensors[i].data = malloc((size_t)count * 8 + 8);
        set_doubles(&tensors[i], values);
        free(values);
        grads[i] = &tensors[i];
    }
    fsdp_status status = fsdp_unit_post_backward(kit->unit, grads, kit->n, work ? &kept : NULL);
    if (kept) OK(fsdp_work_wait(kept, -1)); /* the memory is given back here */
    for (int i = 0; i < kit->n; i++)
        if (grads[i]) free(tensors[i].data);
    if (work) *work = kept;
    return status;
}

void kit_expect_grads(const struct kit *kit, int n, unsigned mask, double times, const char *when)
{
    for (int i = 0; i < kit->n; i++) {
        const struct par *p = &kit->pars[i];
        if (!kit->grad[i]) continue;
        size_t room = (size_t)par_count(p) + 1;
        int64_t *places = malloc(room * sizeof *places), own = par_places(p, kit->rank, kit->size, places);
        double *got = malloc(room * sizeof *got);
        get_doubles(&kit->grad[i]->dl_tensor, got);
        CHECK(elements(&kit->grad[i]->dl_tensor) == own, "%s: the gradient of '%s' has another shape", when, p->name);
        for (int64_t j = 0; j < own; j++) {
            double sum = 0;
            for (int k = 0; k < kit->n; k++)
                for (int r = 0; r < n && first_of(kit->pars, k) == first_of(kit->pars, i) && (mask >> k & 1); r++)
                    sum += kit_gradient(r, k, places[j]);
            double want = rounded(p->type, (double)(float)(sum / n) * times);
            if (p->type == DTYPE_F64) want = sum / n * times;
            CHECK(got[j] == want, "%s: the gradient of '%s' at %lld is %.9g, not %.9g", when, p->name, (long long)j,
                  got[j], want);
        }
        free(places);
        free(got);
    }
}

void kit_step(fsdp_model *model, const struct kit *kit, int r, unsigned mask)
{
    OK(fsdp_unit_pre_forward(kit->unit));
    OK(fsdp_unit_post_forward(kit->unit));
    OK(fsdp_unit_pre_backward(kit->unit));
    OK(kit_give(kit, r, mask, NULL));
    OK(fsdp_model_finish_backward(model));
}

/* ---- layouts */

const char *const layout_names[] = {"shared", "private", "no-shard", "hybrid", "hybrid, private"};

fsdp_model *layout_model(fsdp_group *group, enum layout layout, const fsdp_model_options *options)
{
    static const char *const names[] = {"replicate", "shard"};
    fsdp_group_info info = {.struct_size = sizeof info};
    fsdp_model_options wanted = options ? *options : (fsdp_model_options){0};
    fsdp_model *model;
    OK(fsdp_group_query(group, &info));
    wanted.struct_size = sizeof wanted;
    if (layout == LAYOUT_PRIVATE || layout == LAYOUT_HYBRID_PRIVATE) wanted.private_unshard = 1;
    if (layout == LAYOUT_NO_SHARD) wanted.strategy = FSDP_NO_SHARD;
    if (layout < LAYOUT_HYBRID) {
        OK(fsdp_model_create(group, &wanted, &model));
        return model;
    }
    if (info.size % 2) return NULL;
    fsdp_mesh *mesh;
    int64_t sizes[] = {2, info.size / 2};
    wanted.strategy = FSDP_HYBRID_SHARD;
    OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
    OK(fsdp_model_create_on_mesh(mesh, &wanted, &model));
    fsdp_mesh_release(mesh);
    return model;
}
