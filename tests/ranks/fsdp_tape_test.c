/* Training parity with a real autograd: an MLP and a two-layer attention model (tape_model.h), trained over 1 to 4
 * ranks under every strategy, precision and schedule, equal one process that holds the whole batch. Two oracles (see
 * oracle_train): the plain one for f32, and for low precisions the one that rounds where fsdp.h says so. */
#include "tape_host.h"

#include <math.h>

TestSuite(fsdp_tape, .timeout = RANKS_SECONDS + 30);

/* ---- plans */

static const struct plan mlp = {
    .seed = 1,
    .shape = {.kind = MLP, .layers = 5, .width = {6, 9, 8, 11, 8, 5}, .aux = 1},
    /* the model's gain; block 0 with layer 0; layer 1; layers 2 and 3 each; block 2 with layer 4; auxiliary */
    .unit = {0, 1, 0, 2, 0, 3, 4, 5, 0, 6},
    .steps = 4,
    .rows = 22,
    .schedule = "S",
    .evaluate = 1,
    .edits = 1,
    .callbacks = 1,
};

static const struct plan attention = {
    .seed = 2,
    .shape = {.kind = ATTENTION, .vocabulary = 11, .sequence = 4, .dim = 8, .heads = 2, .hidden = 13, .tied = 1},
    /* embedding and head in one unit; block 0 with its attention, its feed-forward; block 1 whole; the last norm */
    .unit = {0, 1, 2, 0, 3, 4, 0, 0, 1},
    .steps = 3,
    .rows = 7,
    .schedule = "S",
    .evaluate = 1,
    .edits = 1,
    .callbacks = 1,
};

/* ---- a trial: its oracles are made by the test's process, which ranks are forks of */

struct job {
    struct plan plan;
    int has_plain, ill; /* ill: conditioned, as random shapes may be */
    struct result exact, plain;
    void (*look)(struct tape_host *h); /* after each step, or NULL */
};

/* Distance from the oracles. From the one that rounds as ranks do, none: it makes the same sums in the same order; but
 * a norm is summed in another one, and clipping by it changes the last bit. From the plain one: a gradient is the sum
 * of a part for each micro-batch of each rank, and for each call of its module, at most 48, each rounded in f32 (2^-24
 * of at most about 1), and so is the running sum: most of it cancels, 16 * 2^-24 = 1e-6 does not. SGD moves a parameter
 * by 0.05 of it and, with momentum, by more in later steps; Adam by up to 0.01 / 1e-3 = 10 times as much. */
#define EXACT_BOUND(plan) ((plan)->clip > 0 ? 1e-6 : 0)
#define LOSS_BOUND(loss) (1e-5 * (1 + fabs(loss)))
#define SGD_BOUND 1e-6
#define ADAM_BOUND 1e-5
#define ILL_BOUND 1e-3 /* a norm over three elements may divide by next to nothing */

static void say(const struct tape_host *h, const char *what, double d, double bound)
{
    const struct plan *p = h->plan;
    CHECK(d <= bound, "seed %llu, %d ranks, %s, strategy %d, schedule %s, param %s, reduce %s: %s off by %g", p->seed,
          h->r->size, p->shape.kind == MLP ? "MLP" : "attention", p->strategy, p->schedule, format_names[p->param_type],
          format_names[p->reduce_type], what, d);
}

/* An iteration that one rank, or all, leave by an exception. The others may have come to the end without them. */
static void break_once(struct tape_host *h, uint64_t *common)
{
    int culprit = random_below(common, h->r->size + 1), fuse = 1 + random_below(common, 8 * h->model.n_units);
    int mine = culprit == h->r->size || culprit == h->r->rank;
    fsdp_status status = tape_host_break(h, mine ? fuse : 0);
    CHECK(status == FSDP_OK || status == FSDP_ERR_MISMATCH || (mine && status == FSDP_ERR_CALLBACK),
          "seed %llu: broken iteration gave %s", h->plan->seed, fsdp_status_name(status));
    tape_host_reset(h);
}

