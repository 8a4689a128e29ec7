/* Process groups: what the rest of the library sees of them.
 *
 *   operation.c  from public arguments to a checked operation      call.c   headers: what must match, and how a
 *   work.c       handles, completion, waiting                               mismatch is told
 *   lane.c       order, progress threads, running                  group.c  objects: create, split, abort, release
 *   message.c    point to point                             bootstrap.c  meeting to make one
 *   pool.c       buffers for packed copies
 *
 * A work is a list of operations with one handle. Each group has two lanes: collectives, run strictly in order of
 * submission, and point to point, where all advance together. A lane is advanced by one thread at a time, which
 * holds its `busy` mark: the caller of a synchronous call, a waiting thread, or the lane's progress thread, which is
 * started by the first asynchronous call. No lock is held while an operation, a callback or a deleter runs.
 */
#ifndef FSDP_GROUP_GROUP_H
#define FSDP_GROUP_GROUP_H

#include "base/hash.h"
#include "base/os.h"
#include "base/ref.h"
#include "store/store.h"
#include "tensor/tensor.h"
#include "transport/transport.h"

#include <pthread.h>

#define GROUP_NAME 64
#define GROUP_MAX_RANKS TRANSPORT_MAX_RANKS
#define GROUP_TIMEOUT_MOST_MS 1000000000000 /* 30 years: as nanoseconds it still fits */
#define CALL_LABEL 64

/* ---- operations */

struct op;

/* What runs once the ranks agree; NULL: the transfer's move. */
typedef fsdp_status (*op_body)(fsdp_group *group, struct op *op, struct deadline deadline);

/* A tensor that can't travel as it lies (strides, dtype), and the contiguous copy of the same shape that does. */
enum pack_way { PACK_IN = 1, PACK_OUT = 2, PACK_BOTH = 3 }; /* filled before the operation, written back after it */
struct packed {
    struct packed *next;
    struct tensor tensor, copy;
    enum pack_way way;
    size_t bytes; /* of the group's pool, for the copy; 0: it is another's */
};

struct op {
    fsdp_op_kind kind;
    struct call_header header;
    struct transfer transfer;
    const void *payload;
    size_t payload_bytes;
    op_body body;
    void *user;           /* the body's */
    void *target;         /* and where it writes */
    int32_t check_counts; /* uneven all-to-all: the payload says what this rank gives each, then what it expects */
    struct packed *packed;
};

/* One operation of point to point. */
struct transit {
    struct message message;
    struct packed *packed;
    int32_t done;
};

/* ---- works */

struct lane;

/* Something to let go of once a work is complete. */
struct keep {
    struct keep *next;
    void (*release)(void *owner);
    void *owner;
};

struct fsdp_work {
    struct ref ref;
    fsdp_group *group; /* holds its memory, see group_hold */
    struct lane *lane;
    struct fsdp_work *next;
    int32_t n_ops;
    struct op *ops;
    int32_t n_transits;
    struct transit *transits;
    int64_t timeout_ms;       /* fixed when it is made: the thread's, else the group's */
    int32_t own_timeout;      /* it is the thread's */
    int64_t end_ns;           /* when its time is up; 0: timeout_ms after each operation's start on the data path */
    struct deadline deadline; /* of messages */
    void *blocks;             /* chain of memory that lives as long as the work: arrays, pieces */

    /* Written by the completing thread before `done`, or under the lane's lock. */
    fsdp_error_info failure;
    atomic_int done;
    int32_t completing;
    fsdp_done_fn on_done;
    void *on_done_user;
    struct keep *keeps;
};

