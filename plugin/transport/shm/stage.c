/* Moving tensors through staging memory, and inline with the exchange.
 *
 * Staging. Each rank owns SHM_DEPTH slots, which it fills with one chunk after another; a slot holds one lane for all
 * readers (SPREAD) or one for each reader (EXCHANGE, REDUCE; all-reduce has one more for the result). Chunks are
 * numbered through the group's life, the same on all ranks: an operation of R rounds raises every rank's `staged` and
 * `consumed` by R, whether it has something to offer or not. A slot is filled again once every peer has consumed the
 * chunk that lay in it. Chunks are small enough that what one rank writes is still in the cache when its peers read it:
 * data crosses main memory once in, once out.
 *
 * The first chunk is staged before the exchange, so that meeting and first chunk cost one wait together. If the call
 * turns out not to match, it is simply not counted.
 *
 * Inline. Where a rank's whole stream fits a slot's data, it is written there before the exchange, and read from the
 * peers' after it. Slots alternate, and nobody publishes exchange n+2 before all have read n, so no second wait.
 */
#include "transport/shm/shm.h"
#include "transport/stream.h"

#include "tensor/kernel.h"

#include <string.h>

/* SPREADs in which a rank offers so many bytes are read directly, where the kernel allows it. */
#define DIRECT_FROM ((size_t)32 << 10)
#define DIRECT_TO ((size_t)1 << 20)

#define BLOCK ((size_t)8 << 10) /* of what is read once and written twice past the cache */

/* ---- geometry */

static enum stream_side side_of(const struct transfer *transfer)
{
    return transfer->shape == TRANSFER_SPREAD ? STREAM_OUT : STREAM_IN;
}

static size_t lane_bytes(const struct shm *t, const struct transfer *transfer)
{
    size_t slot = t->slot_bytes;
    size_t lanes = 1;
    if (transfer->shape != TRANSFER_SPREAD) lanes = (size_t)(t->base.size - 1) + (transfer->spread ? 1 : 0);
    return slot / lanes & ~(size_t)(STREAM_ALIGN - 1);
}

static char *slot_at(const struct shm *t, int rank, uint32_t chunk)
{
    size_t slot = t->slot_bytes;
    return t->staging + ((size_t)rank * SHM_DEPTH + chunk % SHM_DEPTH) * slot;
}

/* The lane of `from`'s slot that `to` reads. */
static char *lane_at(const struct shm *t, const struct transfer *transfer, int from, int to, uint32_t chunk)
{
    int lane = transfer->shape == TRANSFER_SPREAD ? 0 : (to - from - 1 + t->base.size) % t->base.size;
    return slot_at(t, from, chunk) + (size_t)lane * lane_bytes(t, transfer);
}

static char *result_at(const struct shm *t, const struct transfer *transfer, int rank, uint32_t chunk)
{
    return slot_at(t, rank, chunk) + (size_t)(t->base.size - 1) * lane_bytes(t, transfer);
}

/* The longest stream between any two ranks. For EXCHANGE each rank knows its own; the exchange gives the others'. */
size_t shm_stage_longest(const struct shm *t, const struct transfer *transfer)
{
    size_t longest = 0;
    for (int r = 0; r < t->base.size; r++) {
        size_t bytes = stream_bytes(transfer, side_of(transfer), r);
        if (transfer->shape == TRANSFER_EXCHANGE && r == t->base.rank) bytes = 0;
        if (bytes > longest) longest = bytes;
    }
    return longest;
}

static uint32_t rounds_of(const struct shm *t, const struct transfer *transfer)
{
    size_t longest = shm_stage_longest(t, transfer), lane = lane_bytes(t, transfer);
    if (transfer->shape == TRANSFER_EXCHANGE) /* bounds waits only; memory is addressed by this rank's own splits */
        for (int r = 0; r < t->base.size; r++)
            if (t->seen[r]->longest > longest) longest = t->seen[r]->longest;
    return (uint32_t)((longest + lane - 1) / lane);
}

static size_t output_bytes(const struct transfer *transfer)
{
    size_t sum = 0;
    for (int32_t i = 0; i < transfer->n_pieces; i++) {
        const struct piece *p = &transfer->pieces[i];
        const struct split *s = transfer->shape == TRANSFER_REDUCE ? &p->in_split : &p->out_split;
        sum += (size_t)s->count * dtype_size(p->out_type);
    }
    return sum;
}

enum route shm_route(struct shm *t, const struct transfer *transfer)
{
    if (!transfer || transfer->shape == TRANSFER_NONE || transfer->n_pieces == 0) return ROUTE_NONE;

