/* One rank of libfsdp in `ci/bench collectives`, through the public ABI; and of memcpy, which meets by its
 * barrier.
 *
 * collectives_bench RANK RANKS STORE_URL LARGEST [staging_bytes=N] [direct_read=N] [spin_us=N]
 *
 * The library is FSDP_LIBRARY's, so that two builds can be compared in one run.
 */
#include "worker.h"

#include <fsdp.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARAMS 4 /* of the unit that is unsharded */

static const fsdp_api *api;
static fsdp_group *group;
static int rank, size;
static float *input, *output;

static fsdp_model *model;
static fsdp_unit *unit;
static size_t unit_bytes;

static const char *failed(fsdp_status status)
{
    return status == FSDP_OK ? NULL : api->last_error();
}

static DLTensor tensor(float *data, int64_t *count)
{
    return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = count};
}

/* ---- tasks */

static fsdp_status all_gather(size_t bytes)
{
    int64_t whole = (int64_t)(bytes / 4), part = whole / size;
    DLTensor in = tensor(input, &part), out = tensor(output, &whole);
    return api->all_gather(group, &in, &out, NULL);
}

static fsdp_status reduce_scatter(size_t bytes)
{
    int64_t whole = (int64_t)(bytes / 4), part = whole / size;
    DLTensor in = tensor(input, &whole), out = tensor(output, &part);
    return api->reduce_scatter(group, &in, &out, FSDP_SUM, NULL);
}

static fsdp_status all_reduce(size_t bytes)
{
    int64_t whole = (int64_t)(bytes / 4);
    DLTensor in = tensor(input, &whole), out = tensor(output, &whole);
    return api->all_reduce(group, &in, &out, FSDP_SUM, NULL);
}

static fsdp_status barrier(size_t bytes)
{
    (void)bytes;
    return api->barrier(group, NULL);
}

static fsdp_status copy(size_t bytes)
{
    memcpy(output, input, bytes);
    return FSDP_OK;
}

/* The shards have changed: only the unshard counts, not the reshard before it. */
static fsdp_status publish(int64_t *took)
{
    fsdp_status status = api->unit_reshard(unit);
    if (status == FSDP_OK) status = api->barrier(group, NULL);
    int64_t begin = worker_now();
    if (status == FSDP_OK) status = api->unit_unshard(unit, NULL);
    *took += worker_now() - begin;
    return status;
}

static fsdp_status unshard_changed(size_t bytes, int64_t *took)
{
    (void)bytes;
    return publish(took);
}

/* What a layer costs in forward: both. */
static fsdp_status unshard_reshard(size_t bytes, int64_t *took)
{
    (void)bytes;
    fsdp_status status = publish(took);
    int64_t begin = worker_now();
    if (status == FSDP_OK) status = api->unit_reshard(unit);
    *took += worker_now() - begin;
    return status;
}

/* As in backward: what forward published still stands. */
static fsdp_status unshard_again(size_t bytes, int64_t *took)
{
    (void)bytes;
    fsdp_status status = api->unit_reshard(unit);
    int64_t begin = worker_now();
    if (status == FSDP_OK) status = api->unit_pre_backward(unit);
    *took += worker_now() - begin;
    return status;
}

static const struct {
    const char *name;
    fsdp_status (*whole)(size_t bytes); /* all of it counts */
    fsdp_status (*timed)(size_t bytes, int64_t *took);
} tasks[] = {
    {"memcpy", copy, NULL},
    {"all_gather", all_gather, NULL},
    {"reduce_scatter", reduce_scatter, NULL},
    {"all_reduce", all_reduce, NULL},
    {"barrier", barrier, NULL},
    {"unshard", NULL, unshard_changed},
    {"unshard_reshard", NULL, unshard_reshard},
    {"unshard_again", NULL, unshard_again},
};

static int find(const char *name)
{
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++)
        if (strcmp(tasks[i].name, name) == 0) return (int)i;
    return -1;
}

static const char *turn(const char *name, size_t bytes, long repetitions, struct worker_time *time)
{
    int task = find(name);
    if (task < 0) return "no such task";
    fsdp_status status = api->barrier(group, NULL);
    time->begin = worker_now();
    for (long i = 0; i < repetitions && status == FSDP_OK; i++)
        status = tasks[task].whole ? tasks[task].whole(bytes) : tasks[task].timed(bytes, &time->took);
    time->end = worker_now();
    return failed(status);
}

/* ---- checks */

