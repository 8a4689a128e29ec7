/* Collectives are right: every kind, dtype, reduction, root, size and layout, by every way of moving data. */
#include "job.h"

#include <sys/mman.h>
#include <unistd.h>

#include "../unit/kernel_oracle.h"
#include "transport/shm/shm.h"

static void setup(void)
{
    job_tables();
}

TestSuite(collectives, .init = setup, .timeout = SANITIZED ? 900 : 240);

/* What a run of ranks is to do. */
struct setting {
    enum way route;
    int64_t staging;
};

static int thorough(int size)
{
    return !SANITIZED && size <= 4;
}

/* Every count of a kind and dtype, with the reductions in turn or all. */
static void do_counts(struct rank *r, fsdp_group *group, fsdp_op_kind kind, enum dtype type, const int64_t *counts,
                      int n, int all_ops)
{
    static _Thread_local uint64_t seed;
    for (int i = 0; i < n; i++) {
        int ops = job_reduces(kind) ? FSDP_BXOR + 1 : 1;
        for (int op = 0; op < ops; op++) {
            if (job_reduces(kind) && !job_op_defined(type, op)) continue;
            if (job_reduces(kind) && !all_ops && op != (i + (int)type) % 2) continue;
            struct job job = {.kind = kind, .type = type, .op = op, .count = counts[i], .seed = ++seed};
            job.root = job_has_root(kind) ? (int)(seed % (uint64_t)r->size) : 0;
            job_do(&job, r, group);
        }
    }
}

/* ---- kinds, dtypes, reductions */

static void every_kind(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const int64_t counts[] = {0, 1, 3, 63, 1031}, few[] = {3, 1031};
    for (int k = 0; k < 8; k++)
        for (int type = 0; type < DTYPE_COUNT; type++)
            if (thorough(r->size))
                do_counts(r, group, job_kinds[k], (enum dtype)type, counts, 5, 1);
            else
                do_counts(r, group, job_kinds[k], (enum dtype)type, few, 2, r->size < 8);
    fsdp_group_release(group);
}

#define BOTH_ROUTES(size, fn, bytes)                                                                                   \
    do {                                                                                                               \
        for (enum way route_ = STAGED; route_ <= DIRECT; route_++) {                                                   \
            struct setting setting_ = {route_, bytes};                                                                 \
            ranks_run(size, fn, &setting_);                                                                            \
        }                                                                                                              \
    } while (0)

Test(collectives, every_kind_dtype_and_reduction_alone)
{
    BOTH_ROUTES(1, every_kind, 0);
}

Test(collectives, every_kind_dtype_and_reduction_of_two)
{
    BOTH_ROUTES(2, every_kind, 64 << 10);
}

Test(collectives, every_kind_dtype_and_reduction_of_three)
{
    BOTH_ROUTES(3, every_kind, 64 << 10);
}

Test(collectives, every_kind_dtype_and_reduction_of_four)
{
    BOTH_ROUTES(4, every_kind, 64 << 10);
}

Test(collectives, every_kind_dtype_and_reduction_of_eight)
{
    BOTH_ROUTES(8, every_kind, 64 << 10);
}

/* ---- sizes at which something changes: inline or not, one chunk or more, all slots full */

static void boundaries(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const enum dtype types[] = {DTYPE_U8, DTYPE_F32, DTYPE_BF16, DTYPE_C128};
    int64_t slot = s->staging / SHM_DEPTH, n = r->size;
    for (int k = 0; k < 8; k++)
        for (int t = 0; t < 4; t++) {
            fsdp_op_kind kind = job_kinds[k];
            int64_t size = (int64_t)dtype_size(types[t]),
                    spread = !job_reduces(kind) && kind != FSDP_OP_SCATTER && kind != FSDP_OP_ALL_TO_ALL;
            int64_t lanes = spread ? 1 : kind == FSDP_OP_ALL_REDUCE ? n : n - 1;
            int64_t lane = slot / lanes / 64 * 64, whole = kind == FSDP_OP_ALL_REDUCE ? n : 1;
            int64_t marks[] = {SHM_INLINE, SHM_INLINE / n, lane * whole, SHM_DEPTH * lane * whole,
                               (SHM_DEPTH + 1) * lane * whole};
            int64_t counts[15];
            for (int i = 0; i < 15; i++) counts[i] = marks[i / 3] / size + i % 3 - 1;
            do_counts(r, group, kind, types[t], counts, thorough(r->size) ? 15 : 9, 0);
        }
    fsdp_group_release(group);
}

