/* Copies and casts against definitions (kernel_oracle.h): every pair of dtypes, every tie between
 * neighbouring narrow floats, every code of the narrow floats. */
#include "kernel_oracle.h"

#include "tensor/float_bits.h"

/* ---- Copies -------------------------------------------------------------------------------------------- */

Test(kernel_copy, any_address_and_length)
{
    static const size_t bytes[] = {0, 1, 15, 63, 64, 65, 127, 128, 1000, 4099, 70001};
    for (size_t b = 0; b < sizeof bytes / sizeof *bytes; b++) {
        for (size_t shift = 0; shift < 64; shift += 5) {
            for (int stream = 0; stream < 2; stream++) {
                struct array src = array_random(DTYPE_U8, bytes[b], (shift * 7 + 3) % 64, b + 1);
                struct array dst = array_new(bytes[b], shift);
                kernel_copy(dst.data, src.data, bytes[b], stream);
                cr_assert(memcmp(dst.data, src.data, bytes[b]) == 0);
                array_free(&dst);
                array_free(&src);
            }
        }
    }
}

Test(kernel_copy, two_destinations)
{
    static const size_t bytes[] = {0, 1, 63, 64, 129, 4099, 70001};
    for (size_t b = 0; b < sizeof bytes / sizeof *bytes; b++) {
        for (size_t shift = 0; shift < 64; shift += 9) {
            struct array src = array_random(DTYPE_U8, bytes[b], (shift * 7 + 3) % 64, b + 1);
            struct array past = array_new(bytes[b], shift), cached = array_new(bytes[b], (shift * 3 + 1) % 64);
            kernel_copy2(past.data, cached.data, src.data, bytes[b]);
            cr_assert(memcmp(past.data, src.data, bytes[b]) == 0);
            cr_assert(memcmp(cached.data, src.data, bytes[b]) == 0);
            array_free(&past);
            array_free(&cached);
            array_free(&src);
        }
    }
}

/* ---- Every pair ---------------------------------------------------------------------------------------- */

static void cast_by_definition(enum dtype dst_type, void *dst, enum dtype src_type, const void *src, size_t n)
{
    int wrap = is_integer(src_type) || src_type == DTYPE_BOOL;
    for (size_t i = 0; i < n; i++) {
        struct value v = element_get(src_type, (const char *)src + i * dtype_size(src_type));
        element_set(dst_type, (char *)dst + i * dtype_size(dst_type), v, wrap);
    }
}

static void check_cast(enum dtype dst_type, enum dtype src_type, const struct array *src, size_t n, size_t shift,
                       int stream)
{
    char what[96];
    struct array want = array_new(n * dtype_size(dst_type), 0), got = array_new(n * dtype_size(dst_type), shift);
    snprintf(what, sizeof what, "from %s, stream %d", dtype_name(src_type), stream);
    cast_by_definition(dst_type, want.data, src_type, src->data, n);
    kernel_cast(dst_type, got.data, src_type, src->data, n, stream);
    assert_elements(dst_type, got.data, want.data, n, what);
    array_free(&want);
    array_free(&got);
}

Test(kernel_cast, every_pair)
{
    for (int from = 0; from < DTYPE_COUNT; from++) {
        for (int to = 0; to < DTYPE_COUNT; to++) {
            for (size_t l = 0; l < N_LENGTHS; l++) {
                size_t shift = ((size_t)from * 5 + (size_t)to * 3 + l) % 64;
                struct array src = array_random((enum dtype)from, lengths[l], 63 - shift, l + 100 * (size_t)to);
                check_cast((enum dtype)to, (enum dtype)from, &src, lengths[l], shift, 0);
                check_cast((enum dtype)to, (enum dtype)from, &src, lengths[l], shift, 1);
                array_free(&src);
            }
        }
    }
}

/* A length that fills many whole blocks, where dst can be brought to a cache line and where it cannot. */
Test(kernel_cast, long_arrays)
{
    static const size_t shifts[] = {0, 4, 1};
    size_t n = 50021;
    for (size_t s = 0; s < 3; s++) {
        struct array f32 = array_random(DTYPE_F32, n, shifts[s], s + 1);
        struct array f64 = array_random(DTYPE_F64, n, shifts[s], s + 4);
        check_cast(DTYPE_BF16, DTYPE_F32, &f32, n, shifts[s], 1);
        check_cast(DTYPE_BF16, DTYPE_F64, &f64, n, shifts[s], 0);
        check_cast(DTYPE_I16, DTYPE_F64, &f64, n, shifts[s], 1);
        array_free(&f32);
        array_free(&f64);
    }
}

/* ---- Rounding ------------------------------------------------------------------------------------------ */

/* Between each two neighbours of a narrow float: the tie, and the source type's values just below and just
 * above it. Through a plain f32 those two would become the tie, and be rounded a second time. */
