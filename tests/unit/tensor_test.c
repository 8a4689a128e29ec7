/* Tensors: what is taken from a host's DLTensor and what is refused, which tensors overlap, and strided
 * copies; each against brute force over elements and bytes. */
#include "kernel_oracle.h"

#include "tensor/tensor.h"

#define ARENA 512

static char arena[ARENA];

static void expect_word(const char *word)
{
    cr_expect(strstr(err_message(), word) != NULL, "no \"%s\" in \"%s\"", word, err_message());
}

#define REFUSED(call, status, word)                                                                                    \
    do {                                                                                                               \
        cr_expect_eq(call, status, "%s", #call);                                                                       \
        expect_word(word);                                                                                             \
    } while (0)

static DLTensor host(void *data, enum dtype type, int ndim, int64_t *shape, int64_t *strides)
{
    return (DLTensor){.data = data,
                      .device = {kDLCPU, 0},
                      .ndim = ndim,
                      .dtype = dtype_to_dl(type),
                      .shape = shape,
                      .strides = strides};
}

/* ---- taking */

Test(tensor, element_0_is_at_data_plus_byte_offset)
{
    int64_t shape[] = {2, 3};
    DLTensor dl = host(arena, DTYPE_F32, 2, shape, NULL);
    struct tensor t;
    dl.byte_offset = 32;
    cr_assert_eq(tensor_import(&dl, "in", &t), FSDP_OK);
    cr_expect(t.data == arena + 32 && t.count == 6 && t.bytes == 24 && t.contiguous && t.type == DTYPE_F32);
    cr_expect(t.strides[0] == 3 && t.strides[1] == 1, "strides that are not given are row-major");
}

Test(tensor, strides_that_mean_nothing_are_ignored)
{
    struct tensor t;
    int64_t one[] = {1, 4, 1}, odd[] = {-77, 1, 1 << 20}, empty[] = {3, 0, 2}, huge[] = {INT64_MAX, INT64_MIN, -1};
    DLTensor dl = host(arena, DTYPE_I16, 3, one, odd);
    cr_assert_eq(tensor_import_output(&dl, "out", &t), FSDP_OK);
    cr_expect(t.contiguous && t.count == 4);
    dl = host(NULL, DTYPE_I16, 3, empty, huge);
    cr_assert_eq(tensor_import_output(&dl, "out", &t), FSDP_OK);
    cr_expect(t.contiguous && t.count == 0 && t.bytes == 0 && !t.data);
    dl = host(arena, DTYPE_C128, 0, NULL, NULL);
    cr_assert_eq(tensor_import_output(&dl, "out", &t), FSDP_OK);
    cr_expect(t.contiguous && t.count == 1 && t.bytes == 16 && tensor_rows(&t) == 1 && tensor_row_count(&t) == 1);
}

Test(tensor, empty_tensors_may_have_rows_of_any_size)
{
    struct tensor t;
    int64_t shape[] = {0, (int64_t)1 << 40, (int64_t)1 << 40};
    DLTensor dl = host(NULL, DTYPE_F64, 3, shape, NULL);
    cr_assert_eq(tensor_import(&dl, "in", &t), FSDP_OK);
    cr_expect_eq(tensor_rows(&t), 0);
    cr_expect_gt(tensor_row_count(&t), 0);
}

Test(tensor, what_cannot_be_read_is_refused_by_name)
{
    struct tensor t;
    int64_t shape[] = {2, 3}, negative[] = {2, -3}, large[] = {(int64_t)1 << 32, (int64_t)1 << 32};
    int64_t long_row[] = {(int64_t)1 << 62}, far[] = {INT64_MAX, 1}, many[33] = {0};
    DLTensor good = host(arena, DTYPE_F32, 2, shape, NULL), bad;
    REFUSED(tensor_import(NULL, "in", &t), FSDP_ERR_INVALID, "in is NULL");
    bad = good, bad.device.device_type = kDLCUDA;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_UNSUPPORTED, "device");
    bad = good, bad.ndim = -1;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "dimensions");
    bad = good, bad.ndim = 33, bad.shape = many;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "33 dimensions");
    bad = good, bad.shape = NULL;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "shape is NULL");
    bad = good, bad.shape = negative;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "negative");
    bad = good, bad.shape = large;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "overflow");
    bad = good, bad.shape = long_row, bad.ndim = 1;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "overflow");
    bad = good, bad.strides = far;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "address space");
    bad = good, bad.data = NULL;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_INVALID, "data is NULL");
    bad = good, bad.dtype.lanes = 4;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_UNSUPPORTED, "lanes");
    bad = good, bad.dtype.bits = 4, bad.dtype.code = kDLInt;
    REFUSED(tensor_import(&bad, "in", &t), FSDP_ERR_UNSUPPORTED, "bits 4");
}

