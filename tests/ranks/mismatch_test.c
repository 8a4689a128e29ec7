/* Ranks that don't make the same call: every one of them is told so, in the same words, nothing is written,
 * and the group goes on. Each variant is one wrong call by one rank; all are tried in one group after the
 * other, with good calls in between, for tensors that travel with the exchange, through staging and by direct
 * reads. */
#include "crew.h"

#include <stdio.h>
#include <string.h>

TestSuite(mismatch, .init = crew_init, .fini = crew_fini, .timeout = 120);

#define GUARD 77.0f

/* What one rank calls: the right thing, or (odd) something else. */
struct call {
    fsdp_group *group;
    int rank, n, odd;
    int64_t count; /* a multiple of 24 */
    float *in, *out;
    fsdp_work **work;
};

static DLTensor *in_of(struct call *c, int64_t count)
{
    return crew_tensor(c->in, F32, count);
}
static DLTensor *out_of(struct call *c, int64_t count)
{
    return crew_tensor(c->out, F32, count);
}

static fsdp_status kind(struct call *c)
{
    if (c->odd) return fsdp_all_gather(c->group, in_of(c, c->count / c->n), out_of(c, c->count), c->work);
    return fsdp_all_reduce(c->group, in_of(c, c->count), out_of(c, c->count), FSDP_SUM, c->work);
}

static fsdp_status kind_reduce_scatter(struct call *c)
{
    if (c->odd) return fsdp_all_reduce(c->group, in_of(c, c->count), out_of(c, c->count), FSDP_SUM, c->work);
    return fsdp_reduce_scatter(c->group, in_of(c, c->count), out_of(c, c->count / c->n), FSDP_SUM, c->work);
}

static fsdp_status kind_barrier(struct call *c)
{
    if (c->odd) return fsdp_barrier(c->group, c->work);
    return fsdp_all_to_all(c->group, in_of(c, c->count), out_of(c, c->count), c->work);
}

static fsdp_status dtype(struct call *c)
{
    DLDataType type = c->odd ? I32 : F32; /* as many bytes */
    return fsdp_all_reduce(c->group, crew_tensor(c->in, type, c->count), crew_tensor(c->out, type, c->count), FSDP_SUM,
                           c->work);
}

static fsdp_status op(struct call *c)
{
    return fsdp_all_reduce(c->group, in_of(c, c->count), out_of(c, c->count), c->odd ? FSDP_MAX : FSDP_SUM, c->work);
}

static int root_of(const struct call *c)
{
    return c->odd ? c->n - 1 : 0;
}

static fsdp_status root_reduce(struct call *c)
{
    return fsdp_reduce(c->group, in_of(c, c->count), out_of(c, c->count), FSDP_SUM, root_of(c), c->work);
}

static fsdp_status root_broadcast(struct call *c)
{
    return fsdp_broadcast(c->group, out_of(c, c->count), root_of(c), c->work);
}

static fsdp_status root_gather(struct call *c)
{
    return fsdp_gather(c->group, in_of(c, c->count / c->n), out_of(c, c->count), root_of(c), c->work);
}

static fsdp_status root_scatter(struct call *c)
{
    return fsdp_scatter(c->group, in_of(c, c->count), out_of(c, c->count / c->n), root_of(c), c->work);
}

static fsdp_status count(struct call *c)
{
    int64_t n = c->odd ? c->count - c->n : c->count;
    return fsdp_reduce_scatter(c->group, in_of(c, n), out_of(c, n / c->n), FSDP_AVG, c->work);
}

/* One side's data fits the exchange, the other's is staged or read directly. */
static fsdp_status count_much(struct call *c)
{
    int64_t n = c->odd ? c->n : c->count;
    return fsdp_all_gather(c->group, in_of(c, n / c->n), out_of(c, n), c->work);
}

static fsdp_status empty(struct call *c)
{
    int64_t n = c->odd ? 0 : c->count;
    return fsdp_all_reduce(c->group, in_of(c, n), out_of(c, n), FSDP_SUM, c->work);
}