static void rank_train(struct rank *r)
{
    const struct job *job = r->argument;
    const struct plan *plan = &job->plan;
    struct tape_host *h = tape_host_new(r, plan);
    uint64_t common = plan->seed * 13;
    for (int step = 0; step < plan->steps; step++) {
        for (int b = 0; b < plan->breaks; b++) break_once(h, &common);
        tape_host_step(h);
        if (plan->clip > 0) say(h, "the norm", fabs(h->norm - job->exact.norms[step]), 1e-6 * job->exact.norms[step]);
        for (int e = 0; e < 2 && plan->evaluate; e++) {
            double loss = job->exact.losses[2 * step + e];
            say(h, e ? "the loss" : "the loss before the optimizer's step", fabs(h->losses[e] - loss),
                LOSS_BOUND(loss));
        }
        if (job->look) job->look(h);
    }
    say(h, "the result", tape_host_difference(h, &job->exact), EXACT_BOUND(plan));
    if (job->has_plain)
        say(h, "the plain result", tape_host_difference(h, &job->plain),
            job->ill                  ? ILL_BOUND
            : plan->optimizer == ADAM ? ADAM_BOUND
                                      : SGD_BOUND);
    tape_host_drop(h);
}

/* Whether one process with the whole batch comes to the same but for round-off in f32. */
static int all_f32(const struct plan *plan)
{
    for (int p = 0; p < PARAMS; p++)
        if (plan->master[p] == FORMAT_BF16 || plan->master[p] == FORMAT_F16) return 0;
    return plan->param_type != FORMAT_BF16 && plan->param_type != FORMAT_F16 && plan->reduce_type != FORMAT_BF16 &&
           plan->reduce_type != FORMAT_F16 && plan->output_type == FORMAT_NONE &&
           (plan->divisor == 0 || plan->divisor == 1) && !plan->uneven_use;
}

static void train_job(struct job job, int ranks)
{
    job.has_plain = all_f32(&job.plan);
    oracle_train(&job.plan, ranks, &job.exact);
    if (job.has_plain) oracle_train(&job.plan, 0, &job.plain);
    ranks_run(ranks, rank_train, &job);
    result_drop(&job.exact);
    if (job.has_plain) result_drop(&job.plain);
}

static void train_looking(struct plan plan, int ranks, void (*look)(struct tape_host *h))
{
    train_job((struct job){.plan = plan, .look = look}, ranks);
}

static void train(struct plan plan, int ranks)
{
    train_job((struct job){.plan = plan}, ranks);
}

static const struct plan *const models[] = {&mlp, &attention};

/* ---- strategies */

Test(fsdp_tape, one_to_four_ranks_equal_one_process)
{
    for (int m = 0; m < 2; m++)
        for (int n = 1; n <= 4; n++)
            for (int o = SGD; o <= ADAM; o++) {
                struct plan plan = *models[m];
                plan.optimizer = o ? ADAM : SGD;
                plan.steps = 8;
                train(plan, n);
            }
}

Test(fsdp_tape, every_strategy_equals_one_process)
{
    for (int m = 0; m < 2; m++)
        for (int n = 1; n <= 4; n++)
            for (fsdp_strategy s = FSDP_FULL_SHARD; s <= FSDP_NO_SHARD; s++) {
                struct plan plan = *models[m];
                plan.strategy = s;
                plan.private_unshard = (n + s + m) % 2;
                plan.asynchronous = n % 2;
                plan.replicas = n == 3; /* a mesh of one dimension */
                train(plan, n);
            }
}

Test(fsdp_tape, hybrid_meshes_equal_one_process)
{
    static const int meshes[][2] = {{2, 2}, {1, 2}, {2, 1}, {1, 1}, {3, 1}, {1, 4}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++)
        for (int m = 0; m < 2; m++)
            for (fsdp_strategy s = FSDP_HYBRID_SHARD; s <= FSDP_HYBRID_SHARD_GRAD_OP; s++) {
                struct plan plan = *models[m];
                plan.strategy = s;
                plan.replicas = meshes[i][0];
                plan.private_unshard = (int)i % 2;
                plan.asynchronous = m;
                train(plan, meshes[i][0] * meshes[i][1]);
            }
}

Test(fsdp_tape, units_of_one_model_may_differ_in_strategy)
{
    for (int m = 0; m < 2; m++)
        for (int n = 1; n <= 4; n++) {
            struct plan plan = *models[m];
            for (int u = 0; u < TAPE_UNITS; u++) plan.unit_strategy[u] = (u + n) % 4;
            train(plan, n);
        }
}