/* ---- brute force */

struct picked {
    DLTensor dl;
    int64_t shape[3], strides[3];
};

/* A small view of the arena: any shape, strides that are often regular, and a place that keeps it inside. */
static void pick(struct picked *p, enum dtype type, uint64_t *state)
{
    size_t size = dtype_size(type);
    int ndim = (int)(random_bits(state) % 4);
    int64_t low = 0, high = 0, step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        p->shape[d] = (int64_t)(random_bits(state) % 4);
        switch (random_bits(state) % 6) {
        case 0:
            p->strides[d] = (int64_t)(random_bits(state) % 13) - 6;
            break;
        case 1:
            p->strides[d] = step * 2;
            break;
        case 2:
            p->strides[d] = -step;
            break;
        default:
            p->strides[d] = step;
        }
        step *= p->shape[d] ? p->shape[d] : 1;
        int64_t reach = p->shape[d] ? (p->shape[d] - 1) * p->strides[d] : 0;
        if (reach < 0)
            low += reach;
        else
            high += reach;
    }
    int64_t room = ARENA - (high - low + 1) * (int64_t)size, grain = random_bits(state) & 1 ? 1 : (int64_t)size;
    if (room <= 0) {
        pick(p, type, state);
        return;
    }
    if (room > ARENA / 4) room = ARENA / 4; /* close together, so that many overlap */
    int64_t at = (int64_t)(random_bits(state) % (uint64_t)room) / grain * grain;
    p->dl = host(arena + at - low * (int64_t)size, type, ndim, p->shape, random_bits(state) % 4 ? p->strides : NULL);
    if (!p->dl.strides) p->dl.data = arena; /* row-major: at most 27 elements */
}

/* Element `index` in row-major order. */
static char *element_of(const struct tensor *t, int64_t index)
{
    int64_t at = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        at += index % t->shape[d] * t->strides[d];
        index /= t->shape[d];
    }
    return t->data + at * (int64_t)dtype_size(t->type);
}

static int mark(const struct tensor *t, char marks[ARENA])
{
    int distinct = 1;
    memset(marks, 0, ARENA);
    for (int64_t i = 0; i < t->count; i++) {
        char *from = element_of(t, i);
        for (size_t b = 0; b < dtype_size(t->type); b++) {
            cr_assert(from + b >= arena && from + b < arena + ARENA);
            distinct &= !marks[from + b - arena];
            marks[from + b - arena] = 1;
        }
    }
    return distinct;
}

Test(tensor, an_output_never_has_two_elements_in_one_place)
{
    uint64_t state = 1;
    int taken = 0, strided = 0, refused = 0;
    for (int i = 0; i < 20000; i++) {
        struct picked p;
        struct tensor t;
        char marks[ARENA];
        pick(&p, (enum dtype)(random_bits(&state) % DTYPE_COUNT), &state);
        cr_assert_eq(tensor_import(&p.dl, "in", &t), FSDP_OK);
        int distinct = mark(&t, marks), backward = 0;
        for (int d = 0; d < t.ndim; d++) backward |= t.shape[d] > 1 && t.strides[d] < 0;
        fsdp_status status = tensor_import_output(&p.dl, "out", &t);
        if (status == FSDP_OK) {
            cr_assert(distinct && !backward, "taken with shared elements or negative strides");
            taken++;
            strided += !t.contiguous;
        } else {
            cr_assert_eq(status, FSDP_ERR_INVALID);
            cr_assert(t.count > 1);
            refused++;
        }
    }
    cr_expect(taken > 5000 && strided > 1000 && refused > 1000, "%d taken, %d of them strided, %d refused", taken,
              strided, refused);
}

Test(tensor, regular_outputs_are_taken)
{
    struct tensor t;
    int64_t shape[] = {3, 4, 5}, turned[] = {1, 3, 12}, mixed[] = {5, 60, 1}, padded[] = {40, 10, 2};
    int64_t *strides[] = {NULL, turned, mixed, padded};
    for (int i = 0; i < 4; i++) {
        DLTensor dl = host(arena, DTYPE_I8, 3, shape, strides[i]);
        cr_expect_eq(tensor_import_output(&dl, "out", &t), FSDP_OK, "strides %d: %s", i, err_message());
    }
    int64_t expanded[] = {0, 5, 1}, back[] = {20, 5, -1}, twins[] = {20, 5, 5};
    DLTensor dl = host(arena + 64, DTYPE_I8, 3, shape, expanded);
    REFUSED(tensor_import_output(&dl, "out", &t), FSDP_ERR_INVALID, "share memory");
    dl.strides = twins;
    REFUSED(tensor_import_output(&dl, "out", &t), FSDP_ERR_INVALID, "share memory");
    dl.strides = back;
    REFUSED(tensor_import_output(&dl, "out", &t), FSDP_ERR_INVALID, "negative");
}

