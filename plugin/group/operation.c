/* Operations: from the arguments of a public call to what a lane runs.
 *
 * Everything that can be wrong with the arguments of one rank is found here, before the call takes its place in the
 * order; so is all memory that it needs. A run of calls of one kind, reduction and root becomes one operation with a
 * piece for each tensor. */
#include "group/group.h"

#include "base/mem.h"
#include "tensor/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One public call, checked. */
struct call {
    const fsdp_collective *given;
    struct tensor in, out; /* count -1: not given */
    const char *in_name, *out_name;
    char in_text[32], out_text[32]; /* the names, where a call is one of several */
};

static int reduces(fsdp_op_kind kind)
{
    return kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_REDUCE || kind == FSDP_OP_REDUCE;
}

static int has_root(fsdp_op_kind kind)
{
    return kind == FSDP_OP_REDUCE || kind == FSDP_OP_BROADCAST || kind == FSDP_OP_GATHER || kind == FSDP_OP_SCATTER;
}

static int is_message(fsdp_op_kind kind)
{
    return kind == FSDP_OP_SEND || kind == FSDP_OP_RECV;
}

/* ---- rows */

/* From rows for each rank to element positions. Equal rows give the even form, so that even and uneven calls match. */
static fsdp_status cut_rows(fsdp_work *work, const int64_t *rows, int size, const struct tensor *t,
                            const char *rows_name, const char *tensor_name, struct split *out)
{
    int64_t row = tensor_row_count(t), total = 0, equal = 1;
    for (int r = 0; r < size; r++) {
        CHECK_ARG(rows[r] >= 0, "%s[%d] is %lld: numbers of rows can't be negative", rows_name, r, (long long)rows[r]);
        if (__builtin_add_overflow(total, rows[r], &total))
            return err(FSDP_ERR_INVALID, "%s: the sum overflows", rows_name);
        equal &= rows[r] == rows[0];
    }
    CHECK_ARG(total == tensor_rows(t), "%s add up to %lld rows, but %s has %lld", rows_name, (long long)total,
              tensor_name, (long long)tensor_rows(t));
    *out = (struct split){.count = t->count, .step = rows[0] * row, .only = -1};
    if (equal) return FSDP_OK;
    int64_t *at = work_memory(work, ((size_t)size + 1) * sizeof *at);
    if (!at) return FSDP_ERR_NOMEM;
    for (int r = 0; r < size; r++) at[r + 1] = at[r] + rows[r] * row;
    out->at = at;
    return FSDP_OK;
}

static fsdp_status cut_even(const struct tensor *t, int size, const char *name, struct split *out)
{
    CHECK_ARG(t->count % size == 0, "%s has %lld elements, which %d ranks can't share evenly", name,
              (long long)t->count, size);
    *out = (struct split){.count = t->count, .step = t->count / size, .only = -1};
    return FSDP_OK;
}

/* ---- relations between the two tensors */

static fsdp_status same_type(const struct call *c)
{
    CHECK_ARG(c->in.type == c->out.type, "%s is %s and %s is %s: they must be of one dtype", c->in_name,
              dtype_name(c->in.type), c->out_name, dtype_name(c->out.type));
    return FSDP_OK;
}

static fsdp_status counts(const struct call *c, int64_t want_out, const char *rule)
{
    char in[TENSOR_TEXT], out[TENSOR_TEXT];
    CHECK_ARG(c->out.count == want_out, "%s is %s, but with %s of %s it must have %lld elements (%s)", c->out_name,
              tensor_text(&c->out, out), c->in_name, tensor_text(&c->in, in), (long long)want_out, rule);
    return FSDP_OK;
}

/* in and out may not overlap, but for `in` (or out) being the part of the other that begins at element `begin`. */
static fsdp_status apart(const struct call *c, const struct tensor *whole, const struct tensor *part, int64_t begin)
{
    if (!tensor_overlap(&c->in, &c->out)) return FSDP_OK;
    int in_place =
        whole->contiguous && part->contiguous && part->data == whole->data + begin * (int64_t)dtype_size(whole->type);
    CHECK_ARG(in_place || (begin == 0 && tensor_same_place(&c->in, &c->out)),
              "%s and %s overlap: give separate memory, or exactly the in-place form of %s", c->in_name, c->out_name,
              call_kind_name(c->given->kind));
    return FSDP_OK;
}

