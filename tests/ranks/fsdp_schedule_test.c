/* The schedule: prefetch really begun ahead, orders learnt and changed, passes without backward, modules called again,
 * ranks that break off anywhere, and random calls against a small model of what a unit may show.
 *
 * The hooks are called by scripts, see schedule_host.h. */
#include "schedule_host.h"

#include <time.h>

TestSuite(fsdp_schedule, .timeout = RANKS_SECONDS + 30);

/* ---- what the log says */

static _Atomic int told;

static void count_told(fsdp_log_level level, const char *message, void *user)
{
    if (strstr(message, "the new order is learnt")) told++;
}

/* How often a change of order was told since the last time, on all ranks. */
static int told_now(struct host *h)
{
    int32_t n, all;
    OK(fsdp_barrier(h->group, NULL));
    n = told;
    DLTensor in = view(&n, DTYPE_I32, 1, (int64_t[]){1}), out = view(&all, DTYPE_I32, 1, (int64_t[]){1});
    OK(fsdp_all_reduce(h->group, &in, &out, FSDP_MAX, NULL)); /* threads share the count */
    told = 0;
    OK(fsdp_barrier(h->group, NULL));
    return all;
}

/* ---- prefetch by what was learnt */

static void expect_ahead(const struct host *h, int u, int is, const char *when, int at)
{
    CHECK(ahead(h, u) == is, "%s of unit %d: unit %d is in state %d", when, at, u, state(h, u));
}

static void rank_forward_prefetch(struct rank *r)
{
    struct host h;
    host_make(r, r->argument, &h);
    int n = h.plan->units, depth = h.plan->options.forward_prefetch, limit = h.plan->options.prefetch_limit;
    for (int iteration = 0; iteration < 3; iteration++) {
        for (int u = 0; u < n; u++) {
            OK(fsdp_unit_pre_forward(h.unit[u]));
            for (int v = u + 1; v < n; v++)
                expect_ahead(&h, v, iteration > 0 && v <= u + depth && v - u < limit, "pre_forward", u);
            expect_version(&h, u, "pre_forward");
            OK(fsdp_unit_post_forward(h.unit[u]));
        }
        for (int u = n - 1; u >= 0; u--) {
            OK(fsdp_unit_pre_backward(h.unit[u]));
            for (int v = 0; v < u; v++) expect_ahead(&h, v, 0, "pre_backward", u);
            expect_version(&h, u, "pre_backward");
            OK(post_backward(&h, u, 2));
        }
        OK(fsdp_model_finish_backward(h.model));
        forget_gradients(&h);
        step_all(&h, "forward prefetch");
    }
    host_drop(&h);
}

Test(fsdp_schedule, forward_unshards_as_many_units_ahead_as_asked_for)
{
    for (int depth = 0; depth <= 3; depth++)
        for (int limit = 2; limit <= 8; limit += 6) {
            struct plan plan = {
                .options = {.forward_prefetch = depth, .prefetch_limit = limit, .private_unshard = depth == 1},
                .units = UNITS};
            ranks_run(1 + depth, rank_forward_prefetch, &plan);
        }
}

static void rank_backward_prefetch(struct rank *r)
{
    struct host h;
    host_make(r, r->argument, &h);
    int n = h.plan->units, how = h.plan->options.backward_prefetch;
    h.async = 1;
    for (int iteration = 0; iteration < 3; iteration++) {
        for (int u = 0; u < n; u++) {
            OK(fsdp_unit_pre_forward(h.unit[u]));
            OK(fsdp_unit_post_forward(h.unit[u]));
        }
        for (int u = n - 1; u >= 0; u--) {
            OK(fsdp_unit_pre_backward(h.unit[u]));
            for (int v = 0; v < u; v++)
                expect_ahead(&h, v, iteration && how == FSDP_BACKWARD_PRE && v == u - 1, "pre_backward", u);
            expect_version(&h, u, "pre_backward");
            OK(post_backward(&h, u, 2));
            for (int v = 0; v < u; v++) expect_ahead(&h, v, iteration && how && v == u - 1, "post_backward", u);
            expect_ahead(&h, u, 0, "post_backward", u);
        }
        OK(fsdp_model_finish_backward(h.model));
        forget_gradients(&h);
        step_all(&h, "backward prefetch");
    }
    host_drop(&h);
}

