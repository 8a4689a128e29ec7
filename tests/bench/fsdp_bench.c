/* One rank of the FSDP runtime in `ci/bench fsdp`, through the public ABI; and of what it is compared with: memcpy, and
 * the compute of a training step alone.
 *
 * fsdp_bench RANK RANKS STORE_URL LARGEST OFFLOAD_DIR
 *
 * A task is a word and a setup: "iterate/u=12,s=full,fp=1". The setup says which model it is done with; models are made
 * when first named and live as long as the process, so that contenders share processes and take turns. `bytes` of a
 * task is the model's size: float32 parameters, in u equal units of four matrices each.
 *
 *   u=N units                 s=full|sgo|no|hybrid       fp=N forward_prefetch     bp=N fsdp_backward_prefetch
 *   bf16=1 param_dtype        frozen=1 all parameters    off=1 shards in a file    private=1 private_unshard
 *   big=N one unit more, as large as N others            root=1 the first unit holds the others, as a model its layers
 *   plain=1 no model: the same loops over private memory
 *
 * Tasks that measure memory answer with bytes where others answer with nanoseconds.
 *
 * One thread. Everything is taken once and given back by the process's end, but the model's objects, so that a build
 * with a leak checker stays quiet about the library.
 */
#include "worker.h"

#include <fsdp.h>

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARAMS = 4, COLUMNS = 1024, MOST_UNITS = 66, MOST_MODELS = 48, BATCH = 16, PAGE = 4096 };

static const fsdp_api *api;
static fsdp_group *group;
static int rank, size;
static const char *offload_dir;
static size_t largest;
static float *input, *output; /* memcpy's; input is also what models begin with, and plain's parameters */
static float *grads;          /* gradients of all units, as an allocator would hand out the same memory again */
static uint16_t *grads_bf16;

struct setup {
    int units, forward_prefetch, backward_prefetch, bf16, frozen, offload, private, big, root, plain;
    char strategy[16];
};

struct unit {
    fsdp_unit *unit;
    int64_t shape[2]; /* of each of its parameters */
    size_t first;     /* of its values in `input`, and of its gradients in `grads` */
    size_t count;     /* values of one parameter */
    DLManagedTensorVersioned *full[PARAMS], *shard[PARAMS], *grad[PARAMS];
    const float *values[PARAMS]; /* what compute reads */
    fsdp_work *work;
};

struct model {
    char key[64];
    size_t bytes;
    struct setup setup;
    fsdp_model *model; /* NULL: plain */
    int n;
    struct unit units[MOST_UNITS];
    double before; /* resident bytes of all ranks when it was about to be made */
};

static struct model *models[MOST_MODELS];
static int n_models;

static const char *failed(fsdp_status status)
{
    return status == FSDP_OK ? NULL : api->last_error();
}

/* ---- compute: what a layer of x @ w does, with a fixed x, so that it costs the same whatever was trained */

static float x[BATCH][COLUMNS], dy[BATCH][COLUMNS], y[BATCH][COLUMNS];

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define CLONES __attribute__((target_clones("default", "avx2")))
#else
#define CLONES
#endif

enum { BLOCK = 256 }; /* columns at a time, so that BATCH rows of them stay in the first cache */

/* y += x @ w, where w has `rows` rows, a multiple of 4. */
CLONES static void multiply(const float *w, int64_t rows)
{
    for (int j = 0; j < COLUMNS; j += BLOCK)
        for (int64_t k = 0; k < rows; k += 4) {
            const float *w0 = w + k * COLUMNS + j, *w1 = w0 + COLUMNS, *w2 = w1 + COLUMNS, *w3 = w2 + COLUMNS;
            for (int b = 0; b < BATCH; b++) {
                const float *a = &x[b][k % COLUMNS];
                float *out = &y[b][j];
                for (int i = 0; i < BLOCK; i++) out[i] += a[0] * w0[i] + a[1] * w1[i] + a[2] * w2[i] + a[3] * w3[i];
            }
        }
}

