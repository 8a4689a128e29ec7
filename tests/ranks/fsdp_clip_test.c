/* Norm and clipping of sharded gradients, against plain loops over the whole gradients. */
#include "fsdp_host.h"

#include "fsdp/fsdp.h"

#include <math.h>

TestSuite(fsdp_clip, .timeout = RANKS_SECONDS + 30);

/* Two units of mixed dtypes: parameters with fewer rows than ranks, without rows, frozen. A09, A10. */
static const struct spec first[] = {{"w", DTYPE_F32, 2, {7, 3}, 0},
                                    {"h", DTYPE_BF16, 2, {2, 5}, 0},
                                    {"frozen", DTYPE_F32, 1, {6}, 1},
                                    {"d", DTYPE_F64, 1, {5}, 0}};
static const struct spec second[] = {{"e", DTYPE_F16, 1, {1}, 0}, {"none", DTYPE_F32, 2, {0, 2}, 0}};
#define FIRST (int)(sizeof first / sizeof *first)
#define SECOND (int)(sizeof second / sizeof *second)
#define MOST 32

struct host {
    fsdp_group *group;
    fsdp_model *model;
    struct host_unit units[2];
};

static void host_make(struct rank *r, struct host *h)
{
    h->group = group_make(r, 0, 0);
    h->model = model_make(h->group, NULL);
    host_unit_make(r, h->model, "first", first, FIRST, 0, &h->units[0]);
    host_unit_make(r, h->model, "second", second, SECOND, 9, &h->units[1]);
}

static void host_drop(struct host *h)
{
    host_unit_drop(&h->units[0]);
    host_unit_drop(&h->units[1]);
    fsdp_model_release(h->model);
    fsdp_group_release(h->group);
}

/* The whole gradient's element, as its dtype holds it. */
static double element(const struct spec *spec, int i, int64_t k, double size)
{
    return rounded(spec->type, size * ((double)((k * 37 + i * 11) % 19) - 9) / 7);
}

/* Each rank's rows of the whole gradients, as a reduction would leave them. */
static void set_grads(struct host *h, double size)
{
    for (int u = 0; u < 2; u++)
        for (int i = 0; i < h->units[u].n; i++) {
            const struct host_unit *unit = &h->units[u];
            if (!unit->grad[i]) continue;
            int64_t begin, count;
            double values[MOST];
            spec_part(&unit->specs[i], unit->rank, unit->size, &begin, &count);
            for (int64_t k = 0; k < count; k++) values[k] = element(&unit->specs[i], i, begin + k, size);
            set_doubles(&unit->grad[i]->dl_tensor, values);
        }
}

static long double oracle(double p, double size)
{
    long double total = 0;
    for (int u = 0; u < 2; u++)
        for (int i = 0; i < (u ? SECOND : FIRST); i++) {
            const struct spec *spec = u ? &second[i] : &first[i];
            for (int64_t k = 0; k < spec_count(spec) && !spec->frozen; k++) {
                long double x = fabsl((long double)element(spec, i, k, size));
                if (isinf(p))
                    total = x > total ? x : total;
                else
                    total += powl(x, p);
            }
        }
    return isinf(p) ? total : powl(total, 1 / (long double)p);
}

/* Gradients are the whole ones times `factor`, in the accumulator, rounded once. */
static void expect_grads(const struct host *h, double size, double factor, const char *when)
{
    for (int u = 0; u < 2; u++)
        for (int i = 0; i < h->units[u].n; i++) {
            const struct host_unit *unit = &h->units[u];
            const struct spec *spec = &unit->specs[i];
            if (!unit->grad[i]) continue;
            int64_t begin, count;
            double got[MOST];
            spec_part(spec, unit->rank, unit->size, &begin, &count);
            get_doubles(&unit->grad[i]->dl_tensor, got);
            for (int64_t k = 0; k < count; k++) {
                double x = element(spec, i, begin + k, size);
                double want =
                    spec->type == DTYPE_F64 ? x * factor : rounded(spec->type, (double)((float)x * (float)factor));
                CHECK(got[k] == want, "%s: '%s' at %lld is %.17g, not %.17g", when, spec->name, (long long)(begin + k),
                      got[k], want);
            }
        }
}

