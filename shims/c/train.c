/* Training a small classifier from plain C: everything that a host of libfsdp has to do, in one file.
 *
 *     train [-n ranks] [-s steps] [-l libfsdp.so.0] [data.csv]
 *
 * With -n this program forks its own ranks; without it, it is one rank of whatever launcher started it
 * (env://), or a job of one. It trains over all ranks, then once more alone on the same batches, and
 * compares: the two runs may differ by rounding only. Exit status 0: they agree. A CSV file has one sample a
 * line, numbers only, its class (0, 1, ...) last; without one, clusters of random points are made up.
 *
 * The model is two linear layers with a ReLU in between, softmax and cross-entropy, plain SGD. Each layer is
 * one unit: its parameters exist in full only between pre_forward and post_forward, and between pre_backward
 * and post_backward. In between, and for the optimizer, each rank has its own rows of each parameter and
 * nothing else.
 *
 * Nothing here is linked against the library: the header gives types, dlopen gives the code. Where a call
 * fails, the function prints why and returns -1; objects are released in one place, whatever happened
 * (releasing NULL is fine).
 */
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data.h"
#include "fsdp.h"

enum { HIDDEN = 50, BATCH = 96, REPORT_EVERY = 20 };
static const float LEARNING_RATE = 0.2f;
static const float TOLERANCE = 1e-5f; /* parameters are of order 1, and float32 has 7 digits */

typedef struct settings {
    const char *library;
    const char *csv;
    int ranks; /* to fork; 0: a launcher did */
    int steps;
} settings;

static const fsdp_api *fsdp; /* the library */

/* ---- Errors ---- */

static int failed(const char *call)
{
    fsdp_error_info info = {.struct_size = sizeof(info)};
    if (fsdp->last_error_info(&info) != FSDP_OK) return -1;
    fprintf(stderr, "%s: %s: %s\n", call, fsdp->status_name(info.status), info.message);
    return -1;
}

/* Call the library; on failure say which call it was, and pass the failure on. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if (fsdp->call != FSDP_OK) return failed(#call);                                                               \
    } while (0)

static int no_memory(void)
{
    fputs("train: out of memory\n", stderr);
    return -1;
}

/* ---- Tensors ---- */

/* Memory of ours, described for the library. The descriptor is only read during a call, so it can live on the
 * stack. */
static DLTensor tensor(float *data, int32_t ndim, int64_t *shape)
{
    return (DLTensor){
        .data = data,
        .device = {kDLCPU, 0},
        .ndim = ndim,
        .dtype = {kDLFloat, 32, 1},
        .shape = shape,
    };
}

/* Memory of the library's, described for us. */
static float *values(const DLManagedTensorVersioned *t)
{
    return (float *)((char *)t->dl_tensor.data + t->dl_tensor.byte_offset);
}

static int64_t count(const DLManagedTensorVersioned *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->dl_tensor.ndim; i++) n *= t->dl_tensor.shape[i];
    return n; /* 0 on a rank that has no rows */
}

static void drop(DLManagedTensorVersioned *t)
{
    if (t != NULL && t->deleter != NULL) t->deleter(t);
}

/* ---- A linear layer, which is one unit ---- */

enum { WEIGHT, BIAS, PARAMS };

typedef struct linear {
    int in, out;
    fsdp_unit *unit;
    /* Views of the library's memory; their addresses stay for the unit's life. The full ones may be read only
     * while the unit is unsharded. */
    DLManagedTensorVersioned *full[PARAMS], *shard[PARAMS], *shard_grad[PARAMS];
    float *grad[PARAMS]; /* ours: this rank's gradients of the full parameters */
} linear;