/* dw = x' @ dy */
CLONES static void multiply_grad(float *dw, int64_t rows)
{
    for (int64_t k = 0; k < rows; k++)
        for (int j = 0; j < COLUMNS; j += BLOCK) {
            float *out = dw + k * COLUMNS + j;
            for (int i = 0; i < BLOCK; i++) out[i] = 0;
            for (int b = 0; b < BATCH; b += 4)
                for (int i = 0; i < BLOCK; i++)
                    out[i] += x[b][k % COLUMNS] * dy[b][j + i] + x[b + 1][k % COLUMNS] * dy[b + 1][j + i] +
                              x[b + 2][k % COLUMNS] * dy[b + 2][j + i] + x[b + 3][k % COLUMNS] * dy[b + 3][j + i];
        }
}

static void fill_compute(void)
{
    for (int b = 0; b < BATCH; b++)
        for (int k = 0; k < COLUMNS; k++) {
            x[b][k] = (float)((rank + 1) * ((b + k) % 5 + 1));
            dy[b][k] = (float)((b * 3 + k) % 7 - 3);
        }
}

/* What the average over ranks of multiply_grad's must be. */
static float expected_grad(size_t k, size_t j)
{
    long sum = 0;
    for (size_t b = 0; b < BATCH; b++) sum += (long)((b + k % COLUMNS) % 5 + 1) * (long)((b * 3 + j) % 7 - 3);
    return (float)((double)sum * (size + 1) / 2);
}

/* ---- resident memory, of all ranks together */

static double sum_over_ranks(double value)
{
    int64_t one = 1;
    double sum = 0;
    DLTensor in = {.data = &value, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 64, 1}, .shape = &one};
    DLTensor out = in;
    out.data = &sum;
    return api->all_reduce(group, &in, &out, FSDP_SUM, NULL) == FSDP_OK ? sum : NAN;
}

/* The kernel counts a page that several processes map in equal parts to each. Ranks read it at one moment. */
static double resident(void)
{
    char line[256];
    long long kib = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    api->barrier(group, NULL);
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "Pss: %lld kB", &kib) == 1) break;
    if (file) fclose(file);
    api->barrier(group, NULL);
    return sum_over_ranks((double)kib * 1024);
}

/* ---- models */

static int parse(const char *key, struct setup *s)
{
    *s = (struct setup){.units = 1, .strategy = "full"};
    for (const char *at = key; *at;) {
        char name[16], value[16];
        int used, number;
        if (sscanf(at, "%15[^=]=%15[^,]%n", name, value, &used) != 2) return 0;
        number = atoi(value);
        if (strcmp(name, "u") == 0)
            s->units = number;
        else if (strcmp(name, "s") == 0)
            snprintf(s->strategy, sizeof s->strategy, "%s", value);
        else if (strcmp(name, "fp") == 0)
            s->forward_prefetch = number;
        else if (strcmp(name, "bp") == 0)
            s->backward_prefetch = number;
        else if (strcmp(name, "bf16") == 0)
            s->bf16 = number;
        else if (strcmp(name, "frozen") == 0)
            s->frozen = number;
        else if (strcmp(name, "off") == 0)
            s->offload = number;
        else if (strcmp(name, "private") == 0)
            s->private = number;
        else if (strcmp(name, "big") == 0)
            s->big = number;
        else if (strcmp(name, "root") == 0)
            s->root = number;
        else if (strcmp(name, "plain") == 0)
            s->plain = number;
        else
            return 0;
        at += used + (at[used] == ',');
    }
    return s->units >= 1 && s->units < MOST_UNITS;
}

static fsdp_strategy strategy_of(const struct setup *s)
{
    static const struct {
        const char *name;
        fsdp_strategy strategy;
    } all[] = {
        {"full", FSDP_FULL_SHARD}, {"sgo", FSDP_SHARD_GRAD_OP}, {"no", FSDP_NO_SHARD}, {"hybrid", FSDP_HYBRID_SHARD}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].name, s->strategy) == 0) return all[i].strategy;
    return -1;
}

