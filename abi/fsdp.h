/* fsdp.h - the C ABI of libfsdp: fully sharded data parallelism as one shared object.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Rules that hold for every function (abi/README.md gives the reasons):
 *
 * - Status. A function returns fsdp_status and writes its outputs only when it returns FSDP_OK (two say that they
 *   differ: fsdp_work_test and fsdp_store_get). What was wrong, in words, is in fsdp_last_error() of the calling
 *   thread; for an operation that failed later, on its work handle. A collective that fails in the middle (TIMEOUT,
 *   PEER_LOST, ABORTED) leaves its output tensors undefined; one that is refused (INVALID, UNSUPPORTED, MISMATCH)
 *   leaves them untouched.
 * - Structs. A struct that the caller allocates starts with `struct_size`: set it to sizeof the struct, or use the
 *   fsdp_*_init function. A zero field means the default. Elements of arrays carry it too, all the same: it is also the
 *   distance from one element to the next.
 * - Objects. Opaque; create gives one reference, _retain adds one, _release drops one. _release(NULL) does nothing.
 * - Tensors go in as `const DLTensor *`, borrowed: descriptor, shape and strides may be reused as soon as the call
 *   returns; the data must stay valid until the operation is complete (at return, or when its work handle is done).
 *   Ownership moves only as DLManagedTensorVersioned *. Tensors come out with strides set and byte_offset 0.
 *   NULL strides mean row-major contiguous. byte_offset is honoured. Host memory only in this release. A DLTensor does
 *   not say whether it is read-only: whoever holds the managed tensor must not pass such a one as an output.
 * - Outputs never overlap themselves or (except where a call says "in place") an input.
 * - Strings are UTF-8, zero-terminated and borrowed for the call; those that come out belong to the library.
 * - Times are milliseconds.
 * - Threads. Any function may be called from any thread; handles may move between threads; a model and its units are
 *   used by one thread at a time. Operations on one group take effect in the order in which the calls were made; where
 *   two threads use one group at once that order is the caller's affair, and it must be the same on all ranks.
 * - Callbacks and deleters run without any lock of the library held, on the thread that completes an operation: one of
 *   the library's own, or one of the host's inside a call on the same group. They must return (no longjmp, exception or
 *   panic across them) and must not wait for a lock that the host holds around calls of the library.
 * - After fork() the child's handles answer FSDP_ERR_FORKED; releasing them there is allowed and disturbs nobody.
 */
#ifndef FSDP_H_
#define FSDP_H_

#include <stddef.h>
#include <stdint.h>

#include <dlpack/dlpack.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef FSDP_API /* define it as nothing to read this header with other tools than a compiler */
#if defined(__GNUC__) || defined(__clang__)
#define FSDP_API __attribute__((visibility("default")))
#else
#define FSDP_API
#endif
#endif

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

/* What a call came to. Numbers are never reused; a caller must expect ones it does not know. */
typedef int32_t fsdp_status;
enum {
    FSDP_OK = 0,
    FSDP_ERR_INVALID = 1,     /* an argument is wrong; nothing was done */
    FSDP_ERR_STRUCT_SIZE = 2, /* struct_size is too small, or names fields this library does not know */
    FSDP_ERR_VERSION = 3,     /* an ABI or DLPack version that this library does not speak */
    FSDP_ERR_UNSUPPORTED = 4, /* meaningful, but not available here (dtype, device, transport) */
    FSDP_ERR_NOMEM = 5,       /* out of memory or address space */
    FSDP_ERR_SYSTEM = 6,      /* a system call failed; the message has its error text */
    FSDP_ERR_TIMEOUT = 7,     /* the group's or store's time is up */
    FSDP_ERR_PENDING = 8,     /* fsdp_work_wait: its own timeout passed; the operation goes on */
    FSDP_ERR_MISMATCH = 9,    /* ranks called different operations, or the same one with different arguments */
    FSDP_ERR_PEER_LOST = 10,  /* another rank's process ended or it released the group */
    FSDP_ERR_ABORTED = 11,    /* the group was aborted, here or on another rank */
    FSDP_ERR_FORKED = 12,     /* the handle was made before fork() and this is the child */
    FSDP_ERR_STATE = 13,      /* not now: the object is in another state; the message says which call comes first */
    FSDP_ERR_RENDEZVOUS = 14, /* ranks could not find each other, or disagree about who they are */
    FSDP_ERR_CALLBACK = 15,   /* a host callback reported a failure */
    FSDP_ERR_INTERNAL = 16,   /* a defect of the library */
    FSDP_ERR_CORRUPT = 17,    /* a file is not what it should be: damaged, cut short, or made so */
    FSDP_ERR_NOT_FOUND = 18,  /* no such file, checkpoint or name */
};

/* Reductions. Low-precision floats (f16, bf16, fp8) accumulate in f32, f32 in f32, f64 in f64, integers in their own
 * type (wrapping), in rank order, rounding once to nearest even. NaN in any input gives NaN. */
typedef int32_t fsdp_reduce_op;
enum {
    FSDP_SUM = 0,  /* bool: OR. complex: allowed */
    FSDP_AVG = 1,  /* sum, divided in the accumulator. Floats and complex only; integers are refused */
    FSDP_PROD = 2, /* bool: AND */
    FSDP_MIN = 3,
    FSDP_MAX = 4,
    FSDP_BAND = 5, /* integers and bool only, as are the next two */
    FSDP_BOR = 6,
    FSDP_BXOR = 7,
};

/* Kinds of operation: in error records, and in fsdp_collective.kind. */
typedef int32_t fsdp_op_kind;
enum {
    FSDP_OP_NONE = 0,
    FSDP_OP_ALL_GATHER = 1,
    FSDP_OP_REDUCE_SCATTER = 2,
    FSDP_OP_ALL_REDUCE = 3,
    FSDP_OP_REDUCE = 4,
    FSDP_OP_BROADCAST = 5,
    FSDP_OP_GATHER = 6,
    FSDP_OP_SCATTER = 7,
    FSDP_OP_ALL_TO_ALL = 8,
    FSDP_OP_SEND = 9,
    FSDP_OP_RECV = 10,
    FSDP_OP_BARRIER = 11,
    FSDP_OP_SPLIT = 12,
    FSDP_OP_UNSHARD = 13,
    FSDP_OP_REDUCE_GRADS = 14,
    FSDP_OP_CREATE_UNIT = 15,
    FSDP_OP_RESET = 16,
    FSDP_OP_GRAD_NORM = 17,
    FSDP_OP_CLIP_GRAD_NORM = 18,
    FSDP_OP_UNSCALE = 19,
    FSDP_OP_CREATE_MESH = 20,
    FSDP_OP_CREATE_SLOT = 21,
    FSDP_OP_REPLICATE_GRADS = 22,
    FSDP_OP_SYNC_STATES = 23,
    FSDP_OP_GATHER_PARAM = 24,
    FSDP_OP_GATHER_STATE = 25,
    FSDP_OP_LOAD_STATE = 26,
    FSDP_OP_SAVE_STATE = 27,
};

typedef int32_t fsdp_log_level;
enum {
    FSDP_LOG_ERROR = 1,
    FSDP_LOG_WARN = 2,
    FSDP_LOG_INFO = 3,
    FSDP_LOG_DEBUG = 4,
};

/* ---- Callback types ---------------------------------------------------------------------------------------------- */

typedef void (*fsdp_log_fn)(fsdp_log_level level, const char *message, void *user);
typedef void *(*fsdp_alloc_fn)(size_t bytes, void *user); /* aligned as malloc's; NULL when there is none */
typedef void (*fsdp_free_fn)(void *block, void *user);

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

typedef struct fsdp_error_info {
    size_t struct_size;
    fsdp_status status;
    fsdp_op_kind operation; /* the operation that failed, or FSDP_OP_NONE */
    uint64_t sequence;      /* its number among the group's collectives and unit operations, from 1; 0: none */
    int32_t rank_a;         /* ranks involved; -1: none. PEER_LOST, TIMEOUT: the missing one. ABORTED: who aborted. */
    int32_t rank_b;         /* MISMATCH: the two that differ */
    char message[1024];     /* one sentence: what was wrong and what to do */
} fsdp_error_info;

/* The last failure on the calling thread: one sentence; "" when there was none. Valid until the thread's next failing
 * call. Success does not clear it. */
FSDP_API const char *fsdp_last_error(void);

/* The same with its details. Errors: STRUCT_SIZE. */
FSDP_API fsdp_status fsdp_last_error_info(fsdp_error_info *info);

/* "TIMEOUT", "PEER_LOST", ...; "UNKNOWN" for a number this library does not know. Static. */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/* ---- Library ----------------------------------------------------------------------------------------------------- */

/* The library's own version as major * 10000 + minor * 100 + patch; the header's is FSDP_VERSION_*. */
FSDP_API int32_t fsdp_version(void);

/* Send log lines of `level` and below (more severe) to fn; fn NULL: standard error; level 0: what FSDP_LOG says. */
FSDP_API fsdp_status fsdp_set_log(fsdp_log_fn fn, void *user, fsdp_log_level level);

/* Heap memory for the library's objects (not tensors' data) from the host. Before the first object is made, else
 * STATE. Both NULL: malloc and free. */
FSDP_API fsdp_status fsdp_set_allocator(fsdp_alloc_fn alloc, fsdp_free_fn release, void *user);

/* ---- Store: how ranks find each other ---------------------------------------------------------------------------- */

/* A small key-value service shared by the ranks of a job, used to meet; nothing of the data path goes through it.
 * Every rank makes one with the same address. Keys are 1 to 255 bytes and don't begin with "fsdp/", which the library
 * keeps for itself; values are at most 64 KiB. When rank 0 of a tcp store ends, waits of the others end with
 * PEER_LOST. */
typedef struct fsdp_store fsdp_store;

typedef struct fsdp_store_options {
    size_t struct_size;
    int32_t world_size;  /* 0: take rank and world_size from the URL or the environment */
    int32_t rank;        /* 0 .. world_size-1; read only when world_size > 0 */
    int64_t timeout_ms;  /* for every wait through this store, and for meeting; 0: 300000 */
    const char *job_key; /* all ranks of a job give the same; another job at the same address is refused.
                            NULL: the environment's FSDP_JOB_KEY, else none. At most 255 bytes. */
} fsdp_store_options;

FSDP_API fsdp_status fsdp_store_options_init(fsdp_store_options *options, size_t struct_size);

/* Meet at `url`:
 *   "env://"                        rank and world size from the launcher's variables: RANK, WORLD_SIZE (torchrun, and
 *                                   `python -m libfsdp.run`), else OMPI_COMM_WORLD_*, else PMI_*, else SLURM_PROCID and
 *                                   SLURM_NTASKS. Address from MASTER_ADDR and MASTER_PORT (or FSDP_STORE, a URL of the
 *                                   forms below). With none of the variables set: one rank.
 *   "tcp://host:port?rank=R&world_size=N"   rank 0 listens there (loopback unless host says otherwise), others connect.
 *   "file:///path?rank=R&world_size=N"      through a file on a local disk; made by whoever comes first, must be new
 *                                   for each job, removed when the last rank releases its store.
 * Parameters in the URL may be left out when `options` has them; where both say something they must agree (INVALID).
 * Paths are absolute; in them %XX stands for a byte, so '%' is "%25" and '?' is "%3F". options may be NULL. Returns
 * when every rank has arrived. A host that already serves a TCP store of its own (torchrun's) on MASTER_PORT keeps it:
 * see the environment variable FSDP_MASTER_PORT in README. Under Open MPI or Slurm on one host no address is needed.
 * Errors: INVALID (malformed URL, rank out of range), RENDEZVOUS (missing variable, port in use, two ranks with one
 * number, ranks that disagree on world_size or job_key), TIMEOUT (names the ranks that did not come, or the address
 * that did not answer). */
FSDP_API fsdp_status fsdp_store_open(const char *url, const fsdp_store_options *options, fsdp_store **store);

/* The host's own key-value service. Each function returns 0 for success, 1 for "time is up", anything else for failure.
 * Called from the thread that makes the library call, never with a lock held. */