Test(fsdp_tape, parameters_are_cut_along_any_dimension)
{
    for (int m = 0; m < 2; m++)
        for (int n = 2; n <= 4; n++) {
            struct plan plan = *models[m];
            for (int p = 0; p < PARAMS; p++) plan.shard_dim[p] = p * 7 % 3 != 0;
            plan.strided = 1;
            plan.initial = n % 3;
            train(plan, n);
            plan.strategy = FSDP_HYBRID_SHARD;
            plan.replicas = 2;
            if (n != 3) train(plan, n);
        }
}

/* ---- precision */

static void every_precision(struct plan plan, int n)
{
    static const enum format params[] = {FORMAT_NONE, FORMAT_BF16, FORMAT_F16, FORMAT_F32};
    static const enum format reduces[] = {FORMAT_NONE, FORMAT_F32, FORMAT_BF16};
    for (int p = 0; p < 4; p++)
        for (int r = 0; r < 3; r++) {
            plan.param_type = params[p];
            plan.reduce_type = reduces[r];
            plan.keep_low_precision_grads = (p + r) % 2;
            plan.cast = r == 1;
            plan.output_type = p == 1 ? FORMAT_BF16 : FORMAT_NONE;
            plan.asynchronous = p % 2;
            train(plan, n);
        }
}

Test(fsdp_tape, every_precision_of_the_mlp)
{
    struct plan plan = mlp;
    strcpy(plan.schedule, "NS");
    every_precision(plan, 3);
}

Test(fsdp_tape, every_precision_of_attention)
{
    every_precision(attention, 2);
}

Test(fsdp_tape, low_precision_under_every_strategy)
{
    for (fsdp_strategy s = FSDP_FULL_SHARD; s <= FSDP_HYBRID_SHARD_GRAD_OP; s++)
        for (int m = 0; m < 2; m++) {
            struct plan plan = *models[m];
            plan.strategy = s;
            plan.replicas = s >= FSDP_HYBRID_SHARD ? 2 : 0;
            plan.param_type = FORMAT_BF16;
            plan.reduce_type = m ? FORMAT_F32 : FORMAT_NONE;
            strcpy(plan.schedule, m ? "NNS" : "SS");
            train(plan, s >= FSDP_HYBRID_SHARD ? 4 : 3);
        }
}

Test(fsdp_tape, parameters_may_differ_in_dtype)
{
    static const enum format masters[] = {FORMAT_F32, FORMAT_F64, FORMAT_BF16, FORMAT_F16};
    for (int n = 1; n <= 4; n++)
        for (int kind = 0; kind < 3; kind++) {
            struct plan plan = *models[n % 2];
            plan.shape.tied = 0;
            for (int p = 0; p < PARAMS; p++)
                plan.master[p] = kind == 0   ? masters[(p + p / 3) % 2]
                                 : kind == 1 ? masters[(p + p / 3) % 4]
                                             : FORMAT_BF16;
            train(plan, n);
            plan.param_type = FORMAT_BF16;
            plan.reduce_type = FORMAT_F32;
            train(plan, n);
        }
}

/* ---- schedules */

Test(fsdp_tape, prefetch_changes_nothing)
{
    for (int backward = FSDP_BACKWARD_NONE; backward <= FSDP_BACKWARD_POST; backward++)
        for (int forward = 0; forward <= 2; forward++)
            for (int lists = 0; lists < 2; lists++) {
                struct plan plan = *models[(forward + lists) % 2];
                plan.backward_prefetch = backward;
                plan.forward_prefetch = forward;
                plan.lists = lists;
                plan.prefetch_limit = forward == 2 ? 2 : 0;
                plan.asynchronous = 1;
                plan.private_unshard = backward == FSDP_BACKWARD_POST;
                plan.strategy = lists && forward == 1 ? FSDP_SHARD_GRAD_OP : FSDP_FULL_SHARD;
                train(plan, 2 + (backward + forward) % 3);
            }
}

/* Backward has what forward left, whole or in n-th parts: nothing is published again. */
static void look_at_publications(struct tape_host *h)
{
    int tied = h->plan->shape.tied ? tape_host_unit_of(h, "embed.tokens") : -1;
    for (int u = 0; u < h->model.n_units; u++) {
        int forwards = u == tied && h->plan->reshard_after_forward != FSDP_RESHARD_NEVER ? 2 : 1; /* in one step */
        int64_t n = tape_host_unit(h, u).publications;
        CHECK(n == (int64_t)h->step * forwards, "unit %d was published %lld times in %d steps", u, (long long)n,
              h->step);
    }
}