static int linear_create(linear *layer, fsdp_model *model, const char *name, int in, int out, uint32_t *seed)
{
    layer->in = in;
    layer->out = out;
    layer->grad[WEIGHT] = calloc((size_t)in * (size_t)out, sizeof(float));
    layer->grad[BIAS] = calloc((size_t)out, sizeof(float));
    if (layer->grad[WEIGHT] == NULL || layer->grad[BIAS] == NULL) return no_memory();

    /* Initial values come from any memory that is there for the call (here the gradients'). Every rank
     * computes the whole parameter, the library keeps this rank's rows of it. */
    float scale = sqrtf(3.0f / (float)in);
    for (int i = 0; i < in * out; i++) layer->grad[WEIGHT][i] = scale * random_uniform(seed);
    int64_t shape[2] = {out, in};
    DLTensor weight = tensor(layer->grad[WEIGHT], 2, shape);
    DLTensor bias = tensor(layer->grad[BIAS], 1, shape);

    char names[PARAMS][64];
    snprintf(names[WEIGHT], sizeof(names[WEIGHT]), "%s.weight", name);
    snprintf(names[BIAS], sizeof(names[BIAS]), "%s.bias", name);
    fsdp_param params[PARAMS] = {
        {.struct_size = sizeof(fsdp_param), .name = names[WEIGHT], .full = &weight},
        {.struct_size = sizeof(fsdp_param), .name = names[BIAS], .full = &bias},
    };
    TRY(unit_create(model, name, params, PARAMS, NULL, &layer->unit));
    for (int32_t i = 0; i < PARAMS; i++) {
        TRY(unit_param_full(layer->unit, i, &layer->full[i]));
        TRY(unit_param_shard(layer->unit, i, &layer->shard[i]));
        TRY(unit_param_grad(layer->unit, i, &layer->shard_grad[i]));
    }
    return 0;
}

static void linear_release(linear *layer)
{
    for (int i = 0; i < PARAMS; i++) {
        drop(layer->full[i]);
        drop(layer->shard[i]);
        drop(layer->shard_grad[i]);
        free(layer->grad[i]);
    }
    fsdp->unit_release(layer->unit);
}

/* y = x W^T + b, for n rows of x. */
static int linear_forward(linear *layer, const float *x, float *y, int n)
{
    TRY(unit_pre_forward(layer->unit));
    const float *w = values(layer->full[WEIGHT]), *b = values(layer->full[BIAS]);
    for (int r = 0; r < n; r++)
        for (int o = 0; o < layer->out; o++) {
            float sum = b[o];
            for (int i = 0; i < layer->in; i++) sum += x[r * layer->in + i] * w[o * layer->in + i];
            y[r * layer->out + o] = sum;
        }
    TRY(unit_post_forward(layer->unit));
    return 0;
}

/* From dy, the gradient of y: the parameters' gradients, handed to the library, and dx (NULL: not wanted). */
static int linear_backward(linear *layer, const float *x, const float *dy, float *dx, int n)
{
    TRY(unit_pre_backward(layer->unit));
    const float *w = values(layer->full[WEIGHT]);
    float *dw = layer->grad[WEIGHT], *db = layer->grad[BIAS];
    memset(dw, 0, (size_t)layer->in * (size_t)layer->out * sizeof(float));
    memset(db, 0, (size_t)layer->out * sizeof(float));
    if (dx != NULL) memset(dx, 0, (size_t)n * (size_t)layer->in * sizeof(float));
    for (int r = 0; r < n; r++)
        for (int o = 0; o < layer->out; o++) {
            float d = dy[r * layer->out + o];
            db[o] += d;
            for (int i = 0; i < layer->in; i++) dw[o * layer->in + i] += d * x[r * layer->in + i];
            if (dx != NULL)
                for (int i = 0; i < layer->in; i++) dx[r * layer->in + i] += d * w[o * layer->in + i];
        }

    /* The library sums the ranks' gradients, each rank its own rows. With a work handle instead of NULL this
     * would go on behind the next layer's backward; finish_backward waits for it. */
    int64_t shape[2] = {layer->out, layer->in};
    DLTensor weight = tensor(dw, 2, shape), bias = tensor(db, 1, shape);
    const DLTensor *grads[PARAMS] = {&weight, &bias};
    TRY(unit_post_backward(layer->unit, grads, PARAMS, NULL));
    return 0;
}

