/* The exported functions: check the arguments, call the module, return. No logic; abi/fsdp.h says what each does.
 *
 * Handles are checked by their magic number, which a released object no longer has: that tells most released and
 * foreign handles, though not one whose memory has been used again. */
#include "abi_check.h"

#include "base/log.h"
#include "base/mem.h"
#include "fsdp/fsdp.h"

#include <stdio.h>
#include <string.h>

#define CHECK_HANDLE(is, handle, name)                                                                                 \
    do {                                                                                                               \
        CHECK_ARG(handle, name " is NULL");                                                                            \
        CHECK_ARG(is(handle), name " is not a live %s: released already, or of another kind", #handle);                \
    } while (0)
#define CHECK_OWN(is, handle, name)                                                                                    \
    do {                                                                                                               \
        CHECK_HANDLE(is, handle, name);                                                                                \
        if (ref_forked(&(handle)->ref))                                                                                \
            return err(FSDP_ERR_FORKED,                                                                                \
                       "this " name " was made before fork(): a child process can only release it; make "              \
                       "what it needs in the child");                                                                  \
    } while (0)
#define CHECK_STORE(store) CHECK_OWN(store_is, store, "store")
#define CHECK_GROUP(group) CHECK_OWN(group_is, group, "group")
#define CHECK_WORK(work) CHECK_OWN(work_is, work, "work")
#define CHECK_MODEL(model) CHECK_OWN(model_is, model, "model")
#define CHECK_UNIT(unit) CHECK_OWN(unit_is, unit, "unit")
#define CHECK_SCALER(scaler) CHECK_OWN(scaler_is, scaler, "scaler")
#define CHECK_OUT(pointer) CHECK_ARG(pointer, #pointer " is NULL: there is nowhere to write the result")

/* ---- errors and the library */

const char *fsdp_last_error(void)
{
    return err_message();
}

fsdp_status fsdp_last_error_info(fsdp_error_info *info)
{
    fsdp_error_info last; /* before a failure of this call replaces it */
    err_save(&last);
    return ABI_WRITE(fsdp_error_info, info, &last);
}

const char *fsdp_status_name(fsdp_status status)
{
    return err_status_name(status);
}

int32_t fsdp_version(void)
{
    return FSDP_VERSION_MAJOR * 10000 + FSDP_VERSION_MINOR * 100 + FSDP_VERSION_PATCH;
}

fsdp_status fsdp_set_log(fsdp_log_fn fn, void *user, fsdp_log_level level)
{
    CHECK_ARG(level >= 0 && level <= FSDP_LOG_DEBUG, "level is %d: 0 to %d", level, FSDP_LOG_DEBUG);
    log_set(fn, user, level);
    return FSDP_OK;
}

fsdp_status fsdp_set_allocator(fsdp_alloc_fn alloc, fsdp_free_fn release, void *user)
{
    return mem_set_allocator(alloc, release, user);
}

/* ---- stores */

fsdp_status fsdp_store_options_init(fsdp_store_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_store_options, options, struct_size);
}

fsdp_status fsdp_store_open(const char *url, const fsdp_store_options *options, fsdp_store **store)
{
    CHECK_ARG(url, "url is NULL: \"env://\", \"tcp://host:port\" or \"file:///path\"");
    CHECK_OUT(store);
    fsdp_store_options known;
    TRY(ABI_READ(fsdp_store_options, options, &known));
    return store_open(url, &known, store);
}

fsdp_status fsdp_store_from_callbacks(const fsdp_store_callbacks *callbacks, const fsdp_store_options *options,
                                      fsdp_store **store)
{
    CHECK_ARG(callbacks, "callbacks is NULL");
    CHECK_ARG(options, "options is NULL: rank and world_size are needed");
    CHECK_OUT(store);
    fsdp_store_callbacks known;
    fsdp_store_options known_options;
    TRY(ABI_READ(fsdp_store_callbacks, callbacks, &known));
    TRY(ABI_READ(fsdp_store_options, options, &known_options));
    CHECK_ARG(known.set && known.get && known.add && known.wait, "callbacks: set, get, add and wait are all needed");
    return store_from_callbacks(&known, &known_options, store);
}