Test(fsdp_tape, reshard_after_forward_may_be_never_or_a_number)
{
    static const int ranks[] = {1, 2, 4, 4, 3, 4}, reshard[] = {FSDP_RESHARD_NEVER, 2, 2, 4, 3, FSDP_RESHARD_NEVER};
    for (int i = 0; i < 6; i++)
        for (int private = 0; private < 2; private ++) {
            struct plan plan = *models[(i + private) % 2];
            plan.reshard_after_forward = reshard[i];
            plan.private_unshard = private;
            plan.backward_prefetch = i % 3;
            plan.evaluate = 0;
            train_looking(plan, ranks[i], reshard[i] == ranks[i] ? NULL : look_at_publications);
        }
}

Test(fsdp_tape, orders_that_change_are_followed)
{
    for (int n = 1; n <= 4; n++)
        for (int m = 0; m < 2; m++) {
            struct plan plan = *models[m];
            plan.steps = 7;
            plan.skip_block = m ? 2 : 2;
            plan.skip_every = 3;
            plan.forward_prefetch = 1 + n % 2;
            plan.backward_prefetch = n % 3;
            plan.strategy = n == 3 ? FSDP_SHARD_GRAD_OP : FSDP_FULL_SHARD;
            train(plan, n);
        }
}

Test(fsdp_tape, ranks_may_use_different_parameters)
{
    for (int n = 1; n <= 4; n++)
        for (int m = 0; m < 2; m++) {
            struct plan plan = *models[m];
            plan.uneven_use = 1;
            plan.asynchronous = m;
            strcpy(plan.schedule, n % 2 ? "NS" : "S");
            train(plan, n);
        }
}

/* A03: two groups in sequence, two outputs; the loss uses the first only, and both the next time. */
static void look_at_unused(struct tape_host *h)
{
    int p = model_find(&h->model, "aux.weight");
    const DLTensor *grad = &h->params[p].grad->dl_tensor;
    for (int64_t k = 0; k < elements(grad) && h->step % 2 == 1; k++)
        CHECK(format_get(FORMAT_F32, grad->data, (long)k) == 0, "an unused parameter has a gradient");
    CHECK(tape_host_unit(h, h->model.params[p].unit).state == FSDP_UNIT_SHARDED, "an unused unit stays unsharded");
}

Test(fsdp_tape, a03_a_unit_that_no_gradient_comes_to)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 4; o++) {
            struct plan plan = mlp;
            plan.aux_every = 2;
            plan.evaluate = 0;
            plan.strategy = o & 1 ? FSDP_SHARD_GRAD_OP : FSDP_FULL_SHARD;
            plan.private_unshard = o >> 1;
            plan.backward_prefetch = n % 3;
            train_looking(plan, n, look_at_unused);
        }
}

/* A04 */
Test(fsdp_tape, a04a_two_forwards_then_two_backwards)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 4; o++) {
            struct plan plan = *models[o & 1];
            plan.paired = 1 + (o >> 1);
            plan.strategy = n % 2 ? FSDP_SHARD_GRAD_OP : FSDP_FULL_SHARD;
            plan.finish_each = o == 3;
            plan.asynchronous = o == 2;
            plan.backward_prefetch = (n + o) % 3;
            strcpy(plan.schedule, o == 3 ? "NS" : "SS");
            train(plan, n);
        }
}

static void twice(int around)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 4; o++) {
            struct plan plan = *models[o & 1];
            int block = o & 1 ? n % 2 : 1;
            plan.twice[block] = 1;
            plan.post_each = o >> 1;
            plan.strategy = n % 2 ? FSDP_FULL_SHARD : FSDP_SHARD_GRAD_OP;
            plan.backward_prefetch = (n + o) % 3;
            plan.forward_prefetch = o == 3;
            if (around) {
                for (int module = 1; module < module_count(&plan.shape); module++)
                    plan.checkpoint[module] = (module + n + o) % 3;
                plan.checkpoint[block_module(&plan.shape, block)] = around;
            }
            train(plan, n);
        }
}

