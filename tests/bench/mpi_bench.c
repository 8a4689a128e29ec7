/* One rank of Open MPI in `ci/bench collectives`. Compiled with mpicc by collectives.py, run by mpirun.
 *
 * mpi_bench LARGEST
 */
#include "worker.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size;
static float *input, *output;

static int all_gather(int count)
{
    return MPI_Allgather(input, count / size, MPI_FLOAT, output, count / size, MPI_FLOAT, MPI_COMM_WORLD);
}

static int reduce_scatter(int count)
{
    return MPI_Reduce_scatter_block(input, output, count / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static int all_reduce(int count)
{
    return MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

typedef int (*task_fn)(int count);

static task_fn find(const char *name)
{
    if (strcmp(name, "all_gather") == 0) return all_gather;
    if (strcmp(name, "reduce_scatter") == 0) return reduce_scatter;
    if (strcmp(name, "all_reduce") == 0) return all_reduce;
    return NULL;
}

static const char *turn(const char *name, size_t bytes, long repetitions, struct worker_time *time)
{
    task_fn task = find(name);
    if (!task) return "no such task";
    MPI_Barrier(MPI_COMM_WORLD);
    time->begin = worker_now();
    for (long i = 0; i < repetitions; i++)
        if (task((int)(bytes / 4)) != MPI_SUCCESS) return "MPI reported a failure";
    time->end = worker_now();
    return NULL;
}

static const char *check(const char *name, size_t bytes)
{
    task_fn task = find(name);
    if (!task) return "no such task";
    size_t count = bytes / 4, part = count / (size_t)size, mine = part * (size_t)rank;
    for (size_t i = 0; i < count; i++) input[i] = worker_input(rank, i);
    memset(output, 0, bytes);
    if (task((int)count) != MPI_SUCCESS) return "MPI reported a failure";
    if (task == all_gather)
        for (size_t i = 0; i < part * (size_t)size; i++)
            if (output[i] != worker_input((int)(i / part), i % part)) return "all_gather: the output is wrong";
    if (task == reduce_scatter)
        for (size_t i = 0; i < part; i++)
            if (output[i] != worker_sum(size, mine + i)) return "reduce_scatter: the output is wrong";
    if (task == all_reduce)
        for (size_t i = 0; i < count; i++)
            if (output[i] != worker_sum(size, i)) return "all_reduce: the output is wrong";
    return NULL;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    size_t largest = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    if (!largest) {
        fprintf(stderr, "started by ci/bench collectives: LARGEST\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    input = worker_memory(largest);
    output = worker_memory(largest);
    int status = worker_serve(rank, &(struct worker_tasks){.check = check, .turn = turn});
    MPI_Finalize();
    return status;
}
