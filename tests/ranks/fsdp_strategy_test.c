/* Strategies: how units of every strategy lie on the ranks, alone and mixed in one model, on groups and meshes; what is
 * full when, what is sent, and what becomes of gradients whatever the order of micro-batches.
 *
 * The oracle holds whole parameters and the sums of all ranks' gradients as doubles, and does by three rules what the
 * header says of sync and all-reduce. Gradients are random, missing here and there, given with a work handle or
 * without; every rank knows how all others' are made. */
#include "fsdp_host.h"

#include <math.h>

TestSuite(fsdp_strategy, .timeout = RANKS_SECONDS + 30);

#define UNITS 5
#define PARAMS 5
#define MOST 24   /* elements of a parameter */
#define MICROS 40 /* micro-batches of a run */

/* Uneven rows, fewer rows than ranks, none at all, cut along the second dimension, frozen. */
static const struct shape {
    enum dtype type;
    int ndim;
    int64_t shape[2];
    int shard_dim, frozen;
} shapes[PARAMS] = {{DTYPE_F32, 2, {7, 3}, 0, 0},
                    {DTYPE_F64, 1, {2, 1}, 0, 0},
                    {DTYPE_F32, 2, {0, 2}, 0, 0},
                    {DTYPE_F32, 2, {3, 5}, 1, 0},
                    {DTYPE_F32, 1, {6, 1}, 0, 1}};

/* What a run does: the same on all ranks. */
struct plan {
    int64_t mesh[2]; /* replicate, shard; 0: a group alone */
    fsdp_model_options options;
    int units;
    fsdp_strategy strategy[UNITS]; /* 0: the model's */
    int32_t reshard[UNITS];
    const char *iterations; /* a letter for each micro-batch: S sync, N none, R sync without all-reduce; ' ' step */
    uint64_t seed;
    int nulls, async, naps; /* gradients are missing; some with a work handle; ranks dawdle */
    int exact_traffic;      /* how often units publish is known: all of one strategy */
};

struct host {
    struct rank *r;
    const struct plan *plan;
    fsdp_group *group;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    DLManagedTensorVersioned *full[UNITS][PARAMS], *shard[UNITS][PARAMS], *grad[UNITS][PARAMS];
    int shard_rank[UNITS], shard_size[UNITS], replicate_rank[UNITS], replicate_size[UNITS];
    /* the oracle: whole parameters */
    double value[UNITS][PARAMS][MOST], local[UNITS][PARAMS][MOST], partial[UNITS][PARAMS][MOST],
        sum[UNITS][PARAMS][MOST];
    int64_t publications[UNITS], reduced[UNITS], replicated[UNITS];
    void *held[MICROS * UNITS * PARAMS]; /* gradients that reductions may still read */
    int n_held, micro;
    int poisoned, poisoner; /* unit, and the rank whose gradient of it has `poison` in it */
    double poison;          /* 0: none */
    uint64_t random, own;   /* the same on all ranks; this rank's */
};

/* ---- parameters */

static int64_t count_of(int i)
{
    return shapes[i].shape[0] * (shapes[i].ndim > 1 ? shapes[i].shape[1] : 1);
}

static fsdp_strategy strategy_of(const struct plan *plan, int u)
{
    return plan->strategy[u] ? plan->strategy[u] : plan->options.strategy ? plan->options.strategy : FSDP_FULL_SHARD;
}

static int is_hybrid(fsdp_strategy s)
{
    return s == FSDP_HYBRID_SHARD || s == FSDP_HYBRID_SHARD_GRAD_OP;
}

static int keeps(const struct plan *plan, int u)
{
    fsdp_strategy s = strategy_of(plan, u);
    return s == FSDP_SHARD_GRAD_OP || s == FSDP_HYBRID_SHARD_GRAD_OP || s == FSDP_NO_SHARD ||
           plan->reshard[u] == FSDP_RESHARD_NEVER;
}

static int cut_dim(const struct host *h, int u, int i)
{
    return strategy_of(h->plan, u) == FSDP_NO_SHARD ? 0 : shapes[i].shard_dim;
}

/* A rank's part: rows of the dimension that is cut. */
static void part(const struct host *h, int u, int i, int rank, int64_t *start, int64_t *rows)
{
    int64_t all = shapes[i].shape[cut_dim(h, u, i)], chunk = (all + h->shard_size[u] - 1) / h->shard_size[u];
    *start = chunk * rank < all ? chunk * rank : all;
    *rows = all - *start < chunk ? all - *start : chunk;
}