static void check_ties(enum dtype type, enum dtype src_type)
{
    unsigned codes = 1u << (8 * dtype_size(type) - 1);
    size_t n = 0, size = dtype_size(src_type);
    struct array src = array_new((size_t)codes * 6 * size, 0);
    for (unsigned code = 0; code + 1 < codes; code++) {
        real low = narrow_value(type, code), high = narrow_value(type, code + 1);
        if (!isfinite(low)) break;
        if (!isfinite(high)) high = 2 * low - narrow_value(type, code - 1);
        real tie = (low + high) / 2;
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int side = -1; side <= 1; side++) {
                double d = (double)tie;
                float f = (float)tie;
                struct value v = {tie + side, 0};
                if (src_type == DTYPE_F64) v.re = side ? nextafter(d, side * (double)INFINITY) : d;
                if (src_type == DTYPE_F32) v.re = side ? nextafterf(f, (float)side * INFINITY) : f;
                v.re *= sign;
                if (is_integer(src_type) && (fabsl(v.re) > 9e18L || (sign < 0 && !is_signed(src_type)))) continue;
                element_set(src_type, src.data + n++ * size, v, 0);
            }
        }
    }
    cr_assert_gt(n, 100);
    check_cast(type, src_type, &src, n, 0, 0);
    array_free(&src);
}

Test(kernel_cast, ties_round_once)
{
    for (int type = DTYPE_F16; type <= DTYPE_F8E5M2; type++) {
        check_ties((enum dtype)type, DTYPE_F64);
        check_ties((enum dtype)type, DTYPE_F32);
        check_ties((enum dtype)type, DTYPE_I64);
        check_ties((enum dtype)type, DTYPE_U64);
    }
}

/* Integers beside the ties of f32 and bf16 at every power of two that a 64-bit integer reaches. */
Test(kernel_cast, large_integers_round_once)
{
    static const enum dtype targets[] = {DTYPE_F64, DTYPE_F32, DTYPE_BF16};
    static const int significands[] = {53, 24, 8};
    enum { N = 64 * 2 * 7 };
    for (int t = 0; t < 3; t++) {
        struct array u = array_new(N * 8, 0), s = array_new(N * 8, 0);
        size_t n = 0;
        for (int top = significands[t]; top < 64; top++) {
            for (int odd = 0; odd < 2; odd++) {
                for (int delta = -3; delta <= 3; delta++, n++) {
                    uint64_t step = (uint64_t)1 << (top - significands[t] + 1);
                    uint64_t x = ((uint64_t)1 << top) + (odd ? step : 0) + step / 2 + (uint64_t)delta;
                    int64_t negative = -(int64_t)(x >> 1);
                    memcpy(u.data + 8 * n, &x, 8);
                    memcpy(s.data + 8 * n, &negative, 8);
                }
            }
        }
        check_cast(targets[t], DTYPE_U64, &u, n, 0, 0);
        check_cast(targets[t], DTYPE_I64, &s, n, 0, 0);
        array_free(&u);
        array_free(&s);
    }
}

Test(kernel_cast, every_narrow_code_widens_and_returns)
{
    for (int type = DTYPE_F16; type <= DTYPE_F8E5M2; type++) {
        size_t size = dtype_size((enum dtype)type), n = (size_t)1 << (8 * size);
        struct array codes = array_new(n * size, 0), wide = array_new(n * 4, 0), back = array_new(n * size, 0);
        for (size_t code = 0; code < n; code++) memcpy(codes.data + code * size, &code, size);
        check_cast(DTYPE_F32, (enum dtype)type, &codes, n, 0, 0);
        check_cast(DTYPE_F64, (enum dtype)type, &codes, n, 0, 0);
        kernel_cast(DTYPE_F32, wide.data, (enum dtype)type, codes.data, n, 0);
        kernel_cast((enum dtype)type, back.data, DTYPE_F32, wide.data, n, 0);
        assert_elements((enum dtype)type, back.data, codes.data, n, "there and back");
        array_free(&codes);
        array_free(&wide);
        array_free(&back);
    }
}

/* A walk over all f32 bit patterns, NaNs with every kind of payload among them. */
Test(kernel_cast, f32_patterns)
{
    size_t n = 1 << 18;
    struct array src = array_new(n * 4, 0);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)(i * 16381);
        memcpy(src.data + 4 * i, &bits, 4);
    }
    for (int type = DTYPE_F64; type < DTYPE_COUNT; type++) check_cast((enum dtype)type, DTYPE_F32, &src, n, 0, 0);
    array_free(&src);
}