/* ---- one piece for each kind */

static fsdp_status piece_all_gather(fsdp_work *work, const struct call *c, struct piece *p)
{
    int rank = work->group->rank, size = work->group->size;
    const int64_t *rows = c->given->output_rows;
    TRY(same_type(c));
    if (rows) {
        TRY(cut_rows(work, rows, size, &c->out, "rows", c->out_name, &p->out_split));
        CHECK_ARG(tensor_rows(&c->in) == rows[rank] && c->in.count == split_length(&p->out_split, rank),
                  "%s has %lld rows (%lld elements), but rows[%d] is %lld (%lld elements)", c->in_name,
                  (long long)tensor_rows(&c->in), (long long)c->in.count, rank, (long long)rows[rank],
                  (long long)split_length(&p->out_split, rank));
    } else {
        int64_t want;
        if (__builtin_mul_overflow(c->in.count, size, &want))
            return err(FSDP_ERR_INVALID, "%s is too large", c->in_name);
        TRY(counts(c, want, "the ranks' tensors one after the other"));
        TRY(cut_even(&c->out, size, c->out_name, &p->out_split));
    }
    return apart(c, &c->out, &c->in, split_begin(&p->out_split, rank));
}

static fsdp_status piece_reduce_scatter(fsdp_work *work, const struct call *c, struct piece *p)
{
    int rank = work->group->rank, size = work->group->size;
    const int64_t *rows = c->given->input_rows;
    TRY(same_type(c));
    if (rows) {
        TRY(cut_rows(work, rows, size, &c->in, "rows", c->in_name, &p->in_split));
        CHECK_ARG(tensor_rows(&c->out) == rows[rank] && c->out.count == split_length(&p->in_split, rank),
                  "%s has %lld rows (%lld elements), but rows[%d] is %lld (%lld elements)", c->out_name,
                  (long long)tensor_rows(&c->out), (long long)c->out.count, rank, (long long)rows[rank],
                  (long long)split_length(&p->in_split, rank));
    } else {
        TRY(cut_even(&c->in, size, c->in_name, &p->in_split));
        TRY(counts(c, c->in.count / size, "one rank's part"));
    }
    return apart(c, &c->in, &c->out, split_begin(&p->in_split, rank));
}

static fsdp_status piece_all_reduce(fsdp_work *work, const struct call *c, struct piece *p)
{
    TRY(same_type(c));
    char in[TENSOR_TEXT], out[TENSOR_TEXT];
    CHECK_ARG(tensor_same_shape(&c->in, &c->out), "%s is %s and %s is %s: they must have one shape", c->in_name,
              tensor_text(&c->in, in), c->out_name, tensor_text(&c->out, out));
    /* Slices of whole cache lines. */
    int64_t step = (c->in.count + work->group->size - 1) / work->group->size,
            line = 64 / (int64_t)dtype_size(c->in.type);
    step = (step + line - 1) / line * line;
    p->in_split = (struct split){.count = c->in.count, .step = step, .only = -1};
    return apart(c, &c->in, &c->out, 0);
}

static fsdp_status piece_reduce(fsdp_work *work, const struct call *c, struct piece *p)
{
    p->in_split = (struct split){.count = c->in.count, .only = c->given->peer};
    if (c->out.count < 0) return FSDP_OK;
    TRY(same_type(c));
    char in[TENSOR_TEXT], out[TENSOR_TEXT];
    CHECK_ARG(tensor_same_shape(&c->in, &c->out), "%s is %s and %s is %s: they must have one shape", c->in_name,
              tensor_text(&c->in, in), c->out_name, tensor_text(&c->out, out));
    return apart(c, &c->in, &c->out, 0);
}

static fsdp_status piece_broadcast(fsdp_work *work, const struct call *c, struct piece *p)
{
    p->out_split = (struct split){.count = c->in.count, .only = c->given->peer};
    return FSDP_OK;
}