typedef struct fsdp_store_callbacks {
    size_t struct_size;
    void *user; /* handed to every function */
    int32_t (*set)(void *user, const char *key, const void *value, size_t bytes);
    /* Wait until key exists, then copy its value to buffer and its size to *bytes. Larger than capacity: set *bytes and
     * fail. */
    int32_t (*get)(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes, int64_t timeout_ms);
    /* Atomically add to the integer at key (absent: 0) and give the sum. */
    int32_t (*add)(void *user, const char *key, int64_t amount, int64_t *result);
    int32_t (*wait)(void *user, const char *key, int64_t timeout_ms);
    void (*release)(void *user); /* may be NULL; called once, when the store's last reference is dropped */
} fsdp_store_callbacks;

/* A store over the host's callbacks; options->rank and world_size are required. The struct is copied. When this call
 * fails, `release` is not called. Errors: INVALID, STRUCT_SIZE. */
FSDP_API fsdp_status fsdp_store_from_callbacks(const fsdp_store_callbacks *callbacks, const fsdp_store_options *options,
                                               fsdp_store **store);

/* This process's rank and the number of ranks that met. */
FSDP_API fsdp_status fsdp_store_identity(fsdp_store *store, int32_t *rank, int32_t *world_size);
/* Set key to a copy of `value` (NULL only when bytes is 0), for all ranks. */
FSDP_API fsdp_status fsdp_store_set(fsdp_store *store, const char *key, const void *value, size_t bytes);
/* Waits for key up to the store's timeout. A value larger than capacity: INVALID, with its size in *bytes (buffer may
 * be NULL when capacity is 0). */
FSDP_API fsdp_status fsdp_store_get(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes);
/* Atomically add to the integer at key (absent: 0; kept as decimal text); *result is the sum. */
FSDP_API fsdp_status fsdp_store_add(fsdp_store *store, const char *key, int64_t amount, int64_t *result);
/* Until key exists, up to the store's timeout. */
FSDP_API fsdp_status fsdp_store_wait(fsdp_store *store, const char *key);
FSDP_API fsdp_status fsdp_store_retain(fsdp_store *store);
/* Takes a moment at most (a thread to join, a file to update). Rank 0 of a tcp store serves until its last reference is
 * dropped: keep it until the others are done (a group keeps a reference of its own). */
FSDP_API void fsdp_store_release(fsdp_store *store);

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* Dtypes of this release: float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2, int and uint of 8 to 64 bits,
 * bool, complex64 complex128. At most 32 dimensions. */

/* A new tensor of zeros in the library's own memory (row-major, 64-byte aligned). Free it by calling its deleter, on
 * any thread. Errors: INVALID (negative size), UNSUPPORTED (dtype), NOMEM. */
FSDP_API fsdp_status fsdp_zeros(const DLDataType *dtype, int32_t ndim, const int64_t *shape,
                                DLManagedTensorVersioned **tensor);

/* output[...] = input[...], any strides, casting between dtypes: rounded once to nearest even; float to integer
 * truncates and saturates (NaN gives 0); to bool is != 0 (NaN gives true); complex to real takes the real part. Same
 * shape. Errors: INVALID (shapes differ, output overlaps itself or input), UNSUPPORTED. */
FSDP_API fsdp_status fsdp_copy(const DLTensor *input, const DLTensor *output);

/* Where rank's rows of a dimension of `rows` lie when it is cut for `world_size` ranks: chunks of ceil(rows /
 * world_size), trailing ranks shorter or empty (torch.chunk's rule). An empty shard starts at `rows`. */
FSDP_API fsdp_status fsdp_shard_extent(int64_t rows, int32_t rank, int32_t world_size, int64_t *start, int64_t *length);

/* Copy rank's rows of `full` along `dim` to `shard`, whose shape is full's with shard[dim] = the extent's length.
 * Casts. No communication. */
FSDP_API fsdp_status fsdp_shard(const DLTensor *full, int32_t dim, int32_t rank, int32_t world_size,
                                const DLTensor *shard);

/* Wrap a legacy DLPack tensor (before 1.0) as a versioned one, and back. Both take ownership of their input when they
 * succeed and leave it with the caller when they fail; but a versioned tensor of an unknown major version is deleted,
 * nothing else of it touched, and VERSION returned (DLPack's rule). A read-only tensor has no legacy form: INVALID. */
FSDP_API fsdp_status fsdp_tensor_from_legacy(DLManagedTensor *legacy, DLManagedTensorVersioned **tensor);
FSDP_API fsdp_status fsdp_tensor_to_legacy(DLManagedTensorVersioned *tensor, DLManagedTensor **legacy);

/* A second handle on the memory of a tensor that this library handed out; both are deleted in their own time. Errors:
 * INVALID (not from this library). */
FSDP_API fsdp_status fsdp_tensor_share(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out);

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

/* Ranks that communicate: the field's "process group" or "communicator". Two groups never share state.
 *
 * Failure. A MISMATCH fails that one operation on every rank alike and the group stays usable. TIMEOUT, PEER_LOST,
 * ABORTED, and a failure in the middle of an operation fail the group for good, on every rank: operations under way end
 * with it within moments, and each later call returns it at once (or, with a work handle, through the handle: be ready
 * for both). An operation that a late rank can still complete correctly may do so. Other groups go on; tensors stay
 * readable, so a checkpoint can be written; to go on, make a new store and group. */
typedef struct fsdp_group fsdp_group;

typedef struct fsdp_group_options {
    size_t struct_size;
    const char *name;      /* for messages; at most 63 bytes. NULL: "group<n>". Ranks need not agree on it. */
    const char *transport; /* "self" (one rank), "shm" (one host; with one rank the same as "self"); NULL: by size */
    int64_t timeout_ms;    /* of each operation, from its start on the data path, and of making the group; 0: 600000.
                              See fsdp_group_set_timeout. At most 30 years: what is longer means as much. */
    int64_t
        staging_bytes;   /* shared memory for staging, for each rank; 0: 512 KiB. 64 KiB to 256 MiB; rank 0's counts. */
    int32_t direct_read; /* reading peers' memory with process_vm_readv: 0 where the kernel allows it and it is the
                              faster way, 1 always (UNSUPPORTED where it is refused), 2 never. Rank 0's counts. */
    int32_t spin_us;     /* how long a wait spins before it sleeps; 0: chosen by ranks and cores, -1: never */
} fsdp_group_options;

FSDP_API fsdp_status fsdp_group_options_init(fsdp_group_options *options, size_t struct_size);

/* Make a group of all the store's ranks. Collective: every rank of the store calls it, in the same order as its other
 * groups. store NULL: a group of one. The group keeps a reference to the store.
 * Errors: RENDEZVOUS (ranks on different hosts, two with one number), TIMEOUT (names who did not come), UNSUPPORTED
 * (transport, direct_read), NOMEM (the shared segment can't be reserved: names sizes and the option to change). */
FSDP_API fsdp_status fsdp_group_create(fsdp_store *store, const fsdp_group_options *options, fsdp_group **group);

/* Cut a group into disjoint ones. Collective over `group`. Ranks that give the same color >= 0 form one, ordered by
 * key, then by rank; color -1: this rank takes part in none and *out is NULL. Synchronous. What options leave at zero
 * (all of it, when NULL) is as the parent's; without a name it is "<parent>/<n>". */
FSDP_API fsdp_status fsdp_group_split(fsdp_group *group, int32_t color, int32_t key, const fsdp_group_options *options,
                                      fsdp_group **out);

typedef struct fsdp_group_info {
    size_t struct_size;
    int32_t rank;
    int32_t size;
    fsdp_status status;  /* FSDP_OK, or what ended the group */
    int32_t direct_read; /* 1 when peers' memory can be read directly */
    char transport[16];  /* "self", "shm" */
    char name[64];
    uint64_t operations;   /* collectives and unit operations begun so far */
    uint64_t bytes_moved;  /* bytes this rank read from peers' memory or staging, and wrote to staging and shared
                              regions, since the group was made */
    int64_t segment_bytes; /* shared memory of the whole group, counted once a host */
    int64_t timeout_ms;    /* of operations issued now, see fsdp_group_set_timeout */
} fsdp_group_info;

/* How the group is and what it has done. Also answers for a group that has failed. */
FSDP_API fsdp_status fsdp_group_query(fsdp_group *group, fsdp_group_info *info);

/* Change the timeout of operations that this rank issues from here on; 0: the default, 600000. Those issued before keep
 * theirs, and groups split off before keep what they have, also those that a mesh or model made of this one. From any
 * thread, at any time. Local: each rank sets its own. Where ranks differ, the shortest that passes ends the group on
 * all of them, and names a rank that did not come. Errors: INVALID (negative), FORKED, what ended the group. */
FSDP_API fsdp_status fsdp_group_set_timeout(fsdp_group *group, int64_t timeout_ms);

/* The timeout of operations that the calling thread issues from here on, on whatever group, instead of the group's; 0,
 * as at first: the group's. For one operation: set it, call, set it back to 0. What other threads issue meanwhile, on
 * the same group too, is not touched. It counts as the group's does; but a collective that is run to the end before its
 * call returns counts it from the call, so that waiting behind this rank's earlier operations can't take longer either:
 * when it passes there, the group ends with TIMEOUT. Errors: INVALID (negative). */
FSDP_API fsdp_status fsdp_set_thread_timeout(int64_t timeout_ms);

/* End the group for all its ranks: operations in flight and later ones return ABORTED with `reason` (NULL: none given).
 * From any thread, at any time; does not block. A second abort does nothing. */
FSDP_API fsdp_status fsdp_group_abort(fsdp_group *group, const char *reason);

FSDP_API fsdp_status fsdp_group_retain(fsdp_group *group);
/* Dropping the last reference (a model's, unit's or tensor's release may) waits for this rank's queued operations, then
 * leaves: a peer that then waits for this rank gets PEER_LOST ("released the group"). To leave at once, abort first. */
FSDP_API void fsdp_group_release(fsdp_group *group);

/* ---- Work -------------------------------------------------------------------------------------------------------- */

/* A pending operation. Every operation below takes `fsdp_work **work` last: NULL runs it to the end before returning;
 * otherwise *work is a handle, to be released by the caller, and tensors' data must stay valid until it is done.
 * Releasing a handle early neither cancels nor waits. A handle may outlive its group.
 *
 * Order at completion: kept tensors are deleted, then test and wait report it, then the callback runs. So after a wait
 * the callback may still be about to run: don't free its `user` on account of a wait. */
typedef struct fsdp_work fsdp_work;

/* *done = 1 when complete, successfully or not. Never blocks. Returns the operation's status once done (with *done = 1
 * also when that is a failure), and FSDP_OK before. */
FSDP_API fsdp_status fsdp_work_test(fsdp_work *work, int32_t *done);

/* Wait until complete; returns the operation's status, with its message in fsdp_last_error(). timeout_ms < 0: as long
 * as the group's timeout allows. PENDING when timeout_ms passes first: the operation goes on. */
FSDP_API fsdp_status fsdp_work_wait(fsdp_work *work, int64_t timeout_ms);

/* Call fn once when complete: on the thread that completes it, or at once, here, when it is already. At most one fn for
 * a handle (STATE). It is called also when the handle is released first, and when the operation fails. In it,
 * fsdp_last_error() is the operation's. fn may call any function of the library, but on the same group only with a work
 * handle: a call there that would wait for the group gets STATE. */
typedef void (*fsdp_done_fn)(fsdp_status status, void *user);
FSDP_API fsdp_status fsdp_work_on_done(fsdp_work *work, fsdp_done_fn fn, void *user);

/* Keep `tensor` (an input or output of this operation) until it is complete, then call its deleter, once, on whatever
 * thread. Takes ownership when it succeeds. Already complete: deleted at once. */
FSDP_API fsdp_status fsdp_work_keep(fsdp_work *work, DLManagedTensorVersioned *tensor);

/* The details of a failed operation; status FSDP_OK while pending or when it succeeded. */
FSDP_API fsdp_status fsdp_work_error(fsdp_work *work, fsdp_error_info *info);

FSDP_API fsdp_status fsdp_work_retain(fsdp_work *work);
FSDP_API void fsdp_work_release(fsdp_work *work);

/* ---- Collectives ------------------------------------------------------------------------------------------------- */