Test(fsdp_schedule, backward_unshards_the_next_unit_when_asked_to)
{
    for (int how = FSDP_BACKWARD_NONE; how <= FSDP_BACKWARD_POST; how++)
        for (int n = 1; n <= 4; n++) {
            struct plan plan = {.options = {.backward_prefetch = how}, .units = 4};
            if (n == 4) plan.options.strategy = FSDP_HYBRID_SHARD;
            if (n == 4) plan.mesh[0] = plan.mesh[1] = 2;
            ranks_run(n, rank_backward_prefetch, &plan);
        }
}

static void rank_lists(struct rank *r)
{
    struct host h;
    host_make(r, r->argument, &h);
    fsdp_unit *forward[] = {h.unit[3], h.unit[1]}, *backward[] = {h.unit[0], h.unit[2]};
    OK(fsdp_unit_set_prefetch(h.unit[0], FSDP_FORWARD, forward, 2));
    OK(fsdp_unit_set_prefetch(h.unit[3], FSDP_BACKWARD, backward, 2));
    for (int iteration = 0; iteration < 3; iteration++) { /* also before any order is known */
        OK(fsdp_unit_pre_forward(h.unit[0]));
        for (int v = 1; v < 4; v++) expect_ahead(&h, v, v == 1 || v == 3, "pre_forward", 0);
        play(&h, "g0f1g1f2");
        expect_ahead(&h, 3, 1, "pre_forward", 2);
        play(&h, "g2f3g3b3");
        for (int v = 0; v < 3; v++) expect_ahead(&h, v, v != 1, "pre_backward", 3);
        play(&h, "p3b2p2b1p1b0p0e");
        step_all(&h, "lists");
    }
    OK(fsdp_unit_set_prefetch(h.unit[0], FSDP_FORWARD, NULL, 0));
    OK(fsdp_unit_set_prefetch(h.unit[3], FSDP_BACKWARD, NULL, 0));
    OK(fsdp_unit_pre_forward(h.unit[0]));
    for (int v = 1; v < 4; v++) expect_ahead(&h, v, 0, "pre_forward, lists taken away", 0);
    play(&h, "g0e");
    unit_drop(&h, 3); /* a list does not keep its units */
    OK(fsdp_unit_set_prefetch(h.unit[0], FSDP_FORWARD, (fsdp_unit *[]){h.unit[2], h.unit[1]}, 2));
    unit_drop(&h, 2);
    play(&h, "f0");
    expect_ahead(&h, 1, 1, "pre_forward, a unit gone", 0);
    play(&h, "g0f1g1e");
    host_drop(&h);
}

Test(fsdp_schedule, the_hosts_own_lists_are_followed)
{
    struct plan plan = {.units = 4};
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_lists, &plan);
}

/* ---- orders that change */

static void rank_order(struct rank *r)
{
    static const char other[] = "f0g0f2g2f1g1f3g3b3p3b1p1b2p2b0p0e";
    struct host h;
    fsdp_set_log(count_told, NULL, FSDP_LOG_WARN);
    host_make(r, r->argument, &h);
    told_now(&h);
    for (int iteration = 0; iteration < 3; iteration++) {
        play(&h, TRAIN4);
        step_all(&h, "as ever");
    }
    CHECK(told_now(&h) == 0, "a change was told where there was none");
    play(&h, other);
    step_all(&h, "in another order");
    CHECK(told_now(&h) == 1, "the change was not told once");
    for (int u = 0; u < 4; u++) expect_ahead(&h, u, 0, "finish_backward", u);
    play(&h, "f0"); /* learnt anew */
    expect_ahead(&h, 2, 1, "pre_forward", 0);
    expect_ahead(&h, 1, 0, "pre_forward", 0);
    play(&h, other + 2);
    step_all(&h, "in the new order");
    for (int iteration = 0; iteration < 3; iteration++) {
        play(&h, iteration % 2 ? other : TRAIN4);
        step_all(&h, "to and fro");
    }
    CHECK(told_now(&h) == 0, "a change was told twice");
    play(&h, TRAIN4);
    unit_drop(&h, 2); /* one less */
    play(&h, "f0g0f1g1f3g3b3p3b1p1b0p0e");
    play(&h, "f0g0f1");
    expect_ahead(&h, 3, 1, "pre_forward, a unit gone", 1);
    play(&h, "g1f3g3b3p3b1p1b0p0e");
    host_drop(&h);
}

