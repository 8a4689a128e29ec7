/* Reductions, norms and the finite check against plain scalar loops (kernel_oracle.h). */
#include "kernel_oracle.h"

#define MAX_SOURCES 5
#define OPS (FSDP_BXOR + 1)

/* ---- The oracle ---------------------------------------------------------------------------------------- */

static real combine_real(fsdp_reduce_op op, int wide, real a, real b)
{
    /* A double or float holds both operands: adding in the type itself rounds once, as the accumulator does.
     */
    double x = (double)a, y = (double)b;
    float p = (float)a, q = (float)b;
    switch (op) {
    case FSDP_SUM:
    case FSDP_AVG:
        return wide ? (real)(x + y) : (real)(float)(p + q);
    case FSDP_PROD:
        return wide ? (real)(x * y) : (real)(float)(p * q);
    case FSDP_MIN:
        return isnan(a) || isnan(b) ? (real)NAN : b < a ? b : a;
    default:
        return isnan(a) || isnan(b) ? (real)NAN : b > a ? b : a;
    }
}

static real adjust_real(const struct kernel_reduce *how, int wide, real a)
{
    double x = (double)a;
    float p = (float)a;
    if (how->scale != 1) x *= how->scale, p *= (float)how->scale;
    if (how->divisor != 1) x /= how->divisor, p /= (float)how->divisor;
    return wide ? (real)x : (real)p;
}

static uint64_t combine_integer(enum dtype type, fsdp_reduce_op op, uint64_t a, uint64_t b)
{
    switch (op) {
    case FSDP_SUM:
        return a + b;
    case FSDP_PROD:
        return a * b;
    case FSDP_MIN:
        return (is_signed(type) ? (int64_t)b < (int64_t)a : b < a) ? b : a;
    case FSDP_MAX:
        return (is_signed(type) ? (int64_t)b > (int64_t)a : b > a) ? b : a;
    case FSDP_BAND:
        return a & b;
    case FSDP_BOR:
        return a | b;
    default:
        return a ^ b;
    }
}

static int combine_bool(fsdp_reduce_op op, int a, int b)
{
    switch (op) {
    case FSDP_PROD:
    case FSDP_MIN:
    case FSDP_BAND:
        return a && b;
    case FSDP_BXOR:
        return a != b;
    default:
        return a || b;
    }
}

/* The value of an integer element, sign-extended to 64 bits. */
static uint64_t integer_get(enum dtype type, const void *p)
{
    real x = element_get(type, p).re;
    return x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
}

static void reduce_element(const struct kernel_reduce *how, char *dst, const char *const *x)
{
    enum dtype type = how->src_type;
    int wide = type == DTYPE_F64 || type == DTYPE_C128 || how->dst_type == DTYPE_F64;
    int first = 1, truth = 0;
    struct value sum = {0, 0}, old = element_get(how->dst_type, dst);
    uint64_t integer = 0;

    for (int s = 0; s < how->n_src; s++) {
        char zero[16] = {0};
        const char *at = x[s] ? x[s] : zero;
        struct value v = element_get(type, at);
        if (is_integer(type)) {
            integer = first ? integer_get(type, at) : combine_integer(type, how->op, integer, integer_get(type, at));
        } else if (type == DTYPE_BOOL) {
            truth = first ? v.re != 0 : combine_bool(how->op, truth, v.re != 0);
        } else {
            sum.re = first ? v.re : combine_real(how->op, wide, sum.re, v.re);
            sum.im = first ? v.im : combine_real(how->op, wide, sum.im, v.im);
        }
        first = 0;
    }
    if (is_integer(type)) {
        if (how->accumulate) integer += integer_get(type, dst);
        memcpy(dst, &integer, dtype_size(type));
    } else if (type == DTYPE_BOOL) {
        *dst = (char)(truth || (how->accumulate && *dst != 0));
    } else {
        sum.re = adjust_real(how, wide, sum.re), sum.im = adjust_real(how, wide, sum.im);
        if (how->accumulate) {
            sum.re = combine_real(FSDP_SUM, wide, old.re, sum.re);
            sum.im = combine_real(FSDP_SUM, wide, old.im, sum.im);
        }
        element_set(how->dst_type, dst, sum, 0);
    }
}

/* ---- One comparison ------------------------------------------------------------------------------------ */