static fsdp_status piece_gather(fsdp_work *work, const struct call *c, struct piece *p)
{
    int rank = work->group->rank, size = work->group->size;
    int64_t whole;
    if (__builtin_mul_overflow(c->in.count, size, &whole)) return err(FSDP_ERR_INVALID, "%s is too large", c->in_name);
    p->out_split = (struct split){.count = whole, .step = c->in.count, .only = -1};
    if (c->out.count < 0) return FSDP_OK;
    TRY(same_type(c));
    TRY(counts(c, whole, "the ranks' tensors one after the other"));
    return apart(c, &c->out, &c->in, split_begin(&p->out_split, rank));
}

static fsdp_status piece_scatter(fsdp_work *work, const struct call *c, struct piece *p)
{
    int rank = work->group->rank, size = work->group->size;
    int64_t whole;
    if (__builtin_mul_overflow(c->out.count, size, &whole))
        return err(FSDP_ERR_INVALID, "%s is too large", c->out_name);
    p->in_split = (struct split){.count = whole, .step = c->out.count, .only = -1};
    p->out_split = (struct split){.count = c->out.count, .only = c->given->peer};
    if (c->in.count < 0) return FSDP_OK;
    TRY(same_type(c));
    CHECK_ARG(c->in.count == whole, "%s has %lld elements: with %d ranks and %lld elements in %s it must have %lld",
              c->in_name, (long long)c->in.count, size, (long long)c->out.count, c->out_name, (long long)whole);
    return apart(c, &c->in, &c->out, split_begin(&p->in_split, rank));
}

static fsdp_status piece_all_to_all(fsdp_work *work, const struct call *c, struct piece *p)
{
    int size = work->group->size;
    const int64_t *input_rows = c->given->input_rows, *output_rows = c->given->output_rows;
    TRY(same_type(c));
    CHECK_ARG((input_rows == NULL) == (output_rows == NULL), "input_rows and output_rows: give both, or neither");
    CHECK_ARG(!tensor_overlap(&c->in, &c->out), "%s and %s overlap: all_to_all needs separate memory", c->in_name,
              c->out_name);
    if (!input_rows) {
        TRY(counts(c, c->in.count, "as many as it gives"));
        TRY(cut_even(&c->in, size, c->in_name, &p->in_split));
        return cut_even(&c->out, size, c->out_name, &p->out_split);
    }
    CHECK_ARG(c->in.count == 0 || c->out.count == 0 || tensor_row_count(&c->in) == tensor_row_count(&c->out),
              "a row of %s has %lld elements and one of %s %lld: they must be equal", c->in_name,
              (long long)tensor_row_count(&c->in), c->out_name, (long long)tensor_row_count(&c->out));
    TRY(cut_rows(work, input_rows, size, &c->in, "input_rows", c->in_name, &p->in_split));
    TRY(cut_rows(work, output_rows, size, &c->out, "output_rows", c->out_name, &p->out_split));
    /* What one rank sees as even another may not: always the uneven form. */
    struct split *splits[] = {&p->in_split, &p->out_split};
    for (int i = 0; i < 2; i++) {
        if (splits[i]->at) continue;
        int64_t *at = work_memory(work, ((size_t)size + 1) * sizeof *at);
        if (!at) return FSDP_ERR_NOMEM;
        for (int r = 0; r < size; r++) at[r + 1] = at[r] + splits[i]->step;
        splits[i]->at = at;
    }
    return FSDP_OK;
}

typedef fsdp_status (*piece_fn)(fsdp_work *, const struct call *, struct piece *);

static const struct {
    piece_fn piece;
    enum transfer_shape shape;
    int8_t in_at_root_only, out_at_root_only, out_is_in; /* which tensors must be given */
} kinds[] = {
    [FSDP_OP_ALL_GATHER] = {piece_all_gather, TRANSFER_SPREAD, 0, 0, 0},
    [FSDP_OP_REDUCE_SCATTER] = {piece_reduce_scatter, TRANSFER_REDUCE, 0, 0, 0},
    [FSDP_OP_ALL_REDUCE] = {piece_all_reduce, TRANSFER_REDUCE, 0, 0, 0},
    [FSDP_OP_REDUCE] = {piece_reduce, TRANSFER_REDUCE, 0, 1, 0},
    [FSDP_OP_BROADCAST] = {piece_broadcast, TRANSFER_SPREAD, 0, 0, 1},
    [FSDP_OP_GATHER] = {piece_gather, TRANSFER_SPREAD, 0, 1, 0},
    [FSDP_OP_SCATTER] = {piece_scatter, TRANSFER_EXCHANGE, 1, 0, 0},
    [FSDP_OP_ALL_TO_ALL] = {piece_all_to_all, TRANSFER_EXCHANGE, 0, 0, 0},
};