    /* Everything in this decision is the same on all ranks. For EXCHANGE lengths may not be (a rank knows only its own
     * rows), but its total over all destinations travels in the header's hash only when even: so uneven ones stage. */
    size_t offered = 0;
    int uneven = 0;
    for (int r = 0; r < t->base.size; r++) {
        size_t bytes = stream_bytes(transfer, side_of(transfer), r);
        if (transfer->shape == TRANSFER_SPREAD)
            offered = bytes > offered ? bytes : offered;
        else
            offered += bytes;
    }
    for (int32_t i = 0; i < transfer->n_pieces; i++) uneven |= transfer->pieces[i].in_split.at != NULL;
    if (transfer->shape == TRANSFER_EXCHANGE && uneven) return ROUTE_STAGE;
    if (offered <= SHM_INLINE) return ROUTE_INLINE;
    /* Measured: one copy wins where the bytes are too few to hide the meetings of several chunks, and no reduction
     * waits for them. */
    int middle = transfer->shape == TRANSFER_SPREAD && offered >= DIRECT_FROM && offered <= DIRECT_TO;
    return t->use_direct || (t->base.direct_read && middle) ? ROUTE_DIRECT : ROUTE_STAGE;
}

/* ---- what happens to the spans, shared by the routes */

void shm_reduce_span(const struct shm *t, const struct transfer *transfer, const struct span *span, char *out,
                     const void *const *sources, int stream)
{
    const struct piece *p = &transfer->pieces[span->piece];
    struct kernel_reduce how = {.op = transfer->op,
                                .src_type = p->type,
                                .dst_type = p->out_type,
                                .n_src = t->base.size,
                                .scale = 1,
                                .divisor = transfer->divisor,
                                .accumulate = transfer->accumulate,
                                .stream = stream};
    kernel_reduce(&how, out, sources, span->bytes / dtype_size(p->type));
}

char *shm_reduced_out(const struct transfer *transfer, const struct span *span)
{
    const struct piece *p = &transfer->pieces[span->piece];
    size_t offset = (transfer->spread ? span->begin : span->offset) / dtype_size(p->type);
    return p->out + offset * dtype_size(p->out_type);
}

void shm_copy_own(const struct shm *t, const struct transfer *transfer)
{
    int me = t->base.rank;
    for (int32_t i = 0; i < transfer->n_pieces; i++) {
        const struct piece *p = &transfer->pieces[i];
        size_t size = dtype_size(p->type), bytes = (size_t)split_length(&p->out_split, me) * size;
        const char *in = p->in;
        if (in && transfer->shape == TRANSFER_EXCHANGE) in += (size_t)split_begin(&p->in_split, me) * size;
        if (!p->out || !bytes || !in) continue;
        char *out = p->out + (size_t)split_begin(&p->out_split, me) * size;
        if (out != in) kernel_copy(out, in, bytes, bytes >= KERNEL_STREAM_BYTES);
    }
}

int shm_receives(const struct shm *t, const struct transfer *transfer)
{
    return transfer->reader < 0 || transfer->reader == t->base.rank;
}

/* ---- inline */

void shm_inline_fill(struct shm *t, struct slot *slot, const struct transfer *transfer)
{
    int me = t->base.rank;
    size_t at = 0;
    for (int r = 0; r < t->base.size; r++) {
        if (transfer->shape == TRANSFER_SPREAD && r != me) continue;
        struct stream stream;
        struct span span;
        size_t used = 0;
        stream_begin(&stream, transfer, side_of(transfer), r);
        while (stream_next(&stream, SHM_INLINE, &used, &span)) {
            const struct piece *p = &transfer->pieces[span.piece];
            size_t from = transfer->shape == TRANSFER_SPREAD ? span.offset : span.begin;
            if (p->in)
                memcpy(slot->data + at + span.at, p->in + from, span.bytes);
            else
                memset(slot->data + at + span.at, 0, span.bytes);
        }
        at += used;
    }
}

static void inline_spread(struct shm *t, const struct transfer *transfer)
{
    shm_copy_own(t, transfer);
    for (int s = 0; s < t->base.size && shm_receives(t, transfer); s++) {
        if (s == t->base.rank) continue;
        struct stream stream;
        struct span span;
        size_t used = 0;
        stream_begin(&stream, transfer, STREAM_OUT, s);
        while (stream_next(&stream, SHM_INLINE, &used, &span))
            memcpy(transfer->pieces[span.piece].out + span.begin, t->seen[s]->data + span.at, span.bytes);
    }
}