Test(fsdp_tape, a04b_a_module_called_twice)
{
    twice(KEPT);
}

Test(fsdp_tape, a04c_a_module_called_twice_and_run_again_in_backward)
{
    twice(RUN_AGAIN_IN_UNIT);
    twice(RUN_AGAIN_AROUND_UNIT);
}

Test(fsdp_tape, activation_checkpointing_in_and_around_units)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 8; o++) {
            struct plan plan = *models[o & 1];
            for (int module = 1; module < module_count(&plan.shape); module++)
                plan.checkpoint[module] = o < 4 ? 1 + (o >> 1) : (module * 7 + o) % 3; /* also within each other */
            plan.strategy = 1 + (n + o) % 3;
            plan.post_each = o >> 2;
            plan.backward_prefetch = n % 3;
            plan.forward_prefetch = o % 3;
            plan.param_type = o == 5 ? FORMAT_BF16 : FORMAT_NONE;
            train(plan, n);
        }
}

/* A05: a frozen weight with two trainable parts beside it, between trainable layers; then the other way round. */
static void look_at_frozen(struct tape_host *h)
{
    static const char *const names[] = {"blocks.0.layers.1.weight", "blocks.0.layers.1.lora_a",
                                        "blocks.0.layers.1.lora_b"};
    int64_t reduced = 0, kept = 0;
    fsdp_unit_info now = tape_host_unit(h, tape_host_unit_of(h, names[0]));
    for (int i = 0; i < 3; i++) {
        int p = model_find(&h->model, names[i]);
        for (int step = 0; step < h->step; step++)
            if (!frozen_at(h->plan, p, step)) reduced += h->model.params[p].count * 4;
    }
    for (int p = 0; p < h->model.n_params; p++)
        if (!frozen_at(h->plan, p, h->step - 1)) kept += elements(&h->params[p].shard->dl_tensor) * 4;
    CHECK(now.reduced_bytes == (h->r->size > 1 ? reduced : 0) || h->r->size == 1,
          "%lld bytes of gradients went out, not %lld", (long long)now.reduced_bytes, (long long)reduced);
    CHECK(memory_of(h->fsdp).gradients == kept, "gradients take %lld bytes, not %lld after step %d",
          (long long)memory_of(h->fsdp).gradients, (long long)kept, h->step);
}

Test(fsdp_tape, a05_frozen_and_trainable_parameters_in_one_unit)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 2; o++) {
            struct plan plan = mlp;
            plan.shape = (struct shape){.kind = MLP, .layers = 3, .width = {6, 64, 64, 5}, .lora = 2};
            memset(plan.unit, 0, sizeof plan.unit);
            for (int i = 0; i < 3; i++) plan.unit[layer_module(&plan.shape, i)] = 1 + i;
            struct model m;
            model_build(&m, &plan, 1);
            static const char *const names[] = {"weight", "bias", "lora_a", "lora_b"};
            for (int i = 0; i < 4; i++) {
                char name[64];
                snprintf(name, sizeof name, "blocks.0.layers.1.%s", names[i]);
                int p = model_find(&m, name);
                plan.frozen[p] = i < 2;
                plan.toggled[p] = i != 1;
            }
            plan.toggle_step = 2;
            plan.private_unshard = o;
            plan.evaluate = o;
            train_looking(plan, n, look_at_frozen);
        }
}

Test(fsdp_tape, frozen_parameters_may_change_between_steps)
{
    for (int n = 1; n <= 4; n++)
        for (int m = 0; m < 2; m++) {
            struct plan plan = *models[m];
            for (int p = 0; p < PARAMS; p++) {
                plan.frozen[p] = p % 3 == 1;
                plan.toggled[p] = p % 4 < 2;
            }
            plan.toggle_step = 1;
            plan.strategy = 1 + n % 3;
            train(plan, n);
        }
}

/* A06 */
Test(fsdp_tape, a06_sync_on_and_off_in_any_order)
{
    static const char *const schedules[] = {"SNNS", "NSNS", "SS", "NNNNNS", "SSNSNS"};
    for (int n = 1; n <= 4; n++)
        for (int i = 0; i < 5; i++) {
            struct plan plan = *models[(n + i) % 2];
            strcpy(plan.schedule, schedules[i]);
            plan.steps = 2;
            plan.strategy = 1 + (n + i) % 3;
            plan.finish_each = i % 2;
            plan.asynchronous = n % 2;
            plan.keep_full = i == 3;
            train(plan, n);
        }
}