static int64_t part_count(const struct host *h, int u, int i)
{
    int64_t start, rows, all = shapes[i].shape[cut_dim(h, u, i)];
    part(h, u, i, h->shard_rank[u], &start, &rows);
    return all ? count_of(i) / all * rows : 0;
}

/* Where element k of this rank's shard lies in the whole. */
static int64_t place(const struct host *h, int u, int i, int64_t k)
{
    int64_t start, rows;
    int dim = cut_dim(h, u, i);
    part(h, u, i, h->shard_rank[u], &start, &rows);
    int64_t inner = dim == 0 && shapes[i].ndim > 1 ? shapes[i].shape[1] : 1;
    return k / (rows * inner) * shapes[i].shape[dim] * inner + start * inner + k % (rows * inner);
}

static double in_type(int i, double v)
{
    return shapes[i].type == DTYPE_F64 ? v : (double)(float)v;
}

/* ---- making */

static void geometry(struct host *h, int u)
{
    const struct plan *plan = h->plan;
    fsdp_strategy s = strategy_of(plan, u);
    int rank = h->r->rank, size = h->r->size;
    h->shard_rank[u] = s == FSDP_NO_SHARD ? 0 : is_hybrid(s) ? rank % (int)plan->mesh[1] : rank;
    h->shard_size[u] = s == FSDP_NO_SHARD ? 1 : is_hybrid(s) ? (int)plan->mesh[1] : size;
    h->replicate_rank[u] = s == FSDP_NO_SHARD ? rank : is_hybrid(s) ? rank / (int)plan->mesh[1] : 0;
    h->replicate_size[u] = size / h->shard_size[u];
}

static void new_values(struct host *h, int u)
{
    for (int i = 0; i < PARAMS; i++)
        for (int64_t k = 0; k < count_of(i); k++) h->value[u][i][k] = in_type(i, random_real(&h->random));
}

static void make_unit(struct host *h, int u)
{
    fsdp_param params[PARAMS] = {0};
    DLTensor tensors[PARAMS];
    char names[PARAMS][16], name[16];
    geometry(h, u);
    new_values(h, u);
    for (int i = 0; i < PARAMS; i++) {
        snprintf(names[i], sizeof names[i], "u%d.%d", u, i);
        tensors[i] = view(malloc(MOST * 8), shapes[i].type, shapes[i].ndim, shapes[i].shape);
        set_doubles(&tensors[i], h->value[u][i]);
        params[i] = (fsdp_param){.struct_size = sizeof *params,
                                 .name = names[i],
                                 .full = &tensors[i],
                                 .frozen = shapes[i].frozen,
                                 .shard_dim = shapes[i].shard_dim};
    }
    fsdp_unit_options options;
    OK(fsdp_unit_options_init(&options, sizeof options));
    options.strategy = h->plan->strategy[u];
    options.reshard_after_forward = h->plan->reshard[u];
    snprintf(name, sizeof name, "u%d", u);
    OK(fsdp_unit_create(h->model, name, params, PARAMS, &options, &h->unit[u]));
    for (int i = 0; i < PARAMS; i++) {
        free(tensors[i].data);
        OK(fsdp_unit_param_full(h->unit[u], i, &h->full[u][i]));
        OK(fsdp_unit_param_shard(h->unit[u], i, &h->shard[u][i]));
        if (!shapes[i].frozen) OK(fsdp_unit_param_grad(h->unit[u], i, &h->grad[u][i]));
    }
}

static fsdp_unit_info info_of(const struct host *h, int u)
{
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(h->unit[u], &info));
    return info;
}