static fsdp_status rows(struct call *c)
{
    int64_t each[CREW_MAX];
    for (int r = 0; r < c->n; r++) each[r] = c->count / c->n;
    each[0] -= 1; /* uneven on all; differently on the odd one, whose own part is the same */
    each[c->odd && c->rank != 1 ? 1 : c->odd ? c->n - 1 == 1 ? 1 : c->n - 1 : c->n - 1] += 1;
    if (c->odd && c->n == 2) each[0] -= 1, each[1] += 1;
    return fsdp_all_gather_v(c->group, in_of(c, each[c->rank]), out_of(c, c->count), each, c->work);
}

static fsdp_status rows_reduce_scatter(struct call *c)
{
    int64_t each[CREW_MAX];
    for (int r = 0; r < c->n; r++) each[r] = c->count / c->n;
    each[0] -= c->odd ? 2 : 1;
    each[c->n - 1] += c->odd ? 2 : 1;
    return fsdp_reduce_scatter_v(c->group, in_of(c, c->count), out_of(c, each[c->rank]), each, FSDP_SUM, c->work);
}

static fsdp_status list_length(struct call *c)
{
    fsdp_collective list[3];
    memset(list, 0, sizeof list);
    int n = c->odd ? 2 : 3;
    for (int i = 0; i < n; i++) {
        int64_t each = c->count / 3;
        list[i] = (fsdp_collective){.struct_size = sizeof *list,
                                    .kind = FSDP_OP_ALL_REDUCE,
                                    .input = crew_tensor(c->in + i * each, F32, each),
                                    .output = crew_tensor(c->out + i * each, F32, each)};
    }
    return fsdp_coalesced(c->group, list, n, c->work);
}

/* As many tensors and elements, cut differently. */
static fsdp_status list_cut(struct call *c)
{
    fsdp_collective list[2];
    int64_t first = c->odd ? c->count / 3 : c->count / 2;
    for (int i = 0; i < 2; i++) {
        int64_t at = i ? first : 0, each = i ? c->count - first : first;
        list[i] = (fsdp_collective){.struct_size = sizeof *list,
                                    .kind = FSDP_OP_ALL_REDUCE,
                                    .input = crew_tensor(c->in + at, F32, each),
                                    .output = crew_tensor(c->out + at, F32, each)};
    }
    return fsdp_coalesced(c->group, list, 2, c->work);
}

/* The second tensor's dtype, which no text of the call shows. */
static fsdp_status list_dtype(struct call *c)
{
    fsdp_collective list[2];
    for (int i = 0; i < 2; i++) {
        int64_t each = c->count / 2;
        DLDataType type = i && c->odd ? I32 : F32;
        list[i] = (fsdp_collective){.struct_size = sizeof *list,
                                    .kind = FSDP_OP_ALL_REDUCE,
                                    .input = crew_tensor(c->in + i * each, type, each),
                                    .output = crew_tensor(c->out + i * each, type, each)};
    }
    return fsdp_coalesced(c->group, list, 2, c->work);
}

/* The odd rank keeps more for itself, and gives its right neighbour less than that one expects. */
static fsdp_status pairs(struct call *c)
{
    int64_t in_rows[CREW_MAX], out_rows[CREW_MAX], sum = 0;
    for (int r = 0; r < c->n; r++) in_rows[r] = out_rows[r] = 1 + (c->rank + r) % 3;
    if (c->odd) in_rows[(c->rank + 1) % c->n]--;
    int64_t row = c->count / (3 * CREW_MAX), in = 0;
    if (row < 1) row = 1;
    for (int r = 0; r < c->n; r++) sum += out_rows[r], in += in_rows[r];
    int64_t in_shape[2] = {in, row}, out_shape[2] = {sum, row};
    DLTensor from = {.data = c->in, .device = {kDLCPU, 0}, .ndim = 2, .dtype = F32, .shape = in_shape};
    DLTensor to = {.data = c->out, .device = {kDLCPU, 0}, .ndim = 2, .dtype = F32, .shape = out_shape};
    return fsdp_all_to_all_v(c->group, &from, &to, in_rows, out_rows, c->work);
}