Test(collectives, sizes_around_each_boundary_of_two)
{
    BOTH_ROUTES(2, boundaries, 64 << 10);
}

Test(collectives, sizes_around_each_boundary_of_three)
{
    BOTH_ROUTES(3, boundaries, 64 << 10);
}

Test(collectives, sizes_around_each_boundary_of_eight)
{
    BOTH_ROUTES(8, boundaries, 64 << 10);
}

static void large(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const enum dtype types[] = {DTYPE_F32, DTYPE_U8, DTYPE_BF16};
    const int64_t count = SANITIZED ? (1 << 16) + 7 : ((1 << 20) + 7) / (r->size > 2 ? 4 : 1);
    for (int k = 0; k < 8; k++) do_counts(r, group, job_kinds[k], types[k % 3], &count, 1, 0);
    do_counts(r, group, FSDP_OP_ALL_REDUCE, DTYPE_F32, &count, 1, 0);
    fsdp_group_release(group);
}

Test(collectives, large_tensors_through_staging_of_any_size)
{
    const int64_t staging[] = {64 << 10, 1 << 20, 8 << 20};
    for (int i = 0; i < 3; i++) {
        struct setting setting = {STAGED, staging[i]};
        ranks_run(2, large, &setting);
    }
    ranks_run(8, large, &(struct setting){STAGED, 64 << 10});
}

Test(collectives, large_tensors_read_directly)
{
    ranks_run(2, large, &(struct setting){DIRECT, 0});
    ranks_run(3, large, &(struct setting){DIRECT, 0});
}

/* ---- layouts */

static void layouts(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const int64_t counts[] = {6, 30, 2000, 30030};
    static const enum dtype types[] = {DTYPE_F32, DTYPE_I8, DTYPE_C128, DTYPE_F16};
    uint64_t seed = 1000;
    for (int k = 0; k < 8; k++)
        for (int in = 0; in < LAYOUTS; in++)
            for (int out = 0; out <= PADDED; out++)
                for (int i = 0; i < (seed % 5 || SANITIZED ? 3 : 4); i++) {
                    seed++;
                    struct job job = {.kind = job_kinds[k],
                                      .type = types[seed % 4],
                                      .count = counts[i],
                                      .in = (enum layout)in,
                                      .out = (enum layout)out,
                                      .seed = seed};
                    if (job_has_root(job.kind)) job.root = (int)(seed % (uint64_t)r->size);
                    job_do(&job, r, group);
                    job.uneven = job_can_be_uneven(job.kind);
                    if (job.uneven) job_do(&job, r, group);
                }
    fsdp_group_release(group);
}

Test(collectives, strided_transposed_reversed_and_expanded_tensors)
{
    BOTH_ROUTES(2, layouts, 64 << 10);
    ranks_run(3, layouts, &(struct setting){STAGED, 64 << 10});
    ranks_run(1, layouts, &(struct setting){ANY_ROUTE, 0});
}

static void in_place(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const int64_t counts[] = {0, 1, 63, 1031, 40009};
    static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I64};
    uint64_t seed = 5000;
    for (int k = 0; k < 8; k++)
        for (int t = 0; t < 3; t++)
            for (int i = 0; i < 5 && job_can_be_in_place(job_kinds[k]); i++) {
                struct job job = {
                    .kind = job_kinds[k], .type = types[t], .count = counts[i], .in_place = 1, .seed = ++seed};
                if (job_has_root(job.kind)) job.root = (int)(seed % (uint64_t)r->size);
                job_do(&job, r, group);
                job.uneven = job_can_be_uneven(job.kind);
                if (job.uneven) job_do(&job, r, group);
            }
    fsdp_group_release(group);
}

Test(collectives, in_place)
{
    BOTH_ROUTES(2, in_place, 64 << 10);
    BOTH_ROUTES(3, in_place, 64 << 10);
    ranks_run(1, in_place, &(struct setting){ANY_ROUTE, 0});
}