static fsdp_status make_model(struct model *m)
{
    const struct setup *s = &m->setup;
    fsdp_precision precision = {.struct_size = sizeof precision, .param_dtype = {kDLBfloat, 16, 1}};
    fsdp_model_options options;
    api->model_options_init(&options, sizeof options);
    options.strategy = strategy_of(s);
    options.private_unshard = s->private;
    options.precision = s->bf16 ? &precision : NULL;
    options.forward_prefetch = s->forward_prefetch;
    options.backward_prefetch = s->backward_prefetch;
    options.offload_dir = s->offload ? offload_dir : NULL;
    if (options.strategy != FSDP_HYBRID_SHARD) return api->model_create(group, &options, &m->model);
    int64_t sizes[2] = {2, size / 2};
    const char *names[2] = {"replicate", "shard"};
    fsdp_mesh *mesh;
    fsdp_status status = api->mesh_create(group, 2, sizes, names, &mesh);
    if (status != FSDP_OK) return status;
    status = api->model_create_on_mesh(mesh, &options, &m->model);
    api->mesh_release(mesh);
    return status;
}

static fsdp_status make_unit(struct model *m, struct unit *u, int index)
{
    DLTensor full[PARAMS];
    fsdp_param params[PARAMS];
    char names[PARAMS][32];
    for (int i = 0; i < PARAMS; i++) {
        snprintf(names[i], sizeof names[i], "layers.%d.w%d", index, i);
        u->values[i] = input + u->first + (size_t)i * u->count;
        full[i] = (DLTensor){.data = (void *)u->values[i],
                             .device = {kDLCPU, 0},
                             .ndim = 2,
                             .dtype = {kDLFloat, 32, 1},
                             .shape = u->shape};
        params[i] = (fsdp_param){
            .struct_size = sizeof params[i], .name = names[i], .full = &full[i], .frozen = m->setup.frozen};
    }
    if (!m->model) return FSDP_OK;
    fsdp_status status = api->unit_create(m->model, NULL, params, PARAMS, NULL, &u->unit);
    for (int i = 0; i < PARAMS && status == FSDP_OK; i++) {
        status = api->unit_param_full(u->unit, i, &u->full[i]);
        if (status == FSDP_OK) status = api->unit_param_shard(u->unit, i, &u->shard[i]);
        if (status == FSDP_OK && !m->setup.frozen) status = api->unit_param_grad(u->unit, i, &u->grad[i]);
        if (status == FSDP_OK) u->values[i] = u->full[i]->dl_tensor.data;
    }
    return status;
}

/* The model that a task's setup names. */
static const char *find_model(const char *key, size_t bytes, struct model **found)
{
    for (int i = 0; i < n_models; i++)
        if (models[i]->bytes == bytes && strcmp(models[i]->key, key) == 0) return *found = models[i], NULL;
    if (n_models == MOST_MODELS) return "too many models";
    struct model *m = calloc(1, sizeof *m);
    if (!m || !parse(key, &m->setup) || strategy_of(&m->setup) < 0) return "not a setup";
    snprintf(m->key, sizeof m->key, "%s", key);
    m->bytes = bytes;
    size_t each = bytes / (size_t)m->setup.units / sizeof(float) / PARAMS; /* values of a parameter */
    if (each % (4 * COLUMNS) != 0 || bytes > largest) return "not a size for so many units";
    m->before = resident();
    fsdp_status status = m->setup.plain ? FSDP_OK : make_model(m);
    m->n = m->setup.units + (m->setup.big > 0);
    for (int i = 0; i < m->n && status == FSDP_OK; i++) {
        struct unit *u = &m->units[i];
        int big = i == m->setup.units; /* begins with the values of the first units: there are no others */
        u->count = big ? each * (size_t)m->setup.big : each;
        u->first = big ? 0 : (size_t)i * each * PARAMS;
        u->shape[0] = (int64_t)u->count / COLUMNS;
        u->shape[1] = COLUMNS;
        if ((u->first + PARAMS * u->count) * sizeof(float) > largest) return "too large a unit";
        status = make_unit(m, u, i);
    }
    models[n_models++] = m;
    *found = m;
    return failed(status);
}

/* ---- a training step */

enum use { NOTHING, TOUCH, COMPUTE, SAMPLE }; /* what is done with a unit between its hooks; SAMPLE: TOUCH, and look */

/* resident() with SAMPLE: at most, and at three moments of the last iteration. */
static double peak, after_forward, after_backward, after_step;

