/* Whether a load would write memory that another of its entries has, too. See state.h.
 *
 * Tensors are compared by the bytes that they lie in first, sorted, so that a dict of separate tensors costs a sort.
 * Only those whose extents cross are looked at closer: parts of one matrix may lie between each other and have no byte
 * in common. That is found out exactly, block by block, for writing half of what was asked for is no answer.
 */
#include "state/state.h"

#include "base/mem.h"

#include <stdlib.h>

/* ---- two tensors */

/* The dimension with the longest steps; -1: it has one element. */
static int32_t longest_step(const struct tensor *t, int64_t *step)
{
    int32_t longest = -1;
    *step = -1;
    for (int32_t d = 0; d < t->ndim; d++) {
        int64_t length = t->strides[d] < 0 ? -t->strides[d] : t->strides[d];
        if (t->shape[d] < 2 || length <= *step) continue;
        longest = d;
        *step = length;
    }
    *step *= (int64_t)dtype_size(t->type);
    return longest;
}

static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Whether `a`, taken apart along dimension d, shares a byte with b. */
static int parts_meet(const struct tensor *a, int32_t d, const struct tensor *b)
{
    struct tensor part = *a;
    uintptr_t low, high, b_low, b_high;
    int64_t step = a->strides[d] * (int64_t)dtype_size(a->type), n = step ? a->shape[d] : 1;
    tensor_narrow(&part, d, 0, 1);
    tensor_range(&part, &low, &high);
    tensor_range(b, &b_low, &b_high);
    /* Part i lies in [low + i * step, high + i * step): those that end behind b_low and begin before b_high. */
    int64_t first = 0, last = n - 1, ahead = (int64_t)(b_low - high), behind = (int64_t)(b_high - low);
    if (step > 0) {
        if (floor_div(ahead, step) + 1 > first) first = floor_div(ahead, step) + 1;
        if (floor_div(behind - 1, step) < last) last = floor_div(behind - 1, step);
    } else if (step < 0) {
        if (floor_div(-behind, -step) + 1 > first) first = floor_div(-behind, -step) + 1;
        if (floor_div(-ahead - 1, -step) < last) last = floor_div(-ahead - 1, -step);
    }
    for (int64_t i = first; i <= last; i++) {
        part = *a;
        tensor_narrow(&part, d, i, 1);
        if (tensor_meet(&part, b)) return 1;
    }
    return 0;
}

int tensor_meet(const struct tensor *a, const struct tensor *b)
{
    int64_t a_step, b_step;
    if (!tensor_overlap(a, b)) return 0;
    if (a->contiguous && b->contiguous) return 1;
    int32_t a_dim = longest_step(a, &a_step), b_dim = longest_step(b, &b_step);
    return b->contiguous || (!a->contiguous && a_step >= b_step) ? parts_meet(a, a_dim, b) : parts_meet(b, b_dim, a);
}

/* ---- all of a load */

/* What an entry's tensor, or what is read for it, lies in. */
struct span {
    uintptr_t low, high;
    int64_t entry;
    int read;
};

struct spans {
    const struct source *from;
    const fsdp_state_dict *into;
    const struct state_plan *plan;
    int whole;
    struct span *all;
    int64_t n;
    const struct span **open[2]; /* written, read: those that the one looked at may cross */
    int64_t n_open[2];
};

static void span_tensor(const struct spans *spans, const struct span *span, struct tensor *out)
{
    const struct state_entry *entry = spans->into->entries[span->entry];
    if (span->read)
        spans->from->view(spans->from, spans->plan->from[span->entry], spans->whole ? &entry->whole : &entry->part,
                          out);
    else
        *out = entry->data;
}

static void span_add(struct spans *spans, int64_t entry, int read)
{
    struct tensor t;
    struct span *span = &spans->all[spans->n];
    *span = (struct span){.entry = entry, .read = read};
    span_tensor(spans, span, &t);
    if (!t.count) return;
    tensor_range(&t, &span->low, &span->high);
    spans->n++;
}

static int by_low(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->low < y->low ? -1 : x->low > y->low;
}

/* The entry is there already where it is read from. */
static int in_place(const struct spans *spans, int64_t index)
{
    struct tensor view;
    const struct state_entry *entry = spans->into->entries[index];
    spans->from->view(spans->from, spans->plan->from[index], &entry->part, &view);
    return tensor_same_place(&view, &entry->data);
}

/* One of them is written. */
static fsdp_status spans_compare(const struct spans *spans, const struct span *a, const struct span *b)
{
    struct tensor x, y;
    if (a->entry == b->entry && in_place(spans, a->entry)) return FSDP_OK;
    span_tensor(spans, a, &x);
    span_tensor(spans, b, &y);
    if (!tensor_meet(&x, &y)) return FSDP_OK;
    if (a->read) {
        const struct span *read = a;
        a = b;
        b = read;
    }
    const char *one = spans->into->entries[a->entry]->name, *other = spans->into->entries[b->entry]->name;
    CHECK_ARG(a->entry != b->entry,
              "the tensor of '%.200s' overlaps in memory with what is to be loaded into it: give separate memory", one);
    CHECK_ARG(!b->read,
              "the tensor of '%.200s', which will be written, overlaps in memory with what is to be loaded into "
              "'%.200s': give separate memory",
              one, other);
    if (a->entry > b->entry) {
        const char *first = other;
        other = one;
        one = first;
    }
    return err(FSDP_ERR_INVALID,
               "the tensors of '%.200s' and '%.200s' overlap in memory, and both would be written: give separate "
               "memory, or make the second name tied_to the first",
               one, other);
}

/* With all that are open of one kind; those that end before it are so no longer. */
static fsdp_status compare_open(struct spans *spans, const struct span *span, int kind)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < spans->n_open[kind]; i++) {
        const struct span *other = spans->open[kind][i];
        if (other->high <= span->low) continue;
        spans->open[kind][kept++] = other;
        TRY(spans_compare(spans, span, other));
    }
    spans->n_open[kind] = kept;
    return FSDP_OK;
}

static fsdp_status spans_check(struct spans *spans)
{
    for (int64_t i = 0; i < spans->into->n_entries; i++) {
        if (spans->plan->from[i] < 0) continue;
        span_add(spans, i, 0);
        if (spans->from->view) span_add(spans, i, 1);
    }
    if (spans->n) qsort(spans->all, (size_t)spans->n, sizeof *spans->all, by_low);
    for (int64_t i = 0; i < spans->n; i++) {
        const struct span *span = &spans->all[i];
        TRY(compare_open(spans, span, 0));
        if (!span->read) TRY(compare_open(spans, span, 1));
        spans->open[span->read][spans->n_open[span->read]++] = span;
    }
    return FSDP_OK;
}

fsdp_status state_check_memory(const struct source *from, const fsdp_state_dict *into, const struct state_plan *plan,
                               int whole)
{
    struct spans spans = {.from = from, .into = into, .plan = plan, .whole = whole};
    size_t n = (size_t)into->n_entries;
    spans.all = mem_array(2 * n, sizeof *spans.all);
    spans.open[0] = mem_array(n, sizeof *spans.open[0]);
    spans.open[1] = mem_array(n, sizeof *spans.open[1]);
    fsdp_status status = spans.all && spans.open[0] && spans.open[1] ? spans_check(&spans)
                                                                     : mem_none("a load", 2 * n * sizeof *spans.all);
    mem_free(spans.all);
    mem_free((void *)spans.open[0]);
    mem_free((void *)spans.open[1]);
    return status;
}
