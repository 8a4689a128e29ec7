/* Plans by chance, for property tests (see tape_model.h): shapes, units, precision, options and schedules that a host
 * may ask for together. What a plan holds follows from its seed alone. */
#include "tape_model.h"

#include "fsdp_host.h"

static void random_shape(struct plan *plan, uint64_t *p)
{
    struct shape *s = &plan->shape;
    s->kind = random_below(p, 3) ? MLP : ATTENTION;
    if (s->kind == MLP) {
        s->layers = 1 + random_below(p, LAYERS);
        for (int i = 0; i <= s->layers; i++) s->width[i] = 1 + random_below(p, 12);
        for (int b = 0; 2 * b + 2 <= s->layers; b++)
            if (random_below(p, 2)) s->width[2 * b + 2] = s->width[2 * b];
        s->aux = random_below(p, 2);
        s->lora = s->layers > 1 && random_below(p, 3) == 0 ? 1 + random_below(p, 2) : 0;
        plan->rows = 1 + random_below(p, ROWS);
        plan->aux_every = random_below(p, 3);
    } else {
        s->vocabulary = 2 + random_below(p, 10);
        s->sequence = 1 + random_below(p, SEQUENCE);
        s->heads = 1 + random_below(p, 2);
        s->dim = s->heads * (3 + random_below(p, 3));
        s->hidden = 1 + random_below(p, 12);
        s->tied = random_below(p, 2);
        plan->rows = 1 + random_below(p, 6);
    }
}

static int within(const struct model *m, int module, int outer)
{
    while (module >= 0 && module != outer) module = m->modules[module].parent;
    return module == outer;
}

/* A module is in its parent's unit, begins one, or joins one of modules it is not inside of. */
static void random_units(struct plan *plan, uint64_t *p)
{
    struct model m;
    int n = module_count(&plan->shape), labels = 0;
    for (int i = 0; i < n; i++)
        plan->extra[i] = random_below(p, 5) ? 0 : random_below(p, 4) ? 1 + random_below(p, 9) : -3;
    model_build(&m, plan, 0);
    for (int i = 1; i < n; i++) {
        int join = 1 + random_below(p, n), good = join <= labels && random_below(p, 3) == 0;
        if (random_below(p, 3) == 0) continue;
        for (int k = 1; k < i; k++) good = good && !(plan->unit[k] == join && within(&m, i, k));
        plan->unit[i] = good ? join : ++labels;
    }
    if (plan->shape.kind == ATTENTION && plan->shape.tied) plan->unit[head_module()] = plan->unit[1];
    for (int b = 0; b < block_count(&plan->shape); b++) {
        int same = plan->shape.kind == ATTENTION ||
                   (2 * b + 2 <= plan->shape.layers && plan->shape.width[2 * b] == plan->shape.width[2 * b + 2]);
        plan->twice[b] = same && random_below(p, 4) == 0;
        if (same && random_below(p, 6) == 0) {
            plan->skip_block = b + 1;
            plan->skip_every = 2 + random_below(p, 2);
        }
    }
    int checkpoints = random_below(p, 3) == 0;
    for (int i = 0; i < n; i++) plan->checkpoint[i] = checkpoints ? random_below(p, 3) : 0;
    /* Not both: whether a module's outputs need gradients is to be the same on all ranks, which call alike. */
    int frozen = random_below(p, 2);
    plan->uneven_use = !frozen && random_below(p, 4) == 0;
    for (int i = 0; i < m.n_params; i++) {
        plan->frozen[i] = frozen && random_below(p, 4) == 0;
        plan->toggled[i] = frozen && random_below(p, 5) == 0;
        plan->shard_dim[i] = random_below(p, 4) == 0;
    }
}

static void random_precision(struct plan *plan, uint64_t *p)
{
    static const enum format low[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16};
    static const enum format masters[] = {FORMAT_F32, FORMAT_F64, FORMAT_BF16};
    int kind = random_below(p, 4);
    if (kind == 0) {
        plan->param_type = random_below(p, 3) ? low[random_below(p, 3)] : FORMAT_NONE;
        plan->reduce_type = random_below(p, 2) ? low[random_below(p, 2)] : FORMAT_NONE;
        plan->output_type = random_below(p, 3) ? FORMAT_NONE : low[random_below(p, 2)];
        plan->keep_low_precision_grads = random_below(p, 2);
        plan->cast = random_below(p, 2);
    }
    for (int i = 0; kind == 1 && i < PARAMS; i++) plan->master[i] = masters[random_below(p, 3)];
    if (kind == 1) plan->shape.tied = 0; /* one parameter has one dtype */
}