/* Plain SGD on this rank's rows. The library publishes them in the next pre_forward. */
static void linear_update(linear *layer)
{
    for (int i = 0; i < PARAMS; i++) {
        float *p = values(layer->shard[i]);
        const float *g = values(layer->shard_grad[i]);
        for (int64_t k = 0, n = count(layer->shard[i]); k < n; k++) p[k] -= LEARNING_RATE * g[k];
    }
}

/* Copy the full parameters to `to`; returns the number of values, or -1. */
static int64_t linear_export(linear *layer, float *to)
{
    TRY(unit_unshard(layer->unit, NULL));
    int64_t done = 0;
    for (int i = 0; i < PARAMS; i++) {
        memcpy(to + done, values(layer->full[i]), (size_t)count(layer->full[i]) * sizeof(float));
        done += count(layer->full[i]);
    }
    TRY(unit_reshard(layer->unit));
    return done;
}

/* ---- Training ---- */

typedef struct trainer {
    fsdp_group *group;
    int32_t rank, size;
    int report; /* print losses */
    fsdp_model *model;
    linear layer[2];
    /* Of this rank's part of a batch. logits become their own gradient. */
    float *x, *hidden, *d_hidden, *logits;
} trainer;

typedef struct result {
    float *loss;   /* of each step */
    float *params; /* in full, at the end */
    int64_t n_params;
    fsdp_memory_info memory;
} result;

/* Softmax and cross-entropy. Returns the rows' part of the mean loss over the whole batch and turns logits
 * into its gradient; since each is divided by the whole batch already, the ranks' results need only be added.
 */
static float loss_and_gradient(float *logits, const int *label, int n, int classes)
{
    float loss = 0;
    for (int r = 0; r < n; r++) {
        float *z = logits + r * classes, top = z[0], sum = 0;
        for (int c = 1; c < classes; c++) top = fmaxf(top, z[c]);
        for (int c = 0; c < classes; c++) sum += expf(z[c] - top);
        loss += (logf(sum) + top - z[label[r]]) / BATCH;
        for (int c = 0; c < classes; c++) z[c] = (expf(z[c] - top) / sum - (c == label[r])) / BATCH;
    }
    return loss;
}

/* One step on rows first .. first+BATCH-1 (wrapping) of the data, of which each rank takes its share. */
static int step(trainer *t, const dataset *data, int first, float *loss)
{
    int64_t start, n64;
    TRY(shard_extent(BATCH, t->rank, t->size, &start, &n64)); /* no rows: join in all the same */
    int n = (int)n64, label[BATCH];
    for (int i = 0; i < n; i++) {
        int row = (first + (int)start + i) % data->rows;
        memcpy(t->x + i * data->features, data->x + row * data->features, (size_t)data->features * sizeof(float));
        label[i] = data->label[row];
    }

    TRY(model_zero_grad(t->model));
    if (linear_forward(&t->layer[0], t->x, t->hidden, n) != 0) return -1;
    for (int i = 0; i < n * HIDDEN; i++) t->hidden[i] = fmaxf(t->hidden[i], 0);
    if (linear_forward(&t->layer[1], t->hidden, t->logits, n) != 0) return -1;

    *loss = loss_and_gradient(t->logits, label, n, data->classes);

    if (linear_backward(&t->layer[1], t->hidden, t->logits, t->d_hidden, n) != 0) return -1;
    for (int i = 0; i < n * HIDDEN; i++)
        if (t->hidden[i] <= 0) t->d_hidden[i] = 0;
    if (linear_backward(&t->layer[0], t->x, t->d_hidden, NULL, n) != 0) return -1;
    TRY(model_finish_backward(t->model));

    linear_update(&t->layer[0]);
    linear_update(&t->layer[1]);

    int64_t one = 1;
    DLTensor total = tensor(loss, 1, &one);
    TRY(all_reduce(t->group, &total, &total, FSDP_SUM, NULL)); /* in place */
    return 0;
}