/* Part r of a slot's data begins after the parts of the ranks before it. */
static size_t inline_offset(const struct transfer *transfer, int part)
{
    size_t at = 0;
    for (int r = 0; r < part; r++) at += stream_bytes(transfer, STREAM_IN, r);
    return at;
}

static void inline_exchange(struct shm *t, const struct transfer *transfer)
{
    shm_copy_own(t, transfer);
    int me = t->base.rank;
    for (int s = 0; s < t->base.size; s++) {
        if (s == me) continue;
        struct stream stream;
        struct span span;
        /* An even split: the parts of s's slot lie as ours do. What a rank does not send (scatter) has no span here
         * either, since out_split gives it no length. */
        size_t used = 0, at = inline_offset(transfer, me);
        stream_begin(&stream, transfer, STREAM_OUT, s);
        while (stream_next(&stream, SHM_INLINE, &used, &span))
            memcpy(transfer->pieces[span.piece].out + span.begin, t->seen[s]->data + at + span.at, span.bytes);
    }
}

static void inline_reduce(struct shm *t, const struct transfer *transfer)
{
    const void *sources[SHM_MAX_RANKS];
    size_t at = 0;
    for (int part = 0; part < t->base.size; part++) {
        struct stream stream;
        struct span span;
        size_t used = 0;
        stream_begin(&stream, transfer, STREAM_IN, part);
        while (stream_next(&stream, SHM_INLINE, &used, &span)) {
            if (part != t->base.rank && !transfer->spread) continue;
            for (int s = 0; s < t->base.size; s++) sources[s] = t->seen[s]->data + at + span.at;
            shm_reduce_span(t, transfer, &span, shm_reduced_out(transfer, &span), sources, 0);
        }
        at += used;
    }
}

void shm_inline_move(struct shm *t, const struct transfer *transfer)
{
    switch (transfer->shape) {
    case TRANSFER_SPREAD:
        inline_spread(t, transfer);
        break;
    case TRANSFER_EXCHANGE:
        inline_exchange(t, transfer);
        break;
    case TRANSFER_REDUCE:
        inline_reduce(t, transfer);
        break;
    case TRANSFER_NONE:
        break;
    }
}

/* ---- staging */

/* One operation's walk over its rounds. */
struct stage {
    struct shm *t;
    const struct transfer *transfer;
    struct deadline deadline;
    size_t lane;
    uint32_t base; /* number of the operation's first chunk */
    int stream_store;
    struct pacer pacer;
    struct stream out[SHM_MAX_RANKS]; /* to stage for each reader (SPREAD: [me] only) */
    struct stream in[SHM_MAX_RANKS];  /* to take from each source (REDUCE: results, in all-reduce) */
    struct stream own;                /* REDUCE: this rank's slice */
};

static void stage_begin(struct stage *s, struct shm *t, const struct transfer *transfer, struct deadline deadline)
{
    s->t = t;
    s->transfer = transfer;
    s->deadline = deadline;
    s->lane = lane_bytes(t, transfer);
    s->base = t->chunks;
    s->pacer = (struct pacer){0};
    s->stream_store = output_bytes(transfer) >= KERNEL_STREAM_BYTES;
    enum stream_side side = side_of(transfer);
    for (int r = 0; r < t->base.size; r++) {
        stream_begin(&s->out[r], transfer, side, r);
        stream_begin(&s->in[r], transfer, transfer->shape == TRANSFER_REDUCE ? STREAM_IN : STREAM_OUT, r);
    }
    stream_begin(&s->own, transfer, side, t->base.rank);
}

/* Wait until every peer has consumed what the slot for `chunk` held before. */
static fsdp_status stage_credit(struct stage *s, uint32_t chunk)
{
    struct shm *t = s->t;
    for (int r = 0; r < t->base.size; r++)
        if (r != t->base.rank) TRY(shm_wait(t, WORD(t, r, consumed), chunk + 1 - SHM_DEPTH, r, s->deadline));
    return FSDP_OK;
}

static void copy_twice(const struct stage *s, char *own, char *lane, const char *from, size_t bytes)
{
    if (!s->stream_store) {
        kernel_copy(lane, from, bytes, 0);
        kernel_copy(own, lane, bytes, 0);
    } else if (!s->pacer.past) {
        kernel_copy2(own, lane, from, bytes);
    } else {
        for (size_t at = 0; at < bytes; at += BLOCK) {
            size_t now = bytes - at < BLOCK ? bytes - at : BLOCK;
            kernel_copy(lane + at, from + at, now, 1);
            kernel_copy(own + at, from + at, now, 1);
        }
    }
}