/* All ranks of the group call the same operation with matching arguments: a difference is found always, and every rank
 * gets MISMATCH naming two ranks and both calls. N is the group's size, d0 a tensor's first dimension; a 0-dim tensor
 * counts as one row. Element counts may be 0: the call still takes its place in the order. Any strides; a tensor that
 * is not contiguous goes through a packed copy. Shapes given below say how a result reads; what is checked and compared
 * is dtypes, element counts and, in the uneven forms, rows. A call refused for its own arguments (INVALID, UNSUPPORTED)
 * has no effect and takes no place in the order: the other ranks wait for it, so repeat it corrected, or abort the
 * group. "In place" below means: same address, dtype and strides. `const DLTensor *` says that the descriptor is not
 * written; output data is.
 *
 * Errors of all: INVALID, UNSUPPORTED (device, dtype, op), STRUCT_SIZE, NOMEM, MISMATCH, TIMEOUT, PEER_LOST, ABORTED,
 * FORKED; on one rank `self` transport does the same locally. */

/* output = the ranks' `input`, in rank order. input (s...), output with N times the elements: (N, s...) or (N*d0, ...).
 * Same dtype. In place: input may be output's rows of this rank. */
FSDP_API fsdp_status fsdp_all_gather(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                     fsdp_work **work);

/* Uneven: rank r gives rows[r] rows; `rows` (N entries) is the same on all ranks. input (rows[rank], ...), output (sum
 * of rows, ...). In place as above. */
FSDP_API fsdp_status fsdp_all_gather_v(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                       const int64_t *rows, fsdp_work **work);

/* output = this rank's part of the reduction of the ranks' `input`: input (N*d0, ...) or (N, s...), output with 1/N of
 * the elements. Same dtype. In place: output may be input's rows of this rank. */
FSDP_API fsdp_status fsdp_reduce_scatter(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                         fsdp_reduce_op op, fsdp_work **work);

/* Uneven: rank r receives rows[r] rows. input (sum of rows, ...), output (rows[rank], ...). */
FSDP_API fsdp_status fsdp_reduce_scatter_v(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                           const int64_t *rows, fsdp_reduce_op op, fsdp_work **work);

/* output = the reduction of the ranks' `input`, on all. Same shape and dtype. In place: output may be input. */
FSDP_API fsdp_status fsdp_all_reduce(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                     fsdp_reduce_op op, fsdp_work **work);

/* The same on rank `root` only; elsewhere output may be NULL and is not touched. In place on root. */
FSDP_API fsdp_status fsdp_reduce(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op,
                                 int32_t root, fsdp_work **work);

/* tensor of rank `root` to all, in place: read on root, written elsewhere. */
FSDP_API fsdp_status fsdp_broadcast(fsdp_group *group, const DLTensor *tensor, int32_t root, fsdp_work **work);

/* output on root = the ranks' `input`, in rank order, (N, s...) or (N*d0, ...); elsewhere output is NULL or not
 * touched. */
FSDP_API fsdp_status fsdp_gather(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root,
                                 fsdp_work **work);

/* output = this rank's part of root's `input` ((N, s...) or (N*d0, ...)); elsewhere input is NULL or not read. */
FSDP_API fsdp_status fsdp_scatter(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root,
                                  fsdp_work **work);

/* Part r of input goes to rank r, whose part `rank` of output it becomes. input and output of equal shape, d0 (or the
 * elements of a tensor whose d0 is not divisible) a multiple of N. Not in place. */
FSDP_API fsdp_status fsdp_all_to_all(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                     fsdp_work **work);

/* Uneven: input_rows[r] rows of input go to rank r, output_rows[r] rows of output come from it. input_rows[r] here must
 * equal output_rows[rank] on r (MISMATCH otherwise). Rows are of equal size in input and output, on all ranks. */
FSDP_API fsdp_status fsdp_all_to_all_v(fsdp_group *group, const DLTensor *input, const DLTensor *output,
                                       const int64_t *input_rows, const int64_t *output_rows, fsdp_work **work);

/* Point to point. A send and the recv that takes it have equal element counts and dtypes (MISMATCH on both sides
 * otherwise). For one pair of ranks and one tag, messages are taken in the order in which they were sent; different
 * tags don't wait for each other (while fewer than 32 sends of a pair are under way), and point to point does not queue
 * behind collectives. A send completes when its receive has taken the data: two ranks that both send first,
 * synchronously, wait for each other until the timeout; use work handles or fsdp_coalesced. tag >= 0. src may be
 * FSDP_ANY_RANK, see fsdp_work_source; a rank may send to itself. The timeout counts from the call. */
enum { FSDP_ANY_RANK = -1 };
FSDP_API fsdp_status fsdp_send(fsdp_group *group, const DLTensor *tensor, int32_t dst, int32_t tag, fsdp_work **work);
FSDP_API fsdp_status fsdp_recv(fsdp_group *group, const DLTensor *tensor, int32_t src, int32_t tag, fsdp_work **work);

/* The rank that a completed recv took its message from, also when it asked for FSDP_ANY_RANK. Errors: STATE (not
 * complete, or not of one recv). */
FSDP_API fsdp_status fsdp_work_source(fsdp_work *work, int32_t *rank);

/* Return when every rank has called it. */
FSDP_API fsdp_status fsdp_barrier(fsdp_group *group, fsdp_work **work);

/* One operation of a coalesced call: the arguments of the function of that kind; the others are zero. */
typedef struct fsdp_collective {
    size_t struct_size;
    fsdp_op_kind kind; /* FSDP_OP_ALL_GATHER ... FSDP_OP_RECV (not BARRIER) */
    fsdp_reduce_op op;
    const DLTensor *input;      /* the tensor of BROADCAST and SEND */
    const DLTensor *output;     /* the tensor of RECV */
    const int64_t *input_rows;  /* REDUCE_SCATTER, ALL_TO_ALL: NULL for even */
    const int64_t *output_rows; /* ALL_GATHER, ALL_TO_ALL: NULL for even */
    int32_t peer;               /* root, dst or src */
    int32_t tag;
} fsdp_collective;

/* Several operations as one: checked together before any of them begins, one work handle, and for a run of operations
 * of one kind, reduction and root, one exchange between the ranks instead of one each. Either collectives (of any
 * kinds; runs take effect in the order of the array) or point to point (all at once: no order among them but that of
 * equal peer and tag); not both. Outputs of one call must not overlap its other tensors. n may be 0 (nothing is done;
 * with `work`, a handle that is done). One operation is the same as its own call. Fields that its kind does not use
 * must be zero (INVALID). */
FSDP_API fsdp_status fsdp_coalesced(fsdp_group *group, const fsdp_collective *operations, int32_t n, fsdp_work **work);

/* ---- Mesh -------------------------------------------------------------------------------------------------------- */

/* A group's ranks as a grid of one or more named dimensions, row-major: rank = (c0 * n1 + c1) * n2 + c2 ...; so ranks
 * that differ in the last dimension only are neighbours. For each dimension a rank has a sub-group: the ranks that
 * share its coordinates in all others, in the order of their coordinate. fsdp_group_abort of the group aborts those
 * too, and the ones that models on the mesh make for themselves. */
typedef struct fsdp_mesh fsdp_mesh;

#define FSDP_MESH_MAX_DIMS 8

/* ndim (1 to FSDP_MESH_MAX_DIMS) sizes, each 1 or more, whose product is the group's size; names: one for each
 * dimension, different ("replicate", "shard"), 1 to 31 bytes. Collective over the group, with the same arguments
 * (MISMATCH otherwise); the mesh keeps a reference to it. Errors also: INVALID (says which ranks a mesh of these sizes
 * leaves out, or lacks). */
FSDP_API fsdp_status fsdp_mesh_create(fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names,
                                      fsdp_mesh **mesh);
FSDP_API fsdp_status fsdp_mesh_retain(fsdp_mesh *mesh);
FSDP_API void fsdp_mesh_release(fsdp_mesh *mesh);

typedef struct fsdp_mesh_info {
    size_t struct_size;
    int32_t ndim;
    int32_t rank; /* this rank's in the whole */
    int32_t size;
    int32_t reserved;
    int64_t sizes[FSDP_MESH_MAX_DIMS];
    int64_t coordinates[FSDP_MESH_MAX_DIMS]; /* of this rank */
    char names[FSDP_MESH_MAX_DIMS][32];
} fsdp_mesh_info;

/* What the mesh is, and where this rank lies in it; never communicates. */
FSDP_API fsdp_status fsdp_mesh_query(fsdp_mesh *mesh, fsdp_mesh_info *info);

/* This rank's sub-group of a dimension, or (name NULL) the whole; a new reference. Not collective. Errors: INVALID
 * (names the dimensions there are). */
FSDP_API fsdp_status fsdp_mesh_group(fsdp_mesh *mesh, const char *name, fsdp_group **group);

/* ---- Fully sharded data parallelism ------------------------------------------------------------------------------ */

/* A model is the root: the ranks that parameters are sharded over, and the state of the current iteration. A unit is
 * one all-gather group of parameters, of one module or several. The host calls, for every unit, in the same order on
 * every rank:
 *
 *   pre_forward    parameters become full          post_forward   sharded again (if resharding after forward)
 *   pre_backward   full again                      post_backward  gradients reduced to the shards, sharded again
 *
 * and fsdp_model_finish_backward once backward is over; then its optimizer reads the sharded gradients and updates the
 * shards in place. Each call does nothing when there is nothing to do. Units nest as modules do, a module may be called
 * more than once before backward, and forward may run again inside backward (activation checkpointing): post_forward
 * leaves a unit full whose backward has begun. Forward alone (evaluation) needs nothing else, but for units that stay
 * full after forward: fsdp_model_finish_backward (or fsdp_unit_reshard) before their shards are written.
 *
 * Memory. A parameter's shard, full view and sharded gradient keep their addresses for the unit's life. The full view's
 * content is defined while the unit is unsharded, and only then it may be written. It is private to this rank
 * (copy-on-write): writing it changes no other rank's, and is dropped when the unit is unsharded again; see
 * fsdp_unit_write_back. The memory
 * behind full views is made of slots, which units take in turn: as many as are full at the same time, each as large as
 * the largest unit that needed it; one set a host (in shared memory) or, with private_unshard, one for each rank. They
 * are kept until the model goes, or a reset; one whose unit is released while full stays taken until
 * fsdp_model_finish_backward. Tensors handed out keep their unit, its model, group and store alive until deleted.
 *
 * A call that has nothing to do (unsharding what is unsharded, or again before backward) does not communicate, so a
 * difference between ranks there is found at the next call that does. */
typedef struct fsdp_model fsdp_model;
typedef struct fsdp_unit fsdp_unit;

/* How a unit's parameters lie on the model's ranks. */
typedef int32_t fsdp_strategy;
enum {
    FSDP_STRATEGY_DEFAULT = 0,    /* a model's: FULL_SHARD; a unit's: its model's */
    FSDP_FULL_SHARD = 1,          /* sharded over all ranks, also between forward and backward */
    FSDP_SHARD_GRAD_OP = 2,       /* sharded over all ranks, full from forward to backward */
    FSDP_NO_SHARD = 3,            /* whole on every rank; gradients are all-reduced, a unit at a time: a unit is what
                                     DistributedDataParallel calls a bucket. Without a param_dtype the full parameter
                                     is the shard: the same memory, so that edits of it stay */
    FSDP_HYBRID_SHARD = 4,        /* sharded over one dimension of a mesh, replicated over another */
    FSDP_HYBRID_SHARD_GRAD_OP = 5 /* the same, full from forward to backward */
};

/* What post_forward does. */
enum {
    FSDP_RESHARD_NEVER = -1,
    FSDP_RESHARD_DEFAULT = 0, /* what the strategy says */
    FSDP_RESHARD_ALWAYS = 1,
    /* n of 2 or more: reshard over groups of n neighbouring ranks, where n divides the ranks that parameters are
     * sharded over: backward then gathers within such a group only. Where all of them share memory the parameters stay
     * in their slot instead, which is less memory than n-th parts on every rank, and backward gathers nothing. */
};

/* Dtypes; all fields zero: as the host gives them. A zero DLDataType ({0, 0, 0}) is none. The shards, which the
 * optimizer updates, always keep their own dtype. */
typedef struct fsdp_precision {
    size_t struct_size;
    DLDataType param_dtype;  /* of full parameters, and so of computation and of gradients; none: the parameter's own */
    DLDataType reduce_dtype; /* each rank's gradients are rounded to it before they travel; none: they travel as they
                                come. Sums are in float32 (float64 for float64) whatever it is; HYBRID keeps the sums
                                over the shard dimension as float32 (float64 where param_dtype is) */
    DLDataType output_dtype; /* of forward's outputs: see fsdp_unit_cast */
    DLDataType buffer_dtype;
    int32_t keep_low_precision_grads; /* 1: sharded gradients have reduce_dtype, or else param_dtype; 0: the shard's */
    int32_t keep_inputs;              /* 1: forward's inputs are not cast to param_dtype */
} fsdp_precision;