Test(tensor, overlap_is_never_missed_and_exact_for_contiguous_tensors)
{
    uint64_t state = 2;
    int apart = 0, interleaved = 0;
    for (int i = 0; i < 40000; i++) {
        struct picked p[2];
        struct tensor t[2];
        char marks[2][ARENA];
        int shared = 0;
        for (int k = 0; k < 2; k++) {
            pick(&p[k], (enum dtype)(random_bits(&state) % DTYPE_COUNT), &state);
            cr_assert_eq(tensor_import(&p[k].dl, "in", &t[k]), FSDP_OK);
            mark(&t[k], marks[k]);
        }
        for (int b = 0; b < ARENA; b++) shared |= marks[0][b] && marks[1][b];
        int told = tensor_overlap(&t[0], &t[1]);
        cr_assert_eq(told, tensor_overlap(&t[1], &t[0]));
        cr_assert(!shared || told, "an overlap was missed");
        if (t[0].contiguous && t[1].contiguous) cr_assert_eq(told, shared);
        if (t[0].count == 0 || t[1].count == 0) continue;
        uintptr_t low[2], high[2];
        for (int k = 0; k < 2; k++) {
            tensor_range(&t[k], &low[k], &high[k]);
            for (int b = 0; b < ARENA; b++)
                cr_assert(!marks[k][b] || ((uintptr_t)(arena + b) >= low[k] && (uintptr_t)(arena + b) < high[k]));
            cr_assert(marks[k][(char *)low[k] - arena] && marks[k][(char *)high[k] - 1 - arena],
                      "the range is not tight");
        }
        int disjoint = high[0] <= low[1] || high[1] <= low[0];
        if (disjoint) cr_assert(!told, "disjoint ranges overlap");
        apart += !told;
        interleaved += !told && !disjoint;
    }
    cr_expect(apart > 1000 && interleaved > 20, "%d apart, %d of them interleaved", apart, interleaved);
}

Test(tensor, columns_of_one_matrix_do_not_overlap)
{
    int64_t shape[] = {5}, strides[] = {3};
    struct tensor t[3];
    for (int c = 0; c < 3; c++) {
        DLTensor dl = host(arena + 4 * c, DTYPE_F32, 1, shape, strides);
        cr_assert_eq(tensor_import(&dl, "in", &t[c]), FSDP_OK);
    }
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            cr_expect_eq(tensor_overlap(&t[a], &t[b]), a == b);
            cr_expect_eq(tensor_same_place(&t[a], &t[b]), a == b);
        }
}

/* ---- copies */

Test(tensor, copies_any_layout_to_any_other_and_nothing_else)
{
    static char before[ARENA], source[ARENA], dense[27 * 16];
    uint64_t state = 3;
    for (int i = 0; i < 40000; i++) {
        enum dtype type = (enum dtype)(random_bits(&state) % DTYPE_COUNT);
        size_t size = dtype_size(type);
        struct picked in, out;
        struct tensor from, to;
        pick(&in, type, &state);
        pick(&out, type, &state);
        out.dl.ndim = in.dl.ndim;
        memcpy(out.shape, in.shape, sizeof in.shape);
        out.dl.strides = NULL, out.dl.data = arena + 8; /* as a rule row-major, or: */
        int64_t turned[3], step = 1 + (int64_t)(random_bits(&state) % 2), first = (int64_t)(random_bits(&state) % 3);
        for (int k = 0; k < in.dl.ndim; k++) {
            int d = (int)((k + first) % in.dl.ndim);
            turned[d] = step;
            step *= in.shape[d] ? in.shape[d] : 1;
        }
        if (random_bits(&state) % 4) out.dl.strides = turned;
        cr_assert_eq(tensor_import(&in.dl, "in", &from), FSDP_OK);
        if (tensor_import_output(&out.dl, "out", &to) != FSDP_OK) continue;
        if (to.data && (char *)element_of(&to, to.count - 1) + size > arena + ARENA) continue;

        for (int b = 0; b < ARENA; b++) source[b] = (char)random_bits(&state);
        memcpy(arena, source, ARENA);
        tensor_pack(dense, &from);
        for (int64_t e = 0; e < from.count; e++)
            cr_assert_arr_eq(dense + (size_t)e * size, element_of(&from, e), size, "element %lld", (long long)e);
        cr_assert_arr_eq(arena, source, ARENA, "packing wrote to its input");

        memcpy(before, arena, ARENA);
        tensor_unpack(&to, dense);
        for (int64_t e = 0; e < to.count; e++) {
            cr_assert_arr_eq(element_of(&to, e), dense + (size_t)e * size, size, "element %lld", (long long)e);
            memcpy(element_of(&to, e), before + (element_of(&to, e) - arena), size);
        }
        cr_assert_arr_eq(arena, before, ARENA, "written outside the output");
    }
}