/* What the unit says of itself is what its strategy means on these ranks. */
static void expect_layout(const struct host *h, int u)
{
    fsdp_unit_info info = info_of(h, u);
    CHECK(info.strategy == strategy_of(h->plan, u), "unit %d: strategy %d", u, info.strategy);
    CHECK(info.shard_rank == h->shard_rank[u] && info.shard_size == h->shard_size[u], "unit %d: shard %d of %d", u,
          info.shard_rank, info.shard_size);
    CHECK(info.replicate_rank == h->replicate_rank[u] && info.replicate_size == h->replicate_size[u],
          "unit %d: replica %d of %d", u, info.replicate_rank, info.replicate_size);
    int64_t bytes = 0, full_bytes = 0;
    for (int i = 0; i < PARAMS; i++) {
        const DLTensor *shard = &h->shard[u][i]->dl_tensor;
        fsdp_param_info param = {.struct_size = sizeof param};
        int64_t start, rows;
        part(h, u, i, h->shard_rank[u], &start, &rows);
        OK(fsdp_unit_param_query(h->unit[u], i, &param));
        CHECK(param.shard_start == start && param.shard_length == rows && param.shard_dim == cut_dim(h, u, i),
              "unit %d: parameter %d is rows %lld and %lld more of dimension %d", u, i, (long long)param.shard_start,
              (long long)param.shard_length, param.shard_dim);
        CHECK(elements(shard) == part_count(h, u, i) && shard->shape[cut_dim(h, u, i)] == rows, "shape of a shard");
        bytes += part_count(h, u, i) * (int64_t)dtype_size(shapes[i].type);
        full_bytes += count_of(i) * (int64_t)dtype_size(shapes[i].type);
    }
    CHECK(info.shard_bytes == bytes && info.full_bytes == full_bytes, "unit %d holds %lld of %lld bytes", u,
          (long long)info.shard_bytes, (long long)info.full_bytes);
}

static void host_make(struct rank *r, const struct plan *plan, struct host *h)
{
    static const char *const names[] = {"replicate", "shard"};
    memset(h, 0, sizeof *h);
    h->r = r;
    h->plan = plan;
    h->random = plan->seed;
    h->own = plan->seed * 31 + (uint64_t)r->rank;
    h->group = group_make(r, 0, 0);
    fsdp_model_options options = plan->options;
    options.struct_size = sizeof options;
    if (plan->mesh[0]) {
        OK(fsdp_mesh_create(h->group, 2, plan->mesh, names, &h->mesh));
        OK(fsdp_model_create_on_mesh(h->mesh, &options, &h->model));
    } else {
        OK(fsdp_model_create(h->group, &options, &h->model));
    }
    for (int u = 0; u < plan->units; u++) {
        make_unit(h, u);
        expect_layout(h, u);
    }
}

static void host_drop(struct host *h)
{
    for (int u = 0; u < h->plan->units; u++) {
        for (int i = 0; i < PARAMS; i++) {
            h->full[u][i]->deleter(h->full[u][i]);
            h->shard[u][i]->deleter(h->shard[u][i]);
            if (h->grad[u][i]) h->grad[u][i]->deleter(h->grad[u][i]);
        }
        fsdp_unit_release(h->unit[u]);
    }
    for (int i = 0; i < h->n_held; i++) free(h->held[i]);
    fsdp_model_release(h->model);
    fsdp_mesh_release(h->mesh);
    fsdp_group_release(h->group);
}

/* ---- what is seen */

static fsdp_unit_state state(const struct host *h, int u)
{
    fsdp_unit_state s;
    OK(fsdp_unit_query_state(h->unit[u], &s));
    return s;
}

/* The unit is full or not, and every unit that is shows its own values. */
static void expect_state(const struct host *h, int u, int full, const char *when)
{
    CHECK((state(h, u) == FSDP_UNIT_UNSHARDED) == full, "%s of unit %d (strategy %d): state %d", when, u,
          strategy_of(h->plan, u), state(h, u));
    for (int v = 0; v < h->plan->units; v++)
        for (int i = 0; i < PARAMS && state(h, v) == FSDP_UNIT_UNSHARDED; i++) {
            double got[MOST];
            get_doubles(&h->full[v][i]->dl_tensor, got);
            for (int64_t k = 0; k < count_of(i); k++)
                CHECK(got[k] == h->value[v][i][k], "%s of unit %d: unit %d's parameter %d at %lld is %.9g, not %.9g",
                      when, u, v, i, (long long)k, got[k], h->value[v][i][k]);
        }
}

static void expect_traffic(const struct host *h, const char *when)
{
    fsdp_memory_info memory = memory_of(h->model);
    int64_t published = 0, reduced = 0, replicated = 0;
    for (int u = 0; u < h->plan->units; u++) {
        fsdp_unit_info info = info_of(h, u);
        CHECK(info.published_bytes == info.publications * info.shard_bytes,
              "%s: unit %d published %lld bytes %lld times", when, u, (long long)info.published_bytes,
              (long long)info.publications);
        if (strategy_of(h->plan, u) == FSDP_NO_SHARD)
            CHECK(info.publications == 0 && info.reduced_bytes == 0, "unit %d is not sharded, but publishes", u);
        if (h->plan->exact_traffic)
            CHECK(info.publications == h->publications[u], "%s: unit %d published %lld times, not %lld", when, u,
                  (long long)info.publications, (long long)h->publications[u]);
        CHECK(info.reduced_bytes == h->reduced[u], "%s: unit %d reduced %lld bytes, not %lld", when, u,
              (long long)info.reduced_bytes, (long long)h->reduced[u]);
        CHECK(info.replicated_bytes == h->replicated[u], "%s: unit %d replicated %lld bytes, not %lld", when, u,
              (long long)info.replicated_bytes, (long long)h->replicated[u]);
        published += info.published_bytes;
        reduced += info.reduced_bytes;
        replicated += info.replicated_bytes;
    }
    CHECK(memory.published_bytes == published && memory.reduced_bytes == reduced &&
              memory.replicated_bytes == replicated,
          "%s: the model's counts are not its units'", when);
}