/* All ranks hold the same bits. */
static void expect_alike(struct rank *r, fsdp_group *group, double number)
{
    uint64_t bits, all[RANKS_MAX];
    memcpy(&bits, &number, sizeof bits);
    DLTensor mine = view(&bits, DTYPE_U64, 1, (int64_t[]){1}), others = view(all, DTYPE_U64, 1, (int64_t[]){r->size});
    OK(fsdp_all_gather(group, &mine, &others, NULL));
    for (int i = 0; i < r->size; i++) CHECK(all[i] == bits, "rank %d has other bits than this one", i);
}

static const double orders[] = {1, 2, INFINITY, 3, 0.5};
#define ORDERS (sizeof orders / sizeof *orders)

static void rank_norms(struct rank *r)
{
    struct host h;
    host_make(r, &h);
    static const double limits[] = {0.1, 0, 1e9, INFINITY};
    for (size_t o = 0; o < ORDERS; o++) {
        double p = orders[o], norm = -1, before = -1, want = (double)oracle(p, 3);
        char when[64];
        snprintf(when, sizeof when, "p = %g", p);
        set_grads(&h, 3);
        OK(fsdp_model_grad_norm(h.model, p, &norm));
        CHECK(fabs(norm - want) <= 1e-12 * want, "%s: the norm is %.17g, not %.17g", when, norm, want);
        expect_alike(r, h.group, norm);
        expect_grads(&h, 3, 1, when);
        for (size_t l = 0; l < sizeof limits / sizeof *limits; l++) {
            set_grads(&h, 3);
            OK(fsdp_model_clip_grad_norm(h.model, limits[l], p, l % 2, &before));
            CHECK(before == norm, "%s: clipping says %.17g, the norm is %.17g", when, before, norm);
            double factor = limits[l] / (norm + 1e-6);
            expect_grads(&h, 3, factor < 1 ? factor : 1, when);
        }
    }
    /* No gradient anywhere. */
    OK(fsdp_model_zero_grad(h.model));
    for (size_t o = 0; o < ORDERS; o++) {
        double norm = -1;
        OK(backward_nothing(&h.units[0]));
        OK(fsdp_model_clip_grad_norm(h.model, 1, orders[o], 1, &norm));
        CHECK(norm == 0, "the norm of zeros is %g", norm);
    }
    host_drop(&h);
}

Test(fsdp_clip, norms_and_clipped_gradients_are_those_of_the_whole_gradients)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_norms, NULL);
}