fsdp_status fsdp_store_identity(fsdp_store *store, int32_t *rank, int32_t *world_size)
{
    CHECK_STORE(store);
    CHECK_OUT(rank);
    CHECK_OUT(world_size);
    *rank = store_rank(store);
    *world_size = store_world_size(store);
    return FSDP_OK;
}

static fsdp_status check_key(const char *key)
{
    CHECK_ARG(key, "key is NULL");
    CHECK_ARG(strncmp(key, "fsdp/", 5) != 0, "key '%s' begins with \"fsdp/\", which the library keeps for itself", key);
    return FSDP_OK;
}

fsdp_status fsdp_store_set(fsdp_store *store, const char *key, const void *value, size_t bytes)
{
    CHECK_STORE(store);
    TRY(check_key(key));
    CHECK_ARG(value || bytes == 0, "value is NULL, but bytes is %zu", bytes);
    return store_set(store, key, value, bytes);
}

fsdp_status fsdp_store_get(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes)
{
    CHECK_STORE(store);
    TRY(check_key(key));
    CHECK_ARG(buffer || capacity == 0, "buffer is NULL, but capacity is %zu", capacity);
    CHECK_OUT(bytes);
    return store_get(store, key, buffer, capacity, bytes);
}

fsdp_status fsdp_store_add(fsdp_store *store, const char *key, int64_t amount, int64_t *result)
{
    CHECK_STORE(store);
    TRY(check_key(key));
    CHECK_OUT(result);
    return store_add(store, key, amount, result);
}

fsdp_status fsdp_store_wait(fsdp_store *store, const char *key)
{
    CHECK_STORE(store);
    TRY(check_key(key));
    return store_wait(store, key);
}

fsdp_status fsdp_store_retain(fsdp_store *store)
{
    CHECK_STORE(store);
    store_retain(store);
    return FSDP_OK;
}

void fsdp_store_release(fsdp_store *store)
{
    if (store_is(store)) store_release(store);
}

/* ---- tensors */

fsdp_status fsdp_zeros(const DLDataType *dtype, int32_t ndim, const int64_t *shape, DLManagedTensorVersioned **tensor)
{
    CHECK_ARG(dtype, "dtype is NULL");
    CHECK_ARG(shape || ndim <= 0, "shape is NULL, but ndim is %d", ndim);
    CHECK_OUT(tensor);
    return managed_empty(dtype, ndim, shape, tensor);
}

fsdp_status fsdp_copy(const DLTensor *input, const DLTensor *output)
{
    struct tensor from, to;
    TRY(tensor_import(input, "input", &from));
    TRY(tensor_import_output(output, "output", &to));
    char a[TENSOR_TEXT], b[TENSOR_TEXT];
    CHECK_ARG(tensor_same_shape(&from, &to), "input is %s and output is %s: they must have one shape",
              tensor_text(&from, a), tensor_text(&to, b));
    CHECK_ARG(!tensor_overlap(&from, &to), "input and output overlap: give separate memory");
    tensor_copy(&to, &from);
    return FSDP_OK;
}

static fsdp_status check_rank(int32_t rank, int32_t world_size)
{
    CHECK_ARG(world_size > 0, "world_size is %d: at least 1", world_size);
    CHECK_ARG(rank >= 0 && rank < world_size, "rank is %d: 0 to %d with world_size %d", rank, world_size - 1,
              world_size);
    return FSDP_OK;
}

fsdp_status fsdp_shard_extent(int64_t rows, int32_t rank, int32_t world_size, int64_t *start, int64_t *length)
{
    CHECK_ARG(rows >= 0, "rows is %lld: it can't be negative", (long long)rows);
    TRY(check_rank(rank, world_size));
    CHECK_OUT(start);
    CHECK_OUT(length);
    shard_extent(rows, rank, world_size, start, length);
    return FSDP_OK;
}