static void expect_gradients(const struct host *h, const char *when)
{
    for (int u = 0; u < h->plan->units; u++)
        for (int i = 0; i < PARAMS; i++) {
            double got[MOST], close = shapes[i].type == DTYPE_F64 ? 1e-13 : 4e-6;
            if (!h->grad[u][i]) continue;
            get_doubles(&h->grad[u][i]->dl_tensor, got);
            for (int64_t k = 0; k < part_count(h, u, i); k++) {
                double want = h->sum[u][i][place(h, u, i, k)];
                CHECK(fabs(got[k] - want) <= close,
                      "%s: gradient %d of unit %d (strategy %d) at %lld is %.9g, not %.9g", when, i, u,
                      strategy_of(h->plan, u), (long long)k, got[k], want);
            }
        }
}

/* Ranks that hold the same part hold the same bits. */
static void expect_replicas(const struct host *h)
{
    uint64_t mine[UNITS] = {0}, all[UNITS * RANKS_MAX];
    for (int u = 0; u < h->plan->units; u++)
        for (int i = 0; i < PARAMS; i++) {
            const DLTensor *tensors[] = {&h->shard[u][i]->dl_tensor, h->grad[u][i] ? &h->grad[u][i]->dl_tensor : NULL};
            for (int t = 0; t < 2; t++)
                for (size_t k = 0; tensors[t] && k < tensor_bytes(tensors[t]); k++)
                    mine[u] = (mine[u] ^ ((unsigned char *)tensors[t]->data)[k]) * 0x100000001b3u + 1;
        }
    DLTensor in = view(mine, DTYPE_U64, 1, (int64_t[]){UNITS});
    DLTensor out = view(all, DTYPE_U64, 1, (int64_t[]){UNITS * h->r->size});
    OK(fsdp_all_gather(h->group, &in, &out, NULL));
    for (int u = 0; u < h->plan->units; u++)
        for (int other = 0; other < h->r->size; other++) {
            int same = h->replicate_size[u] == h->r->size || other % h->shard_size[u] == h->shard_rank[u];
            CHECK(!same || all[other * UNITS + u] == mine[u], "unit %d: rank %d, a replica, has other bits", u, other);
        }
}

/* ---- gradients */

/* Rank's gradient for this micro-batch; 0: it has none. */
static int gradient(const struct host *h, int u, int i, int rank, double *out)
{
    uint64_t state = h->plan->seed + (uint64_t)(((h->micro * UNITS + u) * 16 + i) * 16 + rank) * 0x9e37u;
    if (random_below(&state, 4) == 0 && h->plan->nulls) return 0;
    for (int64_t k = 0; k < count_of(i); k++) out[k] = in_type(i, random_real(&state));
    if (h->poison != 0 && i == 0 && u == h->poisoned && rank == h->poisoner) out[5] = h->poison;
    return 1;
}

/* The header's rules, on the sums over all ranks. */
static void oracle(struct host *h, int u, char letter)
{
    fsdp_strategy s = strategy_of(h->plan, u);
    int sends = letter == 'S' || (letter == 'R' && s != FSDP_NO_SHARD),
        ends = sends && (letter == 'S' || !is_hybrid(s));
    for (int i = 0; i < PARAMS; i++) {
        if (shapes[i].frozen) continue;
        int64_t size = (int64_t)dtype_size(shapes[i].type);
        for (int rank = 0; rank < h->r->size; rank++) {
            double g[MOST];
            if (!gradient(h, u, i, rank, g)) continue;
            for (int64_t k = 0; k < count_of(i); k++) h->local[u][i][k] += g[k];
        }
        for (int64_t k = 0; sends && k < count_of(i); k++) {
            h->partial[u][i][k] += h->local[u][i][k];
            h->local[u][i][k] = 0;
            if (!ends) continue;
            h->sum[u][i][k] += h->partial[u][i][k] / h->r->size;
            h->partial[u][i][k] = 0;
        }
        if (sends) *(s == FSDP_NO_SHARD ? &h->replicated[u] : &h->reduced[u]) += count_of(i) * size;
        if (ends && is_hybrid(s)) h->replicated[u] += part_count(h, u, i) * size;
    }
}