static void use_forward(const struct unit *u, enum use use)
{
    memset(y, 0, sizeof y);
    for (int i = 0; i < PARAMS; i++) {
        if (use == COMPUTE) multiply(u->values[i], u->shape[0]);
        if (use == TOUCH || use == SAMPLE)
            for (size_t at = 0; at < u->count; at += PAGE / sizeof(float) / 4) y[0][0] += u->values[i][at];
    }
    if (use == SAMPLE) peak = fmax(peak, resident());
}

static void use_backward(const struct unit *u, enum use use)
{
    use_forward(u, use);
    for (int i = 0; i < PARAMS && use == COMPUTE; i++)
        multiply_grad(grads + u->first + (size_t)i * u->count, u->shape[0]);
}

static fsdp_status post_backward(const struct model *m, struct unit *u, int async)
{
    DLTensor tensors[PARAMS];
    const DLTensor *list[PARAMS];
    for (int i = 0; i < PARAMS; i++) {
        size_t at = u->first + (size_t)i * u->count;
        tensors[i] = (DLTensor){.data = m->setup.bf16 ? (void *)(grads_bf16 + at) : (void *)(grads + at),
                                .device = {kDLCPU, 0},
                                .ndim = 2,
                                .dtype = {kDLFloat, 32, 1},
                                .shape = u->shape};
        if (m->setup.bf16) tensors[i].dtype = (DLDataType){kDLBfloat, 16, 1};
        list[i] = m->setup.frozen ? NULL : &tensors[i];
    }
    return api->unit_post_backward(u->unit, list, PARAMS, async ? &u->work : NULL);
}

#define HOOK(call)                                                                                                     \
    do {                                                                                                               \
        if (m->model && status == FSDP_OK) status = (call);                                                            \
    } while (0)

static fsdp_status forward(struct model *m, enum use use)
{
    fsdp_status status = FSDP_OK;
    struct unit *root = m->setup.root ? &m->units[0] : NULL;
    if (root) HOOK(api->unit_pre_forward(root->unit));
    for (int i = root != NULL; i < m->n; i++) {
        struct unit *u = &m->units[i];
        HOOK(api->unit_pre_forward(u->unit));
        if (status == FSDP_OK) use_forward(u, use);
        HOOK(api->unit_post_forward(u->unit));
    }
    if (root && status == FSDP_OK) use_forward(root, use);
    if (root) HOOK(api->unit_post_forward(root->unit));
    return status;
}

static fsdp_status backward(struct model *m, enum use use, int async)
{
    fsdp_status status = FSDP_OK;
    struct unit *root = m->setup.root ? &m->units[0] : NULL;
    if (root) HOOK(api->unit_pre_backward(root->unit));
    for (int i = m->n - 1; i >= (root != NULL); i--) {
        struct unit *u = &m->units[i];
        HOOK(api->unit_pre_backward(u->unit));
        if (status == FSDP_OK) use_backward(u, use);
        HOOK(post_backward(m, u, async));
    }
    if (root && status == FSDP_OK) use_backward(root, use);
    if (root) HOOK(post_backward(m, root, async));
    HOOK(api->model_finish_backward(m->model));
    for (int i = 0; i < m->n && async && m->model; i++) {
        api->work_release(m->units[i].work);
        m->units[i].work = NULL;
    }
    return status;
}

/* A step of gradient descent: for rows where it matters that shards are written. */
static void optimize(struct model *m)
{
    for (int i = 0; i < m->n && m->model; i++)
        for (int j = 0; j < PARAMS && !m->setup.frozen; j++) {
            const DLTensor *shard = &m->units[i].shard[j]->dl_tensor, *grad = &m->units[i].grad[j]->dl_tensor;
            float *w = shard->data;
            const float *g = grad->data;
            for (int64_t k = 0; k < shard->shape[0] * shard->shape[1]; k++) w[k] -= 1e-6f * g[k];
        }
}

static void look(enum use use, double *moment)
{
    if (use == SAMPLE) peak = fmax(peak, *moment = resident());
}

static fsdp_status iterate(struct model *m, enum use use, int async, int step)
{
    fsdp_status status = forward(m, use);
    if (status != FSDP_OK) return status;
    look(use, &after_forward);
    status = backward(m, use, async);
    if (status != FSDP_OK) return status;
    look(use, &after_backward);
    if (step) optimize(m);
    look(use, &after_step);
    HOOK(api->model_zero_grad(m->model));
    return status;
}

