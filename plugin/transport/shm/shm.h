/* The shared-memory transport's own header: layout of the segment, and what its files offer each other.
 *
 *   join.c     making a group                               stage.c    moving through staging, and inline
 *   shm.c      the object, exchange, failure, leaving       direct.c   moving by reading peers' memory
 *   wait.c     the one way to wait                          message.c  point to point
 *   region.c   shared memory for full parameters           pace.c     through the cache or past it
 *
 * The segment is one memfd that all ranks map: header, an area for each rank, a channel for each ordered pair, staging
 * for each rank; regions for full parameters follow at the end. Each progress word has a single writer (bells, sleeper
 * counts and holds are atomic counters). Progress words only grow (mod 2^32), so nothing is ever reset, no lock lies in
 * shared memory, and a rank that is killed leaves nothing half-changed.
 */
#ifndef FSDP_TRANSPORT_SHM_SHM_H
#define FSDP_TRANSPORT_SHM_SHM_H

#include "base/os.h"
#include "transport/transport.h"

#define SHM_MAX_RANKS TRANSPORT_MAX_RANKS
#define SHM_INLINE 4096                     /* bytes of tensor data that travel with the exchange itself */
#define SHM_DEPTH 4                         /* staging slots of each rank: chunks in flight */
#define SHM_MESSAGES 32                     /* sends under way for each ordered pair; one bit each in `matched` */
#define SHM_EAGER 128                       /* bytes of a message that travel in its entry */
#define SHM_REGIONS 4096                    /* regions at one time */
#define SHM_DIRECT_CHUNK ((size_t)64 << 10) /* bytes read at a time from each peer, to be reduced */

/* ---- the segment */

struct word {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t processor; /* where its owner ran when it last published, from 1; a hint */
};

struct slot { /* what a rank publishes in an exchange; two, used in turn */
    struct call_header header;
    uint64_t in_address, out_address; /* direct: of the only piece, or of a table of the pieces' addresses */
    uint64_t longest;                 /* EXCHANGE: this rank's longest outgoing stream */
    _Alignas(64) char payload[TRANSPORT_PAYLOAD];
    _Alignas(64) char data[SHM_INLINE];
};

struct rank_area {
    struct word joined;   /* steps of making the group */
    struct word posted;   /* exchanges published */
    struct word staged;   /* chunks put into staging */
    struct word reduced;  /* chunks (direct: operations) whose reduced result can be read */
    struct word consumed; /* chunks of all peers' staging that this rank no longer needs */
    struct word done;     /* operations of which this rank no longer reads peers' memory; syncs */
    struct word bell;     /* something changed for this rank's messages */
    _Atomic uint32_t left;
    _Atomic uint32_t fault_set;
    fsdp_error_info fault;
    uint64_t probe_address, probe_value;
    uint32_t probe_ok;
    _Alignas(64) struct slot slots[2];
};

enum entry_state { ENTRY_FREE, ENTRY_POSTED, ENTRY_TAKEN, ENTRY_DONE, ENTRY_REFUSED };

struct entry { /* one send, from a source to a destination; the state says whose turn it is */
    _Atomic uint32_t state;
    int32_t tag, type;
    uint32_t order; /* sends are numbered, so that the receiver finds the oldest */
    int64_t count;
    uint64_t address;
    int32_t refused_type; /* what the receiver wanted, when it refused */
    int32_t unused;
    int64_t refused_count;
    _Alignas(16) char eager[SHM_EAGER];
};

struct channel {
    struct entry entries[SHM_MESSAGES];
    struct word filled; /* bytes put into `lane` for the entry that is TAKEN, in steps of half a lane */
    struct word drained;
};

/* Sizes and places are no part of it: each rank works with its own, which no peer can change. */
struct segment {
    _Atomic uint32_t faulted;
    _Atomic uint32_t holders[SHM_REGIONS]; /* ranks that hold a region; 0: free */
};

/* ---- the object */

/* What pace.c has learnt of one kind of operation: nanoseconds of a window of rounds. */
struct pace {
    int64_t ns[2]; /* staging written through the cache, and past it; 0: not tried */
    uint32_t operations;
};

/* One operation's use of it. */
struct pacer {
    struct pace *pace;
    int32_t trying; /* 1, 2: the first and second in a row; 0: not now */
    int32_t past;   /* write past the cache now */
    int64_t since;
};

struct place { /* of a region */
    uint64_t offset, bytes;
};

struct shm {
    struct transport base;
    struct segment *segment;
    size_t mapped;
    struct rank_area *areas;
    struct channel *channels; /* [from * size + to] */
    char *lanes;              /* message staging, same order */
    char *staging;
    size_t slot_bytes; /* of staging */
    size_t lane_bytes; /* of each channel, for staged messages */
    int32_t crowded;   /* more ranks than processors */
    int32_t use_direct;
    pthread_mutex_t places_lock; /* two models of a group may make units at once */
    struct place *places;        /* rank 0's: the regions made so far */
    uint32_t n_places, room_for_places;
    uint64_t regions_at; /* first byte after those */
    int fd;
    int liveness[SHM_MAX_RANKS];
    int liveness_keep;
    pid_t pids[SHM_MAX_RANKS];
    int64_t spin_ns;
    uint64_t probe; /* read by peers when the group is made */
    char name[64];

