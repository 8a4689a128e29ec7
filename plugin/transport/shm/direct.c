/* Moving tensors by reading the peers' memory where the host left it (process_vm_readv): one copy, no staging.
 *
 * The exchange carries the address of the piece, or of a table of addresses when there are several. A rank reads only;
 * an operation ends when every rank has said that it no longer reads (`done`). All-reduce meets once in between
 * (`reduced`), after which each rank reads the other slices from its peers' outputs. In place is safe: a rank writes
 * only its own slice before that meeting, which no peer reads.
 */
#include "transport/shm/shm.h"
#include "transport/stream.h"

#include <string.h>

/* This rank's addresses, for its peers to read: of the only piece in the exchange itself, of several in a table. */
void shm_direct_offer(struct slot *slot, const struct transfer *transfer)
{
    size_t n = (size_t)transfer->n_pieces;
    for (size_t i = 0; i < n && n > 1; i++) {
        transfer->addresses[i] = (uintptr_t)transfer->pieces[i].in;
        transfer->addresses[n + i] = (uintptr_t)transfer->pieces[i].out;
    }
    slot->in_address = n == 1 ? (uintptr_t)transfer->pieces[0].in : (uintptr_t)transfer->addresses;
    slot->out_address = n == 1 ? (uintptr_t)transfer->pieces[0].out : 0;
}

static fsdp_status read_from(struct shm *t, int rank, uint64_t address, void *to, size_t bytes,
                             struct deadline deadline)
{
    int failed = os_read_peer(t->pids[rank], address, to, bytes);
    if (failed == 0) {
        atomic_fetch_add_explicit(&t->base.bytes_moved, bytes, memory_order_relaxed);
        return FSDP_OK;
    }
    TRY(shm_check_unreadable(t, deadline)); /* its end is the likelier reason, and names it better */
    err_sys(FSDP_ERR_SYSTEM, failed, "group '%s': reading %zu bytes of rank %d's memory in %s (operation %llu)",
            t->name, bytes, rank, deadline.doing, (unsigned long long)deadline.sequence);
    err_operation(deadline.kind, deadline.sequence, rank, -1);
    return shm_fail_now(t, FSDP_ERR_SYSTEM);
}

/* The pieces' addresses on each rank, to `all`: [rank * 2n + i] in, [rank * 2n + n + i] out. */
static fsdp_status collect(struct shm *t, const struct transfer *transfer, struct deadline deadline, uint64_t *all)
{
    size_t n = (size_t)transfer->n_pieces, row = 2 * n;
    for (int r = 0; r < t->base.size; r++) {
        uint64_t *mine = all + row * (size_t)r;
        if (n == 1) {
            mine[0] = t->seen[r]->in_address;
            mine[1] = t->seen[r]->out_address;
        } else if (r == t->base.rank) {
            memcpy(mine, transfer->addresses, row * sizeof *mine);
        } else {
            TRY(read_from(t, r, t->seen[r]->in_address, mine, row * sizeof *mine, deadline));
        }
    }
    return FSDP_OK;
}

/* Take part `part` of every piece from rank `from`. */
static fsdp_status take(struct shm *t, const struct transfer *transfer, const uint64_t *from_addresses, int from,
                        struct deadline deadline)
{
    for (int32_t i = 0; i < transfer->n_pieces; i++) {
        const struct piece *p = &transfer->pieces[i];
        size_t size = dtype_size(p->type), bytes = (size_t)split_length(&p->out_split, from) * size;
        if (!bytes) continue;
        uint64_t address = from_addresses[i];
        if (transfer->shape == TRANSFER_EXCHANGE) address += (uint64_t)split_begin(&p->in_split, t->base.rank) * size;
        TRY(read_from(t, from, address, p->out + (size_t)split_begin(&p->out_split, from) * size, bytes, deadline));
    }
    return FSDP_OK;
}

static fsdp_status reduce(struct shm *t, const struct transfer *transfer, const uint64_t *addresses,
                          struct deadline deadline)
{
    int me = t->base.rank, size = t->base.size;
    size_t row = 2 * (size_t)transfer->n_pieces;
    const void *sources[SHM_MAX_RANKS];
    struct stream stream;
    struct span span;
    stream_begin(&stream, transfer, STREAM_IN, me);
    for (;;) {
        size_t used = 0;
        int any = 0;
        while (stream_next(&stream, SHM_DIRECT_CHUNK, &used, &span)) {
            any = 1;
            const struct piece *p = &transfer->pieces[span.piece];
            for (int r = 0; r < size; r++) {
                uint64_t address = addresses[row * (size_t)r + (size_t)span.piece];
                char *scratch = t->scratch + SHM_DIRECT_CHUNK * (size_t)r;
                sources[r] = !address ? NULL : r == me ? p->in + span.begin : scratch;
                if (address && r != me) TRY(read_from(t, r, address + span.begin, scratch, span.bytes, deadline));
            }
            shm_reduce_span(t, transfer, &span, shm_reduced_out(transfer, &span), sources, 0);
        }
        if (!any) return FSDP_OK;
    }
}

static fsdp_status results(struct shm *t, const struct transfer *transfer, const uint64_t *addresses,
                           struct deadline deadline)
{
    int me = t->base.rank, size = t->base.size;
    size_t n = (size_t)transfer->n_pieces;
    shm_publish(WORD(t, me, reduced), ++t->reductions);
    for (int step = 1; step < size; step++) {
        int from = (me + step) % size;
        TRY(shm_wait(t, WORD(t, from, reduced), t->reductions, from, deadline));
        for (size_t i = 0; i < n; i++) {
            const struct piece *p = &transfer->pieces[i];
            size_t begin = (size_t)split_begin(&p->in_split, from) * dtype_size(p->type);
            size_t bytes = (size_t)split_length(&p->in_split, from) * dtype_size(p->type);
            uint64_t address = addresses[2 * n * (size_t)from + n + i];
            if (bytes) TRY(read_from(t, from, address + begin, p->out + begin, bytes, deadline));
        }
    }
    return FSDP_OK;
}

static fsdp_status move(struct shm *t, const struct transfer *transfer, const uint64_t *addresses,
                        struct deadline deadline)
{
    int me = t->base.rank, size = t->base.size;
    size_t row = 2 * (size_t)transfer->n_pieces;
    if (transfer->shape == TRANSFER_REDUCE) {
        TRY(reduce(t, transfer, addresses, deadline));
        return transfer->spread ? results(t, transfer, addresses, deadline) : FSDP_OK;
    }
    shm_copy_own(t, transfer);
    if (!shm_receives(t, transfer)) return FSDP_OK;
    for (int step = 1; step < size; step++) {
        int from = (me + step) % size;
        TRY(take(t, transfer, addresses + row * (size_t)from, from, deadline));
    }
    return FSDP_OK;
}

fsdp_status shm_direct_move(struct shm *t, const struct transfer *transfer, struct deadline deadline)
{
    uint64_t few[2 * SHM_MAX_RANKS];
    size_t n = (size_t)transfer->n_pieces;
    uint64_t *addresses = n == 1 ? few : transfer->addresses + 2 * n; /* behind this rank's own table */
    TRY(collect(t, transfer, deadline, addresses));
    TRY(move(t, transfer, addresses, deadline));
    return t->base.ops->sync(&t->base, deadline);
}
