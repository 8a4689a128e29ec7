/* Any calls in any order, the same on all ranks, on units of every strategy: a small model says which state a unit is
 * in and which version of its values its full view shows. It knows nothing of slots, publications or prefetch: where
 * the library may choose, the model allows both, and no more.
 *
 * FSDP_TEST_SEED repeats the run of a failure that names it. */
#include "schedule_host.h"

#include <math.h>

TestSuite(fsdp_sequences, .timeout = RANKS_SECONDS + 30);

#define SEQUENCES 10 /* in one run of ranks */
#define CALLS 60

/* What is known of a unit. */
struct view {
    int full;          /* by calls of its own; a prefetch may have made it so as well */
    int current;       /* what was published last will do for backward */
    int64_t published; /* the version that was; -1: none */
    int64_t seen[2];   /* the full view shows one of these; -1: whatever */
    int in_backward, stays, keeps;
};

struct trial {
    struct host host;
    struct view views[UNITS];
    fsdp_work *work[UNITS]; /* of an asynchronous unshard */
    int lists;              /* a unit has a prefetch list of its own */
    int said;               /* changes of shards must be told: between two ends of backward */
    uint64_t common, own, seed;
    char log[CALLS * 16];
};

static int may_prefetch(const struct trial *t)
{
    const fsdp_model_options *o = &t->host.plan->options;
    return o->forward_prefetch || o->backward_prefetch || t->lists;
}

static int is_whole(const struct trial *t, int u) /* the full view is the shard */
{
    const struct plan *plan = t->host.plan;
    return (plan->strategy[u] ? plan->strategy[u] : plan->options.strategy) == FSDP_NO_SHARD;
}

/* ---- what calls do, as the header says */

static void will_unshard(struct trial *t, int u, int reuse)
{
    struct view *v = &t->views[u];
    if (v->full && v->current) return;
    int64_t now = t->host.version[u];
    /* Fetched ahead, it shows what the shards held then: no other, since changes of such units are told. */
    v->seen[0] = now;
    v->seen[1] = reuse && v->current && v->published >= 0 ? v->published : now;
    v->full = v->current = 1;
    if (v->seen[0] == v->seen[1]) v->published = now;
}

static void will_reshard(struct trial *t, int u)
{
    struct view *v = &t->views[u];
    v->full = 0;
}

static void will_end(struct trial *t)
{
    for (int u = 0; u < t->host.plan->units; u++) {
        t->views[u].full = t->views[u].current = t->views[u].in_backward = 0;
        fsdp_work_release(t->work[u]);
        t->work[u] = NULL;
    }
    forget_gradients(&t->host);
}

/* ---- what is seen */

static void check(struct trial *t, const char *call)
{
    struct host *h = &t->host;
    for (int u = 0; u < h->plan->units; u++) {
        struct view *v = &t->views[u];
        fsdp_unit_state is = state(h, u);
        if (v->full) {
            CHECK(is == FSDP_UNIT_UNSHARDED || (is == FSDP_UNIT_UNSHARDING && t->work[u]),
                  "FSDP_TEST_SEED=%llu:%s: unit %d is not full, but in state %d", (unsigned long long)t->seed, t->log,
                  u, is);
        } else {
            CHECK(is == FSDP_UNIT_SHARDED || may_prefetch(t), "FSDP_TEST_SEED=%llu:%s: unit %d is full",
                  (unsigned long long)t->seed, t->log, u);
        }
        if (is != FSDP_UNIT_UNSHARDED) continue;
        int64_t got = shown(h, u);
        if (is_whole(t, u)) {
            CHECK(got == h->version[u], "FSDP_TEST_SEED=%llu:%s: whole unit %d shows version %lld, not %lld",
                  (unsigned long long)t->seed, t->log, u, (long long)got, (long long)h->version[u]);
        } else if (!v->full) {
            CHECK(got >= 0, "FSDP_TEST_SEED=%llu:%s: unit %d, fetched ahead, shows what was never in it",
                  (unsigned long long)t->seed, t->log, u);
        } else if (v->seen[0] >= 0) {
            CHECK(got == v->seen[0] || got == v->seen[1],
                  "FSDP_TEST_SEED=%llu:%s: unit %d shows version %lld, not %lld", (unsigned long long)t->seed, t->log,
                  u, (long long)got, (long long)v->seen[0]);
            v->seen[0] = v->seen[1] = v->published = got;
        }
    }
}

/* ---- calls */

static void quiesce(struct trial *t, int u)
{
    if (t->work[u]) OK(fsdp_work_wait(t->work[u], -1));
    while (state(&t->host, u) == FSDP_UNIT_UNSHARDING) nap(20);
}