/* When the unit that backward needs next is unsharded ahead. */
typedef int32_t fsdp_backward_prefetch;
enum {
    FSDP_BACKWARD_NONE = 0,
    FSDP_BACKWARD_PRE = 1,  /* in pre_backward, before this unit's gradients are computed: more overlap, more memory */
    FSDP_BACKWARD_POST = 2, /* in post_backward, when this unit is sharded again */
};

typedef struct fsdp_model_options {
    size_t struct_size;
    const char *name; /* for messages; NULL: "model" */
    fsdp_strategy strategy;
    int32_t reshard_after_forward; /* FSDP_RESHARD_... */
    int32_t private_unshard;       /* 1: full parameters in each rank's own memory, filled by all-gather;
                                      0: one copy a host, in shared memory, where the transport can */
    int32_t sync_module_states;    /* 1: units begin with the values of the model's rank 0; the others' are not read */
    double gradient_divisor;       /* gradients are summed over ranks and divided by this; 0: the number of the model's
                                      ranks, replicas included */
    const fsdp_precision *precision; /* NULL: all as the host gives it */
    const char *shard_dim;           /* on a mesh, the dimension that parameters are sharded over. NULL: all (HYBRID:
                                        the last) */
    const char *replicate_dim;       /* HYBRID, on a mesh: the dimension of replicas. NULL: the one before the last */
    int32_t forward_prefetch;        /* so many units are unsharded ahead in forward; 0: none */
    fsdp_backward_prefetch backward_prefetch;
    int32_t prefetch_limit;  /* no prefetch begins while so many units are full or becoming so; 0: 4 */
    int32_t reserved;        /* 0 */
    const char *offload_dir; /* a folder on a local disk: shards and sharded gradients live in an unnamed file there,
                                of which memory holds what is in use; NULL: in memory */
} fsdp_model_options;

FSDP_API fsdp_status fsdp_model_options_init(fsdp_model_options *options, size_t struct_size);

/* Over a group's ranks; not collective. The model keeps a reference to the group. Errors: INVALID (options that
 * contradict each other; HYBRID, which needs a mesh). */
FSDP_API fsdp_status fsdp_model_create(fsdp_group *group, const fsdp_model_options *options, fsdp_model **model);
/* Over a mesh's ranks; with shard_dim (HYBRID: and replicate_dim) those of this rank's part of the mesh that differ in
 * these dimensions only. Collective over the mesh, with the same options: makes groups of its own, unless the
 * model's ranks are all of the mesh's. Errors also: INVALID (no such dimension, HYBRID on a mesh of one dimension),
 * MISMATCH (other dimensions or another strategy on another rank). */
FSDP_API fsdp_status fsdp_model_create_on_mesh(fsdp_mesh *mesh, const fsdp_model_options *options, fsdp_model **model);
FSDP_API fsdp_status fsdp_model_retain(fsdp_model *model);
FSDP_API void fsdp_model_release(fsdp_model *model); /* its units keep it alive */

typedef struct fsdp_param {
    size_t struct_size;
    const char *name;     /* unique in the model, e.g. "layers.0.weight" */
    const DLTensor *full; /* whole values; read during the call only. Each rank takes its own part. float dtypes; at
                             least one dimension. Two entries of one call with the same address, shape, strides and
                             dtype, or the same id, are one parameter, tied: one shard, one full view, and a gradient
                             which is the sum of both entries', rounded to their dtype as autograd would. Memory shared
                             in other ways, or with another unit, is not noticed */
    int32_t frozen;       /* 1: no gradient: no memory and no traffic for it; see fsdp_unit_set_frozen */
    int32_t shard_dim;    /* the dimension that is cut over the ranks, as by fsdp_shard_extent; usually 0 */
    int32_t meta;         /* 1: of `full`, shape and dtype are read only. Shards begin as zeros; the host fills them
                             (fsdp_unit_param_query says what part they are), or sync_module_states does, when rank 0
                             has values */
    int32_t reserved;     /* 0 */
    uint64_t id;          /* a number that the host gives this parameter object alone, for as long as the model lives
                             (not an address, which may be used again); 0: none. A parameter with the id of one that
                             another unit holds is refused: modules that share one go into one unit */
} fsdp_param;

typedef struct fsdp_unit_options {
    size_t struct_size;
    fsdp_strategy strategy;          /* HYBRID needs a model that has the mesh for it */
    int32_t reshard_after_forward;   /* FSDP_RESHARD_DEFAULT: as the model, when the strategy is the model's */
    const fsdp_precision *precision; /* NULL: the model's */
} fsdp_unit_options;

FSDP_API fsdp_status fsdp_unit_options_init(fsdp_unit_options *options, size_t struct_size);

/* Make a unit of n >= 1 parameters. Collective over the model's ranks: all give the same names, shapes, dtypes, flags
 * and options, and their models' options agree (MISMATCH otherwise, naming the parameter that differs). Values are not
 * compared: each rank contributes its own part, so begin with equal values, or with sync_module_states. A parameter's
 * name is free again when its unit and all tensors of it are gone. name: for messages, at most 63 bytes count; NULL:
 * "unit<n>". options may be NULL. The unit begins sharded. All or nothing. Errors also: INVALID (names or ids repeated
 * in the model, 0-dim), UNSUPPORTED (dtype), NOMEM. */
FSDP_API fsdp_status fsdp_unit_create(fsdp_model *model, const char *name, const fsdp_param *params, int32_t n,
                                      const fsdp_unit_options *options, fsdp_unit **unit);
FSDP_API fsdp_status fsdp_unit_retain(fsdp_unit *unit);
FSDP_API void fsdp_unit_release(fsdp_unit *unit); /* tensors handed out stay valid until their deleters run */

/* Parameter `index` of the unit (0 .. n-1), as tensors that alias the library's memory; each call gives a new handle.
 * shard: this rank's part, contiguous, in the parameter's dtype, private memory, the host's to update between
 * iterations. full: the whole parameter, in param_dtype. grad: this rank's part of the gradient, shape of shard;
 * FSDP_ERR_STATE for a frozen one. */
FSDP_API fsdp_status fsdp_unit_param_shard(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);
FSDP_API fsdp_status fsdp_unit_param_full(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);
FSDP_API fsdp_status fsdp_unit_param_grad(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);

typedef struct fsdp_param_info {
    size_t struct_size;
    const char *name; /* this and shape are the unit's, valid while it lives */
    int32_t ndim;
    int32_t shard_dim;
    const int64_t *shape; /* of the whole parameter */
    int64_t shard_start;  /* this rank's part along shard_dim */
    int64_t shard_length;
    DLDataType dtype;      /* of the shard */
    DLDataType full_dtype; /* of the full view, and so of the gradients given to post_backward */
    DLDataType grad_dtype; /* of the sharded gradient */
    int32_t frozen;
    int32_t tied_to; /* index of the earlier entry that this one is tied to, or -1 */
    int32_t used;    /* see fsdp_unit_used */
} fsdp_param_info;

/* What parameter `index` is, and which part of it this rank holds; never communicates. */
FSDP_API fsdp_status fsdp_unit_param_query(fsdp_unit *unit, int32_t index, fsdp_param_info *info);
/* used: n numbers, one for each parameter of the unit. 1: some rank, replicas included, gave a gradient of it to the
 * reductions since its sharded gradient last became zeros, or to what was accumulated and is in them; 0: none did, so
 * the gradient is zeros and optimizers may skip the parameter; also for frozen ones. The same on all ranks that zeroed
 * alike. Defined after fsdp_model_finish_backward; never communicates. (In a unit of more than 15872 parameters, those
 * beyond count as used by every reduction.) */
FSDP_API fsdp_status fsdp_unit_used(fsdp_unit *unit, int32_t *used, int32_t n);

/* The first three hooks. Before the unit's forward: as fsdp_unit_unshard. What the optimizer, a checkpoint or the host
 * itself wrote to the shards before is seen; but a unit that is still full (kept so after forward, or unsharded by
 * hand) stays as it is until it is resharded, which fsdp_model_finish_backward does. */
FSDP_API fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit);
/* After it: as fsdp_unit_reshard, unless the unit is to stay full after forward, or its backward has begun. */
FSDP_API fsdp_status fsdp_unit_post_forward(fsdp_unit *unit);
/* Before its backward: full again, with the values that forward used, which costs nothing where its slot still holds
 * them. */
FSDP_API fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit);

/* Needs no other hook before it, and adds once for each call. grads: n entries, one for each parameter of the unit,
 * this rank's gradient of the full parameter (its shape and dtype); NULL entries (unused on this rank) count as zeros,
 * those of frozen parameters are not looked at. With gradient sync on, each rank's part is summed over the ranks,
 * divided, and added to what the sharded gradient holds (zeros after fsdp_model_zero_grad). With sync off, nothing is
 * sent: grads are added to an unsharded buffer of this rank (float32 for narrower floats), which the next synced call
 * includes, also one without any gradient; they are free at return. With HYBRID and all-reduce off
 * (fsdp_model_set_all_reduce), they are reduced within the shard dimension and kept aside as float32: sharded gradients
 * and norms don't have them until the next call with all-reduce on includes them. Then the unit is resharded. With
 * `work`, the reduction goes on after return and grads' data must stay valid until it is done;
 * fsdp_model_finish_backward waits for it, after which the sharded gradients are defined. With HYBRID all ranks give
 * `work`, or none does. The divisor of the call that reduces counts for all that it includes, and does not count
 * micro-batches. After a failed reduction the gradients are not to be used: fsdp_model_finish_backward returns its
 * failure, until zero_grad or reset. */
FSDP_API fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n,
                                             fsdp_work **work);

/* By hand, outside the hooks: make the parameters full (collective) and sharded again. Both idempotent: while an
 * asynchronous unshard is under way another gives one more reference to the same handle. An unshard that has to make a
 * slot waits for the other ranks in the call, also with `work`: in the first iteration, as a rule. Edits of the full
 * view are dropped when it is unsharded again. */
FSDP_API fsdp_status fsdp_unit_unshard(fsdp_unit *unit, fsdp_work **work);
FSDP_API fsdp_status fsdp_unit_reshard(fsdp_unit *unit);

/* Write what this rank changed in the full views back to its shards: summon_full_params(writeback=True). Elements that
 * still are what the shard rounds to keep the shard's full precision. Every rank calls it; it does not communicate:
 * where ranks edited differently, each part is its owner's, and replicas that edited differently part ways. Errors:
 * STATE (not unsharded). */
FSDP_API fsdp_status fsdp_unit_write_back(fsdp_unit *unit);

/* One whole parameter in the shard's own dtype, in new memory of the caller's. Collective over the ranks that the unit
 * is sharded over; whether the unit is full does not matter. */
FSDP_API fsdp_status fsdp_unit_gather_param(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **full);
/* Take this rank's part of a whole parameter (its shape; any float dtype) into the shard. Every rank calls it; it does
 * not communicate. Seen by the next call that unshards; STATE while the unit is unsharded (but where the full parameter
 * is the shard, see FSDP_NO_SHARD, it is seen at once). */
FSDP_API fsdp_status fsdp_unit_load_param(fsdp_unit *unit, int32_t index, const DLTensor *full);

typedef int32_t fsdp_unit_state;
enum {
    FSDP_UNIT_SHARDED = 0,
    FSDP_UNIT_UNSHARDING = 1,
    FSDP_UNIT_UNSHARDED = 2,
};
/* The state as this rank sees it; UNSHARDING while an asynchronous unshard is under way. */
FSDP_API fsdp_status fsdp_unit_query_state(fsdp_unit *unit, fsdp_unit_state *state);