/* ---- rows and roots */

static void uneven_rows(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const int64_t counts[] = {1, 2, 40, 700, 20011};
    static const enum dtype types[] = {DTYPE_F64, DTYPE_F16, DTYPE_U8, DTYPE_BOOL};
    uint64_t seed = 9000;
    for (int k = 0; k < 8; k++)
        for (int i = 0; i < 5 && job_can_be_uneven(job_kinds[k]); i++)
            for (int n = 0; n < (counts[i] < 1000 && !SANITIZED ? 12 : 3); n++) {
                seed++;
                struct job job = {
                    .kind = job_kinds[k], .type = types[seed % 4], .count = counts[i], .uneven = 1, .seed = seed};
                job_do(&job, r, group);
            }
    fsdp_group_release(group);
}

Test(collectives, uneven_rows_and_ranks_without_any)
{
    BOTH_ROUTES(2, uneven_rows, 64 << 10);
    BOTH_ROUTES(4, uneven_rows, 64 << 10);
    ranks_run(1, uneven_rows, &(struct setting){ANY_ROUTE, 0});
}

static void every_root(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static const int64_t counts[] = {0, 5, 3001, 30011};
    uint64_t seed = 12000;
    for (int k = 0; k < 8; k++)
        for (int root = 0; root < r->size && job_has_root(job_kinds[k]); root++)
            for (int i = 0; i < 4; i++)
                for (int n = 0; n < 3; n++) { /* with and without the tensors that a rank does not use */
                    struct job job = {
                        .kind = job_kinds[k], .type = DTYPE_F32, .count = counts[i], .root = root, .seed = ++seed};
                    job_do(&job, r, group);
                }
    fsdp_group_release(group);
}

Test(collectives, every_root_and_nothing_written_elsewhere)
{
    BOTH_ROUTES(2, every_root, 64 << 10);
    BOTH_ROUTES(4, every_root, 64 << 10);
}

/* ---- bits */

#define SOURCES 4
#define SUMMED 40009

struct summed {
    uint32_t crc[SOURCES][3];
};

static uint32_t checksum(const void *data, size_t bytes)
{
    const unsigned char *p = data;
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ p[i]) * 16777619u;
    return sum;
}

/* Sums of random numbers of any size, infinities and NaNs, by each way of moving them. */
static void same_bits(struct rank *r)
{
    static const struct setting settings[SOURCES] = {
        {STAGED, 64 << 10}, {STAGED, 1 << 20}, {STAGED, 8 << 20}, {DIRECT, 0}};
    static const enum dtype types[3] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    struct summed *summed = (struct summed *)(void *)r->shared + r->rank;
    for (int s = 0; s < SOURCES; s++) {
        fsdp_group *group = rank_group(r, settings[s].route, settings[s].staging);
        for (int t = 0; t < 3; t++) {
            size_t size = dtype_size(types[t]);
            char *in = malloc(SUMMED * size), *out = malloc(SUMMED * size);
            uint64_t state = (uint64_t)r->rank + 1;
            for (size_t i = 0; i < SUMMED; i++) element_random(types[t], in + i * size, &state);
            int64_t shape[] = {SUMMED};
            DLTensor a = {.data = in, .device = {kDLCPU, 0}, .ndim = 1, .dtype = dtype_to_dl(types[t]), .shape = shape},
                     b = a;
            b.data = out;
            OK(fsdp_all_reduce(group, &a, &b, FSDP_AVG, NULL));
            summed->crc[s][t] = checksum(out, SUMMED * size);
            free(in);
            free(out);
        }
        fsdp_group_release(group);
    }
}

Test(collectives, same_bits_on_every_rank_by_every_route_and_chunk_size)
{
    const struct summed *summed = (const void *)ranks_run(3, same_bits, NULL);
    for (int rank = 0; rank < 3; rank++)
        for (int s = 0; s < SOURCES; s++)
            cr_assert_arr_eq(summed[rank].crc[s], summed[0].crc[0], sizeof summed->crc[0], "rank %d, way %d", rank, s);
}

static uint16_t bf16(float x)
{
    uint16_t code;
    element_set(DTYPE_BF16, &code, (struct value){x, 0}, 0);
    return code;
}