Test(fsdp_schedule, a_change_of_order_is_told_once_and_learnt)
{
    struct plan plan = {.options = {.forward_prefetch = 1, .backward_prefetch = FSDP_BACKWARD_PRE}, .units = 4};
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_order, &plan);
}

/* The same iteration again and again, however it is made, is no change; and prefetch follows it. */
static void rank_repeat(struct rank *r)
{
    struct host h;
    const struct plan *plan = r->argument;
    fsdp_set_log(count_told, NULL, FSDP_LOG_WARN);
    host_make(r, plan, &h);
    told_now(&h);
    for (int iteration = 0; iteration < 5; iteration++) {
        h.async = iteration % 2;
        play(&h, plan->script);
        step_all(&h, plan->script);
    }
    CHECK(told_now(&h) == 0, "'%s' again is told as a change", plan->script);
    host_drop(&h);
}

static const char *const repeated[] = {
    TRAIN4,
    "f0g0f0g0b0p0b0p0e",                                 /* f(f(x)) */
    "f0g0f1g1f0g0f2g2b2p2b0p0b1p1b0p0e",                 /* the first module again, in between */
    "f0g0f1g1f2g2f1g1f3g3b3p3b1p1b2p2b1p1b0p0e",         /* an inner one */
    "f0g0f1g1f2g2f0g0f1g1f2g2b2p2b1p1b0p0b2p2b1p1b0p0e", /* two forwards, then two backwards */
    TRAIN4 TRAIN4,                                       /* the end after each micro-batch */
    FORWARD4 "b3p3b2p2b1p1b0p0" TRAIN4,                  /* or after the last one */
    "f0g0f1g1f2g2f3g3b3f3g3p3b2f2g2p2b1f1g1p1b0f0g0p0e", /* each checkpointed alone */
    "f0g0f1g1f2g2f3g3b3p3f1g1f2g2b2p2b1p1b0p0e",         /* a segment of two checkpointed */
    "f0f1g1f2f3g3g2g0b0b2b3p3p2b1p1p0e",                 /* nested */
    "f0g0f1g1f2g2b1p1b0p0e",                             /* one unused in backward */
};

/* More or fewer micro-batches, evaluation before or not: no change either, and what comes next is known. */
static void rank_vary(struct rank *r)
{
    struct host h;
    fsdp_set_log(count_told, NULL, FSDP_LOG_WARN);
    host_make(r, r->argument, &h);
    told_now(&h);
    play(&h, TRAIN4);
    for (int round = 0; round < 8; round++) {
        step_all(&h, "varied");
        for (int pass = 0; pass < round % 4; pass++) play(&h, FORWARD4);
        for (int micro = 0; micro < 1 + round % 3; micro++) {
            if (micro) play(&h, "f0g0f1g1f2g2f3g3b3p3b2p2b1p1b0p0");
            play(&h, "f0");
            expect_ahead(&h, 1, 1, "pre_forward, varied", 0);
            play(&h, "g0f1g1f2g2f3g3b3");
            if (round > 1) expect_ahead(&h, 2, 1, "pre_backward, varied", round);
            play(&h, "p3b2p2b1p1b0p0");
        }
        play(&h, "e");
    }
    CHECK(told_now(&h) == 0, "another number of micro-batches was told as a change");
    host_drop(&h);
}

Test(fsdp_schedule, the_number_of_micro_batches_is_no_change)
{
    struct plan plan = {.options = {.forward_prefetch = 1, .backward_prefetch = FSDP_BACKWARD_PRE}, .units = 4};
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_vary, &plan);
}

Test(fsdp_schedule, iterations_of_any_make_are_learnt)
{
    for (size_t k = 0; k < sizeof repeated / sizeof *repeated; k++)
        for (int n = 1; n <= 2; n++) {
            struct plan plan = {.options = {.forward_prefetch = 1 + (int)k % 2,
                                            .backward_prefetch = 1 + (int)k % 2,
                                            .private_unshard = n == 1},
                                .units = 4,
                                .script = repeated[k]};
            ranks_run(n, rank_repeat, &plan);
        }
}