static const struct variant {
    const char *name;
    fsdp_status (*call)(struct call *);
    const char *odd_text, *text; /* what messages call the two */
    int pair;                    /* the ranks are those of a pair, not rank 0 and another */
} variants[] = {
    {"kind", kind, "all_gather", "all_reduce(sum)", 0},
    {"reduce_scatter", kind_reduce_scatter, "all_reduce(sum)", "reduce_scatter(sum)", 0},
    {"barrier", kind_barrier, "barrier", "all_to_all", 0},
    {"dtype", dtype, "int32", "float32", 0},
    {"op", op, "all_reduce(max)", "all_reduce(sum)", 0},
    {"root of reduce", root_reduce, ", root ", ", root 0", 0},
    {"root of broadcast", root_broadcast, ", root ", ", root 0", 0},
    {"root of gather", root_gather, ", root ", ", root 0", 0},
    {"root of scatter", root_scatter, ", root ", ", root 0", 0},
    {"count", count, "reduce_scatter(avg) of ", "reduce_scatter(avg) of ", 0},
    {"count, much", count_much, "all_gather of ", "all_gather of ", 0},
    {"empty", empty, "all_reduce(sum) of 0 float32", "all_reduce(sum) of ", 0},
    {"rows of all_gather", rows, "all_gather", "differ in shapes or rows", 0},
    {"rows of reduce_scatter", rows_reduce_scatter, "reduce_scatter", "differ in shapes or rows", 0},
    {"length of a list", list_length, "in 2 tensors", "in 3 tensors", 0},
    {"cut of a list", list_cut, "in 2 tensors", "differ in shapes", 0},
    {"dtype in a list", list_dtype, "in 2 tensors", "differ in shapes", 0},
    {"pairs of all_to_all", pairs, "uneven all_to_all", "output_rows", 1},
};
#define VARIANTS (int)(sizeof variants / sizeof *variants)

static int ranks_n;
static int64_t elements;
static int32_t direct;

static void check_untouched(const struct call *c, const char *name)
{
    for (int64_t i = 0; i < c->count; i++)
        CHECK(c->out[i] == GUARD, "%s: out[%lld] is %g", name, (long long)i, (double)c->out[i]);
}

static void check_told(const struct variant *v, const struct call *c, int culprit, fsdp_status got)
{
    fsdp_error_info info = {.struct_size = sizeof info};
    char a[32], b[32];
    CHECK(got == FSDP_ERR_MISMATCH, "%s, rank %d of %d odd: %s: %s", v->name, culprit, c->n, fsdp_status_name(got),
          fsdp_last_error());
    OK(fsdp_last_error_info(&info));
    int other = culprit ? culprit : 1;
    int first = v->pair ? culprit : 0, second = v->pair ? (culprit + 1) % c->n : other;
    snprintf(a, sizeof a, "rank %d ", first);
    snprintf(b, sizeof b, "rank %d ", second);
    CHECK(info.status == FSDP_ERR_MISMATCH && info.rank_a == first && info.rank_b == second && info.sequence > 0 &&
              info.operation != FSDP_OP_NONE,
          "%s: ranks %d and %d, sequence %llu: %s", v->name, info.rank_a, info.rank_b,
          (unsigned long long)info.sequence, info.message);
    CHECK(strstr(info.message, a) && strstr(info.message, b) && strstr(info.message, v->text) &&
              strstr(info.message, v->odd_text) && strstr(info.message, "must"),
          "%s: %s", v->name, info.message);
}

static void try_all(int rank)
{
    fsdp_group_options options = crew_options(8000, direct);
    fsdp_group *group = crew_group(rank, ranks_n, &options);
    float *in = crew_floats(elements, (float)(rank + 1)), *out = crew_floats(elements, GUARD);
    for (int v = 0; v < VARIANTS; v++)
        for (int culprit = 0; culprit < ranks_n; culprit += ranks_n - 1)
            for (int async = 0; async < 2; async++) {
                fsdp_work *work = NULL;
                struct call c = {.group = group,
                                 .rank = rank,
                                 .n = ranks_n,
                                 .odd = rank == culprit,
                                 .count = elements,
                                 .in = in,
                                 .out = out,
                                 .work = async ? &work : NULL};
                fsdp_status got = variants[v].call(&c);
                if (async) {
                    CHECK(got == FSDP_OK, "%s: %s", variants[v].name, fsdp_last_error());
                    got = fsdp_work_wait(work, -1);
                    fsdp_error_info info = {.struct_size = sizeof info};
                    OK(fsdp_work_error(work, &info));
                    CHECK(info.status == got && strcmp(info.message, fsdp_last_error()) == 0, "'%s'", info.message);
                    fsdp_work_release(work);
                }
                check_told(&variants[v], &c, culprit, got);
                check_untouched(&c, variants[v].name);
                crew_group_works(group, rank, ranks_n);
            }
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    CHECK(info.status == FSDP_OK, "the group failed: %d", info.status);
    fsdp_group_release(group);
}