/* ---- checking one call */

static fsdp_status call_check(fsdp_group *group, const fsdp_collective *given, int32_t index, int32_t n, struct call *c)
{
    c->given = given;
    c->in.count = c->out.count = -1;
    const char *in = given->kind == FSDP_OP_BROADCAST || given->kind == FSDP_OP_SEND ? "tensor" : "input";
    const char *out = given->kind == FSDP_OP_RECV ? "tensor" : "output";
    c->in_name = in;
    c->out_name = out;
    if (n > 1) {
        snprintf(c->in_text, sizeof c->in_text, "operations[%d].input", index);
        snprintf(c->out_text, sizeof c->out_text, "operations[%d].output", index);
        c->in_name = c->in_text;
        c->out_name = c->out_text;
    }

    if (is_message(given->kind)) {
        int any = given->kind == FSDP_OP_RECV && given->peer == FSDP_ANY_RANK;
        CHECK_ARG(any || (given->peer >= 0 && given->peer < group->size), "%s is %d: ranks of group '%s' are 0 to %d",
                  given->kind == FSDP_OP_SEND ? "dst" : "src", given->peer, group->name, group->size - 1);
        CHECK_ARG(given->tag >= 0, "tag is %d: tags can't be negative", given->tag);
        if (given->kind == FSDP_OP_SEND) return tensor_import(given->input, c->in_name, &c->in);
        return tensor_import_output(given->output, c->out_name, &c->out);
    }

    CHECK_ARG(given->kind > 0 && given->kind < (int)(sizeof kinds / sizeof *kinds) && kinds[given->kind].piece,
              "operations[%d].kind is %d: not a collective or point-to-point operation", index, given->kind);
    if (has_root(given->kind))
        CHECK_ARG(given->peer >= 0 && given->peer < group->size, "root is %d: ranks of group '%s' are 0 to %d",
                  given->peer, group->name, group->size - 1);
    int root = !has_root(given->kind) || given->peer == group->rank;
    if (root || !kinds[given->kind].in_at_root_only) {
        if (given->kind == FSDP_OP_BROADCAST && !root)
            TRY(tensor_import_output(given->input, c->in_name, &c->in));
        else
            TRY(tensor_import(given->input, c->in_name, &c->in));
    }
    if (!kinds[given->kind].out_is_in && (root || !kinds[given->kind].out_at_root_only))
        TRY(tensor_import_output(given->output, c->out_name, &c->out));
    if (reduces(given->kind)) {
        CHECK_ARG(given->op >= FSDP_SUM && given->op <= FSDP_BXOR, "op is %d: FSDP_SUM (0) to FSDP_BXOR (%d) exist",
                  given->op, FSDP_BXOR);
        if (!kernel_reduce_supported(c->in.type, given->op))
            return err(FSDP_ERR_UNSUPPORTED, "op %d is not defined for %s: %s", given->op, dtype_name(c->in.type),
                       given->op == FSDP_AVG ? "use SUM and divide, or a float dtype" : "see fsdp_reduce_op in fsdp.h");
    }
    return FSDP_OK;
}

/* ---- one call of another call's run */

static int continues(const fsdp_collective *a, const fsdp_collective *b)
{
    if (a->kind != b->kind) return 0;
    if (a->input_rows && a->kind == FSDP_OP_ALL_TO_ALL) return 0; /* each needs counts of its own in the exchange */
    if (reduces(a->kind) && a->op != b->op) return 0;
    return !has_root(a->kind) || a->peer == b->peer;
}