/* Squares beyond float32's and float16's ranges, sums beyond bf16's precision. */
static void rank_wide(struct rank *r)
{
    static const struct spec specs[] = {{"f", DTYPE_F32, 1, {4}, 0},
                                        {"h", DTYPE_F16, 1, {4}, 0},
                                        {"b", DTYPE_BF16, 2, {64, 16}, 0},
                                        {"q", DTYPE_F8E5M2, 1, {2}, 0}};
    static const double each[] = {3e30, 60000, 1, 1.5};
    fsdp_group *group = group_make(r, 0, 0);
    for (int i = 0; i < 4; i++) {
        fsdp_model *model = model_make(group, NULL);
        struct host_unit u;
        host_unit_make(r, model, "u", &specs[i], 1, 0, &u);
        int64_t count = elements(&u.grad[0]->dl_tensor), all = spec_count(&specs[i]);
        double *values = malloc((size_t)(count + 1) * sizeof *values), norm, value = rounded(specs[i].type, each[i]);
        for (int64_t k = 0; k < count; k++) values[k] = value;
        set_doubles(&u.grad[0]->dl_tensor, values);
        double want = value * sqrt((double)all);
        OK(fsdp_model_grad_norm(model, 2, &norm));
        CHECK(fabs(norm - want) <= 1e-12 * want, "'%s': %.17g, not %.17g", specs[i].name, norm, want);
        OK(fsdp_model_grad_norm(model, 1, &norm));
        CHECK(fabs(norm - value * (double)all) <= 1e-12 * norm, "'%s': %.17g", specs[i].name, norm);
        free(values);
        host_unit_drop(&u);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_clip, norms_are_summed_in_float64)
{
    for (int n = 1; n <= 3; n += 2) ranks_run(n, rank_wide, NULL);
}

/* One element that is not finite, in one rank's shard: A10. */
static void rank_not_finite(struct rank *r)
{
    struct host h;
    host_make(r, &h);
    static const double strange[] = {INFINITY, -INFINITY, NAN};
    for (int owner = 0; owner < r->size; owner++)
        for (int s = 0; s < 3; s++)
            for (size_t o = 0; o < ORDERS; o++) {
                DLTensor *w = &h.units[0].grad[0]->dl_tensor; /* 7 rows: a rank of four has the last one */
                int64_t begin, count;
                set_grads(&h, 1);
                spec_part(&first[0], owner, r->size, &begin, &count);
                if (r->rank == owner) ((float *)w->data)[count - 1] = (float)strange[s];
                double norm = 7;
                OK(fsdp_model_grad_norm(h.model, orders[o], &norm));
                CHECK(isnan(strange[s]) ? isnan(norm) : isinf(norm) && norm > 0, "the norm is %g with %g on rank %d",
                      norm, strange[s], owner);
                expect_alike(r, h.group, norm);
                norm = 7;
                REFUSED(fsdp_model_clip_grad_norm(h.model, 0.5, orders[o], 1, &norm), FSDP_ERR_STATE,
                        "can't be clipped");
                CHECK(norm == 7, "an output was written");
                if (r->rank == owner) {
                    float kept = ((float *)w->data)[count - 1];
                    CHECK(isnan(strange[s]) ? isnan(kept) : kept == (float)strange[s], "a gradient was changed");
                    double was = element(&first[0], 0, begin + count - 1, 1);
                    ((float *)w->data)[count - 1] = (float)was;
                }
                expect_grads(&h, 1, 1, "after a refusal");

                if (r->rank == owner) ((float *)w->data)[count - 1] = (float)strange[s];
                OK(fsdp_model_clip_grad_norm(h.model, 0.5, orders[o], 0, &norm));
                CHECK(!isfinite(norm), "the norm is %g", norm);
                double got[MOST];
                DLTensor *d = &h.units[0].grad[3]->dl_tensor;
                get_doubles(d, got);
                for (int64_t k = 0; k < elements(d); k++)
                    CHECK(isnan(strange[s]) ? isnan(got[k]) : got[k] == 0, "multiplied by 0 or NaN: %g", got[k]);
            }
    host_drop(&h);
}

Test(fsdp_clip, what_is_not_finite_on_one_rank_is_so_on_all)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_not_finite, NULL);
}

/* Reductions under way are waited for; those that failed make the gradients unfit. */
static void rank_pending(struct rank *r)
{
    struct host h;
    host_make(r, &h);
    double norm = -1;
    float ones[21];
    for (int k = 0; k < 21; k++) ones[k] = 2;
    DLTensor t = view(ones, DTYPE_F32, 2, first[0].shape);
    const DLTensor *grads[FIRST] = {&t}, *none[SECOND] = {0};
    for (int clip = 0; clip < 2; clip++) {
        fsdp_work *work;
        OK(fsdp_model_zero_grad(h.model));
        OK(fsdp_unit_post_backward(h.units[0].unit, grads, FIRST, &work));
        if (clip)
            OK(fsdp_model_clip_grad_norm(h.model, 21, 1, 1, &norm));
        else
            OK(fsdp_model_grad_norm(h.model, 1, &norm));
        CHECK(norm == 42, "the norm is %g, not 42", norm);
        int32_t done;
        OK(fsdp_work_test(work, &done));
        CHECK(done, "the reduction goes on");
        fsdp_work_release(work);
        OK(fsdp_model_finish_backward(h.model));
    }
    if (r->size > 1) { /* ranks reduce different units: MISMATCH */
        fsdp_work *work;
        int odd = r->rank == r->size - 1;
        OK(fsdp_unit_post_backward(h.units[odd].unit, odd ? none : grads, odd ? SECOND : FIRST, &work));
        fsdp_work_release(work);
        for (int again = 0; again < 2; again++) {
            norm = 7;
            REFUSED(fsdp_model_grad_norm(h.model, 2, &norm), FSDP_ERR_STATE, "fsdp_model_zero_grad");
            REFUSED(fsdp_model_clip_grad_norm(h.model, 1, 2, 0, &norm), FSDP_ERR_STATE, "fsdp_model_zero_grad");
            CHECK(norm == 7, "an output was written");
        }
        OK(fsdp_model_reset(h.model));
        OK(fsdp_model_grad_norm(h.model, 2, &norm));
        CHECK(norm == 0, "the norm is %g after reset", norm);

        /* Only one rank lost its gradients: all are told so. */
        if (odd) h.units[0].unit->lost = (fsdp_error_info){.status = FSDP_ERR_TIMEOUT, .message = "made up"};
        REFUSED(fsdp_model_grad_norm(h.model, 2, &norm), FSDP_ERR_STATE, "made up");
        if (!odd) REFUSED(fsdp_model_clip_grad_norm(h.model, 1, 2, 0, &norm), FSDP_ERR_STATE, "reported");
        if (odd) REFUSED(fsdp_model_clip_grad_norm(h.model, 1, 2, 0, &norm), FSDP_ERR_STATE, "unit 'first'");
        OK(fsdp_model_zero_grad(h.model));
        OK(fsdp_model_grad_norm(h.model, 2, &norm));
    }
    host_drop(&h);
}