/* A NaN whose payload is only in the bits that are dropped must not become infinity. */
Test(kernel_cast, nan_with_low_payload)
{
    static const uint32_t f32[] = {0x7f800001, 0xff800001, 0x7f80ffff, 0x7fffffff, 0xffffffff};
    static const uint64_t f64[] = {0x7ff0000000000001, 0xfff0000000000001, 0x7ff000001fffffff};
    for (int type = DTYPE_F32; type <= DTYPE_F8E5M2; type++) {
        char out[5 * 4];
        kernel_cast((enum dtype)type, out, DTYPE_F32, f32, 5, 0);
        for (size_t i = 0; i < 5; i++)
            cr_assert(isnan(element_get((enum dtype)type, out + i * dtype_size((enum dtype)type)).re));
        kernel_cast((enum dtype)type, out, DTYPE_F64, f64, 3, 0);
        for (size_t i = 0; i < 3; i++)
            cr_assert(isnan(element_get((enum dtype)type, out + i * dtype_size((enum dtype)type)).re));
    }
}

/* The f16 instructions and the plain code, bit for bit. */
Test(kernel_cast, f16_same_bits_on_every_machine)
{
    size_t n = 1 << 16;
    uint16_t *half = malloc(2 * n), *narrowed = malloc(2 * n);
    float *single = malloc(4 * n);
    for (size_t i = 0; i < n; i++) half[i] = (uint16_t)i;
    kernel_cast(DTYPE_F32, single, DTYPE_F16, half, n, 0);
    for (size_t i = 0; i < n; i++) cr_assert_eq(f32_to_bits(single[i]), f32_to_bits(f32_from_f16(half[i])));
    for (uint32_t round = 0; round < 16; round++) {
        for (uint32_t i = 0; i < n; i++) single[i] = f32_from_bits((i * 16 + round) * 4093);
        kernel_cast(DTYPE_F16, narrowed, DTYPE_F32, single, n, 0);
        for (size_t i = 0; i < n; i++) cr_assert_eq(narrowed[i], f32_to_f16(single[i]));
    }
    free(half);
    free(narrowed);
    free(single);
}

Test(kernel_cast, fp8_limits)
{
    static const float in[] = {448,   464,   464.00003f, 480, INFINITY, -INFINITY, 0x1p-10f, 0x1.000002p-10f,
                               57344, 61439, 61440};
    static const uint8_t e4m3fn[] = {0x7e, 0x7e, 0x7f, 0x7f, 0x7f, 0xff, 0x00, 0x01, 0x7f, 0x7f, 0x7f};
    static const uint8_t e5m2[] = {0x5f, 0x5f, 0x5f, 0x60, 0x7c, 0xfc, 0x14, 0x14, 0x7b, 0x7b, 0x7c};
    uint8_t out[11];
    kernel_cast(DTYPE_F8E4M3FN, out, DTYPE_F32, in, 11, 0);
    for (int i = 0; i < 11; i++) cr_assert_eq(out[i], e4m3fn[i], "%g gives %#x, not %#x", in[i], out[i], e4m3fn[i]);
    kernel_cast(DTYPE_F8E5M2, out, DTYPE_F32, in, 11, 0);
    for (int i = 0; i < 11; i++) cr_assert_eq(out[i], e5m2[i], "%g gives %#x, not %#x", in[i], out[i], e5m2[i]);
}

/* ---- Element types ------------------------------------------------------------------------------------- */

Test(dtype, dlpack_there_and_back)
{
    for (int type = 0; type < DTYPE_COUNT; type++) {
        enum dtype back = DTYPE_COUNT;
        DLDataType dl = dtype_to_dl((enum dtype)type);
        cr_assert_eq(dl.lanes, 1);
        cr_assert_eq(dtype_size((enum dtype)type) * 8, dl.bits);
        cr_assert_eq(dtype_from_dl(dl, "input", &back), FSDP_OK);
        cr_assert_eq((int)back, type);
        for (int other = 0; other < type; other++)
            cr_assert_str_neq(dtype_name((enum dtype)other), dtype_name((enum dtype)type));
    }
}

Test(dtype, refuses_what_it_does_not_know)
{
    static const DLDataType refused[] = {{kDLFloat, 32, 2},   {kDLFloat, 32, 0},        {kDLInt, 4, 1},
                                         {kDLBool, 1, 1},     {kDLFloat4_e2m1fn, 4, 1}, {kDLFloat8_e4m3fnuz, 8, 1},
                                         {kDLComplex, 32, 1}, {kDLOpaqueHandle, 64, 1}, {kDLFloat, 128, 1}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        enum dtype out = DTYPE_COUNT;
        cr_assert_eq(dtype_from_dl(refused[i], "input", &out), FSDP_ERR_UNSUPPORTED);
        cr_assert_eq(out, DTYPE_COUNT, "written on failure");
        cr_assert(strstr(err_message(), "input"), "the message names the argument: %s", err_message());
    }
}