static fsdp_status add_piece(fsdp_work *work, struct op *op, const struct call *c, struct piece *p)
{
    fsdp_group *group = work->group;
    fsdp_op_kind kind = c->given->kind;
    const struct tensor *main = c->in.count >= 0 ? &c->in : &c->out;
    p->type = p->out_type = main->type;
    p->in_split.only = p->out_split.only = -1;
    TRY(kinds[kind].piece(work, c, p));

    char *data = NULL;
    if (kind == FSDP_OP_BROADCAST) {
        int root = c->given->peer == group->rank;
        TRY(work_pack(work, &op->packed, &c->in, c->in.type, root ? PACK_IN : PACK_OUT, &data));
        if (root) p->in = data;
        p->out = root ? NULL : data;
    } else {
        if (c->in.count >= 0) {
            TRY(work_pack(work, &op->packed, &c->in, c->in.type, PACK_IN, &data));
            p->in = data;
        }
        if (c->out.count >= 0) {
            TRY(work_pack(work, &op->packed, &c->out, c->out.type, PACK_OUT, &data));
            p->out = data;
        }
    }

    /* What all ranks must agree on. */
    struct call_header *h = &op->header;
    const struct split *split = kinds[kind].shape == TRANSFER_SPREAD ? &p->out_split : &p->in_split;
    int uneven_exchange = kind == FSDP_OP_ALL_TO_ALL && p->in_split.at;
    int64_t count = uneven_exchange ? tensor_row_count(main) : split->count;
    h->count += count;
    h->hash = hash_number(hash_number(h->hash, (uint64_t)p->type), (uint64_t)count);
    if (uneven_exchange)
        h->hash = hash_number(h->hash, 1);
    else if (split->at)
        h->hash = hash_bytes(h->hash, split->at, ((size_t)group->size + 1) * sizeof *split->at);
    if (op->header.n_pieces++ == 0) h->type = (int32_t)p->type;
    op->transfer.n_pieces++;

    if (uneven_exchange) {
        int64_t *give = work_memory(work, 2 * (size_t)group->size * sizeof *give);
        if (!give) return FSDP_ERR_NOMEM;
        for (int r = 0; r < group->size; r++) {
            give[r] = split_length(&p->in_split, r);
            give[group->size + r] = split_length(&p->out_split, r);
        }
        op->payload = give;
        op->payload_bytes = 2 * (size_t)group->size * sizeof *give;
        op->check_counts = 1;
    }
    return FSDP_OK;
}

static void op_start(struct op *op, const fsdp_collective *given, int size)
{
    op->kind = given->kind;
    op->header = (struct call_header){.kind = given->kind, .type = -1, .root = -1, .hash = HASH_START};
    if (reduces(given->kind)) op->header.op = given->op;
    if (has_root(given->kind)) op->header.root = given->peer;
    op->transfer.shape = kinds[given->kind].shape;
    op->transfer.reader = given->kind == FSDP_OP_GATHER ? given->peer : -1;
    op->transfer.spread = given->kind == FSDP_OP_ALL_REDUCE;
    op->transfer.op = given->op;
    op->transfer.divisor = given->op == FSDP_AVG ? size : 1;
}

/* ---- overlap between the tensors of one coalesced call */

struct extent {
    const struct tensor *tensor;
    const char *name;
    int32_t call, output;
    uintptr_t low, high;
};

static int by_address(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;
    return x->low < y->low ? -1 : x->low > y->low;
}

static fsdp_status check_overlaps(const struct call *calls, int32_t n)
{
    struct extent *extents = mem_array(2 * (size_t)n, sizeof *extents);
    if (!extents) return mem_none("checking a coalesced call", 2 * (size_t)n * sizeof *extents);
    int32_t m = 0;
    for (int32_t i = 0; i < n; i++) {
        int written = calls[i].given->kind == FSDP_OP_BROADCAST;
        if (calls[i].in.count > 0) extents[m++] = (struct extent){&calls[i].in, calls[i].in_name, i, written, 0, 0};
        if (calls[i].out.count > 0) extents[m++] = (struct extent){&calls[i].out, calls[i].out_name, i, 1, 0, 0};
    }
    for (int32_t i = 0; i < m; i++) tensor_range(extents[i].tensor, &extents[i].low, &extents[i].high);
    qsort(extents, (size_t)m, sizeof *extents, by_address);
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < m && status == FSDP_OK; i++)
        for (int32_t j = i + 1; j < m; j++) {
            const struct extent *a = &extents[i], *b = &extents[j];
            if (b->low >= a->high) break;
            if (a->call == b->call || (!a->output && !b->output) || !tensor_overlap(a->tensor, b->tensor)) continue;
            status = err(FSDP_ERR_INVALID, "%s and %s overlap: tensors of one coalesced call must be apart", a->name,
                         b->name);
            break;
        }
    mem_free(extents);
    return status;
}