typedef struct fsdp_unit_info {
    size_t struct_size;
    fsdp_unit_state state;
    int32_t n_params;
    fsdp_strategy strategy;
    int32_t reshard_after_forward; /* as it is in force: FSDP_RESHARD_NEVER, _ALWAYS or n */
    int32_t shard_rank;            /* this rank among those that the parameters are sharded over */
    int32_t shard_size;
    int32_t replicate_rank; /* and among the replicas */
    int32_t replicate_size;
    int64_t full_bytes; /* of the full parameters */
    int64_t shard_bytes;
    int64_t publications;     /* unshards that moved data, so far; not those from the parts of reshard to n ranks */
    int64_t published_bytes;  /* of this rank's shards, in param_dtype, that they wrote or sent */
    int64_t reduced_bytes;    /* gradient bytes this rank gave to reductions over the shard dimension, NULL ones too */
    int64_t replicated_bytes; /* and over the replicas */
    char name[64];
    int32_t gradient_sync; /* as fsdp_unit_set_gradient_sync, or the model's, set it last */
    int32_t all_reduce;
    double gradient_divisor;
} fsdp_unit_info;
/* The unit's settings and counts; never communicates. */
FSDP_API fsdp_status fsdp_unit_query(fsdp_unit *unit, fsdp_unit_info *info);

/* The host changed a shard's values between forward and backward, or while the unit is unsharded, and wants them to be
 * seen: the next call that unshards publishes anew. At other times nothing need be said: pre_forward and unshard always
 * publish what the shards hold. Every rank calls it, whichever rank's shard changed. */
FSDP_API fsdp_status fsdp_unit_shard_changed(fsdp_unit *unit);

/* Settings of a unit that may change between iterations, alike on all ranks (a difference is found at the next
 * communication that it changes). frozen 1: the parameter takes no part in reductions from now on, its gradient's
 * memory is given back: a tensor of it keeps its address and reads as zeros, fsdp_unit_param_grad returns STATE; 0: it
 * does again, from zeros. Tied entries are frozen together. Errors: STATE (backward of this unit is under way, or
 * gradients wait for a reduction), INVALID. */
FSDP_API fsdp_status fsdp_unit_set_frozen(fsdp_unit *unit, int32_t index, int32_t frozen);
FSDP_API fsdp_status fsdp_unit_set_reshard_after_forward(fsdp_unit *unit, int32_t reshard_after_forward);
/* 0: post_backward leaves the unit full, for the next micro-batch; fsdp_model_finish_backward reshards it. 1: the
 * default. */
FSDP_API fsdp_status fsdp_unit_set_reshard_after_backward(fsdp_unit *unit, int32_t reshard);
/* As fsdp_model_set_gradient_sync and the others, for this unit only, until the model's is called. They count for
 * following post_backward calls, and may change between any two. */
FSDP_API fsdp_status fsdp_unit_set_gradient_sync(fsdp_unit *unit, int32_t sync);
FSDP_API fsdp_status fsdp_unit_set_all_reduce(fsdp_unit *unit, int32_t all_reduce);
FSDP_API fsdp_status fsdp_unit_set_gradient_divisor(fsdp_unit *unit, double divisor);

/* The sharded gradient of parameter `index` (-1: of all of the unit) counts as zeros from now on, as
 * fsdp_model_zero_grad does for all. What was accumulated without sync, and what HYBRID kept with all-reduce off, stays
 * and is in the next reduction; so does a failure. Waits for the unit's reductions under way, whose failure it returns,
 * the gradient being zeros all the same. Never communicates, and ranks may zero differently: each what it holds itself
 * (with replicas, each sums a slice for all, so that a slice is as the rank that sums it has it); but while a
 * reduction of the unit that was given a `work` goes on, all ranks call it or none. Nothing happens to a frozen one.
 * What fsdp_model_zero_grad says of tensors from before is true here too. */
FSDP_API fsdp_status fsdp_unit_zero_grad(fsdp_unit *unit, int32_t index);

/* Call valid(unit, user) when the unit's full parameters have become valid (after an asynchronous unshard: in the next
 * call on the unit), and invalid(unit, user) when they are about
 * to be so no longer, on the thread that makes the call by which it happens; NULL: no call. Hosts swap their parameters
 * there. The unit's tensors may be read and written inside; calls that may change a unit return STATE. Not called for a
 * unit that was full when they were set, nor when a full unit is released. */
typedef void (*fsdp_unit_fn)(fsdp_unit *unit, void *user);
FSDP_API fsdp_status fsdp_unit_set_callbacks(fsdp_unit *unit, fsdp_unit_fn valid, fsdp_unit_fn invalid, void *user);

/* Units to unshard ahead when this unit's pre_forward (pre_backward) has made it full, in this order, in place of what
 * forward_prefetch (backward_prefetch) would do there. n 0: none of its own. The units need not be kept alive, but they
 * go on all ranks alike. What is fetched ahead are the shards' values at that time: a host that writes to the shards of
 * a unit between the hooks of others, within an iteration, calls fsdp_unit_shard_changed. Prefetch
 * without such lists follows the order of the iteration before; when an iteration takes another order, what was
 * fetched in vain is resharded by fsdp_model_finish_backward, the new order is learnt, and the log tells once. */
typedef int32_t fsdp_phase;
enum { FSDP_FORWARD = 0, FSDP_BACKWARD = 1 };
FSDP_API fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, fsdp_phase phase, fsdp_unit *const *units, int32_t n);

/* A float tensor as the unit's precision wants it: forward's inputs in param_dtype, its outputs in output_dtype,
 * buffers in buffer_dtype. *out is new memory of the caller's, or NULL when `input` is as it should be (or not of a
 * float dtype). */
typedef int32_t fsdp_cast_kind;
enum { FSDP_CAST_INPUT = 0, FSDP_CAST_OUTPUT = 1, FSDP_CAST_BUFFER = 2 };
FSDP_API fsdp_status fsdp_unit_cast(fsdp_unit *unit, fsdp_cast_kind kind, const DLTensor *input,
                                    DLManagedTensorVersioned **out);

/* For all units of the model, and those made later. Gradient sync 0: following post_backward calls only accumulate on
 * this rank (no_sync); 1 (the default): they reduce. All-reduce 0: with replicas, they reduce within the shard
 * dimension only (NO_SHARD: only accumulate); 1: the default. Alike on all ranks. */
FSDP_API fsdp_status fsdp_model_set_gradient_sync(fsdp_model *model, int32_t sync);
FSDP_API fsdp_status fsdp_model_set_all_reduce(fsdp_model *model, int32_t all_reduce);
/* What sums of gradients are divided by; 0: the number of the model's ranks, replicas included. */
FSDP_API fsdp_status fsdp_model_set_gradient_divisor(fsdp_model *model, double divisor);

/* Backward is over: waits for reductions under way and reshards every unit. Once for each micro-batch or once before
 * the optimizer's step, as the host likes. Sharded gradients are defined after it. */
FSDP_API fsdp_status fsdp_model_finish_backward(fsdp_model *model);

/* Sharded gradients (and unsharded accumulation) count as zeros from now on. Waits for reductions under way, whose
 * failure it returns, gradients being zeros all the same. Their memory is overwritten by the next
 * reduction, or cleared by finish_backward, norms, clipping, unscale or fsdp_unit_param_grad: a host that reads a
 * tensor it has from before sees the old values until then, and what it writes there itself is lost. */
FSDP_API fsdp_status fsdp_model_zero_grad(fsdp_model *model);

/* After an exception in the middle of forward or backward: every unit sharded, accumulated and pending gradients
 * dropped, the order of units forgotten; the model is as after zero_grad. Collective. It meets ranks that are still in
 * the calls of the broken iteration: those calls return MISMATCH there, and the rank then calls reset too. (A hybrid
 * model has several groups. Ranks that have gone apart may wait for each other in different ones, where no rank is left
 * to call reset: then the group's timeout ends them, so choose one that a training step can't need.) */
FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model);

/* Give all ranks of the model the values of its rank 0: n tensors (buffers), written in place on the others.
 * Collective, with equal shapes and dtypes, none overlapping another. What sync_module_states does for parameters. */
FSDP_API fsdp_status fsdp_model_broadcast(fsdp_model *model, const DLTensor *const *tensors, int32_t n);

/* Bytes, now and at most so far: of this rank, and (host_...) of all ranks of the model together, what they share
 * counted once. For shards and gradients tensor data, without alignment; for full parameters, the slots. */
typedef struct fsdp_memory_info {
    size_t struct_size;
    int64_t shards;
    int64_t gradients; /* sharded gradients and accumulation buffers */
    int64_t unsharded; /* slots; shared ones count on every rank that uses them */
    int64_t staging;   /* shared memory of the model's groups, but for slots */
    int64_t shards_peak;
    int64_t gradients_peak;
    int64_t unsharded_peak;
    int64_t host_shards;
    int64_t host_gradients; /* as if all ranks were as this one */
    int64_t host_unsharded;
    int64_t host_unsharded_peak;
    int64_t total_parameters; /* the model's parameters in their own dtype, once, were they all there */
    int64_t largest_unit;     /* full_bytes of the largest unit */
    int64_t slots;            /* how many, now */
    int64_t published_bytes;  /* sums over units of what fsdp_unit_info counts */
    int64_t reduced_bytes;
    int64_t replicated_bytes;
} fsdp_memory_info;
FSDP_API fsdp_status fsdp_model_memory(fsdp_model *model, fsdp_memory_info *info);

/* ---- Gradient norm and clipping ---------------------------------------------------------------------------------- */

/* The p-norm of all sharded gradients of all units of the model, over all ranks, as if they were one vector: p = 1, 2,
 * any other number above 0, or infinity (the largest absolute value). Collective: every rank calls it, also one whose
 * shards are all empty, with the same p. Waits for reductions under way; what was only accumulated without gradient
 * sync is not in it. Summed in float64 whatever the gradients' dtypes, and the same bits on every rank. An infinity or
 * NaN in any gradient on any rank makes it infinite or NaN on all. (For large p the sum of |g|^p itself can leave
 * float64's range: p = infinity never does.) No gradients at all: 0.
 * Errors also: INVALID (p), MISMATCH (ranks differ in p, or in the model's units: a unit that one rank has released and
 * another still holds), STATE (a unit's reduction failed: its gradients are not to be used until fsdp_model_zero_grad
 * or fsdp_model_reset); a failure of one rank is reported to all. */
FSDP_API fsdp_status fsdp_model_grad_norm(fsdp_model *model, double p, double *norm);

/* Scale all sharded gradients by min(1, max_norm / (norm + 1e-6)), on all ranks by the same number, so that their
 * p-norm is at most max_norm (0 or more; infinity: none is changed, while norm is finite). *norm is the norm before, as
 * fsdp_model_grad_norm gives it. Each gradient is multiplied in its accumulator (float32; float64 for float64) and
 * rounded once. Collective, with the same arguments on all ranks.
 * A norm that is infinite or NaN: with error_if_nonfinite 1, STATE on all ranks, and gradients are left as they are;
 * with 0 they are multiplied all the same, by 0 or NaN. With a scaler, unscale first.
 * Errors: as fsdp_model_grad_norm; gradients are left as they are. */
FSDP_API fsdp_status fsdp_model_clip_grad_norm(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite,
                                               double *norm);

/* ---- Loss scaling ------------------------------------------------------------------------------------------------ */

/* Keeps small gradients of low precision from vanishing: the host multiplies the loss by the scale before backward;
 * unscale divides the gradients again and looks for infinities and NaNs on all ranks; step says, alike on all ranks,
 * whether the optimizer may step; update lowers the scale after a step that was skipped, and raises it after
 * growth_interval ones in a row that were not. The rules and defaults are those of torch's GradScaler, one optimizer
 * for a scaler. For each step:
 *
 *   fsdp_scaler_query (the scale) .. backward .. fsdp_scaler_unscale .. (clipping) .. fsdp_scaler_step ..
 *   fsdp_scaler_update
 *
 * Every rank makes the same calls. A scaler is used by one thread at a time. */
typedef struct fsdp_scaler fsdp_scaler;

typedef struct fsdp_scaler_options {
    size_t struct_size;
    double init_scale;       /* 0: 65536. A normal float32, as every scale is */
    double growth_factor;    /* 0: 2. Above 1 */
    double backoff_factor;   /* 0: 0.5. Between 0 and 1, neither of them */
    int32_t growth_interval; /* steps without an infinity after which the scale grows; 0: 2000 */
    int32_t disabled;        /* 1: the scale reads 1, unscale and update do nothing, step always says yes */
} fsdp_scaler_options;

FSDP_API fsdp_status fsdp_scaler_options_init(fsdp_scaler_options *options, size_t struct_size);