Test(fsdp_tape, a06_hybrid_with_all_reduce_on_the_last_micro_batch)
{
    static const char *const schedules[] = {"RRRS", "NRNS", "RNS", "SRS", "RSNRNS"};
    static const int meshes[][2] = {{2, 2}, {1, 2}, {2, 1}};
    for (int i = 0; i < 5; i++)
        for (int mesh = 0; mesh < 3; mesh++) {
            struct plan plan = *models[(mesh + i) % 2];
            strcpy(plan.schedule, schedules[i]);
            plan.steps = 2;
            plan.strategy = i % 2 ? FSDP_HYBRID_SHARD : FSDP_HYBRID_SHARD_GRAD_OP;
            plan.replicas = meshes[mesh][0];
            plan.finish_each = i % 2;
            plan.asynchronous = mesh == 0;
            plan.param_type = i == 1 ? FORMAT_BF16 : FORMAT_NONE;
            train(plan, meshes[mesh][0] * meshes[mesh][1]);
        }
}

/* A11: sizes (8), (0) and (24), and biases of one element. */
static void look_at_empty(struct tape_host *h)
{
    for (int p = 0; p < h->model.n_params; p++) {
        const struct model_param *info = &h->model.params[p];
        DLManagedTensorVersioned *whole;
        OK(fsdp_unit_gather_param(h->units[info->unit], info->index, &whole));
        CHECK(whole->dl_tensor.ndim == info->ndim && h->params[p].info.ndim == info->ndim, "%s: dimensions",
              info->name);
        for (int d = 0; d < info->ndim; d++)
            CHECK(whole->dl_tensor.shape[d] == info->shape[d] && h->params[p].info.shape[d] == info->shape[d],
                  "%s: shape", info->name);
        whole->deleter(whole);
    }
}

Test(fsdp_tape, a11_parameters_smaller_than_the_ranks)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 5; o++) {
            struct plan plan = mlp;
            plan.shape = (struct shape){.kind = MLP, .layers = 2, .width = {5, 8, o == 3 ? 1 : 24}};
            memset(plan.unit, 0, sizeof plan.unit);
            plan.unit[1] = 1;
            if (o == 0) plan.extra[2] = 1;  /* the block's unit: weight, bias (8), (0), weight, bias (24) */
            if (o == 1) plan.extra[1] = 1;  /* (0) first */
            if (o == 2) plan.extra[3] = -3; /* (3, 0) last */
            if (o == 3) plan.extra[3] = 2;  /* one element, never used, beside a bias of one */
            if (o == 4) {                   /* a unit of empty parameters only */
                plan.extra[1] = 1;
                plan.unit[2] = 2;
                plan.unit[3] = 3;
            }
            plan.private_unshard = n % 2;
            plan.strategy = 1 + (n + o) % 3;
            train_looking(plan, n, look_at_empty);
        }
}

/* ---- beside training proper */

Test(fsdp_tape, gradients_are_clipped_alike_under_every_strategy)
{
    static const double norms[] = {1, 2, INFINITY, 3};
    for (int n = 1; n <= 4; n++)
        for (fsdp_strategy s = FSDP_FULL_SHARD; s <= FSDP_HYBRID_SHARD_GRAD_OP; s++) {
            struct plan plan = *models[(n + s) % 2];
            plan.strategy = s;
            plan.replicas = s < FSDP_HYBRID_SHARD ? 0 : n % 2 ? n : 2;
            for (int u = 0; u < TAPE_UNITS && s == FSDP_FULL_SHARD; u++) plan.unit_strategy[u] = u % 4; /* A09 */
            plan.norm = norms[(n + s) % 4];
            plan.clip = isinf(plan.norm) ? 0.01 : 0.1;
            plan.master[1] = FORMAT_F64;
            train(plan, n);
        }
}