static int trainer_run(trainer *t, const dataset *data, int steps, result *out)
{
    fsdp_group_info info = {.struct_size = sizeof(info)};
    TRY(group_query(t->group, &info));
    t->rank = info.rank;
    t->size = info.size;

    fsdp_model_options options;
    TRY(model_options_init(&options, sizeof(options)));
    /* Our gradients are parts of the whole batch's mean already; the default divides by the group's size. */
    options.gradient_divisor = 1;
    TRY(model_create(t->group, &options, &t->model));
    uint32_t seed = 1; /* the same on every rank */
    if (linear_create(&t->layer[0], t->model, "hidden", data->features, HIDDEN, &seed) != 0) return -1;
    if (linear_create(&t->layer[1], t->model, "output", HIDDEN, data->classes, &seed) != 0) return -1;

    t->x = calloc((size_t)BATCH * (size_t)data->features, sizeof(float));
    t->hidden = calloc((size_t)BATCH * HIDDEN, sizeof(float));
    t->d_hidden = calloc((size_t)BATCH * HIDDEN, sizeof(float));
    t->logits = calloc((size_t)BATCH * (size_t)data->classes, sizeof(float));
    out->loss = calloc((size_t)steps, sizeof(float));
    out->params = calloc((size_t)(HIDDEN * (data->features + 1) + data->classes * (HIDDEN + 1)), sizeof(float));
    if (t->x == NULL || t->hidden == NULL || t->d_hidden == NULL || t->logits == NULL || out->loss == NULL ||
        out->params == NULL)
        return no_memory();

    for (int s = 0; s < steps; s++) {
        if (step(t, data, s * BATCH % data->rows, &out->loss[s]) != 0) return -1;
        if (t->report && t->rank == 0 && (s % REPORT_EVERY == 0 || s == steps - 1))
            printf("ranks %d  step %4d  loss %.6f\n", (int)t->size, s, (double)out->loss[s]);
    }
    out->memory.struct_size = sizeof(out->memory);
    TRY(model_memory(t->model, &out->memory));
    for (int i = 0; i < 2; i++) {
        int64_t n = linear_export(&t->layer[i], out->params + out->n_params);
        if (n < 0) return -1;
        out->n_params += n;
    }
    return 0;
}

/* Train over the store's ranks; store NULL: alone. */
static int train(fsdp_store *store, const dataset *data, int steps, result *out)
{
    trainer t = {.report = store != NULL};
    int status = -1;
    if (fsdp->group_create(store, NULL, &t.group) != FSDP_OK)
        failed("group_create");
    else
        status = trainer_run(&t, data, steps, out);

    linear_release(&t.layer[0]);
    linear_release(&t.layer[1]);
    fsdp->model_release(t.model);
    fsdp->group_release(t.group); /* last: peers take it as our leave */
    free(t.x);
    free(t.hidden);
    free(t.d_hidden);
    free(t.logits);
    return status;
}

static float largest_difference(const float *a, const float *b, int64_t n)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float difference = fabsf(a[i] - b[i]);
        if (!(difference <= largest)) largest = difference; /* so that a NaN is taken, and kept */
        if (isnan(largest)) break;
    }
    return largest;
}

/* ---- Ranks ---- */

/* One symbol to look up; everything else is in the table. The library stays loaded for the life of the
 * process. */
static int load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "train: %s\n", dlerror());
        return -1;
    }
    fsdp_status (*get_api)(int32_t, int32_t, const fsdp_api **);
    void *symbol = dlsym(library, "fsdp_get_api");
    memcpy(&get_api, &symbol, sizeof(get_api)); /* C has no cast from void * to a function pointer */
    if (symbol == NULL || get_api(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, &fsdp) != FSDP_OK) {
        fprintf(stderr, "train: %s has no ABI version %d.%d\n", path, FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR);
        return -1;
    }
    return 0;
}