/* ---- tasks: *took is what counts, where not all of it does */

static fsdp_status copy(struct model *m, int64_t *took)
{
    (void)took;
    memcpy(output, input, m->bytes);
    return FSDP_OK;
}

/* Between parts that count and parts that don't. */
static int64_t meet(fsdp_status *status)
{
    if (*status == FSDP_OK) *status = api->barrier(group, NULL);
    return worker_now();
}

/* Every unit, by hand; their shards have changed. */
static fsdp_status unshard(struct model *m, int64_t *took)
{
    fsdp_status status = FSDP_OK;
    int64_t begin = meet(&status);
    for (int i = 0; i < m->n; i++) HOOK(api->unit_unshard(m->units[i].unit, NULL));
    *took += worker_now() - begin;
    for (int i = 0; i < m->n; i++) HOOK(api->unit_reshard(m->units[i].unit));
    return status;
}

static fsdp_status unshard_reshard(struct model *m, int64_t *took)
{
    fsdp_status status = FSDP_OK;
    int64_t begin = meet(&status);
    status = forward(m, NOTHING);
    *took += worker_now() - begin;
    return status;
}

/* Backward comes after forward, and what forward published still stands. */
static fsdp_status unshard_again(struct model *m, int64_t *took)
{
    fsdp_status status = forward(m, NOTHING);
    struct unit *u = &m->units[0];
    int64_t begin = meet(&status);
    HOOK(api->unit_pre_backward(u->unit));
    *took += worker_now() - begin;
    HOOK(post_backward(m, u, 0));
    HOOK(api->model_finish_backward(m->model));
    return status;
}

static fsdp_status reduce_some(struct model *m, int64_t *took, int async)
{
    fsdp_status status = forward(m, NOTHING);
    int64_t begin = meet(&status);
    if (status == FSDP_OK) status = backward(m, NOTHING, async);
    *took += worker_now() - begin;
    HOOK(api->model_zero_grad(m->model));
    return status;
}

static fsdp_status reduce(struct model *m, int64_t *took)
{
    return reduce_some(m, took, 0);
}

static fsdp_status reduce_async(struct model *m, int64_t *took)
{
    return reduce_some(m, took, 1);
}

static fsdp_status iterate_sync(struct model *m, int64_t *took)
{
    (void)took;
    return iterate(m, COMPUTE, 0, 0);
}

static fsdp_status iterate_async(struct model *m, int64_t *took)
{
    (void)took;
    return iterate(m, COMPUTE, 1, 0);
}

static fsdp_status train(struct model *m, int64_t *took)
{
    (void)took;
    return iterate(m, COMPUTE, 0, 1);
}

/* Resident bytes of all ranks that this model takes, in three iterations. */
static fsdp_status resident_in(struct model *m, int64_t *took, const double *moment)
{
    fsdp_status status = FSDP_OK;
    peak = 0;
    for (int i = 0; i < 3 && status == FSDP_OK; i++) status = iterate(m, SAMPLE, 0, 1);
    *took = (int64_t)(*moment - m->before);
    return status;
}

static fsdp_status resident_peak(struct model *m, int64_t *took)
{
    return resident_in(m, took, &peak);
}

static fsdp_status resident_forward(struct model *m, int64_t *took)
{
    return resident_in(m, took, &after_forward);
}

static fsdp_status resident_backward(struct model *m, int64_t *took)
{
    return resident_in(m, took, &after_backward);
}

static fsdp_status resident_step(struct model *m, int64_t *took)
{
    return resident_in(m, took, &after_step);
}

/* And what the library says. */
static fsdp_memory_info memory;

static fsdp_status counted(struct model *m, int64_t *took, const int64_t *field)
{
    memory = (fsdp_memory_info){.struct_size = sizeof memory};
    fsdp_status status = api->model_memory(m->model, &memory);
    *took = *field;
    return status;
}

static fsdp_status shards_bytes(struct model *m, int64_t *took)
{
    return counted(m, took, &memory.host_shards);
}

static fsdp_status unsharded_bytes(struct model *m, int64_t *took)
{
    return counted(m, took, &memory.host_unsharded_peak);
}