static void post_backward(struct host *h, int u, char letter)
{
    const DLTensor *given[PARAMS];
    DLTensor tensors[PARAMS];
    for (int i = 0; i < PARAMS; i++) {
        double g[MOST];
        given[i] = NULL;
        if (!gradient(h, u, i, h->r->rank, g)) continue;
        tensors[i] = view(h->held[h->n_held++] = malloc(MOST * 8), shapes[i].type, shapes[i].ndim, shapes[i].shape);
        set_doubles(&tensors[i], g);
        given[i] = &tensors[i];
    }
    int async = h->plan->async && random_below(&h->random, 3) > 0, waits = random_below(&h->random, 4) == 0;
    fsdp_work *work = NULL;
    OK(fsdp_unit_post_backward(h->unit[u], given, PARAMS, async ? &work : NULL));
    if (async && waits) OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
    oracle(h, u, letter);
}

/* ---- iterations */

static void settings(struct host *h, char letter)
{
    OK(fsdp_model_set_gradient_sync(h->model, letter != 'N'));
    OK(fsdp_model_set_all_reduce(h->model, letter == 'S' || (letter == 'N' && random_below(&h->random, 2))));
}

static void dawdle(struct host *h)
{
    if (h->plan->naps && random_below(&h->own, 4) == 0) nap(random_below(&h->own, 300));
}

static void micro_batch(struct host *h, char letter)
{
    int n = h->plan->units, last = -1;
    settings(h, letter);
    for (int u = 0; u < n; u++)
        if (!keeps(h->plan, u)) last = u; /* its values are still in the slot when backward begins */
    for (int u = 0; u < n; u++) {
        dawdle(h);
        OK(fsdp_unit_pre_forward(h->unit[u]));
        expect_state(h, u, 1, "pre_forward");
        OK(fsdp_unit_post_forward(h->unit[u]));
        expect_state(h, u, keeps(h->plan, u), "post_forward");
        if (strategy_of(h->plan, u) != FSDP_NO_SHARD)
            h->publications[u] += 1 + (!keeps(h->plan, u) && u != last && h->plan->reshard[u] < 2);
    }
    for (int u = n - 1; u >= 0; u--) {
        dawdle(h);
        uint64_t before = operations_of(h->group);
        OK(fsdp_unit_pre_backward(h->unit[u]));
        int at_hand =
            keeps(h->plan, u) || (h->plan->reshard[u] > 1 && h->micro) || (h->plan->exact_traffic && u == last);
        CHECK(!at_hand || h->plan->async || before == operations_of(h->group),
              "unit %d, whose values are at hand, talked to all ranks before backward", u);
        expect_state(h, u, 1, "pre_backward");
        post_backward(h, u, letter);
        expect_state(h, u, 0, "post_backward");
    }
    h->micro++;
}

/* The optimizer: new values in the shards. */
static void step(struct host *h)
{
    for (int u = 0; u < h->plan->units; u++) {
        new_values(h, u);
        for (int i = 0; i < PARAMS; i++) {
            double own[MOST];
            for (int64_t k = 0; k < part_count(h, u, i); k++) own[k] = h->value[u][i][place(h, u, i, k)];
            set_doubles(&h->shard[u][i]->dl_tensor, own);
        }
    }
}

static void zero(struct host *h)
{
    OK(fsdp_model_zero_grad(h->model));
    memset(h->local, 0, sizeof h->local);
    memset(h->partial, 0, sizeof h->partial);
    memset(h->sum, 0, sizeof h->sum);
}

static void run(struct host *h)
{
    char when[128];
    for (const char *at = h->plan->iterations;; at++) {
        if (*at && *at != ' ') {
            micro_batch(h, *at);
            if (random_below(&h->random, 3)) continue;
        }
        OK(fsdp_model_finish_backward(h->model)); /* after some micro-batches, and at the end of an iteration */
        for (int u = 0; u < h->plan->units; u++) expect_state(h, u, 0, "finish_backward");
        snprintf(when, sizeof when, "seed %llu, '%s' at %d", (unsigned long long)h->plan->seed, h->plan->iterations,
                 (int)(at - h->plan->iterations));
        expect_gradients(h, when);
        expect_traffic(h, when);
        for (int i = 0; i < h->n_held; i++) free(h->held[i]);
        h->n_held = 0;
        if (*at && *at != ' ') continue;
        expect_replicas(h);
        if (!*at) return;
        step(h);
        expect_replicas(h);
        if (random_below(&h->random, 4)) zero(h);
    }
}