/* ---- submission */

static fsdp_status build_messages(fsdp_work *work, const struct call *calls, int32_t n)
{
    work->deadline = work_deadline(work, calls[0].given->kind, 0);
    for (int32_t i = 0; i < n; i++) {
        struct transit *transit = &work->transits[i];
        const fsdp_collective *given = calls[i].given;
        int sending = given->kind == FSDP_OP_SEND;
        const struct tensor *tensor = sending ? &calls[i].in : &calls[i].out;
        char *data;
        TRY(work_pack(work, &transit->packed, tensor, tensor->type, sending ? PACK_IN : PACK_OUT, &data));
        packed_fill(transit->packed);
        transit->message = (struct message){.sending = sending,
                                            .peer = given->peer,
                                            .tag = given->tag,
                                            .type = tensor->type,
                                            .count = tensor->count,
                                            .bytes = tensor->bytes,
                                            .data = data,
                                            .source = given->peer};
    }
    return FSDP_OK;
}

static fsdp_status build_collectives(fsdp_work *work, const struct call *calls, int32_t n)
{
    int32_t run = -1;
    for (int32_t i = 0; i < n; i++) {
        if (i == 0 || !continues(calls[i - 1].given, calls[i].given)) {
            int32_t length = 1;
            while (i + length < n && continues(calls[i + length - 1].given, calls[i + length].given)) length++;
            op_start(&work->ops[++run], calls[i].given, work->group->size);
            work->ops[run].transfer.pieces = work_memory(work, (size_t)length * sizeof(struct piece));
            if (!work->ops[run].transfer.pieces) return FSDP_ERR_NOMEM;
        }
        struct op *op = &work->ops[run];
        TRY(add_piece(work, op, &calls[i], &op->transfer.pieces[op->transfer.n_pieces]));
    }
    for (run = 0; run < work->n_ops; run++) TRY(work_addresses(work, &work->ops[run].transfer));
    return FSDP_OK;
}

#define FEW 4

fsdp_status group_collective(fsdp_group *group, const fsdp_collective *given, int32_t n, fsdp_work **handle)
{
    TRY(group_usable(group));
    int32_t n_messages = 0, n_ops = 0;
    for (int32_t i = 0; i < n; i++) {
        n_messages += is_message(given[i].kind);
        n_ops += i == 0 || !continues(&given[i - 1], &given[i]);
    }
    CHECK_ARG(n_messages == 0 || n_messages == n,
              "operations hold %d point-to-point and %d collective ones: a coalesced call takes one sort", n_messages,
              n - n_messages);
    if (n_messages) n_ops = 0;

    struct call few[FEW], *calls = n <= FEW ? few : mem_array((size_t)n, sizeof *calls);
    if (!calls) return mem_none("a coalesced call", (size_t)n * sizeof *calls);
    fsdp_work *work = NULL;
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < n && status == FSDP_OK; i++) status = call_check(group, &given[i], i, n, &calls[i]);
    if (status == FSDP_OK && n > 1) status = check_overlaps(calls, n);
    if (status == FSDP_OK)
        status = work_create(group, n_messages ? &group->messages : &group->collectives, n_ops, n_messages, &work);
    if (status == FSDP_OK) status = n_messages ? build_messages(work, calls, n) : build_collectives(work, calls, n);
    if (calls != few) mem_free(calls);
    if (status != FSDP_OK) {
        work_release(work);
        return status;
    }
    return lane_submit(work, handle);
}

struct op *op_init(fsdp_work *work, int32_t index, fsdp_op_kind kind, uint64_t hash, const void *payload, size_t bytes)
{
    struct op *op = &work->ops[index];
    op->kind = kind;
    op->header = (struct call_header){.kind = kind, .type = -1, .root = -1, .hash = hash};
    op->payload = payload;
    op->payload_bytes = bytes;
    return op;
}

fsdp_status group_barrier(fsdp_group *group, fsdp_work **handle)
{
    TRY(group_usable(group));
    fsdp_work *work;
    TRY(work_create(group, &group->collectives, 1, 0, &work));
    (void)op_init(work, 0, FSDP_OP_BARRIER, HASH_START, NULL, 0);
    return lane_submit(work, handle);
}