fsdp_status fsdp_shard(const DLTensor *full, int32_t dim, int32_t rank, int32_t world_size, const DLTensor *shard)
{
    struct tensor from, to;
    TRY(tensor_import(full, "full", &from));
    TRY(tensor_import_output(shard, "shard", &to));
    TRY(check_rank(rank, world_size));
    CHECK_ARG(dim >= 0 && dim < from.ndim, "dim is %d: full has %d dimensions", dim, from.ndim);
    int64_t start, length;
    shard_extent(from.shape[dim], rank, world_size, &start, &length);
    if (from.count) from.data += start * from.strides[dim] * (int64_t)dtype_size(from.type);
    from.shape[dim] = length;
    from.count = 1;
    for (int d = 0; d < from.ndim; d++) from.count *= from.shape[d];
    char a[TENSOR_TEXT], b[TENSOR_TEXT];
    CHECK_ARG(tensor_same_shape(&from, &to), "shard is %s: rank %d's part of full is %s", tensor_text(&to, b), rank,
              tensor_text(&from, a));
    CHECK_ARG(!tensor_overlap(&from, &to), "full and shard overlap: give separate memory");
    tensor_copy(&to, &from);
    return FSDP_OK;
}

fsdp_status fsdp_tensor_from_legacy(DLManagedTensor *legacy, DLManagedTensorVersioned **tensor)
{
    CHECK_ARG(legacy, "legacy is NULL");
    CHECK_OUT(tensor);
    return managed_from_legacy(legacy, tensor);
}

fsdp_status fsdp_tensor_to_legacy(DLManagedTensorVersioned *tensor, DLManagedTensor **legacy)
{
    CHECK_ARG(tensor, "tensor is NULL");
    CHECK_OUT(legacy);
    return managed_to_legacy(tensor, legacy);
}

fsdp_status fsdp_tensor_share(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out)
{
    CHECK_ARG(tensor, "tensor is NULL");
    CHECK_OUT(out);
    return managed_share(tensor, out);
}

/* ---- groups */

fsdp_status fsdp_group_options_init(fsdp_group_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_group_options, options, struct_size);
}

fsdp_status fsdp_group_create(fsdp_store *store, const fsdp_group_options *options, fsdp_group **group)
{
    if (store) CHECK_STORE(store);
    CHECK_OUT(group);
    fsdp_group_options known;
    TRY(ABI_READ(fsdp_group_options, options, &known));
    return group_create(store, &known, group);
}

fsdp_status fsdp_group_split(fsdp_group *group, int32_t color, int32_t key, const fsdp_group_options *options,
                             fsdp_group **out)
{
    CHECK_GROUP(group);
    CHECK_OUT(out);
    fsdp_group_options known;
    TRY(ABI_READ(fsdp_group_options, options, &known));
    return group_split(group, color, key, options ? &known : NULL, out);
}

fsdp_status fsdp_group_query(fsdp_group *group, fsdp_group_info *info)
{
    CHECK_GROUP(group);
    TRY(ABI_WRITE_CHECK(fsdp_group_info, info));
    fsdp_group_info now;
    group_query(group, &now);
    return ABI_WRITE(fsdp_group_info, info, &now);
}

fsdp_status fsdp_group_abort(fsdp_group *group, const char *reason)
{
    CHECK_GROUP(group);
    group_abort(group, reason);
    return FSDP_OK;
}

fsdp_status fsdp_group_retain(fsdp_group *group)
{
    CHECK_GROUP(group);
    group_retain(group);
    return FSDP_OK;
}

void fsdp_group_release(fsdp_group *group)
{
    if (group_is(group)) group_release(group);
}

/* ---- works */

fsdp_status fsdp_work_test(fsdp_work *work, int32_t *done)
{
    CHECK_WORK(work);
    CHECK_OUT(done);
    *done = atomic_load_explicit(&work->done, memory_order_acquire);
    return *done ? work_status(work) : FSDP_OK;
}

fsdp_status fsdp_work_wait(fsdp_work *work, int64_t timeout_ms)
{
    CHECK_WORK(work);
    return work_wait(work, timeout_ms);
}

fsdp_status fsdp_work_on_done(fsdp_work *work, fsdp_done_fn fn, void *user)
{
    CHECK_WORK(work);
    CHECK_ARG(fn, "fn is NULL");
    return work_on_done(work, fn, user);
}