static void run(int n, int64_t count, int32_t direct_read)
{
    ranks_n = n;
    elements = count;
    direct = direct_read;
    crew_run(n, 40000, try_all);
}

#define SMALL 96
#define LARGE (24 * 12500)

Test(mismatch, two_ranks_inline)
{
    run(2, SMALL, 0);
}
Test(mismatch, two_ranks_staged)
{
    run(2, LARGE, 2);
}
Test(mismatch, two_ranks_direct)
{
    run(2, LARGE, 1);
}
Test(mismatch, three_ranks_inline)
{
    run(3, SMALL, 0);
}
Test(mismatch, three_ranks_staged)
{
    run(3, LARGE, 2);
}
Test(mismatch, three_ranks_direct)
{
    run(3, LARGE, 1);
}
Test(mismatch, four_ranks_inline)
{
    run(4, SMALL, 0);
}
Test(mismatch, four_ranks_staged)
{
    run(4, LARGE, 2);
}
Test(mismatch, four_ranks_direct)
{
    run(4, LARGE, 1);
}

/* Of five queued operations the second and the fourth differ: just those fail. */
static void queue(int rank)
{
    fsdp_group_options options = crew_options(8000, 0);
    fsdp_group *group = crew_group(rank, 3, &options);
    float *in = crew_floats(5 * LARGE, (float)(rank + 1)), *out = crew_floats(5 * LARGE, GUARD);
    fsdp_work *works[5];
    for (int i = 0; i < 5; i++) {
        int wrong = (i == 1 && rank == 0) || (i == 3 && rank == 2);
        OK(fsdp_all_reduce(group, crew_tensor(in + i * LARGE, F32, LARGE), crew_tensor(out + i * LARGE, F32, LARGE),
                           wrong ? FSDP_MIN : FSDP_SUM, &works[i]));
    }
    for (int i = 4; i >= 0; i--) {
        if (i == 1 || i == 3)
            EXPECT(fsdp_work_wait(works[i], -1), FSDP_ERR_MISMATCH, "all_reduce(min)", "all_reduce(sum)",
                   i == 1 ? "rank 1" : "rank 2");
        else
            OK(fsdp_work_wait(works[i], -1));
        float want = i == 1 || i == 3 ? GUARD : 6;
        for (int64_t k = 0; k < LARGE; k++)
            CHECK(out[i * LARGE + k] == want, "operation %d: out[%lld] is %g", i, (long long)k,
                  (double)out[i * LARGE + k]);
        fsdp_work_release(works[i]);
    }
    crew_group_works(group, rank, 3);
    fsdp_group_release(group);
}

Test(mismatch, inside_a_queue)
{
    crew_run(3, 20000, queue);
}