struct exchange {
    void *out;
    size_t bytes;
};

static fsdp_status exchange_body(fsdp_group *group, struct op *op, struct deadline deadline)
{
    struct exchange *e = op->user;
    struct transport *t = group->transport;
    for (int r = 0; r < group->size && e->bytes; r++)
        memcpy((char *)e->out + (size_t)r * e->bytes, t->ops->payload_of(t, r), e->bytes);
    return FSDP_OK;
}

fsdp_status group_prepare(fsdp_group *group, fsdp_work **prepared)
{
    return work_create(group, &group->collectives, 1, 0, prepared);
}

fsdp_status group_exchange_prepared(fsdp_group *group, fsdp_work **prepared, fsdp_op_kind kind, uint64_t hash,
                                    const void *in, size_t bytes, void *out)
{
    TRY(group_usable(group));
    fsdp_work *work = *prepared;
    *prepared = NULL;
    struct exchange e = {.out = out, .bytes = bytes};
    struct op *op = op_init(work, 0, kind, hash, in, bytes);
    op->body = exchange_body;
    op->user = &e;
    return lane_submit(work, NULL);
}

fsdp_status group_exchange(fsdp_group *group, fsdp_op_kind kind, uint64_t hash, const void *in, size_t bytes, void *out)
{
    fsdp_work *work;
    TRY(group_usable(group));
    TRY(group_prepare(group, &work));
    return group_exchange_prepared(group, &work, kind, hash, in, bytes, out);
}

/* ---- running */

/* Uneven all-to-all: what rank a says it gives b must be what b says it expects of a. All ranks see all counts, check
 * every pair in the same order, and so come to the same verdict. */
static fsdp_status check_counts(fsdp_group *group, const struct op *op)
{
    struct transport *t = group->transport;
    int size = group->size;
    for (int a = 0; a < size; a++)
        for (int b = 0; b < size; b++) {
            int64_t gives, expects;
            memcpy(&gives, (const int64_t *)t->ops->payload_of(t, a) + b, sizeof gives);
            memcpy(&expects, (const int64_t *)t->ops->payload_of(t, b) + size + a, sizeof expects);
            if (gives == expects) continue;
            char giver[GROUP_RANK_TEXT], taker[GROUP_RANK_TEXT];
            err(FSDP_ERR_MISMATCH,
                "group '%s', operation %llu: uneven all_to_all: %s gives %s %lld elements, but rank %d expects %lld of "
                "it: input_rows[%d] on rank %d and output_rows[%d] on rank %d must be equal",
                group->name, (unsigned long long)op->header.sequence, group_rank_text(group, a, giver),
                group_rank_text(group, b, taker), (long long)gives, b, (long long)expects, b, a, a, b);
            err_operation(op->kind, op->header.sequence, a, b);
            return FSDP_ERR_MISMATCH;
        }
    return FSDP_OK;
}

fsdp_status op_run(fsdp_work *work, struct op *op)
{
    fsdp_group *group = work->group;
    struct transport *t = group->transport;
    op->header.sequence = ++group->sequence;
    atomic_fetch_add_explicit(&group->operations, 1, memory_order_relaxed);
    struct deadline deadline = work_deadline(work, op->kind, op->header.sequence);

    packed_fill(op->packed);
    fsdp_status status = t->ops->exchange(t, &op->header, op->payload, op->payload_bytes,
                                          op->transfer.shape ? &op->transfer : NULL, deadline);
    if (status == FSDP_OK) {
        status = call_compare(group);
        if (status == FSDP_OK && op->check_counts) status = check_counts(group, op);
        if (status != FSDP_OK) return status; /* the same on all ranks: the group goes on */
        if (op->body)
            status = op->body(group, op, deadline);
        else if (op->transfer.shape)
            status = t->ops->move(t, &op->transfer, deadline);
    }
    if (status != FSDP_OK) {
        /* Peers may be waiting for this rank: whatever stopped it half-way ends the group for all. */
        fsdp_error_info failure;
        err_save(&failure);
        transport_fail(t, &failure);
        return status;
    }
    packed_store(op->packed);
    return FSDP_OK;
}