static void delete_tensor(void *tensor)
{
    managed_delete(tensor);
}

fsdp_status fsdp_work_keep(fsdp_work *work, DLManagedTensorVersioned *tensor)
{
    CHECK_WORK(work);
    CHECK_ARG(tensor, "tensor is NULL");
    TRY(managed_accept(tensor, "tensor"));
    return work_keep(work, delete_tensor, tensor);
}

fsdp_status fsdp_work_error(fsdp_work *work, fsdp_error_info *info)
{
    CHECK_WORK(work);
    fsdp_error_info none = {.rank_a = -1, .rank_b = -1};
    int done = atomic_load_explicit(&work->done, memory_order_acquire);
    return ABI_WRITE(fsdp_error_info, info, done && work->failure.status ? &work->failure : &none);
}

fsdp_status fsdp_work_retain(fsdp_work *work)
{
    CHECK_WORK(work);
    ref_get(&work->ref);
    return FSDP_OK;
}

void fsdp_work_release(fsdp_work *work)
{
    if (work_is(work)) work_release(work);
}

/* ---- collectives */

static fsdp_status run(fsdp_group *group, fsdp_op_kind kind, const DLTensor *input, const DLTensor *output,
                       fsdp_reduce_op op, int32_t peer, fsdp_work **work)
{
    CHECK_GROUP(group);
    fsdp_collective call = {
        .struct_size = sizeof call, .kind = kind, .op = op, .input = input, .output = output, .peer = peer};
    return group_collective(group, &call, 1, work);
}

static fsdp_status run_rows(fsdp_group *group, fsdp_op_kind kind, const DLTensor *input, const DLTensor *output,
                            const int64_t *input_rows, const int64_t *output_rows, fsdp_reduce_op op, fsdp_work **work)
{
    CHECK_GROUP(group);
    fsdp_collective call = {.struct_size = sizeof call,
                            .kind = kind,
                            .op = op,
                            .input = input,
                            .output = output,
                            .input_rows = input_rows,
                            .output_rows = output_rows};
    return group_collective(group, &call, 1, work);
}

fsdp_status fsdp_all_gather(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_work **work)
{
    return run(group, FSDP_OP_ALL_GATHER, input, output, 0, 0, work);
}

fsdp_status fsdp_all_gather_v(fsdp_group *group, const DLTensor *input, const DLTensor *output, const int64_t *rows,
                              fsdp_work **work)
{
    CHECK_GROUP(group);
    CHECK_ARG(rows, "rows is NULL: one entry for each rank is needed");
    return run_rows(group, FSDP_OP_ALL_GATHER, input, output, NULL, rows, 0, work);
}

fsdp_status fsdp_reduce_scatter(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op,
                                fsdp_work **work)
{
    return run(group, FSDP_OP_REDUCE_SCATTER, input, output, op, 0, work);
}

fsdp_status fsdp_reduce_scatter_v(fsdp_group *group, const DLTensor *input, const DLTensor *output, const int64_t *rows,
                                  fsdp_reduce_op op, fsdp_work **work)
{
    CHECK_GROUP(group);
    CHECK_ARG(rows, "rows is NULL: one entry for each rank is needed");
    return run_rows(group, FSDP_OP_REDUCE_SCATTER, input, output, rows, NULL, op, work);
}

fsdp_status fsdp_all_reduce(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op,
                            fsdp_work **work)
{
    return run(group, FSDP_OP_ALL_REDUCE, input, output, op, 0, work);
}

fsdp_status fsdp_reduce(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op,
                        int32_t root, fsdp_work **work)
{
    return run(group, FSDP_OP_REDUCE, input, output, op, root, work);
}

fsdp_status fsdp_broadcast(fsdp_group *group, const DLTensor *tensor, int32_t root, fsdp_work **work)
{
    return run(group, FSDP_OP_BROADCAST, tensor, NULL, 0, root, work);
}

fsdp_status fsdp_gather(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root,
                        fsdp_work **work)
{
    return run(group, FSDP_OP_GATHER, input, output, 0, root, work);
}

fsdp_status fsdp_scatter(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root,
                         fsdp_work **work)
{
    return run(group, FSDP_OP_SCATTER, input, output, 0, root, work);
}