static void rank_run(struct rank *r)
{
    struct host *h = malloc(sizeof *h);
    host_make(r, r->argument, h);
    run(h);
    host_drop(h);
    free(h);
}

/* A06, and all-reduce left for the last micro-batch. */
#define ORDERS "SNNS NSNS N S RRS NRS RNS SRN RS"

Test(fsdp_strategy, sharded_and_whole_units_on_a_group)
{
    static const fsdp_strategy strategies[] = {FSDP_FULL_SHARD, FSDP_SHARD_GRAD_OP, FSDP_NO_SHARD};
    for (int s = 0; s < 3; s++)
        for (int n = 1; n <= 4; n++)
            for (int private = 0; private < 2; private ++) {
                struct plan plan = {.options = {.strategy = strategies[s], .private_unshard = private},
                                    .units = 3,
                                    .iterations = ORDERS,
                                    .seed = random_seed(),
                                    .async = n % 2,
                                    .exact_traffic = 1};
                ranks_run(n, rank_run, &plan);
            }
}

static const int64_t meshes[][2] = {{2, 2}, {1, 4}, {4, 1}, {2, 1}};
#define MESHES (sizeof meshes / sizeof *meshes)

Test(fsdp_strategy, hybrid_units_on_meshes)
{
    for (size_t m = 0; m < MESHES; m++)
        for (int k = 0; k < 4; k++) {
            struct plan plan = {.mesh = {meshes[m][0], meshes[m][1]},
                                .options = {.strategy = k % 2 ? FSDP_HYBRID_SHARD_GRAD_OP : FSDP_HYBRID_SHARD,
                                            .private_unshard = k / 2},
                                .units = 3,
                                .iterations = ORDERS,
                                .seed = random_seed(),
                                .async = m != 1,
                                .naps = k == 0,
                                .exact_traffic = 1};
            ranks_run((int)(meshes[m][0] * meshes[m][1]), rank_run, &plan);
        }
}

Test(fsdp_strategy, other_strategies_use_all_ranks_of_a_mesh)
{
    for (int s = FSDP_FULL_SHARD; s <= FSDP_NO_SHARD; s++) {
        struct plan plan = {.mesh = {2, 2},
                            .options = {.strategy = s},
                            .units = 2,
                            .iterations = "SNS RS",
                            .seed = random_seed(),
                            .exact_traffic = 1};
        ranks_run(4, rank_run, &plan);
    }
}

/* Any strategies in one model, gradients missing on some ranks (A02), work handles or none, any order. */
static void mixed(uint64_t seed)
{
    uint64_t random = seed;
    struct plan plan = {.seed = seed, .units = 2 + random_below(&random, UNITS - 1), .nulls = 1, .async = 1};
    int n = 1 + random_below(&random, 4), hybrid = random_below(&random, 3) > 0;
    char letters[MICROS / 2 + 1] = "";
    if (hybrid) {
        size_t m = (size_t)random_below(&random, MESHES);
        memcpy(plan.mesh, meshes[m], sizeof plan.mesh);
        n = (int)(meshes[m][0] * meshes[m][1]);
    }
    plan.options.strategy =
        hybrid ? FSDP_HYBRID_SHARD + random_below(&random, 2) : FSDP_FULL_SHARD + random_below(&random, 3);
    plan.options.private_unshard = random_below(&random, 3) == 0;
    plan.naps = random_below(&random, 2);
    for (int u = 0; u < plan.units; u++) plan.strategy[u] = random_below(&random, hybrid ? 6 : 4);
    for (int k = 0; k < MICROS / 2; k++) letters[k] = k % 5 == 4 ? ' ' : "SSNR"[random_below(&random, 4)];
    plan.iterations = letters;
    ranks_run(n, rank_run, &plan);
}

Test(fsdp_strategy, any_strategies_in_one_model)
{
    uint64_t seed = random_seed();
    int runs = getenv("FSDP_TEST_SEED") ? 1 : SANITIZED ? 6 : 30;
    for (int k = 0; k < runs; k++) {
        fprintf(stderr, "FSDP_TEST_SEED=%llu\n", (unsigned long long)(seed + (uint64_t)k));
        mixed(seed + (uint64_t)k);
    }
}

