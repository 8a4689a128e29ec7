/* The exported functions, but for those of meshes, models and scalers (api_fsdp.c): check the arguments, call the
 * module, return. No logic; abi/fsdp.h says what each does.
 *
 * Handles are checked by their magic number, which a released object no longer has: that tells most released and
 * foreign handles, though not one whose memory has been used again. */
#include "api.h"

#include "base/log.h"

#include <stdio.h>
#include <string.h>

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

fsdp_status fsdp_group_set_timeout(fsdp_group *group, int64_t timeout_ms)
{
    CHECK_GROUP(group);
    return group_set_timeout(group, timeout_ms);
}

fsdp_status fsdp_set_thread_timeout(int64_t timeout_ms)
{
    return work_set_thread_timeout(timeout_ms);
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