fsdp_status fsdp_all_to_all(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_work **work)
{
    return run(group, FSDP_OP_ALL_TO_ALL, input, output, 0, 0, work);
}

fsdp_status fsdp_all_to_all_v(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                              const int64_t *input_rows, const int64_t *output_rows, fsdp_work **work)
{
    CHECK_GROUP(group);
    CHECK_ARG(input_rows, "input_rows is NULL: one entry for each rank is needed");
    CHECK_ARG(output_rows, "output_rows is NULL: one entry for each rank is needed");
    return run_rows(group, FSDP_OP_ALL_TO_ALL, input, output, input_rows, output_rows, 0, work);
}

static fsdp_status run_message(fsdp_group *group, fsdp_op_kind kind, const DLTensor *tensor, int32_t peer, int32_t tag,
                               fsdp_work **work)
{
    CHECK_GROUP(group);
    fsdp_collective call = {
        .struct_size = sizeof call, .kind = kind, .input = tensor, .output = tensor, .peer = peer, .tag = tag};
    return group_collective(group, &call, 1, work);
}

fsdp_status fsdp_send(fsdp_group *group, const DLTensor *tensor, int32_t dst, int32_t tag, fsdp_work **work)
{
    return run_message(group, FSDP_OP_SEND, tensor, dst, tag, work);
}

fsdp_status fsdp_recv(fsdp_group *group, const DLTensor *tensor, int32_t src, int32_t tag, fsdp_work **work)
{
    return run_message(group, FSDP_OP_RECV, tensor, src, tag, work);
}

fsdp_status fsdp_work_source(fsdp_work *work, int32_t *rank)
{
    CHECK_WORK(work);
    CHECK_OUT(rank);
    return work_source(work, rank);
}

fsdp_status fsdp_barrier(fsdp_group *group, fsdp_work **work)
{
    CHECK_GROUP(group);
    return group_barrier(group, work);
}

/* A field that means nothing now must be free to mean something later. */
static fsdp_status check_unused(const fsdp_collective *c, int32_t index)
{
    int reduces = c->kind == FSDP_OP_REDUCE_SCATTER || c->kind == FSDP_OP_ALL_REDUCE || c->kind == FSDP_OP_REDUCE;
    int rooted = c->kind == FSDP_OP_REDUCE || c->kind == FSDP_OP_BROADCAST || c->kind == FSDP_OP_GATHER ||
                 c->kind == FSDP_OP_SCATTER;
    int message = c->kind == FSDP_OP_SEND || c->kind == FSDP_OP_RECV;
    int both = c->kind == FSDP_OP_ALL_TO_ALL;
    const char *field = !reduces && c->op                                                        ? "op"
                        : c->kind == FSDP_OP_RECV && c->input                                    ? "input"
                        : (c->kind == FSDP_OP_BROADCAST || c->kind == FSDP_OP_SEND) && c->output ? "output"
                        : c->input_rows && !both && c->kind != FSDP_OP_REDUCE_SCATTER            ? "input_rows"
                        : c->output_rows && !both && c->kind != FSDP_OP_ALL_GATHER               ? "output_rows"
                        : c->peer && !rooted && !message                                         ? "peer"
                        : c->tag && !message                                                     ? "tag"
                                                                                                 : NULL;
    CHECK_ARG(!field, "operations[%d].%s is set, but an operation of kind %d does not use it: leave it zero", index,
              field, c->kind);
    return FSDP_OK;
}

fsdp_status fsdp_coalesced(fsdp_group *group, const fsdp_collective *operations, int32_t n, fsdp_work **work)
{
    CHECK_GROUP(group);
    CHECK_ARG(n >= 0, "n is %d: it can't be negative", n);
    CHECK_ARG(operations || n == 0, "operations is NULL, but n is %d", n);
    fsdp_collective *known = mem_array((size_t)n, sizeof *known);
    if (!known) return mem_none("a coalesced call", (size_t)n * sizeof *known);
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) {
        status = ABI_READ_ELEMENT(fsdp_collective, operations, i, &known[i]);
        if (status == FSDP_OK) status = check_unused(&known[i], i);
    }
    if (status == FSDP_OK) status = group_collective(group, known, n, work);
    mem_free(known);
    return status;
}