/* ---- resharding to a smaller group */

Test(fsdp_strategy, resharded_over_two_of_four_ranks_backward_gathers_within_two)
{
    for (int private = 0; private < 2; private ++)
        for (int hybrid = 0; hybrid < 2; hybrid++) {
            struct plan plan = {.options = {.private_unshard = private},
                                .units = 3,
                                .reshard = {2, 2, 2},
                                .iterations = "SN SRS",
                                .seed = random_seed(),
                                .naps = 1,
                                .exact_traffic = 1};
            if (hybrid) plan.options.strategy = FSDP_HYBRID_SHARD;
            if (hybrid) memcpy(plan.mesh, meshes[1], sizeof plan.mesh);
            ranks_run(4, rank_run, &plan);
            plan.reshard[1] = FSDP_RESHARD_NEVER; /* and mixed with other kinds */
            plan.reshard[2] = 0;
            ranks_run(4, rank_run, &plan);
        }
}

/* ---- norms, clipping and loss scaling over mixed strategies */

static double norm_of(const struct host *h, double p)
{
    long double total = 0;
    for (int u = 0; u < h->plan->units; u++)
        for (int i = 0; i < PARAMS; i++)
            for (int64_t k = 0; k < count_of(i) && !shapes[i].frozen; k++) {
                long double x = fabsl((long double)h->sum[u][i][k]);
                total = isinf(p) ? (x > total ? x : total) : total + powl(x, (long double)p);
            }
    return (double)(isinf(p) ? total : powl(total, 1 / (long double)p));
}

static void expect_alike(const struct host *h, double number)
{
    double all[RANKS_MAX];
    DLTensor in = view(&number, DTYPE_F64, 1, (int64_t[]){1}), out = view(all, DTYPE_F64, 1, (int64_t[]){h->r->size});
    OK(fsdp_all_gather(h->group, &in, &out, NULL));
    for (int i = 0; i < h->r->size; i++)
        CHECK(memcmp(&all[i], &number, sizeof number) == 0, "rank %d has %.17g, not %.17g", i, all[i], number);
}

static void scale_oracle(struct host *h, double factor)
{
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < PARAMS; i++)
            for (int64_t k = 0; k < MOST; k++) h->sum[u][i][k] *= factor;
}

/* A09, A10: replicated gradients count once, empty shards nothing, what is not finite is so for all. */
static void rank_clip(struct rank *r)
{
    static const double orders[] = {1, 2, INFINITY, 3}, strange[] = {INFINITY, NAN};
    struct host *h = malloc(sizeof *h);
    host_make(r, r->argument, h);
    for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
        double norm, before;
        zero(h);
        micro_batch(h, 'S'); /* the norm itself waits for what is under way */
        double want = norm_of(h, orders[o]);
        OK(fsdp_model_grad_norm(h->model, orders[o], &norm));
        CHECK(fabs(norm - want) <= 1e-6 * want, "p = %g: %.9g, not %.9g", orders[o], norm, want);
        expect_alike(h, norm);
        OK(fsdp_model_clip_grad_norm(h->model, 0.1, orders[o], 1, &before));
        CHECK(before == norm, "clipping says %.17g, the norm is %.17g", before, norm);
        scale_oracle(h, 0.1 / (norm + 1e-6));
        expect_gradients(h, "clipped");
        expect_replicas(h);
        OK(fsdp_model_finish_backward(h->model));
    }
    for (int k = 0; k < h->plan->units * r->size * 2; k++) {
        double norm;
        zero(h);
        h->poison = strange[k % 2];
        h->poisoned = k / 2 % h->plan->units;
        h->poisoner = k / 2 / h->plan->units;
        micro_batch(h, 'S');
        OK(fsdp_model_finish_backward(h->model));
        OK(fsdp_model_grad_norm(h->model, 2, &norm));
        CHECK(k % 2 ? isnan(norm) : isinf(norm), "%g in unit %d on rank %d: the norm is %g", h->poison, h->poisoned,
              h->poisoner, norm);
        REFUSED(fsdp_model_clip_grad_norm(h->model, 1, INFINITY, 1, &norm), FSDP_ERR_STATE, "can't be clipped");
    }
    host_drop(h);
    free(h);
}