static void random_options(struct plan *plan, uint64_t *p, int n)
{
    static const int reshard[] = {FSDP_RESHARD_DEFAULT, FSDP_RESHARD_DEFAULT, FSDP_RESHARD_NEVER, FSDP_RESHARD_ALWAYS,
                                  2};
    plan->strategy = 1 + random_below(p, 5);
    if (plan->strategy >= FSDP_HYBRID_SHARD) {
        do plan->replicas = 1 + random_below(p, n);
        while (n % plan->replicas);
    } else {
        plan->replicas = random_below(p, 4) == 0;
        for (int u = 0; u < TAPE_UNITS && random_below(p, 4) == 0; u++) plan->unit_strategy[u] = random_below(p, 4);
    }
    int size = plan->strategy >= FSDP_HYBRID_SHARD ? n / plan->replicas : n;
    int keeps = plan->strategy != FSDP_FULL_SHARD && plan->strategy != FSDP_HYBRID_SHARD;
    plan->reshard_after_forward = reshard[random_below(p, keeps ? 3 : size % 2 ? 4 : 5)];
    plan->private_unshard = random_below(p, 3) == 0;
    plan->initial = random_below(p, 3);
    plan->divisor = random_below(p, 3) ? 0 : 1;
    plan->forward_prefetch = random_below(p, 3);
    plan->backward_prefetch = random_below(p, 3);
    plan->prefetch_limit = random_below(p, 4);
    plan->lists = random_below(p, 4) == 0;
    plan->offload = random_below(p, 8) == 0;
}

static void random_schedule(struct plan *plan, uint64_t *p)
{
    int micros = 1 + random_below(p, 4);
    for (int m = 0; m < micros; m++) plan->schedule[m] = m + 1 == micros ? 'S' : "SNR"[random_below(p, 3)];
    plan->optimizer = random_below(p, 2) ? ADAM : SGD;
    plan->steps = 1 + random_below(p, 3);
    plan->toggle_step = 1 + random_below(p, 2);
    plan->paired = random_below(p, 3);
    plan->post_each = random_below(p, 2);
    plan->finish_each = random_below(p, 2);
    plan->keep_full = random_below(p, 4) == 0;
    plan->evaluate = random_below(p, 2);
    plan->asynchronous = random_below(p, 2);
    plan->edits = random_below(p, 2);
    plan->strided = random_below(p, 2);
    plan->naps = random_below(p, 4) == 0;
    plan->callbacks = random_below(p, 2);
    plan->discard = random_below(p, 6) == 0;
    plan->breaks = random_below(p, 4) == 0;
}

int plan_random(struct plan *plan, unsigned long long seed)
{
    uint64_t p = seed;
    int n = 1 + random_below(&p, 4);
    *plan = (struct plan){.seed = seed};
    random_shape(plan, &p);
    random_precision(plan, &p);
    random_units(plan, &p);
    random_options(plan, &p, n);
    random_schedule(plan, &p);
    return n;
}

void plan_tell(const struct plan *p, int n)
{
    struct model m;
    model_build(&m, p, 1);
    fprintf(stderr, "%d ranks, %s, %d units\n", n, p->shape.kind == MLP ? "MLP" : "attention", m.n_units);
    for (int i = 0; i < m.n_modules; i++)
        fprintf(stderr, "  module %d %s: unit %d, checkpoint %d, extra %d\n", i, m.modules[i].name, m.modules[i].unit,
                (int)p->checkpoint[i], p->extra[i]);
    for (int i = 0; i < m.n_params; i++)
        fprintf(stderr, "  %s (%lld, %lld): unit %d, frozen %d, toggled %d, shard_dim %d, master %s\n",
                m.params[i].name, m.params[i].shape[0], m.params[i].shape[1], m.params[i].unit, p->frozen[i],
                p->toggled[i], p->shard_dim[i], format_names[p->master[i]]);
    fprintf(
        stderr,
        "  strategy %d, replicas %d, reshard %d, private %d, initial %d, divisor %g, param %s, reduce %s, output %s, "
        "keep_low %d, cast %d, forward_prefetch %d, backward_prefetch %d, limit %d, lists %d\n",
        p->strategy, p->replicas, p->reshard_after_forward, p->private_unshard, p->initial, p->divisor,
        format_names[p->param_type], format_names[p->reduce_type], format_names[p->output_type],
        p->keep_low_precision_grads, p->cast, p->forward_prefetch, p->backward_prefetch, p->prefetch_limit, p->lists);
    for (int u = 0; u < m.n_units; u++) fprintf(stderr, "  unit %d strategy %d\n", u, p->unit_strategy[u]);
    fprintf(
        stderr,
        "  %s, %d steps, %d rows, %s, paired %d, post_each %d, finish_each %d, keep_full %d, evaluate %d, discard %d, "
        "asynchronous %d, edits %d, strided %d, callbacks %d, breaks %d, twice %d%d%d, skip %d every %d, aux every "
        "%d, toggle at %d, uneven %d\n",
        p->optimizer ? "Adam" : "SGD", p->steps, p->rows, p->schedule, p->paired, p->post_each, p->finish_each,
        p->keep_full, p->evaluate, p->discard, p->asynchronous, p->edits, p->strided, p->callbacks, p->breaks,
        p->twice[0], p->twice[1], p->twice[2], p->skip_block, p->skip_every, p->aux_every, p->toggle_step,
        p->uneven_use);
}