/* The whole life of one rank that meets the others at `url`. Returns the exit status. */
static int rank_main(const settings *set, const char *url)
{
    if (load(set->library) != 0) return EXIT_FAILURE;

    dataset data = {0};
    result sharded = {0}, alone = {0};
    fsdp_store *store = NULL;
    int32_t rank = 0, size = 1;
    int ok = (set->csv == NULL ? dataset_make(&data) : dataset_read(&data, set->csv)) == 0;
    fsdp_store_options options = {.struct_size = sizeof(options), .timeout_ms = 60000};
    if (ok &&
        (fsdp->store_open(url, &options, &store) != FSDP_OK || fsdp->store_identity(store, &rank, &size) != FSDP_OK)) {
        failed("store_open");
        ok = 0;
    }
    ok = ok && train(store, &data, set->steps, &sharded) == 0;
    ok = ok && train(NULL, &data, set->steps, &alone) == 0;
    if (ok) {
        float params = largest_difference(sharded.params, alone.params, alone.n_params);
        float loss = largest_difference(sharded.loss, alone.loss, set->steps);
        ok = params <= TOLERANCE && loss <= TOLERANCE && sharded.n_params == alone.n_params;
        if (rank == 0)
            printf("%lld bytes of parameters, %lld of them on rank 0\n", (long long)sharded.memory.total_parameters,
                   (long long)sharded.memory.shards);
        if (rank == 0 || !ok)
            printf("rank %d of %d against 1: parameters differ by %.2g, losses by %.2g at most: %s\n", (int)rank,
                   (int)size, (double)params, (double)loss, ok ? "equal to round-off" : "NOT EQUAL");
    }

    fsdp->store_release(store);
    free(sharded.loss);
    free(sharded.params);
    free(alone.loss);
    free(alone.params);
    dataset_free(&data);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Fork the ranks, before the library is loaded: handles don't survive a fork. They meet in a file of our own.
 * When one fails the others learn it from the library, so it is enough to wait for all. */
static int launch(const settings *set)
{
    const char *tmp = getenv("TMPDIR");
    char folder[512], file[600], url[700];
    snprintf(folder, sizeof(folder), "%s/fsdp-train-XXXXXX", tmp != NULL && tmp[0] == '/' ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) {
        fprintf(stderr, "train: %s: %s\n", folder, strerror(errno));
        return EXIT_FAILURE;
    }
    snprintf(file, sizeof(file), "%s/store", folder);

    int started = 0, status = EXIT_SUCCESS, ended;
    for (; started < set->ranks; started++) {
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            snprintf(url, sizeof(url), "file://%s?rank=%d&world_size=%d", file, started, set->ranks);
            exit(rank_main(set, url));
        }
        if (pid < 0) {
            fprintf(stderr, "train: fork: %s\n", strerror(errno));
            status = EXIT_FAILURE;
            break;
        }
    }
    for (int i = 0; i < started; i++)
        if (wait(&ended) < 0 || !WIFEXITED(ended) || WEXITSTATUS(ended) != EXIT_SUCCESS) status = EXIT_FAILURE;
    unlink(file); /* already gone, unless a rank crashed */
    rmdir(folder);
    return status;
}

int main(int argc, char **argv)
{
    settings set = {.library = "libfsdp.so.0", .steps = 100};
    int option, usage = 0;
    opterr = 0; /* the usage says it */
    while ((option = getopt(argc, argv, "n:s:l:")) != -1) {
        if (option == 'n') set.ranks = atoi(optarg), usage |= set.ranks < 1;
        if (option == 's') set.steps = atoi(optarg), usage |= set.steps < 1;
        if (option == 'l') set.library = optarg;
        usage |= option == '?';
    }
    if (optind < argc) set.csv = argv[optind++];
    if (usage || optind < argc) {
        fputs("usage: train [-n ranks] [-s steps] [-l libfsdp.so.0] [data.csv]\n", stderr);
        return 2;
    }
    return set.ranks > 0 ? launch(&set) : rank_main(&set, "env://");
}