/* group: the ranks that skip steps together; the scaler keeps a reference to it. All give the same options. Not
 * collective: a difference is told at the first unscale, as MISMATCH. Errors: INVALID. */
FSDP_API fsdp_status fsdp_scaler_create(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **scaler);
FSDP_API fsdp_status fsdp_scaler_retain(fsdp_scaler *scaler);
FSDP_API void fsdp_scaler_release(fsdp_scaler *scaler);

typedef struct fsdp_scaler_info {
    size_t struct_size;
    double scale;           /* what to multiply the loss by; 1 when disabled */
    int32_t growth_tracker; /* updates without an infinity since the scale last changed */
    int32_t found_inf;      /* 1: the last unscale found an infinity or NaN, on some rank */
    int64_t steps;          /* how often step said yes */
    int64_t skipped;        /* how often it said no */
} fsdp_scaler_info;

/* How the scaler is; never communicates. */
FSDP_API fsdp_status fsdp_scaler_query(fsdp_scaler *scaler, fsdp_scaler_info *info);

/* Multiply the model's sharded gradients by 1 / scale, in place (in the accumulator, float32, or float64 for float64,
 * and rounded once), and find out whether one of them was infinite or NaN before, on any rank of the scaler's group.
 * Collective over that group, which must hold all ranks of the model, all dimensions of its mesh; ranks without any
 * elements take part. Waits for reductions under way. Once for each update. Errors also: INVALID (the group has fewer
 * ranks than the model), STATE (called already since the last update, or after step; a unit's reduction failed),
 * MISMATCH (scale, growth tracker or options differ between ranks). After an error gradients are as they were and
 * unscale can be called again. */
FSDP_API fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_model *model);

/* The same for gradients of the host's own: n tensors of float or complex dtypes, written in place, any strides, none
 * of which overlap; NULL entries, and n 0, mean none. Ranks may give different ones. Errors also: INVALID, UNSUPPORTED
 * (dtype). */
FSDP_API fsdp_status fsdp_scaler_unscale_tensors(fsdp_scaler *scaler, const DLTensor *const *grads, int32_t n);

/* *should_step = 1: the host lets its optimizer step; 0: it must not, since gradients are infinite or NaN. The same on
 * all ranks, by what the last unscale found; not collective. A step that is skipped is counted, and told in the log
 * (WARN, by the group's rank 0). Errors also: STATE (no unscale, or a step already, since the last update). */
FSDP_API fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, int32_t *should_step);

/* End of the step: scale *= backoff_factor when the last unscale found an infinity; else scale *= growth_factor when
 * that was the growth_interval-th time in a row without one. Rounded to float32; a scale that would leave its normal
 * range stays. Not collective. Errors also: STATE (no unscale since the last update). */
FSDP_API fsdp_status fsdp_scaler_update(fsdp_scaler *scaler);

/* What a checkpoint keeps of a scaler: the same on all ranks. */
typedef struct fsdp_scaler_state {
    size_t struct_size;
    double scale; /* also of a disabled scaler */
    double growth_factor;
    double backoff_factor;
    int32_t growth_interval;
    int32_t growth_tracker;
    int64_t steps;
    int64_t skipped;
} fsdp_scaler_state;

/* Errors of both also: STATE (between unscale and update), STRUCT_SIZE; of load: INVALID (a field out of range; there
 * are no defaults here). Load on every rank alike; whether the scaler is disabled stays. */
FSDP_API fsdp_status fsdp_scaler_save(fsdp_scaler *scaler, fsdp_scaler_state *state);
FSDP_API fsdp_status fsdp_scaler_load(fsdp_scaler *scaler, const fsdp_scaler_state *state);

/* ---- State dicts ------------------------------------------------------------------------------------------------- */

/* Named tensors in a fixed order, each whole or this rank's part of a larger one, and named JSON values: what a
 * checkpoint is written from and read into. Parameters, buffers, an optimizer's state and a host's own counters are
 * all of this form; the names are the host's, and must be equal and in the same order on all ranks (entries of a rank
 * excepted). Used by one thread at a time. */
typedef struct fsdp_state_dict fsdp_state_dict;

typedef int32_t fsdp_entry_kind;
enum {
    FSDP_ENTRY_TENSOR = 0,
    FSDP_ENTRY_OF_RANK = 1, /* this rank's own, like the state of a random generator: another value, of another shape
                               even, on each rank, or on some only. Kept in checkpoints beside the rank's number */
};

typedef struct fsdp_entry {
    size_t struct_size;
    const char *name; /* 1 to 4095 bytes of UTF-8; unique in the dict. Comes out valid as long as the dict, as do the
                         other pointers */
    fsdp_entry_kind kind;
    int32_t ndim;
    const int64_t *shape;  /* of the whole tensor */
    const int64_t *offset; /* where this rank's part begins in it, in each dimension; NULL: all zeros */
    const int64_t *length; /* and its extents; in: NULL, or what the tensor given has */
    DLDataType dtype;      /* in which it is kept in files; the tensor may have another: see fsdp_state_dict_add */
    int32_t copies;        /* so many ranks hold this very part; each of them writes a slice of it to files. 0: 1 */
    int32_t copy;          /* which of them this rank is */
    int32_t rank;          /* out: whose it is, of a checkpoint's OF_RANK; else -1. In: not read */
    const char *tied_to;   /* an earlier entry's name that is the same tensor: this one has no values; or NULL */
} fsdp_entry;

/* An empty one. */
FSDP_API fsdp_status fsdp_state_dict_create(fsdp_state_dict **dict);
FSDP_API fsdp_status fsdp_state_dict_retain(fsdp_state_dict *dict);
FSDP_API void fsdp_state_dict_release(fsdp_state_dict *dict); /* tensors handed out stay valid */

/* Add an entry with this rank's part of it. `tensor`: host memory, any strides; not copied: what loads write goes into
 * it, saves read it. Taken when the call succeeds, left with the caller when it fails (but one of an unknown DLPack
 * version is deleted: VERSION). NULL for an entry that is tied_to another. entry->dtype {0, 0, 0}: the tensor's.
 * Another one, both being floats: values are rounded on their way to and from files (a buffer that computes in bfloat16
 * and is kept as float32). Errors: INVALID (name taken, empty or not UTF-8; a part that leaves the shape; shapes that
 * differ; tied_to unknown), UNSUPPORTED (dtype). */
FSDP_API fsdp_status fsdp_state_dict_add(fsdp_state_dict *dict, const fsdp_entry *entry,
                                         DLManagedTensorVersioned *tensor);
/* Add, or replace, a JSON value: `text` is one, of any kind (at most 64 MiB, 1000 levels deep; integers in int64's
 * range; no NaN, no character 0). Its meaning is the host's: parameter groups, step counters. Names as for entries, but
 * a value and an entry may have the same. In a checkpoint it is rank 0's that is kept. */
FSDP_API fsdp_status fsdp_state_dict_set_json(fsdp_state_dict *dict, const char *name, const char *text);

typedef struct fsdp_state_dict_info {
    size_t struct_size;
    int64_t n_entries;
    int64_t n_json;
    int64_t bytes;       /* of this rank's parts, as they are kept in files; tied ones once */
    int64_t whole_bytes; /* of all tensors, were they whole */
} fsdp_state_dict_info;
/* How much it has; never communicates. */
FSDP_API fsdp_status fsdp_state_dict_query(fsdp_state_dict *dict, fsdp_state_dict_info *info);
/* Entry `index`, in the order of adding. */
FSDP_API fsdp_status fsdp_state_dict_entry(fsdp_state_dict *dict, int64_t index, fsdp_entry *entry);
/* The index of a name. Errors: NOT_FOUND. */
FSDP_API fsdp_status fsdp_state_dict_find(fsdp_state_dict *dict, const char *name, int64_t *index);
/* A handle on this rank's part of an entry (of a tied one: of that which it is tied to): the memory that was given. */
FSDP_API fsdp_status fsdp_state_dict_tensor(fsdp_state_dict *dict, int64_t index, DLManagedTensorVersioned **tensor);
/* JSON value `index`: its name, and itself as text without line breaks; the dict's, until it is replaced. */
FSDP_API fsdp_status fsdp_state_dict_json(fsdp_state_dict *dict, int64_t index, const char **name, const char **text);

typedef int32_t fsdp_state_kind;
enum {
    FSDP_STATE_SHARDED = 0, /* this rank's parts, with where they lie in the whole */
    FSDP_STATE_FULL = 1,    /* whole tensors */
    FSDP_STATE_LOCAL = 2,   /* this rank's parts as tensors by themselves: of use where each rank has the same part */
};

typedef struct fsdp_state_dict_options {
    size_t struct_size;
    fsdp_state_kind kind;
    int32_t rank0_only; /* FULL, 1: rank 0 of the group alone gets values; the others' dict is empty */
    int32_t copy;       /* SHARDED, LOCAL: 1: values in memory of the dict's own; 0: the shards themselves: what is
                           loaded into the dict is in the model, see fsdp_unit_shard_changed. FULL has memory of its
                           own always */
    int32_t reserved;   /* 0 */
    const char *prefix; /* put before every name, of tensors and of JSON values; NULL: none */
} fsdp_state_dict_options;

FSDP_API fsdp_status fsdp_state_dict_options_init(fsdp_state_dict_options *options, size_t struct_size);

/* The parameters of all units of the model, in the order of making, by name, in their own dtype; tied entries under
 * each name. FULL is collective over the model's ranks and gathers one parameter at a time, so that a rank never has
 * more than its results and one parameter in addition. Buffers are the host's to add. Units may be full or sharded, and
 * an iteration may be under way: values are the shards'. Errors also: MISMATCH. */
FSDP_API fsdp_status fsdp_model_state_dict(fsdp_model *model, const fsdp_state_dict_options *options,
                                           fsdp_state_dict **dict);

/* What an entry must say whose tensor is shaped like the shard of parameter `index` (its own state, or an optimizer's):
 * name (the parameter's), shape, offset, length, dtype, copies and copy. Pointers are the unit's. Give the entry
 * another name before adding it, "exp_avg" behind a dot, say; other dtypes are fine. */
FSDP_API fsdp_status fsdp_unit_param_entry(fsdp_unit *unit, int32_t index, fsdp_entry *entry);

/* A dict of whole tensors from one whose parts lie on the group's ranks. Collective; all ranks give dicts of the same
 * names in the same order (MISMATCH names the first that differs). One tensor at a time, as above. The JSON values are
 * each rank's own, entries of a rank are left out. With rank0_only the others' dict has nothing in it. options: kind is
 * FULL (or 0), rank0_only and prefix as above. Errors also: INVALID on all ranks (parts that overlap or leave gaps). */
FSDP_API fsdp_status fsdp_state_dict_gather(fsdp_state_dict *dict, fsdp_group *group,
                                            const fsdp_state_dict_options *options, fsdp_state_dict **full);

typedef int32_t fsdp_name_kind;
enum {
    FSDP_NAME_MISSING = 0,    /* wanted, and not in what is loaded */
    FSDP_NAME_UNEXPECTED = 1, /* in what is loaded, and not wanted */
};
typedef void (*fsdp_name_fn)(fsdp_name_kind kind, const char *name, void *user);
/* Bytes done and in all. On the thread that makes the call. Returns 0 to go on; anything else ends it with CALLBACK. */
typedef int32_t (*fsdp_progress_fn)(int64_t done, int64_t total, void *user);

typedef struct fsdp_load_options {
    size_t struct_size;
    int32_t partial; /* 0: all names must agree; 1: what is missing keeps its values, what is unexpected is not read */
    int32_t from_rank0;   /* 1: rank 0's dict counts, whole tensors; the other ranks give NULL for it. Collective */
    const char *prefix;   /* of the names in what is loaded: those without it are not looked at; NULL: none */
    fsdp_name_fn on_name; /* told every missing and unexpected name, with the prefix, before anything is written; NULL:
                             nobody. With from_rank0 both functions are rank 0's */
    fsdp_progress_fn on_progress; /* NULL: nobody */
    void *user;                   /* of both */
} fsdp_load_options;

FSDP_API fsdp_status fsdp_load_options_init(fsdp_load_options *options, size_t struct_size);