    /* the collective lane's: counts of the words above that every rank agrees on */
    uint32_t sequence; /* exchanges made */
    uint32_t chunks, reductions, dones;
    const struct slot *seen[SHM_MAX_RANKS]; /* slots of the exchange just made */
    int route;                              /* enum route, of the transfer under way */
    struct pace paces[3];                   /* SPREAD, REDUCE, all-reduce */
    char *scratch;                          /* for direct reductions: a chunk from each rank */

    /* the message lane's */
    uint32_t orders[SHM_MAX_RANKS];   /* sends to each rank so far */
    int32_t receiving[SHM_MAX_RANKS]; /* 1 while an entry of that source is TAKEN through its lane */
    uint32_t matched[SHM_MAX_RANKS];  /* a bit for each entry of that source that a message here waits to take */
    uint32_t round;                   /* of steps: what was posted when a source was first looked at in one, */
    uint32_t looked[SHM_MAX_RANKS];   /* the last round in which it was, */
    uint32_t posted[SHM_MAX_RANKS];   /* is all that receives of this round may take; a bit for each entry */
};

enum route { ROUTE_NONE, ROUTE_INLINE, ROUTE_STAGE, ROUTE_DIRECT };

/* ---- join.c */

/* Everything up to the first exchange; on failure what it has got is shm_destroy's to give back. */
fsdp_status shm_join(struct shm *t, const struct transport_setup *setup);

/* ---- wait.c */

/* Publish a new value of a word of this rank, and wake whoever sleeps on it. */
void shm_publish(struct word *word, uint32_t value);
void shm_wake(struct word *word);

/* Wait until *word has reached `target`; `rank` owns the word. Fails with the group: on a recorded failure, a peer's
 * fault, the end of any rank's process, the owner's leaving, or the deadline, which are recorded and told to the
 * peers. */
fsdp_status shm_wait(struct shm *t, struct word *word, uint32_t target, int rank, struct deadline deadline);
/* What else would end a wait, looked at once. `rank` (-1: none) is the one waited for, until its `word` (or NULL) has
 * reached target. */
fsdp_status shm_check(struct shm *t, int rank, struct word *word, uint32_t target, struct deadline deadline);
/* The vtable's status: a failure recorded here, or a fault that a peer published. */
fsdp_status shm_status(struct transport *base);
/* The owner of a word has released the group, and so will never go on. Fails the group. */
fsdp_status shm_lost_to_release(struct shm *t, int rank, struct deadline deadline);
/* A peer's memory can't be read: it may be about to end, which takes a moment to show. */
fsdp_status shm_check_unreadable(struct shm *t, struct deadline deadline);
int shm_reached(struct word *word, uint32_t target);
/* Record err's current failure as the group's and return its status. */
fsdp_status shm_fail_now(struct shm *t, fsdp_status status);

/* ---- stage.c, direct.c */

enum route shm_route(struct shm *t, const struct transfer *transfer);
void shm_inline_fill(struct shm *t, struct slot *slot, const struct transfer *transfer);
void shm_inline_move(struct shm *t, const struct transfer *transfer);
/* Before the exchange: this rank's longest stream, and its first chunk put into staging. */
size_t shm_stage_longest(const struct shm *t, const struct transfer *transfer);
fsdp_status shm_stage_first(struct shm *t, const struct transfer *transfer, struct deadline deadline);
fsdp_status shm_stage_move(struct shm *t, const struct transfer *transfer, struct deadline deadline);
void shm_direct_offer(struct slot *slot, const struct transfer *transfer);
fsdp_status shm_direct_move(struct shm *t, const struct transfer *transfer, struct deadline deadline);

/* What the routes share. Reduce a span of all ranks' inputs to `out`; where in this rank's output a reduced span goes
 * (its slice, or its place in the whole of an all-reduce); copy this rank's own part of SPREAD and EXCHANGE from in to
 * out; whether this rank receives anything of a SPREAD. */
struct span;
void shm_reduce_span(const struct shm *t, const struct transfer *transfer, const struct span *span, char *out,
                     const void *const *sources, int stream);
char *shm_reduced_out(const struct transfer *transfer, const struct span *span);
void shm_copy_own(const struct shm *t, const struct transfer *transfer);
int shm_receives(const struct shm *t, const struct transfer *transfer);

/* ---- pace.c */

/* `large`: outputs of this operation are written past the cache anyway. */
void shm_pace_begin(struct pacer *pacer, struct pace *pace, uint32_t rounds, int large);
void shm_pace_round(struct pacer *pacer, uint32_t round);

/* ---- message.c, region.c: the vtable's functions */

fsdp_status shm_message_step(struct transport *base, struct message *m, int *done, int *moved);
uint32_t shm_message_ticket(struct transport *base);
void shm_message_nudge(struct transport *base);
void shm_message_wait(struct transport *base, uint32_t ticket, int64_t most_ns);
fsdp_status shm_message_check(struct transport *base, const struct message *m, struct deadline deadline);
fsdp_status shm_region_reserve(struct transport *base, size_t bytes, struct region *out);
fsdp_status shm_region_map(struct transport *base, struct region *region);
void shm_region_release(struct transport *base, struct region *region);

#define WORD(t, rank, member) (&(t)->areas[rank].member)

#endif