static uint16_t f16(float x)
{
    uint16_t code;
    element_set(DTYPE_F16, &code, (struct value){x, 0}, 0);
    return code;
}

/* A 256 among ones: 259 in f32, 260 in bf16. Added hop by hop in bf16 it would stay 256. */
static void one_rounding(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    static _Thread_local uint16_t in[RANKS_MAX * 5000], out[5000];
    for (int count = 3; count <= 5000; count = count * 10 + 7) {
        for (int large_one = 0; large_one < r->size; large_one++) {
            int64_t whole[] = {r->size, count}, part[] = {count};
            for (int n = 0; n < r->size; n++)
                for (int i = 0; i < count; i++) in[n * count + i] = bf16(r->rank == large_one ? 256 : 1);
            DLTensor a = {
                .data = in, .device = {kDLCPU, 0}, .ndim = 2, .dtype = dtype_to_dl(DTYPE_BF16), .shape = whole};
            DLTensor b = {
                .data = out, .device = {kDLCPU, 0}, .ndim = 1, .dtype = dtype_to_dl(DTYPE_BF16), .shape = part};
            OK(fsdp_reduce_scatter(group, &a, &b, FSDP_SUM, NULL));
            for (int i = 0; i < count; i++)
                CHECK(out[i] == bf16(260), "256 on rank %d: element %d is %#x", large_one, i, out[i]);
        }
        /* The sum is above f16's range, the mean is not. */
        int64_t part[] = {count};
        for (int i = 0; i < count; i++) in[i] = f16(40000);
        DLTensor a = {.data = in, .device = {kDLCPU, 0}, .ndim = 1, .dtype = dtype_to_dl(DTYPE_F16), .shape = part},
                 b = a;
        b.data = out;
        OK(fsdp_all_reduce(group, &a, &b, FSDP_AVG, NULL));
        for (int i = 0; i < count; i++) CHECK(out[i] == f16(40000), "mean %d is %#x", i, out[i]);
    }
    fsdp_group_release(group);
}

Test(collectives, low_precision_rounds_once_in_any_order_of_ranks)
{
    BOTH_ROUTES(4, one_rounding, 64 << 10);
}

/* ---- what is refused */

static DLTensor tensor(void *data, enum dtype type, int ndim, int64_t *shape, int64_t *strides)
{
    return (DLTensor){.data = data,
                      .device = {kDLCPU, 0},
                      .ndim = ndim,
                      .dtype = dtype_to_dl(type),
                      .shape = shape,
                      .strides = strides};
}