/* Write the values of `from` into the tensors of `into`, entry by entry, by name: each takes its part of the whole from
 * the part that `from` holds, which must contain it. Floats are cast; other dtypes must be equal. A tensor with several
 * names (tied_to) is wanted once, and read by the first of them that is there. JSON values of `from` are set in `into`.
 * Entries of a rank are not touched. All names, shapes, dtypes and parts are checked first: after an error nothing has
 * been written. Errors: INVALID (missing or unexpected names, of which the message has the first few; shapes, dtypes or
 * parts that don't fit, a tensor that is read-only, naming the entry; a byte that would be written for two entries, or
 * written for one and read for another, naming both: parts of one array may lie between each other, and what is
 * tied_to another is that one), CALLBACK (on_progress ended it: what it was told of is written). */
FSDP_API fsdp_status fsdp_state_dict_load(fsdp_state_dict *into, fsdp_state_dict *from,
                                          const fsdp_load_options *options);
/* The same into a model's shards, but for JSON values. Seen by the next call that unshards; STATE while a unit is
 * unsharded, naming it. A dict that was made with FSDP_STATE_LOCAL knows which parts it has: they load where the
 * model's are within them, INVALID elsewhere; what else is shaped like a part does not. All ranks make this call, each
 * with its own dict. With from_rank0 it is collective: tensors are sent one at a time, and an error is the same on all
 * ranks; when a rank is lost, or on_progress ends it, in the middle, some are written. */
FSDP_API fsdp_status fsdp_model_load_state_dict(fsdp_model *model, fsdp_state_dict *from,
                                                const fsdp_load_options *options);

/* ---- Checkpoints ------------------------------------------------------------------------------------------------- */

/* A state dict in files. abi/checkpoint.md describes them. A checkpoint is complete or absent: what makes it one is
 * renamed into place last, and a save over an earlier one leaves that as it was until then, whatever happens. */

typedef int32_t fsdp_checkpoint_format;
enum {
    FSDP_CHECKPOINT_SHARDED = 0, /* a folder: a safetensors file of each rank, and manifest.json */
    FSDP_CHECKPOINT_FULL = 1,    /* whole tensors: `path` ends in ".safetensors": that file; else a folder with
                                    model.safetensors, or several files and model.safetensors.index.json */
};

typedef struct fsdp_save_options {
    size_t struct_size;
    fsdp_checkpoint_format format;
    int32_t no_sync;        /* 1: don't wait for the disk: after a power failure the checkpoint may be damaged, which
                               its checksums tell */
    int64_t max_file_bytes; /* FULL: begin another file rather than exceed this; 0: one file */
    int32_t background;     /* 1: return when values are copied, and write on a thread of the library's */
    int32_t reserved;       /* 0 */
} fsdp_save_options;

FSDP_API fsdp_status fsdp_save_options_init(fsdp_save_options *options, size_t struct_size);

/* A save that goes on. */
typedef struct fsdp_save fsdp_save;

/* Write a state dict. Collective over the group; NULL: one process. All ranks give the same path (on a file system that
 * all of them see; FULL: only rank 0 writes), format and names. SHARDED: each rank writes its own parts, replicas a
 * slice each. FULL: gathered by rank 0, one tensor at a time; entries of a rank are left out. Parents of the folder are
 * made. With `save` (background or not): a handle on it. In the background values are those of the time of the call:
 * they are copied before it returns, and the memory is given back when they are written; an own group is made for it,
 * so training may go on. NULL: returns when all is written, and background must be 0. Ranks wait for one that writes as
 * long as it goes on doing so, longer than the group's timeout, too; a failure on one is told on all, and leaves an
 * earlier checkpoint at `path` as it was.
 * Errors: INVALID (path of another kind of checkpoint or of foreign files; parts that overlap or leave gaps),
 * UNSUPPORTED (complex128, which safetensors lacks), STATE (another save into this folder is under way), SYSTEM (names
 * the file), NOMEM, MISMATCH (names, dtypes or shapes differ between ranks). */
FSDP_API fsdp_status fsdp_checkpoint_save(fsdp_group *group, fsdp_state_dict *dict, const char *path,
                                          const fsdp_save_options *options, fsdp_save **save);

typedef struct fsdp_save_info {
    size_t struct_size;
    int32_t done;          /* 1: complete, or failed */
    fsdp_status status;    /* when done */
    int64_t written_bytes; /* by this rank, so far */
    int64_t total_bytes;   /* that it will write */
} fsdp_save_info;
/* How far it is; never waits. */
FSDP_API fsdp_status fsdp_save_query(fsdp_save *save, fsdp_save_info *info);
/* Until it is complete; timeout_ms as for fsdp_work_wait. Returns its failure, or PENDING. Several threads may wait. */
FSDP_API fsdp_status fsdp_save_wait(fsdp_save *save, int64_t timeout_ms);
FSDP_API fsdp_status fsdp_save_retain(fsdp_save *save);
/* A save that goes on does so without its handle; when the process ends first, there is no new checkpoint. */
FSDP_API void fsdp_save_release(fsdp_save *save);

/* An open checkpoint; any thread may read from it, several at a time. */
typedef struct fsdp_checkpoint fsdp_checkpoint;

/* Open what fsdp_checkpoint_save wrote, a safetensors file, or a folder of Hugging Face's with or without an index. Not
 * collective, and the number of ranks that wrote it does not matter. Reads all headers, and checks them: each tensor is
 * whole, nothing overlaps, files are as long as they must be. Errors: NOT_FOUND (no such path, or no checkpoint
 * there: says what was looked for), CORRUPT (names the file, and the tensor), SYSTEM, UNSUPPORTED (written by a newer
 * version; a dtype). */
FSDP_API fsdp_status fsdp_checkpoint_open(const char *path, fsdp_checkpoint **checkpoint);
FSDP_API fsdp_status fsdp_checkpoint_retain(fsdp_checkpoint *checkpoint);
FSDP_API void fsdp_checkpoint_release(fsdp_checkpoint *checkpoint);

typedef struct fsdp_checkpoint_info {
    size_t struct_size;
    fsdp_checkpoint_format format;
    int32_t ranks;     /* that wrote it; 0: not known */
    int32_t checksums; /* 1: it has them */
    int32_t reserved;
    int64_t n_entries;
    int64_t n_json;
    int64_t n_files;  /* that hold tensors */
    int64_t bytes;    /* of all tensors */
    char save_id[40]; /* of this save alone; "": not written by libfsdp */
} fsdp_checkpoint_info;
/* What it is, and how much it has. */
FSDP_API fsdp_status fsdp_checkpoint_query(fsdp_checkpoint *checkpoint, fsdp_checkpoint_info *info);
/* Entry `index`, in the order of the state dict that was saved (foreign files: of their data): whole tensors, offset
 * all zeros; and entries of ranks, each rank's by itself. */
FSDP_API fsdp_status fsdp_checkpoint_entry(fsdp_checkpoint *checkpoint, int64_t index, fsdp_entry *entry);
/* The index of a name. rank -1: of a tensor; else of that rank's entry. Errors: NOT_FOUND. */
FSDP_API fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *checkpoint, const char *name, int32_t rank, int64_t *index);
FSDP_API fsdp_status fsdp_checkpoint_json(fsdp_checkpoint *checkpoint, int64_t index, const char **name,
                                          const char **text);

/* A part of an entry that lies in one file. */
typedef struct fsdp_checkpoint_part {
    size_t struct_size;
    const char *file; /* its name in the folder */
    int32_t ndim;
    int32_t reserved;
    const int64_t *offset; /* in the whole tensor */
    const int64_t *length;
    int64_t bytes;
} fsdp_checkpoint_part;
FSDP_API fsdp_status fsdp_checkpoint_n_parts(fsdp_checkpoint *checkpoint, int64_t index, int64_t *n);
FSDP_API fsdp_status fsdp_checkpoint_part_of(fsdp_checkpoint *checkpoint, int64_t index, int64_t part,
                                             fsdp_checkpoint_part *out);

/* Read the box of an entry that begins at `offset` (NULL: zeros) and has the shape of `tensor`, into it, any strides.
 * Reads what it needs of the files and no more than a checksum's block (1 MiB) beyond; what it reads is verified.
 * Floats are cast; other dtypes must be equal. Errors: INVALID, CORRUPT (naming file and tensor: `tensor` is undefined
 * then), SYSTEM. */
FSDP_API fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, int64_t index, const int64_t *offset,
                                          const DLTensor *tensor);
/* Read into every entry of a state dict its part, by name; as fsdp_state_dict_load, from_rank0 excepted. Names,
 * shapes and dtypes are checked before anything is written; after CORRUPT or SYSTEM tensors are undefined: load another
 * checkpoint. Not collective: in a model of several ranks each loads its own part. */
FSDP_API fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *checkpoint, fsdp_state_dict *into,
                                          const fsdp_load_options *options);
/* Read all and compare with the checksums. on_progress may be NULL. Errors: CORRUPT (the first damage), CALLBACK,
 * SYSTEM. */
FSDP_API fsdp_status fsdp_checkpoint_verify(fsdp_checkpoint *checkpoint, fsdp_progress_fn on_progress, void *user);

/* ---- Function table ---------------------------------------------------------------------------------------------- */

/* For hosts that load the library with dlopen: one symbol to look up. The table holds every function above, is static,
 * and only grows within a major version: check struct_size before using a slot that a newer minor version added.
 * Refused (VERSION, saying which versions there are) when major differs or minor is above the library's. */
typedef struct fsdp_api fsdp_api;
FSDP_API fsdp_status fsdp_get_api(int32_t major, int32_t minor, const fsdp_api **api);