static const char *make_unit(size_t bytes)
{
    if (unit && unit_bytes == bytes) return NULL;
    if (unit) api->unit_release(unit);
    unit = NULL;
    if (!model) {
        fsdp_model_options options;
        api->model_options_init(&options, sizeof options);
        fsdp_status status = api->model_create(group, &options, &model);
        if (status != FSDP_OK) return failed(status);
    }
    int64_t shape[2] = {(int64_t)(bytes / PARAMS / 4 / 1024), 1024};
    DLTensor full[PARAMS];
    fsdp_param params[PARAMS];
    char names[PARAMS][32];
    for (int i = 0; i < PARAMS; i++) {
        snprintf(names[i], sizeof names[i], "layer%d.weight", i);
        full[i] = (DLTensor){.data = input + (size_t)i * (bytes / PARAMS / 4),
                             .device = {kDLCPU, 0},
                             .ndim = 2,
                             .dtype = {kDLFloat, 32, 1},
                             .shape = shape};
        params[i] = (fsdp_param){.struct_size = sizeof params[i], .name = names[i], .full = &full[i]};
    }
    unit_bytes = bytes;
    return failed(api->unit_create(model, "bench", params, PARAMS, NULL, &unit));
}

/* Each rank makes its rows its own, and all must see them. */
static const char *check_unit(size_t bytes)
{
    const char *wrong = make_unit(bytes);
    int64_t took = 0;
    for (int i = 0; i < PARAMS && !wrong; i++) {
        DLManagedTensorVersioned *shard;
        wrong = failed(api->unit_param_shard(unit, i, &shard));
        if (wrong) break;
        float *values = shard->dl_tensor.data;
        int64_t count = shard->dl_tensor.shape[0] * shard->dl_tensor.shape[1];
        for (int64_t j = 0; j < count; j++) values[j] = worker_input(rank, (size_t)j);
        shard->deleter(shard);
    }
    if (!wrong) wrong = failed(publish(&took));
    for (int i = 0; i < PARAMS && !wrong; i++) {
        DLManagedTensorVersioned *full;
        wrong = failed(api->unit_param_full(unit, i, &full));
        if (wrong) break;
        const float *values = full->dl_tensor.data;
        int64_t rows = full->dl_tensor.shape[0], row = full->dl_tensor.shape[1];
        for (int r = 0; r < size; r++) {
            int64_t begin, length;
            api->shard_extent(rows, r, size, &begin, &length);
            for (int64_t j = 0; j < length * row; j++)
                if (values[begin * row + j] != worker_input(r, (size_t)j)) wrong = "unshard: a full parameter is wrong";
        }
        full->deleter(full);
    }
    return wrong;
}

static const char *check(const char *name, size_t bytes)
{
    int task = find(name);
    if (task < 0) return "no such task";
    if (strncmp(name, "unshard", 7) == 0) return check_unit(bytes);
    size_t count = bytes / 4, part = count / (size_t)size, mine = part * (size_t)rank;
    for (size_t i = 0; i < count; i++) input[i] = worker_input(rank, i);
    memset(output, 0, bytes);
    fsdp_status status = tasks[task].whole(bytes);
    if (status != FSDP_OK) return failed(status);
    if (tasks[task].whole == all_gather)
        for (size_t i = 0; i < part * (size_t)size; i++)
            if (output[i] != worker_input((int)(i / part), i % part)) return "all_gather: the output is wrong";
    if (tasks[task].whole == reduce_scatter)
        for (size_t i = 0; i < part; i++)
            if (output[i] != worker_sum(size, mine + i)) return "reduce_scatter: the output is wrong";
    if (tasks[task].whole == all_reduce)
        for (size_t i = 0; i < count; i++)
            if (output[i] != worker_sum(size, i)) return "all_reduce: the output is wrong";
    return NULL;
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
    return entry.get_api(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, &api) == FSDP_OK;
}

static int set_option(fsdp_group_options *options, const char *text)
{
    long long staging;
    return (sscanf(text, "staging_bytes=%lld", &staging) == 1 && ((options->staging_bytes = staging), 1)) ||
           sscanf(text, "direct_read=%d", &options->direct_read) == 1 ||
           sscanf(text, "spin_us=%d", &options->spin_us) == 1;
}

int main(int argc, char **argv)
{
    if (argc < 5 || !load()) {
        fprintf(stderr, "started by ci/bench collectives: RANK RANKS STORE_URL LARGEST [OPTION=VALUE ...]\n");
        return 1;
    }
    rank = atoi(argv[1]);
    size = atoi(argv[2]);
    size_t largest = strtoull(argv[4], NULL, 10);
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
    for (int i = 5; i < argc; i++) {
        if (!set_option(&options, argv[i])) {
            fprintf(stderr, "%s: not an option of a group\n", argv[i]);
            return 1;
        }
    }
    if (api->store_open(argv[3], &where, &store) != FSDP_OK || api->group_create(store, &options, &group) != FSDP_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, api->last_error());
        return 1;
    }
    input = worker_memory(largest);
    output = worker_memory(largest);

    int status = worker_serve(rank, &(struct worker_tasks){.check = check, .turn = turn});

    if (unit) api->unit_release(unit);
    if (model) api->model_release(model);
    api->group_release(group);
    api->store_release(store);
    return status;
}