Test(fsdp_clip, reductions_are_waited_for_and_lost_gradients_refused_everywhere)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_pending, NULL);
}

static void rank_refused(struct rank *r)
{
    struct host h;
    host_make(r, &h);
    set_grads(&h, 2);
    double norm = 7;
    static const double bad[] = {0, -1, NAN, -INFINITY};
    uint64_t before = operations_of(h.group);
    for (int i = 0; i < 4; i++) {
        REFUSED(fsdp_model_grad_norm(h.model, bad[i], &norm), FSDP_ERR_INVALID, "p is");
        REFUSED(fsdp_model_clip_grad_norm(h.model, 1, bad[i], 0, &norm), FSDP_ERR_INVALID, "p is");
        if (i) REFUSED(fsdp_model_clip_grad_norm(h.model, bad[i], 2, 0, &norm), FSDP_ERR_INVALID, "max_norm is");
    }
    REFUSED(fsdp_model_clip_grad_norm(h.model, 1, 2, 2, &norm), FSDP_ERR_INVALID, "error_if_nonfinite is 2");
    CHECK(operations_of(h.group) == before, "a refused call took a place in the order");
    int odd = r->size > 1 && r->rank == r->size - 1;
    if (r->size > 1) {
        REFUSED(fsdp_model_grad_norm(h.model, odd ? 1 : 2, &norm), FSDP_ERR_MISMATCH, "grad_norm");
        REFUSED(fsdp_model_clip_grad_norm(h.model, 1, odd ? 1 : 2, 0, &norm), FSDP_ERR_MISMATCH, "clip_grad_norm");
        REFUSED(fsdp_model_clip_grad_norm(h.model, odd ? 1 : 2, 2, 0, &norm), FSDP_ERR_MISMATCH, "max_norm");
        REFUSED(fsdp_model_clip_grad_norm(h.model, 1, 2, odd, &norm), FSDP_ERR_MISMATCH, "error_if_nonfinite");
        REFUSED(odd ? fsdp_model_grad_norm(h.model, 2, &norm) : fsdp_model_clip_grad_norm(h.model, 1, 2, 0, &norm),
                FSDP_ERR_MISMATCH, "clip_grad_norm");
        /* A unit that one rank still has. */
        DLManagedTensorVersioned *held = NULL;
        if (odd) OK(fsdp_unit_param_shard(h.units[1].unit, 0, &held));
        host_unit_drop(&h.units[1]);
        REFUSED(fsdp_model_grad_norm(h.model, 2, &norm), FSDP_ERR_MISMATCH, "the model's units");
        if (held) held->deleter(held);
        host_unit_make(r, h.model, "second", second, SECOND, 9, &h.units[1]);
        set_grads(&h, 2);
    }
    CHECK(norm == 7, "an output was written");
    expect_grads(&h, 2, 1, "after refusals");
    OK(fsdp_model_grad_norm(h.model, 2, &norm));
    CHECK(fabs(norm - (double)oracle(2, 2)) < 1e-12 * norm, "the norm is %g", norm);
    host_drop(&h);
}

Test(fsdp_clip, bad_and_differing_arguments_are_refused_and_change_nothing)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_refused, NULL);
}
