/* Transports: how the ranks of a group exchange a few bytes, move tensors, and learn of each other's end.
 *
 * The group layer turns every collective into one `struct transfer`, which has one of three shapes:
 *
 *   SPREAD  rank s's bytes go to every reader (all-gather, broadcast, gather)
 *   EXCHANGE rank s's part r goes to rank r only (all-to-all, scatter)
 *   REDUCE  rank r's slice of all ranks' inputs is reduced, in rank order, to rank r; optionally followed by a SPREAD
 *   of
 *           the results (reduce-scatter, reduce; all-reduce)
 *
 * over one or more pieces (tensors). The call sequence of one collective, in the group's order:
 *
 *   exchange   publish this rank's header and payload, wait until all ranks have, and read theirs;
 *   the group compares the headers; if they agree:
 *   move       the data movement of the transfer. Returns when this rank's outputs are complete and its inputs may
 *              be overwritten.
 *   sync       (publication only) a second meeting, after which what each rank wrote before is visible to all.
 *
 * Threads: exchange, move, sync and region calls come from one thread at a time (the group's collective lane; region
 * calls from any, the transport serialises them); p2p calls from one thread at a time (its point-to-point lane), which
 * may be another; fail and leave from any. A transport never takes loop bounds or addresses to write to from a peer.
 */
#ifndef FSDP_TRANSPORT_TRANSPORT_H
#define FSDP_TRANSPORT_TRANSPORT_H

#include "tensor/dtype.h"

#include <stdatomic.h>

/* ---- what is moved */

/* How a piece's elements are cut over the ranks. */
struct split {
    int64_t count;     /* elements in all */
    int64_t step;      /* rank r begins at min(r * step, count), unless `at` or `only` says otherwise */
    const int64_t *at; /* N + 1 ascending positions, or NULL */
    int32_t only;      /* >= 0: that rank has all of it, the others nothing. -1: no such rank */
};

static inline int64_t split_begin(const struct split *s, int rank)
{
    if (s->only >= 0) return rank <= s->only ? 0 : s->count;
    if (s->at) return s->at[rank];
    int64_t at;
    if (__builtin_mul_overflow(s->step, (int64_t)rank, &at)) return s->count;
    return at < s->count ? at : s->count;
}

static inline int64_t split_length(const struct split *s, int rank)
{
    return split_begin(s, rank + 1) - split_begin(s, rank);
}

/* One tensor's part in a transfer. Memory is contiguous (the group packs what is not).
 *   SPREAD    in: split_length(out_split, rank) elements; out: all of out_split, NULL on a rank that receives nothing
 *   EXCHANGE  in: in_split, NULL on a rank that sends nothing; out: out_split (part r comes from rank r)
 *   REDUCE    in: in_split; NULL counts as zeros (SUM and AVG); out: split_length(in_split, rank) elements of out_type,
 *             or, with `spread`, all in_split.count elements */
struct piece {
    const char *in;
    char *out;
    enum dtype type;     /* of in, and of what travels */
    enum dtype out_type; /* REDUCE: may be another float type; else equal */
    struct split in_split;
    struct split out_split;
};

enum transfer_shape { TRANSFER_NONE, TRANSFER_SPREAD, TRANSFER_EXCHANGE, TRANSFER_REDUCE };

struct transfer {
    enum transfer_shape shape;
    int32_t reader; /* SPREAD: the only rank that receives (gather); -1: all */
    int32_t spread; /* REDUCE: 1 for all-reduce */
    fsdp_reduce_op op;
    double divisor;     /* REDUCE: the accumulator is divided by this before rounding (AVG: the number of ranks) */
    int32_t accumulate; /* REDUCE: add to out (in out_type) instead of overwriting it */
    int32_t n_pieces;
    struct piece *pieces;
    uint64_t *addresses; /* room for 2 * n_pieces * (ranks + 1), where direct_read and more than one piece; else NULL */
};

/* ---- what is exchanged */

/* What the ranks of a collective must agree on, byte for byte. */
struct call_header {
    int32_t kind; /* fsdp_op_kind */
    int32_t type; /* enum dtype of the first piece, -1: none */
    int32_t op;
    int32_t root; /* -1: none */
    int64_t n_pieces;
    int64_t count; /* elements of all pieces */
    uint64_t hash; /* of everything else: each piece's dtype and counts, row arrays, names, shapes */
    uint64_t sequence;
};

/* "all_reduce", ... */
const char *call_kind_name(fsdp_op_kind kind);

#define TRANSPORT_MAX_RANKS 128