/* ---- models and units */

fsdp_status fsdp_model_options_init(fsdp_model_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_model_options, options, struct_size);
}

fsdp_status fsdp_model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **model)
{
    CHECK_GROUP(group);
    CHECK_OUT(model);
    fsdp_model_options known;
    TRY(ABI_READ(fsdp_model_options, options, &known));
    return model_create(group, &known, model);
}

fsdp_status fsdp_model_retain(fsdp_model *model)
{
    CHECK_MODEL(model);
    model_retain(model);
    return FSDP_OK;
}

void fsdp_model_release(fsdp_model *model)
{
    if (model_is(model)) model_release(model);
}

fsdp_status fsdp_unit_create(fsdp_model *model, const char *name, const fsdp_param *params, int32_t n, fsdp_unit **unit)
{
    CHECK_MODEL(model);
    CHECK_ARG(params, "params is NULL: a unit has at least one parameter");
    CHECK_ARG(n > 0, "n is %d: a unit has at least one parameter", n);
    CHECK_OUT(unit);
    fsdp_param *known = mem_array((size_t)n, sizeof *known);
    struct tensor *fulls = mem_array((size_t)n, sizeof *fulls);
    fsdp_status status = known && fulls ? FSDP_OK : mem_none("a unit's parameters", (size_t)n * sizeof *fulls);
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) {
        char name_text[64];
        snprintf(name_text, sizeof name_text, "params[%d].full", i);
        status = ABI_READ_ELEMENT(fsdp_param, params, i, &known[i]);
        if (status == FSDP_OK) status = tensor_import(known[i].full, name_text, &fulls[i]);
    }
    if (status == FSDP_OK) status = unit_create(model, name, known, fulls, n, unit);
    mem_free(known);
    mem_free(fulls);
    return status;
}

fsdp_status fsdp_unit_retain(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    unit_retain(unit);
    return FSDP_OK;
}

void fsdp_unit_release(fsdp_unit *unit)
{
    if (unit_is(unit)) unit_release(unit);
}

fsdp_status fsdp_unit_param_shard(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_SHARD, tensor);
}

fsdp_status fsdp_unit_param_full(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_FULL, tensor);
}

fsdp_status fsdp_unit_param_grad(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_UNIT(unit);
    CHECK_OUT(tensor);
    return unit_tensor(unit, index, UNIT_GRAD, tensor);
}

fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return unit_unshard(unit, 0, NULL);
}

fsdp_status fsdp_unit_post_forward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return unit_post_forward(unit);
}

fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    return unit_unshard(unit, 1, NULL);
}

fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **work)
{
    CHECK_UNIT(unit);
    CHECK_ARG(grads, "grads is NULL: an array with an entry for each parameter, NULL for none");
    return unit_post_backward(unit, grads, n, work);
}

fsdp_status fsdp_unit_unshard(fsdp_unit *unit, fsdp_work **work)
{
    CHECK_UNIT(unit);
    return unit_unshard(unit, 0, work);
}

fsdp_status fsdp_unit_reshard(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    TRY(group_usable(unit->model->group));
    return unit_reshard(unit);
}

fsdp_status fsdp_unit_query_state(fsdp_unit *unit, fsdp_unit_state *state)
{
    CHECK_UNIT(unit);
    CHECK_OUT(state);
    *state = unit_query_state(unit);
    return FSDP_OK;
}

fsdp_status fsdp_unit_shard_changed(fsdp_unit *unit)
{
    CHECK_UNIT(unit);
    unit->current = 0;
    return FSDP_OK;
}

fsdp_status fsdp_model_set_gradient_sync(fsdp_model *model, int32_t sync)
{
    CHECK_MODEL(model);
    return model_set_gradient_sync(model, sync);
}

fsdp_status fsdp_model_finish_backward(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_finish_backward(model);
}

fsdp_status fsdp_model_zero_grad(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_zero_grad(model);
}

fsdp_status fsdp_model_reset(fsdp_model *model)
{
    CHECK_MODEL(model);
    return model_reset(model);
}