static fsdp_status largest_bytes(struct model *m, int64_t *took)
{
    return counted(m, took, &memory.largest_unit);
}

static const struct {
    const char *name;
    fsdp_status (*run)(struct model *m, int64_t *took);
} tasks[] = {
    {"memcpy", copy},
    {"unshard", unshard},
    {"unshard_reshard", unshard_reshard},
    {"unshard_again", unshard_again},
    {"reduce", reduce},
    {"reduce_async", reduce_async},
    {"iterate", iterate_sync},
    {"iterate_async", iterate_async},
    {"train", train},
    {"resident", resident_peak},
    {"resident_forward", resident_forward},
    {"resident_backward", resident_backward},
    {"resident_step", resident_step},
    {"shards", shards_bytes},
    {"unsharded", unsharded_bytes},
    {"largest", largest_bytes},
};

static const char *find(const char *text, size_t bytes, int *task, struct model **m)
{
    char word[64];
    const char *slash = strchr(text, '/');
    if (!slash) return "not a task and a setup";
    snprintf(word, sizeof word, "%.*s", (int)(slash - text), text);
    for (*task = 0; (size_t)*task < sizeof tasks / sizeof *tasks; ++*task)
        if (strcmp(tasks[*task].name, word) == 0) return find_model(slash + 1, bytes, m);
    return "no such task";
}

static const char *turn(const char *text, size_t bytes, long repetitions, struct worker_time *time)
{
    int task;
    struct model *m;
    const char *wrong = find(text, bytes, &task, &m);
    if (wrong) return wrong;
    fsdp_status status = FSDP_OK;
    time->begin = meet(&status);
    for (long i = 0; i < repetitions && status == FSDP_OK; i++) status = tasks[task].run(m, &time->took);
    time->end = worker_now();
    return failed(status);
}

/* ---- checks: a step gives what it must before it is timed */

/* The rank that a row of a parameter comes from. */
static int owner(const struct model *m, int64_t rows, int64_t row)
{
    if (strategy_of(&m->setup) == FSDP_NO_SHARD) return rank;
    int over = strategy_of(&m->setup) == FSDP_HYBRID_SHARD ? size / 2 : size, r = 0;
    int64_t begin, length;
    for (;; r++) {
        api->shard_extent(rows, r, over, &begin, &length);
        if (row < begin + length) break;
    }
    return rank / over * over + r;
}