Test(fsdp_tape, shards_may_live_in_a_file)
{
    for (int n = 1; n <= 4; n++)
        for (fsdp_strategy s = FSDP_FULL_SHARD; s <= FSDP_NO_SHARD; s++) {
            struct plan plan = *models[(n + s) % 2];
            plan.strategy = s;
            plan.offload = 1;
            plan.frozen[2] = plan.toggled[3] = plan.toggle_step = 1;
            plan.param_type = n == 2 ? FORMAT_BF16 : FORMAT_NONE;
            plan.backward_prefetch = n % 3;
            strcpy(plan.schedule, n % 2 ? "S" : "NS");
            train(plan, n);
        }
}

Test(fsdp_tape, zero_grad_drops_what_was_never_synced)
{
    for (int n = 1; n <= 4; n++)
        for (fsdp_strategy s = FSDP_FULL_SHARD; s <= FSDP_HYBRID_SHARD_GRAD_OP; s++) {
            struct plan plan = *models[(n + s) % 2];
            plan.strategy = s;
            plan.replicas = s < FSDP_HYBRID_SHARD ? 0 : n % 2 ? n : 2;
            plan.discard = 1;
            plan.asynchronous = n % 2;
            strcpy(plan.schedule, n % 2 ? "S" : "RS");
            train(plan, n);
        }
}

/* ---- exceptions */

Test(fsdp_tape, reset_makes_good_an_exception_in_the_middle)
{
    for (int n = 1; n <= 4; n++)
        for (int o = 0; o < 6; o++) {
            struct plan plan = *models[o & 1];
            plan.seed += (unsigned long long)(n * 100 + o);
            plan.steps = 3;
            plan.breaks = 4;
            plan.naps = 1;
            plan.strategy = 1 + o % 3;
            plan.private_unshard = o == 3;
            plan.asynchronous = n % 2;
            plan.forward_prefetch = o % 2;
            plan.backward_prefetch = o % 3;
            plan.finish_each = o == 4;
            strcpy(plan.schedule, o & 1 ? "NS" : "S");
            if (o == 5 && n != 3) {
                plan.strategy = FSDP_HYBRID_SHARD;
                plan.replicas = n > 1 ? 2 : 1;
                strcpy(plan.schedule, "RS");
            }
            train(plan, n);
        }
}

/* Where one rank had seen more of an iteration than another, both still prefetch alike afterwards. */
Test(fsdp_tape, reset_makes_good_an_exception_in_two_forwards)
{
    for (int n = 2; n <= 4; n++)
        for (int o = 0; o < 6; o++) {
            struct plan plan = *models[o & 1];
            plan.seed += (unsigned long long)(n * 100 + o);
            plan.breaks = 3;
            plan.paired = 1;
            plan.finish_each = 1;
            plan.private_unshard = o % 3 == 1;
            plan.forward_prefetch = 1 + o % 2;
            plan.backward_prefetch = o % 3;
            plan.evaluate = o > 2;
            strcpy(plan.schedule, o < 4 ? "NSS" : "SS");
            train(plan, n);
        }
}

/* ---- random trials */

static uint64_t last_seed; /* the one that failed, if one did */

static void tell_seed(void)
{
    fprintf(stderr, "FSDP_TEST_SEED=%llu was the last\n", (unsigned long long)last_seed);
}

static void random_trials(int first, int trials)
{
    uint64_t seed = random_seed() + (getenv("FSDP_TEST_SEED") ? 0 : (uint64_t)first), random = seed;
    if (getenv("FSDP_TEST_SEED")) trials = 1;
    for (int trial = 0; trial < trials; trial++) {
        struct plan plan;
        int n = plan_random(&plan, trials == 1 ? seed : random_next(&random) % 1000000000u);
        last_seed = plan.seed;
        if (trials == 1) plan_tell(&plan, n);
        train_job((struct job){.plan = plan, .ill = 1}, n);
    }
}

/* In four parts, since each test has a deadline of its own. */
#define TRIALS (SANITIZED ? 6 : 60)

Test(fsdp_tape, random_models_plans_and_schedules_1, .fini = tell_seed)
{
    random_trials(1, TRIALS);
}

Test(fsdp_tape, random_models_plans_and_schedules_2, .fini = tell_seed)
{
    random_trials(2, TRIALS);
}

Test(fsdp_tape, random_models_plans_and_schedules_3, .fini = tell_seed)
{
    random_trials(3, TRIALS);
}

Test(fsdp_tape, random_models_plans_and_schedules_4, .fini = tell_seed)
{
    random_trials(4, TRIALS);
}