/* Evaluation: passes of forward alone, between which somebody changes the shards. */
static void rank_evaluate(struct rank *r)
{
    struct host h;
    fsdp_set_log(count_told, NULL, FSDP_LOG_WARN);
    host_make(r, r->argument, &h);
    told_now(&h);
    for (int round = 0; round < 3; round++) {
        for (int pass = 0; pass < 4; pass++) {
            play(&h, "f0");
            if (pass > 1) expect_ahead(&h, 1, 1, "pre_forward of a later pass", 0);
            play(&h, "g0f1g1f2g2f3g3");
            for (int u = 0; u < 4; u++) {
                expect_ahead(&h, u, 0, "the end of a pass", u);
                set_version(&h, u, h.version[u] + 1);
            }
        }
        play(&h, "f0g0f1g1"); /* a pass that is given up: what was fetched ahead for it is old */
        for (int u = 0; u < 4; u++) {
            while (state(&h, u) == FSDP_UNIT_UNSHARDING) nap(50);
            set_version(&h, u, h.version[u] + 1);
        }
        play(&h, TRAIN4);
        step_all(&h, "after evaluation");
        play(&h, TRAIN4);
        step_all(&h, "training again");
    }
    CHECK(told_now(&h) == 0, "evaluation was told as a change of order");
    host_drop(&h);
}

Test(fsdp_schedule, passes_without_backward_see_new_values_and_are_learnt)
{
    struct plan plan = {.options = {.forward_prefetch = 2, .backward_prefetch = FSDP_BACKWARD_PRE}, .units = 4};
    for (int n = 1; n <= 4; n++) {
        plan.options.private_unshard = n == 2;
        ranks_run(n, rank_evaluate, &plan);
    }
}

/* Parts kept for backward are of no use once the iteration is over, or somebody told that shards have changed. */
static void rank_parts(struct rank *r)
{
    struct host h;
    host_make(r, r->argument, &h);
    for (int k = 0; k < 3; k++) {
        play(&h, "f0g0f1g1");
        if (k == 0) play(&h, "e");
        for (int u = 0; u < 2; u++) {
            set_version(&h, u, h.version[u] + 1);
            if (k) OK(fsdp_unit_shard_changed(h.unit[u]));
        }
        play(&h, k == 2 ? "f1g1b1p1f0g0b0p0e" : "b1p1b0p0e");
        step_all(&h, "parts");
    }
    host_drop(&h);
}

Test(fsdp_schedule, what_was_kept_for_backward_is_not_used_when_it_is_old)
{
    for (int k = 0; k < 6; k++) {
        static const int32_t ways[] = {2, FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER};
        struct plan plan = {.options = {.private_unshard = k % 2, .reshard_after_forward = ways[k / 2]}, .units = 2};
        ranks_run(4, rank_parts, &plan);
    }
}

/* ---- ranks that break off */

#define RESET_SECONDS (SANITIZED ? 60 : 10) /* far below the group's timeout */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Reset, and see that nothing of the broken iteration is left. */
static void reset(struct host *h, const char *when)
{
    double begin = now();
    OK(fsdp_model_reset(h->model));
    CHECK(now() - begin < RESET_SECONDS, "%s: reset took %.1f s", when, now() - begin);
    forget_gradients(h);
    memset(h->sum, 0, sizeof h->sum);
    for (int u = 0; u < h->plan->units; u++) {
        DLManagedTensorVersioned *grad; /* zeros at the latest when one asks for it */
        CHECK(!ahead(h, u), "%s: unit %d is not sharded after reset", when, u);
        OK(fsdp_unit_param_grad(h->unit[u], 0, &grad));
        grad->deleter(grad);
    }
    expect_gradients(h, when);
    for (int u = 0; u < h->plan->units; u++) set_version(h, u, h->version[u] + 1);
}

/* The rank `raiser` (-1: all) breaks off before step `at`; the others go on, and on, until they are told. */
static void break_off(struct host *h, const char *script, int at, int raiser, const char *when)
{
    double begin = now();
    int raises = raiser < 0 || h->r->rank == raiser, steps = 0;
    fsdp_status status = FSDP_OK;
    for (const char *step = script; status == FSDP_OK && !(raises && steps == at) && steps < 100; steps++) {
        status = hook(h, step);
        step = next(step);
        if (!*step) step = script;
    }
    CHECK(status == FSDP_OK || status == FSDP_ERR_MISMATCH, "%s: %s", when, fsdp_last_error());
    CHECK(raises ? status == FSDP_OK : status != FSDP_OK || h->r->size == 1, "%s: not told within %d steps", when,
          steps);
    CHECK(now() - begin < RESET_SECONDS, "%s: told after %.1f s", when, now() - begin);
    reset(h, when);
}