static void change(struct trial *t, int u, int tell)
{
    struct host *h = &t->host;
    quiesce(t, u); /* nobody reads the shards now */
    set_version(h, u, h->version[u] + 1);
    if (!tell) return;
    OK(fsdp_unit_shard_changed(h->unit[u]));
    t->views[u].current = 0;
}

/* This rank alone writes over its view, or doesn't. */
static void scribble_view(struct trial *t, int u)
{
    struct host *h = &t->host;
    if (!t->views[u].full || is_whole(t, u)) return;
    quiesce(t, u);
    OK(fsdp_unit_unshard(h->unit[u], NULL)); /* full already; so by this call, whoever began it */
    will_unshard(t, u, 0);
    t->views[u].seen[0] = -1;
    float *full = h->full[u]->dl_tensor.data;
    if (random_below(&t->own, 2)) full[random_below(&t->own, (int)sizes[u])] = -3;
    if (random_below(&t->own, 4) == 0) memset(full, 0x55, (size_t)sizes[u] * sizeof *full);
}

static void load(struct trial *t, int u)
{
    struct host *h = &t->host;
    float *values = malloc((size_t)sizes[u] * sizeof *values);
    DLTensor full = view(values, DTYPE_F32, 1, &sizes[u]);
    if (ahead(h, u) && !is_whole(t, u)) {
        quiesce(t, u);
        OK(fsdp_unit_reshard(h->unit[u]));
        will_reshard(t, u);
    }
    h->version[u] = (h->version[u] + 1) % VERSIONS;
    full_values(u, h->version[u], values);
    OK(fsdp_unit_load_param(h->unit[u], 0, &full));
    t->views[u].current = 0;
    free(values);
}

static void gather(struct trial *t, int u)
{
    struct host *h = &t->host;
    DLManagedTensorVersioned *whole;
    float *want = malloc((size_t)sizes[u] * sizeof *want);
    full_values(u, h->version[u], want);
    OK(fsdp_unit_gather_param(h->unit[u], 0, &whole));
    CHECK(memcmp(whole->dl_tensor.data, want, (size_t)sizes[u] * sizeof *want) == 0,
          "FSDP_TEST_SEED=%llu:%s: what was gathered of unit %d is not what the shards hold",
          (unsigned long long)t->seed, t->log, u);
    whole->deleter(whole);
    free(want);
}

static void set_list(struct trial *t, int u)
{
    struct host *h = &t->host;
    fsdp_unit *list[3];
    int n = random_below(&t->common, 4), phase = random_below(&t->common, 2);
    for (int k = 0; k < n; k++) list[k] = h->unit[random_below(&t->common, h->plan->units)];
    OK(fsdp_unit_set_prefetch(h->unit[u], phase, list, n));
    t->lists = 1;
}

static void set_reshard(struct trial *t, int u)
{
    static const int32_t ways[] = {FSDP_RESHARD_NEVER, FSDP_RESHARD_ALWAYS, 2, 2};
    struct host *h = &t->host;
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(h->unit[u], &info));
    int32_t way = ways[random_below(&t->common, info.shard_size % 2 ? 2 : 4)];
    OK(fsdp_unit_set_reshard_after_forward(h->unit[u], way));
    t->views[u].stays = way == FSDP_RESHARD_NEVER;
}

static void end(struct trial *t, int reset)
{
    struct host *h = &t->host;
    OK(reset ? fsdp_model_reset(h->model) : fsdp_model_finish_backward(h->model));
    will_end(t);
    if (reset) memset(h->sum, 0, sizeof h->sum);
    if (reset) OK(fsdp_model_finish_backward(h->model)); /* zeros can be seen */
    expect_gradients(h, t->log);
    for (int u = 0; u < h->plan->units; u++) {
        CHECK(!ahead(h, u), "FSDP_TEST_SEED=%llu:%s: unit %d is not sharded", (unsigned long long)t->seed, t->log, u);
        if (random_below(&t->common, 2)) change(t, u, 0);
    }
}