/* Fill a lane with the next chunk of a stream. A SPREAD's own part of the output is written along the way, from the one
 * read of the input; not so for the first chunk (`write_own` 0), which is staged before the call is known to match. */
static void stage_lane(struct stage *s, int reader, uint32_t chunk, int write_own)
{
    struct shm *t = s->t;
    const struct transfer *transfer = s->transfer;
    char *lane = lane_at(t, transfer, t->base.rank, reader, chunk);
    int spread = transfer->shape == TRANSFER_SPREAD;
    struct span span;
    size_t used = 0, moved = 0;
    while (stream_next(&s->out[reader], s->lane, &used, &span)) {
        const struct piece *p = &transfer->pieces[span.piece];
        const char *from = p->in ? p->in + (spread ? span.offset : span.begin) : NULL;
        char *own = write_own && spread && shm_receives(t, transfer) && p->out ? p->out + span.begin : NULL;
        if (own == from) own = NULL;
        if (!from && transfer->shape != TRANSFER_REDUCE) continue; /* sends nothing; nobody reads it */
        moved += span.bytes;
        if (!from)
            memset(lane + span.at, 0, span.bytes);
        else if (!own)
            kernel_copy(lane + span.at, from, span.bytes, s->pacer.past);
        else
            copy_twice(s, own, lane + span.at, from, span.bytes);
    }
    atomic_fetch_add_explicit(&t->base.bytes_moved, moved, memory_order_relaxed);
}

/* Whether any peer reads what this rank would stage in a SPREAD. */
static int stage_is_read(const struct stage *s)
{
    return s->transfer->reader < 0 || s->transfer->reader != s->t->base.rank;
}

static fsdp_status stage_fill(struct stage *s, uint32_t chunk, int write_own)
{
    struct shm *t = s->t;
    int me = t->base.rank;
    TRY(stage_credit(s, chunk));
    if (s->transfer->shape == TRANSFER_SPREAD) {
        if (stage_is_read(s)) stage_lane(s, me, chunk, write_own);
        return FSDP_OK;
    }
    for (int step = 1; step < t->base.size; step++) stage_lane(s, (me + step) % t->base.size, chunk, write_own);
    return FSDP_OK;
}

static fsdp_status stage_take(struct stage *s, uint32_t chunk)
{
    struct shm *t = s->t;
    int me = t->base.rank, size = t->base.size;
    for (int step = 1; step < size && shm_receives(t, s->transfer); step++) {
        int from = (me + step) % size;
        TRY(shm_wait(t, WORD(t, from, staged), chunk + 1, from, s->deadline));
        const char *lane = lane_at(t, s->transfer, from, me, chunk);
        struct span span;
        size_t used = 0, moved = 0;
        for (; stream_next(&s->in[from], s->lane, &used, &span); moved += span.bytes)
            kernel_copy(s->transfer->pieces[span.piece].out + span.begin, lane + span.at, span.bytes, s->stream_store);
        atomic_fetch_add_explicit(&t->base.bytes_moved, moved, memory_order_relaxed);
    }
    return FSDP_OK;
}

/* A span's result both to this rank's output and to where the peers read it. */
static void reduce_twice(const struct stage *s, const struct span *span, char *out, char *result,
                         const void *const *sources)
{
    const struct shm *t = s->t;
    if (!s->pacer.past) {
        shm_reduce_span(t, s->transfer, span, result, sources, 0);
        kernel_copy(out, result, span->bytes, s->stream_store);
        return;
    }
    _Alignas(64) char hot[BLOCK];
    const void *some[SHM_MAX_RANKS];
    for (size_t at = 0; at < span->bytes; at += BLOCK) {
        struct span part = *span;
        part.bytes = span->bytes - at < BLOCK ? span->bytes - at : BLOCK;
        for (int r = 0; r < t->base.size; r++) some[r] = sources[r] ? (const char *)sources[r] + at : NULL;
        shm_reduce_span(t, s->transfer, &part, hot, some, 0);
        kernel_copy(result + at, hot, part.bytes, 1);
        kernel_copy(out + at, hot, part.bytes, 1);
    }
}