/* The slots, in the order in which functions were released. Written by abi/generate.py from the prototypes above. */
/* clang-format off */
/* generated: table */
struct fsdp_api {
    size_t struct_size;
    int32_t major;
    int32_t minor;
    const char *(*last_error)(void);
    fsdp_status (*last_error_info)(fsdp_error_info *info);
    const char *(*status_name)(fsdp_status status);
    int32_t (*version)(void);
    fsdp_status (*set_log)(fsdp_log_fn fn, void *user, fsdp_log_level level);
    fsdp_status (*set_allocator)(fsdp_alloc_fn alloc, fsdp_free_fn release, void *user);
    fsdp_status (*store_options_init)(fsdp_store_options *options, size_t struct_size);
    fsdp_status (*store_open)(const char *url, const fsdp_store_options *options, fsdp_store **store);
    fsdp_status (*store_from_callbacks)(const fsdp_store_callbacks *callbacks, const fsdp_store_options *options, fsdp_store **store);
    fsdp_status (*store_identity)(fsdp_store *store, int32_t *rank, int32_t *world_size);
    fsdp_status (*store_set)(fsdp_store *store, const char *key, const void *value, size_t bytes);
    fsdp_status (*store_get)(fsdp_store *store, const char *key, void *buffer, size_t capacity, size_t *bytes);
    fsdp_status (*store_add)(fsdp_store *store, const char *key, int64_t amount, int64_t *result);
    fsdp_status (*store_wait)(fsdp_store *store, const char *key);
    fsdp_status (*store_retain)(fsdp_store *store);
    void (*store_release)(fsdp_store *store);
    fsdp_status (*zeros)(const DLDataType *dtype, int32_t ndim, const int64_t *shape, DLManagedTensorVersioned **tensor);
    fsdp_status (*copy)(const DLTensor *input, const DLTensor *output);
    fsdp_status (*shard_extent)(int64_t rows, int32_t rank, int32_t world_size, int64_t *start, int64_t *length);
    fsdp_status (*shard)(const DLTensor *full, int32_t dim, int32_t rank, int32_t world_size, const DLTensor *shard);
    fsdp_status (*tensor_from_legacy)(DLManagedTensor *legacy, DLManagedTensorVersioned **tensor);
    fsdp_status (*tensor_to_legacy)(DLManagedTensorVersioned *tensor, DLManagedTensor **legacy);
    fsdp_status (*tensor_share)(DLManagedTensorVersioned *tensor, DLManagedTensorVersioned **out);
    fsdp_status (*group_options_init)(fsdp_group_options *options, size_t struct_size);
    fsdp_status (*group_create)(fsdp_store *store, const fsdp_group_options *options, fsdp_group **group);
    fsdp_status (*group_split)(fsdp_group *group, int32_t color, int32_t key, const fsdp_group_options *options, fsdp_group **out);
    fsdp_status (*group_query)(fsdp_group *group, fsdp_group_info *info);
    fsdp_status (*group_abort)(fsdp_group *group, const char *reason);
    fsdp_status (*group_retain)(fsdp_group *group);
    void (*group_release)(fsdp_group *group);
    fsdp_status (*work_test)(fsdp_work *work, int32_t *done);
    fsdp_status (*work_wait)(fsdp_work *work, int64_t timeout_ms);
    fsdp_status (*work_on_done)(fsdp_work *work, fsdp_done_fn fn, void *user);
    fsdp_status (*work_keep)(fsdp_work *work, DLManagedTensorVersioned *tensor);
    fsdp_status (*work_error)(fsdp_work *work, fsdp_error_info *info);
    fsdp_status (*work_retain)(fsdp_work *work);
    void (*work_release)(fsdp_work *work);
    fsdp_status (*all_gather)(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_work **work);
    fsdp_status (*all_gather_v)(fsdp_group *group, const DLTensor *input, const DLTensor *output, const int64_t *rows, fsdp_work **work);
    fsdp_status (*reduce_scatter)(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op, fsdp_work **work);
    fsdp_status (*reduce_scatter_v)(fsdp_group *group, const DLTensor *input, const DLTensor *output, const int64_t *rows, fsdp_reduce_op op, fsdp_work **work);
    fsdp_status (*all_reduce)(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op, fsdp_work **work);
    fsdp_status (*reduce)(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_reduce_op op, int32_t root, fsdp_work **work);
    fsdp_status (*broadcast)(fsdp_group *group, const DLTensor *tensor, int32_t root, fsdp_work **work);
    fsdp_status (*gather)(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root, fsdp_work **work);
    fsdp_status (*scatter)(fsdp_group *group, const DLTensor *input, const DLTensor *output, int32_t root, fsdp_work **work);
    fsdp_status (*all_to_all)(fsdp_group *group, const DLTensor *input, const DLTensor *output, fsdp_work **work);
    fsdp_status (*all_to_all_v)(fsdp_group *group, const DLTensor *input, const DLTensor *output, const int64_t *input_rows, const int64_t *output_rows, fsdp_work **work);
    fsdp_status (*send)(fsdp_group *group, const DLTensor *tensor, int32_t dst, int32_t tag, fsdp_work **work);
    fsdp_status (*recv)(fsdp_group *group, const DLTensor *tensor, int32_t src, int32_t tag, fsdp_work **work);
    fsdp_status (*work_source)(fsdp_work *work, int32_t *rank);
    fsdp_status (*barrier)(fsdp_group *group, fsdp_work **work);
    fsdp_status (*coalesced)(fsdp_group *group, const fsdp_collective *operations, int32_t n, fsdp_work **work);
    fsdp_status (*model_options_init)(fsdp_model_options *options, size_t struct_size);
    fsdp_status (*model_create)(fsdp_group *group, const fsdp_model_options *options, fsdp_model **model);
    fsdp_status (*model_retain)(fsdp_model *model);
    void (*model_release)(fsdp_model *model);
    fsdp_status (*unit_create)(fsdp_model *model, const char *name, const fsdp_param *params, int32_t n, const fsdp_unit_options *options, fsdp_unit **unit);
    fsdp_status (*unit_retain)(fsdp_unit *unit);
    void (*unit_release)(fsdp_unit *unit);
    fsdp_status (*unit_param_shard)(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);
    fsdp_status (*unit_param_full)(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);
    fsdp_status (*unit_param_grad)(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **tensor);
    fsdp_status (*unit_pre_forward)(fsdp_unit *unit);
    fsdp_status (*unit_post_forward)(fsdp_unit *unit);
    fsdp_status (*unit_pre_backward)(fsdp_unit *unit);
    fsdp_status (*unit_post_backward)(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **work);
    fsdp_status (*unit_unshard)(fsdp_unit *unit, fsdp_work **work);
    fsdp_status (*unit_reshard)(fsdp_unit *unit);
    fsdp_status (*unit_query_state)(fsdp_unit *unit, fsdp_unit_state *state);
    fsdp_status (*unit_shard_changed)(fsdp_unit *unit);
    fsdp_status (*model_set_gradient_sync)(fsdp_model *model, int32_t sync);
    fsdp_status (*model_finish_backward)(fsdp_model *model);
    fsdp_status (*model_zero_grad)(fsdp_model *model);
    fsdp_status (*model_reset)(fsdp_model *model);
    fsdp_status (*model_memory)(fsdp_model *model, fsdp_memory_info *info);
    fsdp_status (*model_grad_norm)(fsdp_model *model, double p, double *norm);
    fsdp_status (*model_clip_grad_norm)(fsdp_model *model, double max_norm, double p, int32_t error_if_nonfinite, double *norm);
    fsdp_status (*scaler_options_init)(fsdp_scaler_options *options, size_t struct_size);
    fsdp_status (*scaler_create)(fsdp_group *group, const fsdp_scaler_options *options, fsdp_scaler **scaler);
    fsdp_status (*scaler_retain)(fsdp_scaler *scaler);
    void (*scaler_release)(fsdp_scaler *scaler);
    fsdp_status (*scaler_query)(fsdp_scaler *scaler, fsdp_scaler_info *info);
    fsdp_status (*scaler_unscale)(fsdp_scaler *scaler, fsdp_model *model);
    fsdp_status (*scaler_unscale_tensors)(fsdp_scaler *scaler, const DLTensor *const *grads, int32_t n);
    fsdp_status (*scaler_step)(fsdp_scaler *scaler, int32_t *should_step);
    fsdp_status (*scaler_update)(fsdp_scaler *scaler);
    fsdp_status (*scaler_save)(fsdp_scaler *scaler, fsdp_scaler_state *state);
    fsdp_status (*scaler_load)(fsdp_scaler *scaler, const fsdp_scaler_state *state);
    fsdp_status (*mesh_create)(fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names, fsdp_mesh **mesh);
    fsdp_status (*mesh_retain)(fsdp_mesh *mesh);
    void (*mesh_release)(fsdp_mesh *mesh);
    fsdp_status (*mesh_query)(fsdp_mesh *mesh, fsdp_mesh_info *info);
    fsdp_status (*mesh_group)(fsdp_mesh *mesh, const char *name, fsdp_group **group);
    fsdp_status (*model_create_on_mesh)(fsdp_mesh *mesh, const fsdp_model_options *options, fsdp_model **model);
    fsdp_status (*unit_options_init)(fsdp_unit_options *options, size_t struct_size);
    fsdp_status (*unit_param_query)(fsdp_unit *unit, int32_t index, fsdp_param_info *info);
    fsdp_status (*unit_write_back)(fsdp_unit *unit);
    fsdp_status (*unit_gather_param)(fsdp_unit *unit, int32_t index, DLManagedTensorVersioned **full);
    fsdp_status (*unit_load_param)(fsdp_unit *unit, int32_t index, const DLTensor *full);
    fsdp_status (*unit_query)(fsdp_unit *unit, fsdp_unit_info *info);
    fsdp_status (*unit_set_frozen)(fsdp_unit *unit, int32_t index, int32_t frozen);
    fsdp_status (*unit_set_reshard_after_forward)(fsdp_unit *unit, int32_t reshard_after_forward);
    fsdp_status (*unit_set_reshard_after_backward)(fsdp_unit *unit, int32_t reshard);
    fsdp_status (*unit_set_callbacks)(fsdp_unit *unit, fsdp_unit_fn valid, fsdp_unit_fn invalid, void *user);
    fsdp_status (*unit_set_prefetch)(fsdp_unit *unit, fsdp_phase phase, fsdp_unit *const *units, int32_t n);
    fsdp_status (*unit_cast)(fsdp_unit *unit, fsdp_cast_kind kind, const DLTensor *input, DLManagedTensorVersioned **out);
    fsdp_status (*model_set_all_reduce)(fsdp_model *model, int32_t all_reduce);
    fsdp_status (*model_set_gradient_divisor)(fsdp_model *model, double divisor);
    fsdp_status (*model_broadcast)(fsdp_model *model, const DLTensor *const *tensors, int32_t n);
    fsdp_status (*group_set_timeout)(fsdp_group *group, int64_t timeout_ms);
    fsdp_status (*set_thread_timeout)(int64_t timeout_ms);
    fsdp_status (*unit_used)(fsdp_unit *unit, int32_t *used, int32_t n);
    fsdp_status (*unit_set_gradient_sync)(fsdp_unit *unit, int32_t sync);
    fsdp_status (*unit_set_all_reduce)(fsdp_unit *unit, int32_t all_reduce);
    fsdp_status (*unit_set_gradient_divisor)(fsdp_unit *unit, double divisor);
    fsdp_status (*unit_zero_grad)(fsdp_unit *unit, int32_t index);
    fsdp_status (*state_dict_create)(fsdp_state_dict **dict);
    fsdp_status (*state_dict_retain)(fsdp_state_dict *dict);
    void (*state_dict_release)(fsdp_state_dict *dict);
    fsdp_status (*state_dict_add)(fsdp_state_dict *dict, const fsdp_entry *entry, DLManagedTensorVersioned *tensor);
    fsdp_status (*state_dict_set_json)(fsdp_state_dict *dict, const char *name, const char *text);
    fsdp_status (*state_dict_query)(fsdp_state_dict *dict, fsdp_state_dict_info *info);
    fsdp_status (*state_dict_entry)(fsdp_state_dict *dict, int64_t index, fsdp_entry *entry);
    fsdp_status (*state_dict_find)(fsdp_state_dict *dict, const char *name, int64_t *index);
    fsdp_status (*state_dict_tensor)(fsdp_state_dict *dict, int64_t index, DLManagedTensorVersioned **tensor);
    fsdp_status (*state_dict_json)(fsdp_state_dict *dict, int64_t index, const char **name, const char **text);
    fsdp_status (*state_dict_options_init)(fsdp_state_dict_options *options, size_t struct_size);
    fsdp_status (*model_state_dict)(fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **dict);
    fsdp_status (*unit_param_entry)(fsdp_unit *unit, int32_t index, fsdp_entry *entry);
    fsdp_status (*state_dict_gather)(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options, fsdp_state_dict **full);
    fsdp_status (*load_options_init)(fsdp_load_options *options, size_t struct_size);
    fsdp_status (*state_dict_load)(fsdp_state_dict *into, fsdp_state_dict *from, const fsdp_load_options *options);
    fsdp_status (*model_load_state_dict)(fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options);
    fsdp_status (*save_options_init)(fsdp_save_options *options, size_t struct_size);
    fsdp_status (*checkpoint_save)(fsdp_group *group, fsdp_state_dict *dict, const char *path, const fsdp_save_options *options, fsdp_save **save);
    fsdp_status (*save_query)(fsdp_save *save, fsdp_save_info *info);
    fsdp_status (*save_wait)(fsdp_save *save, int64_t timeout_ms);
    fsdp_status (*save_retain)(fsdp_save *save);
    void (*save_release)(fsdp_save *save);
    fsdp_status (*checkpoint_open)(const char *path, fsdp_checkpoint **checkpoint);
    fsdp_status (*checkpoint_retain)(fsdp_checkpoint *checkpoint);
    void (*checkpoint_release)(fsdp_checkpoint *checkpoint);
    fsdp_status (*checkpoint_query)(fsdp_checkpoint *checkpoint, fsdp_checkpoint_info *info);
    fsdp_status (*checkpoint_entry)(fsdp_checkpoint *checkpoint, int64_t index, fsdp_entry *entry);
    fsdp_status (*checkpoint_find)(fsdp_checkpoint *checkpoint, const char *name, int32_t rank, int64_t *index);
    fsdp_status (*checkpoint_json)(fsdp_checkpoint *checkpoint, int64_t index, const char **name, const char **text);
    fsdp_status (*checkpoint_n_parts)(fsdp_checkpoint *checkpoint, int64_t index, int64_t *n);
    fsdp_status (*checkpoint_part_of)(fsdp_checkpoint *checkpoint, int64_t index, int64_t part, fsdp_checkpoint_part *out);
    fsdp_status (*checkpoint_read)(fsdp_checkpoint *checkpoint, int64_t index, const int64_t *offset, const DLTensor *tensor);
    fsdp_status (*checkpoint_load)(fsdp_checkpoint *checkpoint, fsdp_state_dict *into, const fsdp_load_options *options);
    fsdp_status (*checkpoint_verify)(fsdp_checkpoint *checkpoint, fsdp_progress_fn on_progress, void *user);
};
/* generated: end */
/* clang-format on */

#ifdef __cplusplus
}
#endif
#endif /* FSDP_H_ */