fsdp_status fsdp_model_memory(fsdp_model *model, fsdp_memory_info *info)
{
    CHECK_MODEL(model);
    TRY(ABI_WRITE_CHECK(fsdp_memory_info, info));
    fsdp_memory_info now;
    model_memory(model, &now);
    return ABI_WRITE(fsdp_memory_info, info, &now);
}

fsdp_status fsdp_model_grad_norm(fsdp_model *model, double p, double *norm)
{
    CHECK_MODEL(model);
    CHECK_OUT(norm);
    return model_grad_norm(model, p, norm);
}

fsdp_status fsdp_model_clip_grad_norm(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite,
                                      double *norm)
{
    CHECK_MODEL(model);
    CHECK_OUT(norm);
    return model_clip_grad_norm(model, max_norm, p, error_if_nonfinite, norm);
}

/* ---- scalers */

fsdp_status fsdp_scaler_options_init(fsdp_scaler_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_scaler_options, options, struct_size);
}

fsdp_status fsdp_scaler_create(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **scaler)
{
    CHECK_GROUP(group);
    CHECK_OUT(scaler);
    fsdp_scaler_options known;
    TRY(ABI_READ(fsdp_scaler_options, options, &known));
    return scaler_create(group, &known, scaler);
}

fsdp_status fsdp_scaler_retain(fsdp_scaler *scaler)
{
    CHECK_SCALER(scaler);
    ref_get(&scaler->ref);
    return FSDP_OK;
}

void fsdp_scaler_release(fsdp_scaler *scaler)
{
    if (scaler_is(scaler)) scaler_release(scaler);
}

fsdp_status fsdp_scaler_query(fsdp_scaler *scaler, fsdp_scaler_info *info)
{
    CHECK_SCALER(scaler);
    TRY(ABI_WRITE_CHECK(fsdp_scaler_info, info));
    fsdp_scaler_info now;
    scaler_query(scaler, &now);
    return ABI_WRITE(fsdp_scaler_info, info, &now);
}

fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_model *model)
{
    CHECK_SCALER(scaler);
    CHECK_MODEL(model);
    return scaler_unscale(scaler, model);
}

fsdp_status fsdp_scaler_unscale_tensors(fsdp_scaler *scaler, const DLTensor *const *grads, int32_t n)
{
    CHECK_SCALER(scaler);
    CHECK_ARG(n >= 0, "n is %d: it can't be negative", n);
    CHECK_ARG(grads || n == 0, "grads is NULL, but n is %d", n);
    struct tensor *checked = mem_array((size_t)n, sizeof *checked);
    if (!checked) return mem_none("gradients", (size_t)n * sizeof *checked);
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "grads[%d]", i);
        checked[i].count = -1;
        if (grads[i]) status = tensor_import_output(grads[i], name, &checked[i]);
    }
    if (status == FSDP_OK) status = scaler_unscale_tensors(scaler, checked, n);
    mem_free(checked);
    return status;
}

fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, int32_t *should_step)
{
    CHECK_SCALER(scaler);
    CHECK_OUT(should_step);
    return scaler_step(scaler, should_step);
}

fsdp_status fsdp_scaler_update(fsdp_scaler *scaler)
{
    CHECK_SCALER(scaler);
    return scaler_update(scaler);
}

fsdp_status fsdp_scaler_save(fsdp_scaler *scaler, fsdp_scaler_state *state)
{
    CHECK_SCALER(scaler);
    CHECK_OUT(state);
    TRY(ABI_WRITE_CHECK(fsdp_scaler_state, state));
    fsdp_scaler_state now;
    TRY(scaler_save(scaler, &now));
    return ABI_WRITE(fsdp_scaler_state, state, &now);
}

fsdp_status fsdp_scaler_load(fsdp_scaler *scaler, const fsdp_scaler_state *state)
{
    CHECK_SCALER(scaler);
    CHECK_ARG(state, "state is NULL: pass what fsdp_scaler_save gave");
    fsdp_scaler_state known;
    TRY(ABI_READ(fsdp_scaler_state, state, &known));
    return scaler_load(scaler, &known);
}