static float full_value(const struct model *m, const struct unit *u, int param, size_t at)
{
    if (!m->setup.bf16) return u->values[param][at];
    uint32_t bits = (uint32_t)((const uint16_t *)u->values[param])[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static const char *check_full(struct model *m, struct unit *u)
{
    fsdp_status status = FSDP_OK;
    const char *wrong = NULL;
    HOOK(api->unit_unshard(u->unit, NULL));
    for (int i = 0; i < PARAMS && status == FSDP_OK; i++)
        for (int64_t row = 0; row < u->shape[0]; row++) {
            int from = owner(m, u->shape[0], row);
            for (size_t j = 0; j < COLUMNS; j += 37) {
                size_t at = (size_t)row * COLUMNS + j;
                if (full_value(m, u, i, at) != worker_input(from, u->first + (size_t)i * u->count + at))
                    wrong = "unshard: a full parameter is wrong";
            }
        }
    HOOK(api->unit_reshard(u->unit));
    return status == FSDP_OK ? wrong : failed(status);
}

static const char *check_grads(struct model *m, int computed)
{
    for (int n = 0; n < m->n; n++)
        for (int i = 0; i < PARAMS; i++) {
            struct unit *u = &m->units[n];
            fsdp_param_info info = {.struct_size = sizeof info};
            fsdp_status status = api->unit_param_query(u->unit, i, &info);
            if (status != FSDP_OK) return failed(status);
            const float *grad = u->grad[i]->dl_tensor.data;
            for (size_t at = 0; at < (size_t)info.shard_length * COLUMNS; at += 37) {
                size_t whole = (size_t)info.shard_start * COLUMNS + at;
                float want = computed ? expected_grad(whole / COLUMNS, whole % COLUMNS)
                                      : worker_sum(size, u->first + (size_t)i * u->count + whole) / (float)size;
                if (fabsf(grad[at] - want) > 1e-6f * fabsf(want)) return "reduce: a gradient is wrong";
            }
        }
    return NULL;
}

static void fill_grads(void)
{
    for (size_t i = 0; i < largest / sizeof(float); i++) {
        uint32_t bits;
        grads[i] = worker_input(rank, i);
        memcpy(&bits, &grads[i], sizeof bits);
        grads_bf16[i] = (uint16_t)(bits >> 16); /* exact */
    }
}

static const char *check(const char *text, size_t bytes)
{
    int task;
    struct model *m;
    const char *wrong = find(text, bytes, &task, &m);
    if (wrong || !m->model) return wrong;
    for (int i = 0; i < m->n && !wrong; i++) wrong = check_full(m, &m->units[i]);
    if (wrong || m->setup.frozen) return wrong;
    int computed = tasks[task].run == iterate_sync || tasks[task].run == iterate_async || tasks[task].run == train;
    int async = tasks[task].run == iterate_async || tasks[task].run == reduce_async;
    if (!computed) fill_grads();
    for (int i = 0; i < 2 && !wrong; i++) { /* prefetch knows the order the second time */
        fsdp_status status = api->model_zero_grad(m->model);
        if (status == FSDP_OK) status = forward(m, computed ? COMPUTE : NOTHING);
        if (status == FSDP_OK) status = backward(m, computed ? COMPUTE : NOTHING, async);
        wrong = status == FSDP_OK ? check_grads(m, computed) : failed(status);
        if (!wrong) wrong = failed(api->model_zero_grad(m->model));
    }
    return wrong;
}

/* ---- start */

static int load(void)
{
    const char *path = getenv("FSDP_LIBRARY");
    void *library = dlopen(path ? path : "libfsdp.so.0", RTLD_NOW);
    union {
        void *symbol;
        fsdp_status (*get_api)(int32_t, int32_t, const fsdp_api **);
    } entry = {.symbol = library ? dlsym(library, "fsdp_get_api") : NULL};
    if (!entry.symbol) {
        fprintf(stderr, "%s\n", dlerror());
        return 0;
    }
    return entry.get_api(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, &api) == FSDP_OK && api->struct_size >= sizeof *api;
}

static void release(struct model *m)
{
    for (int i = 0; i < m->n && m->model; i++) {
        struct unit *u = &m->units[i];
        for (int j = 0; j < PARAMS; j++) {
            DLManagedTensorVersioned *held[] = {u->full[j], u->shard[j], u->grad[j]};
            for (int k = 0; k < 3; k++)
                if (held[k]) held[k]->deleter(held[k]);
        }
        api->unit_release(u->unit);
    }
    if (m->model) api->model_release(m->model);
    free(m);
}

int main(int argc, char **argv)
{
    if (argc < 6 || !load()) {
        fprintf(stderr, "started by ci/bench fsdp: RANK RANKS STORE_URL LARGEST OFFLOAD_DIR\n");
        return 1;
    }
    rank = atoi(argv[1]);
    size = atoi(argv[2]);
    largest = strtoull(argv[4], NULL, 10);
    offload_dir = argv[5];
    fsdp_store_options where;
    fsdp_group_options options;
    fsdp_store *store;
    api->store_options_init(&where, sizeof where);
    where.rank = rank;
    where.world_size = size;
    where.timeout_ms = 60000;
    api->group_options_init(&options, sizeof options);
    options.name = "bench";
    options.timeout_ms = 60000;
    if (api->store_open(argv[3], &where, &store) != FSDP_OK || api->group_create(store, &options, &group) != FSDP_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, api->last_error());
        return 1;
    }
    input = worker_memory(largest);
    output = worker_memory(largest);
    grads = worker_memory(largest);
    grads_bf16 = worker_memory(largest / 2);
    for (size_t i = 0; i < largest / sizeof(float); i++) input[i] = worker_input(rank, i);
    fill_grads();
    fill_compute();
    resident(); /* what the library takes at its first operations is no model's */

    int status = worker_serve(rank, &(struct worker_tasks){.check = check, .turn = turn});

    while (n_models) release(models[--n_models]);
    api->group_release(group);
    api->store_release(store);
    return status;
}