/* The timeout of works that this thread makes from here on, instead of their groups'; 0: their groups'. */
fsdp_status work_set_thread_timeout(int64_t timeout_ms);
fsdp_status work_create(fsdp_group *group, struct lane *lane, int32_t n_ops, int32_t n_transits, fsdp_work **out);
/* Of an operation of the work that begins now. */
struct deadline work_deadline(const fsdp_work *work, fsdp_op_kind kind, uint64_t sequence);
/* Zeroed memory that is freed with the work. */
void *work_memory(fsdp_work *work, size_t bytes);
/* Room for the transfer's addresses, where its transport may want it. After its pieces are all there. */
fsdp_status work_addresses(fsdp_work *work, struct transfer *transfer);
/* Where `tensor`'s elements are to be found by (and after) the operation: in place when it is contiguous and of `type`,
 * else in a copy that packed_fill and packed_store keep in step with it. */
fsdp_status work_pack(fsdp_work *work, struct packed **list, const struct tensor *tensor, enum dtype type,
                      enum pack_way way, char **data);
/* Memory for the work's copies, and a copy of a tensor in it that is made now: *t becomes the copy. */
fsdp_status work_copy(fsdp_work *work, struct packed **list, struct tensor *t);
void packed_fill(const struct packed *list);
void packed_store(const struct packed *list);
/* Call release(owner) once the work is complete; if this fails, nothing is called. */
fsdp_status work_keep(fsdp_work *work, void (*release)(void *owner), void *owner);
fsdp_status work_on_done(fsdp_work *work, fsdp_done_fn fn, void *user);
fsdp_status work_wait(fsdp_work *work, int64_t timeout_ms);
fsdp_status work_status(fsdp_work *work);                /* of a complete one */
fsdp_status work_source(fsdp_work *work, int32_t *rank); /* of a complete one of a single recv */
void work_complete(fsdp_work *work, fsdp_status status); /* with this thread's error record when it failed */
void work_release(fsdp_work *work);
int work_is(const fsdp_work *work);

/* ---- lanes */

struct lane {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fsdp_work *head, *tail;
    int32_t busy; /* a thread advances it: */
    pthread_t advancing;
    int32_t waiting; /* threads that wait for `changed` */
    int32_t stopping;
    int32_t has_thread;
    pthread_t thread;
    fsdp_group *group;
    int64_t checked_ns; /* messages: when those that wait were last looked after; the advancing thread's */
    void (*nudge)(struct lane *lane); /* wake the thread that advances it, which sleeps on something else; or NULL */
    /* Advance: for collectives, run the head to its end; for messages, step all until `until` is complete (NULL: until
     * none is left). Called with busy set and without the lock. */
    void (*advance)(struct lane *lane, fsdp_work *until);
};

void lane_init(struct lane *lane, fsdp_group *group, void (*advance)(struct lane *, fsdp_work *),
               void (*nudge)(struct lane *));
void lane_destroy(struct lane *lane); /* after lane_stop */
/* Submit a work. With `handle` NULL it is run to its end and released, and its status returned; otherwise *handle gets
 * the reference. On failure to submit the work is released and nothing was done.
 * A synchronous work with a timeout of its own that passes while earlier ones run ends the group. */
fsdp_status lane_submit(fsdp_work *work, fsdp_work **handle);
/* Wait for `work`; helps when timeout_ms < 0. 1 when complete. Inside a callback of the same lane: 0 at once, if it is
 * not. */
int lane_wait(fsdp_work *work, int64_t timeout_ms);
/* Let everything queued come to its end, and end the progress thread. Not on that thread. */
void lane_stop(struct lane *lane);
int lane_is_advanced_here(struct lane *lane); /* by the calling thread: it is in a callback or deleter */

void collectives_advance(struct lane *lane, fsdp_work *until);
void messages_advance(struct lane *lane, fsdp_work *until);
void messages_nudge(struct lane *lane);

/* ---- pool: buffers for packed copies */

#define POOL_BUFFERS 16

struct pool {
    pthread_mutex_t lock;
    void *at[POOL_BUFFERS]; /* NULL: none */
    size_t bytes[POOL_BUFFERS];
    unsigned next;
    size_t out, most, kept; /* bytes: with works now, and at most so far; and here */
};

void pool_init(struct pool *pool);
void pool_destroy(struct pool *pool);
/* Page-rounded bytes of any content. */
fsdp_status pool_take(struct pool *pool, size_t bytes, void **out);
void pool_give(struct pool *pool, void *at, size_t bytes);