static void rank_break(struct rank *r)
{
    struct host h;
    const struct plan *plan = r->argument;
    uint64_t own = plan->seed + (uint64_t)r->rank, common = plan->seed;
    int steps = 0, raisers = SANITIZED ? 2 : 3;
    fsdp_set_log(count_told, NULL, FSDP_LOG_ERROR);
    host_make(r, plan, &h);
    for (const char *step = plan->script; *step; step = next(step)) steps++;
    for (int at = 0; at <= steps; at++)
        for (int k = 0; k < raisers; k++) {
            char when[128];
            int raiser = k == 0 ? -1 : k == 1 ? r->size - 1 : random_below(&common, r->size);
            snprintf(when, sizeof when, "rank %d broke off before step %d, strategy %d", raiser, at,
                     plan->options.strategy);
            h.async = random_below(&common, 4) > 0;
            if (random_below(&common, 3) == 0) { /* an order is known, and so there is prefetch */
                play(&h, plan->script);
                step_all(&h, when);
            }
            if (random_below(&own, 3) == 0) nap(random_below(&own, 200));
            break_off(&h, plan->script, at, raiser, when);
            play(&h, plan->script);
            step_all(&h, when);
        }
    host_drop(&h);
}

static const struct {
    int64_t mesh[2];
    fsdp_strategy strategy[4]; /* the model's, then its units' where they differ */
    int private, reshard;
} broken[] = {
    {{0, 0}, {FSDP_FULL_SHARD}, 0, 0},
    {{0, 0}, {FSDP_FULL_SHARD}, 1, 0},
    {{0, 0}, {FSDP_FULL_SHARD}, 0, 2},
    {{0, 0}, {FSDP_FULL_SHARD}, 1, 2},
    {{0, 0}, {FSDP_SHARD_GRAD_OP}, 0, 0},
    {{0, 0}, {FSDP_NO_SHARD}, 0, 0},
    {{2, 2}, {FSDP_HYBRID_SHARD}, 0, 0},
    {{2, 2}, {FSDP_HYBRID_SHARD}, 1, 0},
    {{2, 2}, {FSDP_HYBRID_SHARD_GRAD_OP}, 0, 0},
    {{2, 2}, {FSDP_HYBRID_SHARD, FSDP_FULL_SHARD, FSDP_NO_SHARD, FSDP_HYBRID_SHARD_GRAD_OP}, 0, 0},
    {{1, 4}, {FSDP_HYBRID_SHARD, 0, FSDP_NO_SHARD}, 0, 0},
    {{4, 1}, {FSDP_HYBRID_SHARD, FSDP_FULL_SHARD}, 0, 0},
};

static void break_each(int first, int step)
{
    for (int k = first; k < (int)(sizeof broken / sizeof *broken); k += step) {
        struct plan plan = {.mesh = {broken[k].mesh[0], broken[k].mesh[1]},
                            .options = {.strategy = broken[k].strategy[0],
                                        .private_unshard = broken[k].private,
                                        .forward_prefetch = 1,
                                        .backward_prefetch = k % 3},
                            .units = 3,
                            .script = "f0g0f1g1f2g2b2p2b1p1b0p0e",
                            .seed = random_seed()};
        for (int u = 0; u < 3; u++) plan.strategy[u] = broken[k].strategy[u + 1], plan.reshard[u] = broken[k].reshard;
        fprintf(stderr, "kind %d: FSDP_TEST_SEED=%llu\n", k, (unsigned long long)plan.seed);
        ranks_run(4, rank_break, &plan);
        if (!plan.mesh[0] && !broken[k].reshard) ranks_run(2, rank_break, &plan);
    }
}

Test(fsdp_schedule, after_an_exception_anywhere_reset_makes_the_model_usable)
{
    break_each(0, 1);
}