static void refusals(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    int n = r->size;
    float data[64] = {0};
    int64_t four[] = {4}, all[] = {4 * n}, two_by_two[] = {2, 2}, expanded[] = {0, 1}, back[] = {-1}, mixed[] = {1, 1};
    DLTensor part = tensor(data, DTYPE_F32, 1, four, NULL), whole = tensor(data + 4, DTYPE_F32, 1, all, NULL);
    DLTensor copy = tensor(data + 40, DTYPE_F32, 1, four, NULL);
    DLTensor wide = tensor(data + 40, DTYPE_F32, 2, two_by_two, expanded),
             twins = tensor(data + 40, DTYPE_F32, 2, two_by_two, mixed);
    DLTensor reversed = tensor(data + 43, DTYPE_F32, 1, four, back), ints = tensor(data + 40, DTYPE_I32, 1, four, NULL);
    DLTensor inside = tensor(data + 5, DTYPE_F32, 1, four, NULL), square = tensor(data, DTYPE_F32, 2, two_by_two, NULL);

    /* Only some ranks make the refused call: it takes no place in the order. */
    for (int turn = 0; turn < 2; turn++) {
        if (turn == 0 || r->rank == 0) {
            REFUSED(fsdp_all_reduce(group, &square, &wide, FSDP_SUM, NULL), FSDP_ERR_INVALID, "share memory");
            REFUSED(fsdp_all_reduce(group, &square, &twins, FSDP_SUM, NULL), FSDP_ERR_INVALID, "share memory");
            REFUSED(fsdp_all_reduce(group, &part, &reversed, FSDP_SUM, NULL), FSDP_ERR_INVALID, "negative");
            REFUSED(fsdp_all_reduce(group, &part, &ints, FSDP_SUM, NULL), FSDP_ERR_INVALID, "dtype");
            REFUSED(fsdp_all_reduce(group, &part, &square, FSDP_SUM, NULL), FSDP_ERR_INVALID, "shape");
            REFUSED(fsdp_all_reduce(group, &ints, &ints, FSDP_AVG, NULL), FSDP_ERR_UNSUPPORTED, "op");
            REFUSED(fsdp_all_reduce(group, &part, &copy, FSDP_BXOR, NULL), FSDP_ERR_UNSUPPORTED, "op");
            REFUSED(fsdp_all_reduce(group, &part, &copy, FSDP_BXOR + 1, NULL), FSDP_ERR_INVALID, "op");
            REFUSED(fsdp_all_reduce(group, &part, NULL, FSDP_SUM, NULL), FSDP_ERR_INVALID, "NULL");
            REFUSED(fsdp_all_gather(group, &inside, &whole, NULL), FSDP_ERR_INVALID, "overlap");
            REFUSED(fsdp_all_gather(group, &part, &copy, NULL), FSDP_ERR_INVALID, "elements");
            REFUSED(fsdp_reduce_scatter(group, &whole, &inside, FSDP_SUM, NULL), FSDP_ERR_INVALID, "overlap");
            REFUSED(fsdp_all_to_all(group, &whole, &whole, NULL), FSDP_ERR_INVALID, "overlap");
            REFUSED(fsdp_broadcast(group, &part, n, NULL), FSDP_ERR_INVALID, "root");
            REFUSED(fsdp_broadcast(group, &part, -1, NULL), FSDP_ERR_INVALID, "root");
            int64_t rows[RANKS_MAX] = {[0] = 1}, negative[RANKS_MAX] = {-1, 5};
            REFUSED(fsdp_all_gather_v(group, &part, &whole, rows, NULL), FSDP_ERR_INVALID, "rows");
            REFUSED(fsdp_reduce_scatter_v(group, &whole, &part, negative, FSDP_SUM, NULL), FSDP_ERR_INVALID, "rows");
            REFUSED(fsdp_all_to_all_v(group, &part, &copy, rows, NULL, NULL), FSDP_ERR_INVALID, "output_rows");
        }
        OK(fsdp_barrier(group, NULL));
        struct job job = {.kind = FSDP_OP_ALL_GATHER, .type = DTYPE_F32, .count = 77, .seed = 3};
        job_do(&job, r, group);
    }
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    CHECK(info.status == FSDP_OK, "the group failed");
    CHECK(info.operations == 4, "%llu operations", (unsigned long long)info.operations);
    fsdp_group_release(group);
}

Test(collectives, wrong_arguments_are_refused_and_take_no_place_in_the_order)
{
    ranks_run(2, refusals, NULL);
}

/* Two columns of one matrix don't overlap: one may be reduced into the other. */
static void columns(struct rank *r)
{
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    float m[2][2] = {{(float)r->rank + 1, -1}, {(float)r->rank + 10, -2}};
    int64_t shape[] = {2}, strides[] = {2};
    DLTensor in = tensor(&m[0][0], DTYPE_F32, 1, shape, strides), out = tensor(&m[0][1], DTYPE_F32, 1, shape, strides);
    OK(fsdp_all_reduce(group, &in, &out, FSDP_SUM, NULL));
    CHECK(m[0][0] == (float)r->rank + 1 && m[1][0] == (float)r->rank + 10, "the input changed");
    CHECK(m[0][1] == 3 && m[1][1] == 21, "%g %g", (double)m[0][1], (double)m[1][1]);
    OK(fsdp_all_reduce(group, &out, &out, FSDP_SUM, NULL)); /* in place, with strides */
    CHECK(m[0][1] == 6 && m[1][1] == 42, "%g %g", (double)m[0][1], (double)m[1][1]);
    fsdp_group_release(group);
}

Test(collectives, columns_of_one_matrix_are_apart)
{
    ranks_run(2, columns, NULL);
}

/* ---- accounts */

static uint64_t moved(fsdp_group *group)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    return info.bytes_moved;
}

