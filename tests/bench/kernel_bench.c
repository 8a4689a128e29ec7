/* Kernel throughput beside memcpy of as many bytes, alternating in one run, medians.
 *
 * A kernel's bytes are those it must read plus those it must write; memcpy is given half of them to copy, so
 * that it reads and writes as many. Lines: BENCH kernel_<name> value=<GB/s> better=higher, and the same for
 * the ratio to memcpy.
 *
 * kernel_bench [MiB per array, 64] [repetitions, 11]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tensor/kernel.h"

static size_t n_bytes = (size_t)64 << 20;
static int repetitions = 11;
static char *array[6];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return x[n / 2];
}

struct job {
    const char *name;
    void (*run)(const struct job *job, size_t n);
    enum dtype from, to;
    int n_src, stream;
    fsdp_reduce_op op;
};

static void run_copy(const struct job *job, size_t n)
{
    kernel_copy(array[0], array[1], n, job->stream);
}

static void run_copy2(const struct job *job, size_t n)
{
    (void)job;
    kernel_copy2(array[0], array[2], array[1], n);
}

static void run_cast(const struct job *job, size_t n)
{
    kernel_cast(job->to, array[0], job->from, array[1], n, job->stream);
}

static void run_reduce(const struct job *job, size_t n)
{
    struct kernel_reduce how = {job->op, job->from, job->to, job->n_src, 1, 1, 0, job->stream};
    if (job->op == FSDP_AVG) how.divisor = job->n_src;
    kernel_reduce(&how, array[0], (const void *const *)(array + 1), n);
}

static void run_norm(const struct job *job, size_t n)
{
    *(double *)(void *)array[0] = kernel_norm(job->from, array[1], n, 2);
}

static void run_finite(const struct job *job, size_t n)
{
    array[0][0] = (char)kernel_all_finite(job->from, array[1], n);
}

static const struct job jobs[] = {
    {"copy_cached", run_copy, DTYPE_U8, DTYPE_U8, 1, 0, 0},
    {"copy_stream", run_copy, DTYPE_U8, DTYPE_U8, 1, 1, 0},
    {"copy2", run_copy2, DTYPE_U8, DTYPE_U8, 1, 1, 0},
    {"cast_f32_bf16_cached", run_cast, DTYPE_F32, DTYPE_BF16, 1, 0, 0},
    {"cast_f32_bf16_stream", run_cast, DTYPE_F32, DTYPE_BF16, 1, 1, 0},
    {"cast_bf16_f32_cached", run_cast, DTYPE_BF16, DTYPE_F32, 1, 0, 0},
    {"cast_bf16_f32_stream", run_cast, DTYPE_BF16, DTYPE_F32, 1, 1, 0},
    {"cast_f32_f16_stream", run_cast, DTYPE_F32, DTYPE_F16, 1, 1, 0},
    {"cast_f16_f32_stream", run_cast, DTYPE_F16, DTYPE_F32, 1, 1, 0},
    {"sum2_f32_cached", run_reduce, DTYPE_F32, DTYPE_F32, 2, 0, FSDP_SUM},
    {"sum2_f32_stream", run_reduce, DTYPE_F32, DTYPE_F32, 2, 1, FSDP_SUM},
    {"avg2_f32_stream", run_reduce, DTYPE_F32, DTYPE_F32, 2, 1, FSDP_AVG},
    {"sum4_f32_stream", run_reduce, DTYPE_F32, DTYPE_F32, 4, 1, FSDP_SUM},
    {"avg4_f32_stream", run_reduce, DTYPE_F32, DTYPE_F32, 4, 1, FSDP_AVG},
    {"sum2_bf16_stream", run_reduce, DTYPE_BF16, DTYPE_BF16, 2, 1, FSDP_SUM},
    {"avg2_bf16_stream", run_reduce, DTYPE_BF16, DTYPE_BF16, 2, 1, FSDP_AVG},
    {"avg4_bf16_stream", run_reduce, DTYPE_BF16, DTYPE_BF16, 4, 1, FSDP_AVG},
    {"avg2_bf16_to_f32", run_reduce, DTYPE_BF16, DTYPE_F32, 2, 1, FSDP_AVG},
    {"sum2_f16_stream", run_reduce, DTYPE_F16, DTYPE_F16, 2, 1, FSDP_SUM},
    {"sum4_f16_stream", run_reduce, DTYPE_F16, DTYPE_F16, 4, 1, FSDP_SUM},
    {"norm2_f32", run_norm, DTYPE_F32, DTYPE_U8, 1, 0, 0},
    {"all_finite_f32", run_finite, DTYPE_F32, DTYPE_U8, 1, 0, 0},
};

static void measure(const struct job *job)
{
    size_t from = dtype_size(job->from), to = dtype_size(job->to), n = n_bytes / (from > to ? from : to);
    int writes = job->run == run_copy2 ? 2 : job->run == run_norm || job->run == run_finite ? 0 : 1;
    double bytes = (double)n * (double)(from * (size_t)job->n_src + to * (size_t)writes);
    double *kernel = malloc((size_t)repetitions * sizeof(double)), *copy = malloc((size_t)repetitions * sizeof(double));
    size_t copied = n_bytes;

    for (int i = -1; i < repetitions; i++) { /* the first is a warm-up */
        double start = now();
        job->run(job, n);
        double middle = now();
        memcpy(array[4], array[5], copied);
        double end = now();
        if (i >= 0) kernel[i] = bytes / (middle - start) * 1e-9, copy[i] = 2.0 * (double)copied / (end - middle) * 1e-9;
    }
    double rate = median(kernel, repetitions), beside = median(copy, repetitions);
    printf("BENCH kernel_%s value=%.2f better=higher\n", job->name, rate);
    printf("BENCH kernel_%s_to_memcpy value=%.2f better=higher\n", job->name, rate / beside);
    fflush(stdout);
    free(kernel);
    free(copy);
}

int main(int argc, char **argv)
{
    if (argc > 1) n_bytes = strtoul(argv[1], NULL, 10) << 20;
    if (argc > 2) repetitions = atoi(argv[2]);
    if (n_bytes == 0 || repetitions < 1) return 1;
    for (int a = 0; a < 6; a++) {
        array[a] = aligned_alloc(4096, n_bytes);
        if (!array[a]) return 1;
        for (size_t i = 0; i < n_bytes; i += 2) {
            uint16_t x = (uint16_t)(0x3c00 + (i / 2 * 7 + (size_t)a * 13) % 512); /* ordinary in every float type */
            memcpy(array[a] + i, &x, 2);
        }
    }
    for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) measure(&jobs[j]);
    for (int a = 0; a < 6; a++) free(array[a]);
    return 0;
}