/* Bytes a rank can exchange beside its header. */
#define TRANSPORT_PAYLOAD 2048

/* When an operation gives up, and what messages call it. */
struct deadline {
    int64_t at_ns; /* os_now_ns() time */
    int64_t timeout_ms;
    const char *doing; /* "all_reduce" */
    fsdp_op_kind kind;
    uint64_t sequence;
};

/* ---- point to point */

struct message {
    int32_t sending; /* 1 send, 0 receive */
    int32_t peer;    /* may be FSDP_ANY_RANK when receiving */
    int32_t tag;
    enum dtype type;
    int64_t count;
    size_t bytes;
    char *data;
    /* the transport's: */
    int32_t stage;  /* 0: not begun; a send that is past it keeps its place among its peer's */
    int32_t source; /* the peer; receiving from any: the rank whose message was taken, or -1 */
    int32_t slot;
    size_t done;
};

/* ---- the vtable */

struct region {
    size_t offset, bytes;
    char *shared; /* this process's writable shared mapping */
    int fd;
    int32_t cell;
};

/* Everything a transport needs to know to be made. */
struct transport_setup {
    int32_t rank, size;
    const char *name; /* the group's, for messages */
    int64_t timeout_ms;
    int64_t staging_bytes;
    int32_t direct_read;
    int32_t spin_us;
    /* Every rank gives `bytes` (at most 1024) and gets all ranks', in rank order. */
    fsdp_status (*all_gather)(void *context, const void *in, size_t bytes, void *out);
    void *context;
};

struct transport {
    const struct transport_ops *ops;
    int32_t rank, size;
    uint32_t process;      /* os_process() of the one that made it */
    int32_t direct_read;   /* whether peers' memory can be read */
    int64_t segment_bytes; /* shared memory of the group, but for regions */
    _Atomic uint64_t bytes_moved;
    atomic_int failed;       /* 1 once `failure` is set (-1: being written): every wait ends with it */
    fsdp_error_info failure; /* what ended this rank's use of the group; set once, before `failed` */
};

struct transport_ops {
    const char *name;
    fsdp_status (*create)(const struct transport_setup *setup, struct transport **out);
    void (*destroy)(struct transport *t);

    fsdp_status (*exchange)(struct transport *t, const struct call_header *mine, const void *payload, size_t bytes,
                            const struct transfer *transfer, struct deadline deadline);
    /* Of the exchange just made: valid until the next exchange. */
    const struct call_header *(*header_of)(struct transport *t, int rank);
    const void *(*payload_of)(struct transport *t, int rank);
    fsdp_status (*move)(struct transport *t, const struct transfer *transfer, struct deadline deadline);
    fsdp_status (*sync)(struct transport *t, struct deadline deadline);

    /* Advance one message without blocking: *done = 1 when complete, *moved = 1 when anything was achieved. */
    fsdp_status (*message_step)(struct transport *t, struct message *m, int *done, int *moved);
    /* message_ticket begins a round of steps: receives of one round see the same sends, so that a later one does not
     * take what an earlier one has just missed. Sleep until something may have changed for this rank's messages, at
     * most `most_ns`. `ticket` is from message_ticket, taken before the last round of steps. */
    uint32_t (*message_ticket)(struct transport *t);
    void (*message_nudge)(struct transport *t); /* end a message_wait, from any thread */
    void (*message_wait)(struct transport *t, uint32_t ticket, int64_t most_ns);
    /* What would keep a message that is not complete from ever going on. Fails the group. */
    fsdp_status (*message_check)(struct transport *t, const struct message *m, struct deadline deadline);

    /* Shared memory for full parameters, in two steps: the first rank reserves, all map what it reserved. */
    fsdp_status (*region_reserve)(struct transport *t, size_t bytes, struct region *out);
    fsdp_status (*region_map)(struct transport *t, struct region *region);
    void (*region_release)(struct transport *t, struct region *region);

    /* FSDP_OK, or what ended the group, here or (as far as they have said so) on a peer. Cheap. */
    fsdp_status (*status)(struct transport *t);
    /* Tell the peers that this rank's use of the group ended with the failure now recorded in t->failure. */
    void (*fail)(struct transport *t);
};

/* Record a failure once (the first stays) and tell the peers; from any thread. */
void transport_fail(struct transport *t, const fsdp_error_info *info);
/* FSDP_OK, or the failure recorded here made this thread's error. */
fsdp_status transport_status(struct transport *t);

extern const struct transport_ops transport_self;
extern const struct transport_ops transport_shm;

#endif