static void call(struct trial *t)
{
    struct host *h = &t->host;
    int u = random_below(&t->common, h->plan->units), kind = random_below(&t->common, 26);
    struct view *v = &t->views[u];
    fsdp_unit *unit = h->unit[u];
    size_t used = strlen(t->log);
    snprintf(t->log + used, sizeof t->log - used, " %d.%d", kind, u);
    switch (kind) {
    case 0:
    case 1:
    case 2:
    case 3:
        OK(fsdp_unit_pre_forward(unit));
        will_unshard(t, u, v->in_backward);
        break;
    case 4:
    case 5:
    case 6:
        OK(fsdp_unit_post_forward(unit));
        if (!v->in_backward && !v->stays) will_reshard(t, u);
        break;
    case 7:
    case 8:
    case 9:
        OK(fsdp_unit_pre_backward(unit));
        will_unshard(t, u, 1);
        v->in_backward = 1;
        break;
    case 10:
    case 11:
    case 12:
        h->async = random_below(&t->common, 2);
        OK(post_backward(h, u, 1 + random_below(&t->common, 3)));
        v->in_backward = 0;
        if (!v->keeps) will_reshard(t, u);
        break;
    case 13:
        OK(fsdp_unit_unshard(unit, NULL));
        will_unshard(t, u, 0);
        break;
    case 14:
        fsdp_work_release(t->work[u]);
        OK(fsdp_unit_unshard(unit, &t->work[u]));
        will_unshard(t, u, 0);
        break;
    case 15:
        OK(fsdp_unit_reshard(unit));
        will_reshard(t, u);
        break;
    case 16:
    case 17:
        change(t, u, 1);
        break;
    case 18:
        if (!may_prefetch(t) && !v->full) change(t, u, 0); /* untold: forward sees it all the same */
        break;
    case 19:
        scribble_view(t, u);
        break;
    case 20:
        load(t, u);
        break;
    case 21:
        gather(t, u);
        break;
    case 22:
        if (random_below(&t->common, 3) == 0) set_list(t, u);
        break;
    case 23:
        v->keeps = random_below(&t->common, 2);
        OK(fsdp_unit_set_reshard_after_backward(unit, !v->keeps));
        break;
    case 24:
        set_reshard(t, u);
        break;
    default:
        end(t, random_below(&t->common, 4) == 0);
        break;
    }
}

static void sequence(struct rank *r, const struct plan *plan)
{
    struct trial *t = calloc(1, sizeof *t);
    t->seed = plan->seed;
    t->common = plan->seed;
    t->own = plan->seed * 7 + (uint64_t)r->rank;
    host_make(r, plan, &t->host);
    for (int u = 0; u < plan->units; u++) {
        fsdp_unit_info info = {.struct_size = sizeof info};
        OK(fsdp_unit_query(t->host.unit[u], &info));
        t->views[u].stays = info.reshard_after_forward == FSDP_RESHARD_NEVER;
        t->views[u].published = -1;
    }
    for (int k = 0; k < CALLS; k++) {
        if (random_below(&t->own, 8) == 0) nap(random_below(&t->own, 100));
        call(t);
        check(t, t->log);
    }
    end(t, 0);
    host_drop(&t->host);
    free(t);
}

/* A model of any kind for this number of ranks. */
static struct plan any_plan(uint64_t seed, int size)
{
    static const int64_t meshes[][2] = {{1, 1}, {2, 1}, {1, 3}, {2, 2}, {4, 1}, {1, 4}};
    uint64_t random = seed * 3 + 1;
    struct plan plan = {.seed = seed, .units = 2 + random_below(&random, UNITS - 1)};
    int hybrid = random_below(&random, 3) == 0, first = size == 4 ? 3 + random_below(&random, 3) : size - 1;
    if (hybrid) memcpy(plan.mesh, meshes[first], sizeof plan.mesh);
    plan.options.strategy =
        hybrid ? FSDP_HYBRID_SHARD + random_below(&random, 2) : FSDP_FULL_SHARD + random_below(&random, 3);
    plan.options.private_unshard = random_below(&random, 3) == 0;
    if (random_below(&random, 2)) plan.options.forward_prefetch = 1 + random_below(&random, 3);
    if (random_below(&random, 2)) plan.options.backward_prefetch = 1 + random_below(&random, 2);
    plan.options.prefetch_limit = random_below(&random, 6);
    for (int u = 0; u < plan.units; u++) {
        plan.strategy[u] = random_below(&random, hybrid ? 6 : 4);
        fsdp_strategy strategy = plan.strategy[u] ? plan.strategy[u] : plan.options.strategy;
        int ranks = strategy == FSDP_FULL_SHARD ? size : strategy == FSDP_HYBRID_SHARD ? (int)plan.mesh[1] : 1;
        if (ranks % 2 == 0 && random_below(&random, 2)) plan.reshard[u] = 2;
    }
    return plan;
}

static void quiet(fsdp_log_level level, const char *message, void *user) {}

static void rank_sequences(struct rank *r)
{
    uint64_t seed = *(const uint64_t *)r->argument;
    fsdp_set_log(quiet, NULL, FSDP_LOG_ERROR);
    for (int k = 0; k < SEQUENCES; k++) {
        struct plan plan = any_plan(seed + (uint64_t)k, r->size);
        sequence(r, &plan);
    }
}

Test(fsdp_sequences, calls_in_any_order_show_the_right_values)
{
    uint64_t seed = random_seed();
    int again = getenv("FSDP_TEST_SEED") != NULL, runs = again || SANITIZED ? 4 : 24;
    for (int k = 0; k < runs; k++) {
        uint64_t first = again ? seed : seed + (uint64_t)(k * SEQUENCES); /* again: with any number of ranks */
        ranks_run(1 + k % 4, rank_sequences, &first);
    }
}