static fsdp_status stage_reduce(struct stage *s, uint32_t chunk)
{
    struct shm *t = s->t;
    const struct transfer *transfer = s->transfer;
    int me = t->base.rank, size = t->base.size;
    const char *lanes[SHM_MAX_RANKS];
    const void *sources[SHM_MAX_RANKS];
    for (int r = 0; r < size; r++) {
        if (r == me) continue;
        TRY(shm_wait(t, WORD(t, r, staged), chunk + 1, r, s->deadline));
        lanes[r] = lane_at(t, transfer, r, me, chunk);
    }
    char *result = transfer->spread ? result_at(t, transfer, me, chunk) : NULL;
    struct span span;
    size_t used = 0, moved = 0;
    while (stream_next(&s->own, s->lane, &used, &span)) {
        const struct piece *p = &transfer->pieces[span.piece];
        moved += span.bytes * (size_t)(result ? size : size - 1); /* the peers' parts read, a result written */
        for (int r = 0; r < size; r++) sources[r] = r == me ? (p->in ? p->in + span.begin : NULL) : lanes[r] + span.at;
        char *out = shm_reduced_out(transfer, &span);
        if (!result) {
            shm_reduce_span(t, transfer, &span, out, sources, s->stream_store);
        } else {
            reduce_twice(s, &span, out, result + span.at, sources);
        }
    }
    atomic_fetch_add_explicit(&t->base.bytes_moved, moved, memory_order_relaxed);
    return FSDP_OK;
}

static fsdp_status stage_results(struct stage *s, uint32_t chunk, uint32_t reduced)
{
    struct shm *t = s->t;
    int me = t->base.rank, size = t->base.size;
    for (int step = 1; step < size; step++) {
        int from = (me + step) % size;
        TRY(shm_wait(t, WORD(t, from, reduced), reduced, from, s->deadline));
        const char *lane = result_at(t, s->transfer, from, chunk);
        struct span span;
        size_t used = 0, moved = 0;
        for (; stream_next(&s->in[from], s->lane, &used, &span); moved += span.bytes)
            kernel_copy(s->transfer->pieces[span.piece].out + span.begin, lane + span.at, span.bytes, s->stream_store);
        atomic_fetch_add_explicit(&t->base.bytes_moved, moved, memory_order_relaxed);
    }
    return FSDP_OK;
}

fsdp_status shm_stage_first(struct shm *t, const struct transfer *transfer, struct deadline deadline)
{
    struct stage s;
    stage_begin(&s, t, transfer, deadline);
    return stage_fill(&s, s.base, 0);
}

/* The first chunk lies in staging already: step over it, and write a SPREAD's own part of it now. */
static void stage_pass_first(struct stage *s)
{
    struct shm *t = s->t;
    const struct transfer *transfer = s->transfer;
    int spread = transfer->shape == TRANSFER_SPREAD, me = t->base.rank;
    if (spread && !stage_is_read(s)) return;
    for (int r = 0; r < t->base.size; r++) {
        struct span span;
        size_t used = 0;
        if (spread && r != me) continue;
        while (stream_next(&s->out[r], s->lane, &used, &span)) {
            const struct piece *p = &transfer->pieces[span.piece];
            if (!spread || !shm_receives(t, transfer) || !p->out || !p->in) continue;
            if (p->out + span.begin != p->in + span.offset)
                kernel_copy(p->out + span.begin, p->in + span.offset, span.bytes, s->stream_store);
        }
    }
}

fsdp_status shm_stage_move(struct shm *t, const struct transfer *transfer, struct deadline deadline)
{
    struct stage s;
    int me = t->base.rank;
    stage_begin(&s, t, transfer, deadline);
    uint32_t rounds = rounds_of(t, transfer), reduced = t->reductions;
    int kind = transfer->shape == TRANSFER_REDUCE ? 1 + transfer->spread : 0;
    shm_pace_begin(&s.pacer, &t->paces[kind], rounds, s.stream_store);

    stage_pass_first(&s);
    if (transfer->shape == TRANSFER_EXCHANGE || !stage_is_read(&s)) shm_copy_own(t, transfer);

    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t chunk = s.base + i;
        shm_pace_round(&s.pacer, i);
        shm_publish(WORD(t, me, staged), chunk + 1);
        if (i + 1 < rounds) TRY(stage_fill(&s, chunk + 1, 1));
        if (transfer->shape == TRANSFER_REDUCE)
            TRY(stage_reduce(&s, chunk));
        else
            TRY(stage_take(&s, chunk));
        if (transfer->spread) {
            shm_publish(WORD(t, me, reduced), ++reduced);
            TRY(stage_results(&s, chunk, reduced));
        }
        shm_publish(WORD(t, me, consumed), chunk + 1);
    }
    t->chunks = s.base + rounds;
    t->reductions = reduced;
    return FSDP_OK;
}