/* Ranks that took different slots before one broke off choose alike afterwards. */
static void rank_slots(struct rank *r)
{
    struct host h;
    host_make(r, r->argument, &h);
    OK(fsdp_unit_unshard(h.unit[0], NULL));
    OK(fsdp_unit_unshard(h.unit[1], NULL));
    OK(fsdp_unit_reshard(h.unit[1])); /* its slot is free, but unit 2 gets a smaller one if it may */
    fsdp_status status = r->rank ? fsdp_unit_unshard(h.unit[2], NULL) : FSDP_OK;
    CHECK(status == (r->rank ? FSDP_ERR_MISMATCH : FSDP_OK), "%s", fsdp_last_error());
    reset(&h, "slots");
    OK(fsdp_unit_unshard(h.unit[2], NULL));
    expect_version(&h, 2, "slots");
    host_drop(&h);
}

Test(fsdp_schedule, after_a_reset_ranks_choose_slots_alike)
{
    struct plan plan = {.units = 4};
    for (int n = 2; n <= 4; n++) ranks_run(n, rank_slots, &plan);
}

/* ---- ranks that differ */

/* Every rank is told, with both names, and after a reset the model trains. */
static void expect_differ(struct host *h, fsdp_status status, const char *a, const char *b)
{
    CHECK(status == FSDP_ERR_MISMATCH, "%s or %s: %s: %s", a, b, fsdp_status_name(status), fsdp_last_error());
    CHECK(strstr(fsdp_last_error(), a) && strstr(fsdp_last_error(), b), "no '%s' and '%s' in: %s", a, b,
          fsdp_last_error());
    reset(h, a);
    play(h, h->plan->script);
    step_all(h, "after a difference");
}

static void rank_differ(struct rank *r)
{
    struct host h;
    fsdp_set_log(count_told, NULL, FSDP_LOG_ERROR);
    host_make(r, r->argument, &h);
    for (int odd = 0; odd < r->size; odd++) {
        int other = r->rank == odd;
        expect_differ(&h, fsdp_unit_pre_forward(h.unit[other]), "'u0'", "'u1'");
        OK(fsdp_unit_pre_forward(h.unit[0]));
        expect_differ(&h, other ? post_backward(&h, 0, 1) : fsdp_unit_pre_forward(h.unit[1]), "unshard", "reduce");
        OK(fsdp_unit_pre_forward(h.unit[0]));
        OK(fsdp_unit_pre_forward(h.unit[1]));
        expect_differ(&h, post_backward(&h, other, 1), "'u0'", "'u1'");
        double norm;
        expect_differ(&h, other ? fsdp_model_grad_norm(h.model, 2, &norm) : fsdp_unit_pre_forward(h.unit[0]), "norm",
                      "'u0'");
        OK(fsdp_model_set_gradient_divisor(h.model, other ? 7 : 0));
        fsdp_status status = post_backward(&h, 0, 1);
        OK(fsdp_model_set_gradient_divisor(h.model, 0));
        expect_differ(&h, status, "'u0'", "divisor");
    }
    host_drop(&h);
}

/* On a mesh, two rows of ranks that each agree within themselves, but not with each other. */
static void rank_rows_differ(struct rank *r)
{
    struct host h;
    fsdp_set_log(count_told, NULL, FSDP_LOG_ERROR);
    host_make(r, r->argument, &h);
    for (int k = 0; k < 4; k++) {
        h.async = k % 2;
        int u = k / 2 ? r->rank % 2 : r->rank / 2; /* differs along the other dimension */
        if (k / 2) {
            expect_differ(&h, fsdp_unit_pre_forward(h.unit[u]), "'u0'", "'u1'");
            continue;
        }
        OK(fsdp_unit_pre_forward(h.unit[u]));
        OK(fsdp_unit_pre_backward(h.unit[u]));
        fsdp_status status = post_backward(&h, u, 1);
        if (status == FSDP_OK) status = fsdp_model_finish_backward(h.model);
        expect_differ(&h, status, "'u0'", "'u1'");
    }
    host_drop(&h);
}

Test(fsdp_schedule, hooks_that_differ_between_ranks_are_told_and_can_be_recovered_from)
{
    struct plan plan = {.units = 4, .script = TRAIN4};
    for (int n = 2; n <= 4; n++) {
        plan.options.private_unshard = n == 3;
        ranks_run(n, rank_differ, &plan);
    }
    plan = (struct plan){.mesh = {2, 2}, .options = {.strategy = FSDP_HYBRID_SHARD}, .units = 4, .script = TRAIN4};
    ranks_run(4, rank_rows_differ, &plan);
}