static void accounts(struct rank *r)
{
    const struct setting *s = r->argument;
    fsdp_group *group = rank_group(r, s->route, s->staging);
    int staged = s->route == STAGED;
    uint64_t n = (uint64_t)r->size, part = 50000 * 4;
    struct {
        fsdp_op_kind kind;
        uint64_t staged, direct;
    } want[] = {
        {FSDP_OP_ALL_GATHER, part + (n - 1) * part, (n - 1) * part},
        {FSDP_OP_REDUCE_SCATTER, 2 * (n - 1) * part, (n - 1) * part},
        {FSDP_OP_ALL_TO_ALL, 2 * (n - 1) * part, (n - 1) * part},
        {FSDP_OP_BROADCAST, part, r->rank ? part : 0},
        {FSDP_OP_GATHER, r->rank ? part : (n - 1) * part, r->rank ? 0 : (n - 1) * part},
        {FSDP_OP_SCATTER, r->rank ? part : (n - 1) * part, r->rank ? part : 0},
        {FSDP_OP_REDUCE, r->rank ? part : (n - 1) * part, r->rank ? 0 : (n - 1) * part},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct job job = {.kind = want[i].kind, .type = DTYPE_F32, .count = 50000, .seed = i};
        uint64_t before = moved(group);
        job_do(&job, r, group);
        uint64_t now = moved(group) - before, expected = staged ? want[i].staged : want[i].direct;
        CHECK(now == expected, "kind %d moved %llu bytes, not %llu", want[i].kind, (unsigned long long)now,
              (unsigned long long)expected);
    }
    fsdp_group_release(group);
}

Test(collectives, bytes_moved_counts_what_the_way_of_moving_must_move)
{
    BOTH_ROUTES(2, accounts, 64 << 10);
    BOTH_ROUTES(3, accounts, 1 << 20);
}

/* ---- more than 2^31 bytes */

#define HUGE (((int64_t)1 << 31) + 5)

static void huge(struct rank *r)
{
    fsdp_group *staged = rank_group(r, STAGED, 0), *direct = rank_group(r, DIRECT, 0);
    int64_t whole[] = {HUGE}, rows[] = {HUGE - 3, 3};
    char *data = mmap(NULL, HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(data != MAP_FAILED, "no memory");
    madvise(data, HUGE, MADV_HUGEPAGE);
    const int64_t marks[] = {0, 12345, ((int64_t)1 << 31) - 1, (int64_t)1 << 31, HUGE - 4, HUGE - 1};
    DLTensor t = tensor(data, DTYPE_U8, 1, whole, NULL);
    if (r->rank == 0)
        for (int i = 0; i < 6; i++) data[marks[i]] = (char)(i + 1);
    OK(fsdp_broadcast(staged, &t, 0, NULL));
    for (int i = 0; i < 6; i++)
        CHECK(data[marks[i]] == i + 1, "broadcast: byte %lld is %d", (long long)marks[i], data[marks[i]]);
    OK(fsdp_all_reduce(staged, &t, &t, FSDP_SUM, NULL));
    for (int i = 0; i < 6; i++)
        CHECK(data[marks[i]] == 2 * i + 2, "all_reduce: byte %lld is %d", (long long)marks[i], data[marks[i]]);
    /* In place: rank 1 brings the last three bytes. */
    char first = data[0];
    if (r->rank == 1) {
        data[0] = 99;
        memset(data + HUGE - 3, 77, 3);
    }
    DLTensor mine = t;
    mine.byte_offset = r->rank ? (uint64_t)rows[0] : 0;
    mine.shape = &rows[r->rank];
    OK(fsdp_all_gather_v(direct, &mine, &t, rows, NULL));
    CHECK(data[0] == first && data[HUGE - 4] == (5 << 1) && data[HUGE - 3] == 77 && data[HUGE - 1] == 77,
          "all_gather_v: %d %d %d %d", data[0], data[HUGE - 4], data[HUGE - 3], data[HUGE - 1]);
    munmap(data, HUGE);
    fsdp_group_release(staged);
    fsdp_group_release(direct);
}

Test(collectives, tensors_above_two_gibibytes)
{
    if (SANITIZED || (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) < 3 * HUGE)
        cr_skip_test("not enough memory");
    ranks_run(2, huge, NULL);
}