Test(tensor, casts_through_strides_as_it_casts_in_a_row)
{
    enum { N = 700 };
    static char in[N * 3 * 16], out[N * 2 * 16], dense_in[N * 16], dense_out[N * 16];
    uint64_t state = 4;
    int64_t shape[] = {N}, in_step[] = {3}, out_step[] = {2};
    for (int a = 0; a < DTYPE_COUNT; a++)
        for (int b = 0; b < DTYPE_COUNT; b++) {
            enum dtype in_type = (enum dtype)a, out_type = (enum dtype)b;
            size_t in_size = dtype_size(in_type), out_size = dtype_size(out_type);
            DLTensor dl_in = host(in, in_type, 1, shape, in_step), dl_out = host(out, out_type, 1, shape, out_step);
            struct tensor from, to;
            cr_assert_eq(tensor_import(&dl_in, "in", &from), FSDP_OK);
            cr_assert_eq(tensor_import_output(&dl_out, "out", &to), FSDP_OK);
            for (size_t i = 0; i < N; i++) {
                element_random(in_type, dense_in + i * in_size, &state);
                memcpy(in + 3 * i * in_size, dense_in + i * in_size, in_size);
            }
            memset(out, 0x77, sizeof out);
            tensor_copy(&to, &from);
            if (a == b)
                memcpy(dense_out, dense_in, sizeof dense_out);
            else
                kernel_cast(out_type, dense_out, in_type, dense_in, N, 0);
            for (size_t i = 0; i < N; i++) {
                cr_assert_arr_eq(out + 2 * i * out_size, dense_out + i * out_size, out_size, "%s to %s, element %zu",
                                 dtype_name(in_type), dtype_name(out_type), i);
                for (size_t k = 0; k < out_size; k++)
                    cr_assert_eq(out[(2 * i + 1) * out_size + k], 0x77, "a gap was written");
            }
        }
}

/* The public call: src[8:16] of a guarded array, by byte_offset, as input and as output. */
Test(tensor, fsdp_copy_honours_byte_offset_on_both_sides)
{
    float from[24], to[24];
    int64_t shape[] = {8};
    for (int i = 0; i < 24; i++) from[i] = (float)i, to[i] = -1;
    DLTensor in = host(from, DTYPE_F32, 1, shape, NULL), out = host(to, DTYPE_F32, 1, shape, NULL);
    in.byte_offset = out.byte_offset = 32;
    cr_assert_eq(fsdp_copy(&in, &out), FSDP_OK, "%s", err_message());
    for (int i = 0; i < 24; i++) cr_expect_eq(to[i], i >= 8 && i < 16 ? (float)i : -1);
    int64_t expanded[] = {0}, other[] = {7};
    out.strides = expanded;
    REFUSED(fsdp_copy(&in, &out), FSDP_ERR_INVALID, "share memory");
    out.strides = NULL, out.shape = other;
    REFUSED(fsdp_copy(&in, &out), FSDP_ERR_INVALID, "shape");
    out = in, out.byte_offset = 36;
    REFUSED(fsdp_copy(&in, &out), FSDP_ERR_INVALID, "overlap");
}

Test(tensor, messages_say_what_a_tensor_is)
{
    char text[TENSOR_TEXT];
    int64_t shape[] = {3, 4}, many[32];
    struct tensor t;
    tensor_make(&t, arena, DTYPE_BF16, 2, shape);
    cr_expect_str_eq(tensor_text(&t, text), "(3, 4) bfloat16");
    tensor_make(&t, arena, DTYPE_I64, 1, shape);
    cr_expect_str_eq(tensor_text(&t, text), "(3,) int64");
    tensor_make(&t, arena, DTYPE_BOOL, 0, shape);
    cr_expect_str_eq(tensor_text(&t, text), "() bool");
    for (int d = 0; d < 32; d++) many[d] = d ? 1 : INT64_MAX / 16;
    tensor_make(&t, arena, DTYPE_F8E4M3FN, 32, many);
    cr_expect_lt(strlen(tensor_text(&t, text)), TENSOR_TEXT);
}