/* ---- groups */

struct fsdp_group {
    struct ref ref;   /* users */
    atomic_int holds; /* the memory: users as one, and each work */
    int32_t rank, size;
    char name[GROUP_NAME];
    int32_t world[GROUP_MAX_RANKS];    /* the ranks' numbers in the group that all splits began with, */
    char origin[GROUP_NAME];           /* and its name; "" in that group itself */
    _Atomic int64_t timeout_ms;        /* of works that are made from here on */
    struct fsdp_group_options options; /* strings not kept, nor the timeout */
    fsdp_store *store;
    struct transport *transport;
    struct lane collectives, messages;
    struct pool pool;
    uint64_t sequence;           /* of the collective lane */
    fsdp_group *parent;          /* that it ends with, see group_adopt: its memory is held. Or NULL */
    fsdp_group *children, *next; /* not held: a child takes itself out; under the parent's `family` */
    int32_t told;                /* of the parent's abort */
    pthread_mutex_t family;
    _Atomic uint64_t operations;
    _Atomic uint64_t splits;
};

fsdp_status group_create(fsdp_store *store, const fsdp_group_options *options, fsdp_group **out);
fsdp_status group_split(fsdp_group *group, int32_t color, int32_t key, const fsdp_group_options *options,
                        fsdp_group **out);
fsdp_status group_set_timeout(fsdp_group *group, int64_t timeout_ms);
void group_query(fsdp_group *group, fsdp_group_info *info);
void group_abort(fsdp_group *group, const char *reason);
/* Aborting the parent aborts the child too: for groups that the library makes for itself, or as part of something. */
void group_adopt(fsdp_group *parent, fsdp_group *child);
void group_retain(fsdp_group *group);
void group_release(fsdp_group *group);
void group_hold(fsdp_group *group);
void group_unhold(fsdp_group *group);
int group_is(const fsdp_group *group);
/* FORKED in a child, the recorded failure of a failed group. */
fsdp_status group_usable(fsdp_group *group);
/* "rank 1", in a part of a split group "rank 1 (rank 5 of 'group0')". */
#define GROUP_RANK_TEXT (GROUP_NAME + 48)
const char *group_rank_text(const fsdp_group *group, int rank, char text[GROUP_RANK_TEXT]);

/* Build and submit what the public call asks for. */
fsdp_status group_collective(fsdp_group *group, const fsdp_collective *calls, int32_t n, fsdp_work **handle);
fsdp_status group_barrier(fsdp_group *group, fsdp_work **handle);
/* Every rank gives `bytes` (at most TRANSPORT_PAYLOAD) and gets all ranks'. A call of its own kind and hash;
 * synchronous, in order with the collectives. */
fsdp_status group_exchange(fsdp_group *group, fsdp_op_kind kind, uint64_t hash, const void *in, size_t bytes,
                           void *out);
/* For exchanges that must not fail for want of memory while the peers wait: take what one needs beforehand. *prepared
 * is used up (set to NULL); what is left of prepared ones is let go of with work_release. */
fsdp_status group_prepare(fsdp_group *group, fsdp_work **prepared);
fsdp_status group_exchange_prepared(fsdp_group *group, fsdp_work **prepared, fsdp_op_kind kind, uint64_t hash,
                                    const void *in, size_t bytes, void *out);
/* Begin operation `index` of a work: what all ranks must agree on, and what each tells the others. */
struct op *op_init(fsdp_work *work, int32_t index, fsdp_op_kind kind, uint64_t hash, const void *payload, size_t bytes);
/* Run one collective of the work: exchange, compare, move. */
fsdp_status op_run(fsdp_work *work, struct op *op);

/* ---- calls */

/* FSDP_OK when all ranks' headers of the exchange just made are equal; else MISMATCH naming two ranks and both
 * calls. */
fsdp_status call_compare(fsdp_group *group);

#endif