Test(fsdp_strategy, norms_over_mixed_strategies_count_each_element_once)
{
    struct plan plan = {.options = {.strategy = FSDP_FULL_SHARD},
                        .units = 3,
                        .strategy = {FSDP_FULL_SHARD, FSDP_NO_SHARD, FSDP_SHARD_GRAD_OP},
                        .seed = random_seed(),
                        .async = 1};
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_clip, &plan);
    plan.options.strategy = FSDP_HYBRID_SHARD;
    plan.strategy[2] = FSDP_HYBRID_SHARD;
    for (size_t m = 0; m < MESHES; m++) {
        memcpy(plan.mesh, meshes[m], sizeof plan.mesh);
        ranks_run((int)(meshes[m][0] * meshes[m][1]), rank_clip, &plan);
    }
}

/* A17: an infinity in one rank's gradient of any unit, and all ranks skip. */
static void rank_scale(struct rank *r)
{
    struct host *h = malloc(sizeof *h);
    host_make(r, r->argument, h);
    fsdp_scaler *scaler;
    fsdp_scaler_options options;
    fsdp_scaler_info info = {.struct_size = sizeof info};
    int32_t steps;
    OK(fsdp_scaler_options_init(&options, sizeof options));
    options.init_scale = 1 << 20;
    options.growth_interval = 1;
    OK(fsdp_scaler_create(h->group, &options, &scaler));
    double scale = 1 << 20;
    for (int k = 0; k < h->plan->units * r->size; k++)
        for (int bad = 0; bad < 2; bad++) {
            zero(h);
            h->poison = bad ? INFINITY : 0;
            h->poisoned = k % h->plan->units;
            h->poisoner = k / h->plan->units;
            micro_batch(h, 'S');
            OK(fsdp_scaler_unscale(scaler, h->model));
            scale_oracle(h, 1 / scale);
            if (!bad) expect_gradients(h, "unscaled");
            OK(fsdp_scaler_step(scaler, &steps));
            OK(fsdp_scaler_update(scaler));
            scale *= bad ? 0.5 : 2;
            OK(fsdp_scaler_query(scaler, &info));
            CHECK(steps == !bad && info.found_inf == bad && info.scale == scale, "step %d: steps %d, inf %d, scale %g",
                  k, steps, info.found_inf, info.scale);
            OK(fsdp_model_finish_backward(h->model));
        }
    fsdp_scaler_release(scaler);
    host_drop(h);
    free(h);
}

static void quiet(fsdp_log_level level, const char *message, void *user) {}

Test(fsdp_strategy, loss_scaling_over_mixed_strategies_skips_on_all_ranks)
{
    struct plan plan = {.mesh = {2, 2},
                        .options = {.strategy = FSDP_HYBRID_SHARD},
                        .units = 4,
                        .strategy = {FSDP_FULL_SHARD, FSDP_NO_SHARD, FSDP_HYBRID_SHARD, FSDP_HYBRID_SHARD_GRAD_OP},
                        .seed = random_seed(),
                        .async = 1};
    fsdp_set_log(quiet, NULL, FSDP_LOG_ERROR);
    ranks_run(4, rank_scale, &plan);
}

/* ---- hybrid: the replicas' turn comes at once or with the next unit, for all ranks alike */

static void rank_work_differs(struct rank *r)
{
    struct host *h = malloc(sizeof *h);
    host_make(r, r->argument, h);
    micro_batch(h, 'S');
    OK(fsdp_model_finish_backward(h->model));
    const DLTensor *none[8] = {NULL};
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(h->unit[0], &info));
    fsdp_work *work = NULL;
    fsdp_status status = fsdp_unit_post_backward(h->unit[0], none, info.n_params, r->rank == 1 ? &work : NULL);
    if (status == FSDP_OK) status = fsdp_model_finish_backward(h->model);
    /* Of the other half of the mesh, some have met already. */
    if (r->rank < 2) CHECK(status == FSDP_ERR_MISMATCH, "%s", fsdp_status_name(status));
    fsdp_work_release(work);
    OK(fsdp_model_reset(h->model));
    zero(h);
    micro_batch(h, 'S');
    OK(fsdp_model_finish_backward(h->model));
    expect_gradients(h, "after ranks differed");
    host_drop(h);
    free(h);
}

Test(fsdp_strategy, hybrid_ranks_that_differ_in_work_handles_are_told)
{
    struct plan plan = {.mesh = {2, 2}, .options = {.strategy = FSDP_HYBRID_SHARD}, .units = 2, .seed = random_seed()};
    ranks_run(4, rank_work_differs, &plan);
}