/* `missing`: bit s set means that source s is NULL. `in_place`: the source that is dst, or -1. */
static void check_reduce(const struct kernel_reduce *how, size_t n, size_t shift, unsigned missing, int in_place)
{
    static const char *names[OPS] = {"SUM", "AVG", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"};
    size_t src_size = dtype_size(how->src_type), dst_size = dtype_size(how->dst_type);
    struct array source[MAX_SOURCES], got, want;
    const void *src[MAX_SOURCES];
    char what[128];

    for (int s = 0; s < how->n_src; s++) {
        source[s] = array_random(how->src_type, n, (shift + 11 * (size_t)s) % 64, 1000 * (size_t)s + n);
        src[s] = missing >> s & 1 ? NULL : source[s].data;
    }
    got = in_place < 0 ? array_random(how->dst_type, n, 63 - shift, 77) : array_copy(&source[in_place]);
    want = array_copy(&got);
    for (size_t i = 0; i < n; i++) {
        const char *x[MAX_SOURCES];
        for (int s = 0; s < how->n_src; s++) x[s] = src[s] ? (const char *)src[s] + i * src_size : NULL;
        reduce_element(how, want.data + i * dst_size, x);
    }
    if (in_place >= 0) src[in_place] = got.data;
    kernel_reduce(how, got.data, src, n);
    snprintf(what, sizeof what, "%s of %d %s, stream %d, accumulate %d, missing %#x, in place %d", names[how->op],
             how->n_src, dtype_name(how->src_type), how->stream, how->accumulate, missing, in_place);
    assert_elements(how->dst_type, got.data, want.data, n, what);
    array_free(&got);
    array_free(&want);
    for (int s = 0; s < how->n_src; s++) array_free(&source[s]);
}

static struct kernel_reduce reduction(fsdp_reduce_op op, enum dtype type, int n_src)
{
    return (struct kernel_reduce){op, type, type, n_src, 1, op == FSDP_AVG ? n_src : 1, 0, 0};
}

static const int counts[] = {1, 2, 3, 5};

/* ---- Reductions ---------------------------------------------------------------------------------------- */

static void check_all_of(enum dtype type)
{
    for (fsdp_reduce_op op = 0; op < OPS; op++) {
        if (!kernel_reduce_supported(type, op)) continue;
        for (size_t c = 0; c < 4; c++) {
            struct kernel_reduce how = reduction(op, type, counts[c]);
            for (size_t l = 0; l < N_LENGTHS; l++) {
                size_t shift = ((size_t)op * 7 + l * 13 + c) % 64;
                how.stream = 0;
                check_reduce(&how, lengths[l], shift, 0, -1);
                how.stream = 1;
                check_reduce(&how, lengths[l], shift, 0, -1);
            }
        }
    }
}

Test(kernel_reduce, floats)
{
    for (int type = DTYPE_F64; type <= DTYPE_F8E5M2; type++) check_all_of((enum dtype)type);
}

Test(kernel_reduce, integers_and_bool)
{
    for (int type = DTYPE_I8; type <= DTYPE_BOOL; type++) check_all_of((enum dtype)type);
}

Test(kernel_reduce, complex)
{
    check_all_of(DTYPE_C64);
    check_all_of(DTYPE_C128);
}

/* f16 and f64 lead to every float: f32 accumulators where the result is not f64, f64 where it is or the
 * source is. */
Test(kernel_reduce, every_result_type)
{
    for (int from = DTYPE_F64; from <= DTYPE_F8E5M2; from++) {
        for (int to = DTYPE_F64; to <= DTYPE_F8E5M2; to++) {
            for (size_t c = 0; c < 4; c++) {
                struct kernel_reduce how = reduction(FSDP_AVG, (enum dtype)from, counts[c]);
                how.dst_type = (enum dtype)to;
                how.stream = c % 2;
                check_reduce(&how, 1500, c, 0, -1);
                how.accumulate = 1;
                check_reduce(&how, 1500, 2 * c, 0, -1);
            }
        }
    }
}

Test(kernel_reduce, scale_and_divisor)
{
    static const double scales[] = {1, 0.37, 1.0 / 1024, 3}, divisors[] = {1, 2, 3, 8, 7, 0.3};
    static const enum dtype types[] = {DTYPE_F32, DTYPE_F64, DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_C64, DTYPE_C128};
    for (size_t t = 0; t < 6; t++) {
        for (size_t s = 0; s < 4; s++) {
            for (size_t d = 0; d < 6; d++) {
                struct kernel_reduce how = reduction(FSDP_SUM, types[t], 3);
                how.scale = scales[s], how.divisor = divisors[d], how.accumulate = s % 2;
                check_reduce(&how, 1100, d, 0, -1);
            }
        }
    }
}

Test(kernel_reduce, accumulate)
{
    for (int type = 0; type < DTYPE_COUNT; type++) {
        for (size_t c = 0; c < 4; c++) {
            struct kernel_reduce how = reduction(FSDP_SUM, (enum dtype)type, counts[c]);
            how.accumulate = 1;
            for (how.stream = 0; how.stream < 2; how.stream++) check_reduce(&how, 2051, 3 + c, 0, -1);
        }
    }
}

Test(kernel_reduce, missing_sources_are_zeros)
{
    for (int type = 0; type < DTYPE_COUNT; type++) {
        for (int n_src = 1; n_src <= 3; n_src++) {
            for (unsigned missing = 0; missing < 1u << n_src; missing++) {
                struct kernel_reduce how = reduction(FSDP_SUM, (enum dtype)type, n_src);
                check_reduce(&how, 1031, missing, missing, -1);
                how.accumulate = 1;
                check_reduce(&how, 33, missing, missing, -1);
            }
        }
    }
}

Test(kernel_reduce, in_place)
{
    for (int type = 0; type < DTYPE_COUNT; type++) {
        for (fsdp_reduce_op op = 0; op < OPS; op++) {
            if (!kernel_reduce_supported((enum dtype)type, op)) continue;
            for (int n_src = 1; n_src <= 3; n_src++) {
                for (int same = 0; same < n_src; same++) {
                    struct kernel_reduce how = reduction(op, (enum dtype)type, n_src);
                    how.stream = same % 2;
                    check_reduce(&how, 2500, 5, 0, same);
                }
            }
        }
    }
}

/* The order of the sources is the order of the additions: 2^25 + 1 - 2^25 loses the 1, 2^25 - 2^25 + 1 keeps
 * it. */
Test(kernel_reduce, sources_in_order)
{
    float big = 0x1p25f, one = 1, minus = -0x1p25f, out;
    struct kernel_reduce how = reduction(FSDP_SUM, DTYPE_F32, 3);
    kernel_reduce(&how, &out, (const void *[]){&big, &one, &minus}, 1);
    cr_assert_eq(out, 0);
    kernel_reduce(&how, &out, (const void *[]){&big, &minus, &one}, 1);
    cr_assert_eq(out, 1);
}

/* bf16 keeps 8 bits: 256 + 1 + 1 rounded at every addition would stay 256. */
Test(kernel_reduce, narrow_floats_round_once)
{
    uint16_t big = 0x4380, one = 0x3f80, out;
    struct kernel_reduce how = reduction(FSDP_SUM, DTYPE_BF16, 3);
    kernel_reduce(&how, &out, (const void *[]){&big, &one, &one}, 1);
    cr_assert_eq(out, 0x4381);
}

Test(kernel_reduce, supported)
{
    for (int t = 0; t < DTYPE_COUNT; t++) {
        enum dtype type = (enum dtype)t;
        int bits = is_integer(type) || type == DTYPE_BOOL, complex_pair = dtype_is_complex(type);
        cr_assert(kernel_reduce_supported(type, FSDP_SUM));
        cr_assert_eq(kernel_reduce_supported(type, FSDP_AVG), !bits);
        cr_assert_eq(kernel_reduce_supported(type, FSDP_PROD), !complex_pair);
        cr_assert_eq(kernel_reduce_supported(type, FSDP_MIN), !complex_pair);
        cr_assert_eq(kernel_reduce_supported(type, FSDP_MAX), !complex_pair);
        for (fsdp_reduce_op op = FSDP_BAND; op <= FSDP_BXOR; op++) {
            cr_assert_eq(kernel_reduce_supported(type, op), bits);
        }
        cr_assert_not(kernel_reduce_supported(type, -1));
        cr_assert_not(kernel_reduce_supported(type, OPS));
    }
}

/* ---- Scale, norm, finite ------------------------------------------------------------------------------- */

Test(kernel_scale, in_accumulator_type)
{
    for (int t = 0; t < DTYPE_COUNT; t++) {
        enum dtype type = (enum dtype)t;
        if (!dtype_is_float(type) && !dtype_is_complex(type)) continue;
        struct array got = array_random(type, 1777, 3, 9), want = array_copy(&got);
        struct kernel_reduce how = reduction(FSDP_SUM, type, 1);
        how.scale = 0.3;
        for (size_t i = 0; i < 1777; i++) {
            char *at = want.data + i * dtype_size(type), copy[16];
            memcpy(copy, at, dtype_size(type));
            reduce_element(&how, at, (const char *[]){copy});
        }
        kernel_scale(type, got.data, 1777, 0.3);
        assert_elements(type, got.data, want.data, 1777, "scale");
        memcpy(want.data, got.data, got.bytes);
        kernel_scale(type, got.data, 1777, 1);
        cr_assert(memcmp(got.data, want.data, got.bytes) == 0, "a factor of 1 changes nothing");
        array_free(&got);
        array_free(&want);
    }
}

/* Finite values only. */
static struct array array_finite(enum dtype type, size_t n, size_t shift, uint64_t seed)
{
    struct array a = array_new(n * dtype_size(type), shift);
    for (size_t i = 0; i < n; i++) {
        struct value v = {ldexpl((int32_t)random_bits(&seed), -26), ldexpl((int32_t)random_bits(&seed), -26)};
        element_set(type, a.data + i * dtype_size(type), v, 0);
    }
    return a;
}

Test(kernel_norm, sums_powers)
{
    static const double powers[] = {1, 2, 3, 0.5, INFINITY};
    for (int t = 0; t < DTYPE_COUNT; t++) {
        enum dtype type = (enum dtype)t;
        for (size_t l = 0; l < N_LENGTHS; l++) {
            struct array x = array_finite(type, lengths[l], l, 17);
            for (size_t p = 0; p < 5; p++) {
                real sum = 0;
                for (size_t i = 0; i < lengths[l]; i++) {
                    struct value v = element_get(type, x.data + i * dtype_size(type));
                    real a = hypotl(v.re, v.im);
                    sum = isinf(powers[p]) ? fmaxl(sum, a) : sum + powl(a, powers[p]);
                }
                real got = kernel_norm(type, x.data, lengths[l], powers[p]);
                cr_assert(fabsl(got - sum) <= 1e-13L * sum, "%s p %g n %zu: %.20Lg, not %.20Lg", dtype_name(type),
                          powers[p], lengths[l], got, sum);
            }
            array_free(&x);
        }
    }
}

Test(kernel_norm, same_bits_at_every_address)
{
    struct array a = array_finite(DTYPE_F32, 4099, 0, 5), b = array_new(4099 * 4, 3);
    memcpy(b.data, a.data, a.bytes);
    double x = kernel_norm(DTYPE_F32, a.data, 4099, 2), y = kernel_norm(DTYPE_F32, b.data, 4099, 2);
    cr_assert(memcmp(&x, &y, sizeof x) == 0);
    array_free(&a);
    array_free(&b);
}

/* One bad element, at any position, in any component. */
Test(kernel_all_finite, finds_one)
{
    for (int t = 0; t < DTYPE_COUNT; t++) {
        enum dtype type = (enum dtype)t;
        size_t size = dtype_size(type), n = 2500;
        struct array x = array_finite(type, n, 1, 23);
        cr_assert(kernel_all_finite(type, x.data, n), "%s", dtype_name(type));
        cr_assert(kernel_all_finite(type, x.data, 0));
        for (size_t i = 0; i < n && (dtype_is_float(type)); i += 7) {
            char kept[16];
            struct value bad = {i % 2 ? NAN : -INFINITY, 1};
            if (dtype_is_complex(type) && i % 3) bad = (struct value){1, i % 2 ? NAN : INFINITY};
            memcpy(kept, x.data + i * size, size);
            element_set(type, x.data + i * size, bad, 0);
            cr_assert_not(kernel_all_finite(type, x.data, n), "%s element %zu", dtype_name(type), i);
            cr_assert(kernel_all_finite(type, x.data, i));
            if (i % 2) {
                cr_assert(isnan(kernel_norm(type, x.data, n, 2)));
                cr_assert(isnan(kernel_norm(type, x.data, n, INFINITY)));
            }
            memcpy(x.data + i * size, kept, size);
        }
        array_free(&x);
    }
}