/* Rank 1 makes two calls in the other order: both fail, on both, and the third is right again. */
static void order(int rank)
{
    fsdp_group_options options = crew_options(8000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[16];
    for (int i = 0; i < 16; i++) out[i] = GUARD;
    for (int i = 0; i < 2; i++) {
        const char *mine = "rank 0 called all_gather of 8 float32, rank 1 called broadcast of 4 float32, root 0";
        const char *other = "rank 0 called broadcast of 4 float32, root 0, rank 1 called all_gather of 8 float32";
        if (i == rank)
            EXPECT(fsdp_all_gather(group, crew_tensor(in, F32, 4), crew_tensor(out, F32, 8), NULL), FSDP_ERR_MISMATCH,
                   i == 0 ? mine : other);
        else
            EXPECT(fsdp_broadcast(group, crew_tensor(out, F32, 4), 0, NULL), FSDP_ERR_MISMATCH, i == 0 ? mine : other);
    }
    for (int i = 0; i < 16; i++) CHECK(out[i] == GUARD, "out[%d] is %g", i, (double)out[i]);
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(mismatch, order_of_calls)
{
    crew_run(2, 10000, order);
}

/* In a part of a split group, and in a part of that, ranks have other numbers than those their user knows: both are
 * told. Ranks 1 to 3 of 4 form a part in reverse order, all but its first rank another. */
static void part(int rank)
{
    fsdp_group_options options = crew_options(8000, 0), named = options;
    options.name = "everyone";
    named.name = "inner";
    fsdp_group *group = crew_group(rank, 4, &options), *outer = NULL, *inner = NULL;
    OK(fsdp_group_split(group, rank > 0 ? 0 : -1, -rank, NULL, &outer));
    if (rank > 0) {
        float *data = crew_floats(3 * (4 + rank), GUARD);
        int64_t n = rank == 2 ? 4 : 5; /* rank 1 of outer */
        EXPECT(fsdp_all_reduce(outer, crew_tensor(data, F32, n), crew_tensor(data, F32, n), FSDP_SUM, NULL),
               FSDP_ERR_MISMATCH, "group 'everyone/0'", "rank 0 (rank 3 of 'everyone') called all_reduce(sum) of 5",
               "rank 1 (rank 2 of 'everyone') called all_reduce(sum) of 4");
        OK(fsdp_group_split(outer, rank < 3 ? 0 : -1, 0, &named, &inner));
    }
    if (inner) {
        float data[8] = {0}, out[8];
        int64_t gives[2] = {1, rank}, takes[2] = {1, 1}; /* rank 2 of everyone gives 2 */
        EXPECT(fsdp_all_to_all_v(inner, crew_tensor(data, F32, 1 + rank), crew_tensor(out, F32, 2), gives, takes, NULL),
               FSDP_ERR_MISMATCH, "group 'inner'", "rank 0 (rank 2 of 'everyone') gives rank 1 (rank 1 of 'everyone')");
        crew_group_works(inner, 2 - rank, 2);
    }
    crew_group_works(group, rank, 4);
    fsdp_group_release(inner);
    fsdp_group_release(outer);
    fsdp_group_release(group);
}

Test(mismatch, in_a_part_both_numbers_of_a_rank_are_told)
{
    crew_run(4, 20000, part);
}

/* Point to point: counts or dtypes that differ fail that message on both sides, and only it. */
static void messages(int rank)
{
    fsdp_group_options options = crew_options(8000, direct);
    fsdp_group *group = crew_group(rank, 2, &options);
    static const int64_t counts[] = {1, 24, 40000, LARGE};
    for (int i = 0; i < 4; i++) {
        int64_t n = counts[i];
        float *data = crew_floats(n + 1, GUARD);
        if (rank == 0) {
            EXPECT(fsdp_send(group, crew_tensor(data, F32, n), 1, 3, NULL), FSDP_ERR_MISMATCH, "rank 1", "tag 3",
                   "send");
            EXPECT(fsdp_send(group, crew_tensor(data, F32, n), 1, 3, NULL), FSDP_ERR_MISMATCH, "rank 1", "int32",
                   "send");
            for (int64_t k = 0; k < n; k++) data[k] = 5;
            OK(fsdp_send(group, crew_tensor(data, F32, n), 1, 3, NULL));
        } else {
            EXPECT(fsdp_recv(group, crew_tensor(data, F32, n + 1), 0, 3, NULL), FSDP_ERR_MISMATCH, "rank 0", "tag 3",
                   "recv");
            EXPECT(fsdp_recv(group, crew_tensor(data, I32, n), FSDP_ANY_RANK, 3, NULL), FSDP_ERR_MISMATCH, "rank 0",
                   "float32", "recv");
            for (int64_t k = 0; k <= n; k++) CHECK(data[k] == GUARD, "data[%lld] is %g", (long long)k, (double)data[k]);
            OK(fsdp_recv(group, crew_tensor(data, F32, n), 0, 3, NULL));
            for (int64_t k = 0; k < n; k++) CHECK(data[k] == 5, "data[%lld] is %g", (long long)k, (double)data[k]);
        }
    }
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(mismatch, messages)
{
    for (direct = 1; direct <= 2; direct++) {
        crew_fini();
        crew_init();
        crew_run(2, 20000, messages);
    }
}
