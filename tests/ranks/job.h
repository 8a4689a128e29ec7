/* Jobs: one collective with values that differ from rank to rank and element to element, in tensors of any
 * layout between guard bytes, and what must come of it.
 *
 * Every rank knows how every other's values are made, so each checks its own output against the collective's
 * definition, worked out here element by element in plain C; reductions as the header promises them
 * (accumulated in rank order, in f32 for the narrow floats, rounded once), bit for bit. Bytes that are not
 * the output's must not change. */
#ifndef FSDP_TEST_JOB_H
#define FSDP_TEST_JOB_H

#include "ranks.h"
#include "tensor/dtype.h"

enum layout {
    DENSE,
    STEPPED,    /* every third element, as a column of a matrix */
    TRANSPOSED, /* column-major */
    PADDED,     /* rows apart */
    REVERSED,   /* negative strides; inputs only */
    EXPANDED,   /* stride 0 in the first dimension; inputs only */
    LAYOUTS
};

struct job {
    fsdp_op_kind kind;
    enum dtype type;
    fsdp_reduce_op op;
    int32_t root;
    int64_t count;  /* elements of one rank's part; uneven: at most so many rows */
    int32_t uneven; /* ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL: rows of different number, some zero */
    int32_t in_place;
    enum layout in, out;
    uint64_t seed; /* of values, shapes, rows and alignment */
};

#define JOB_DIMS 4

struct view {
    DLTensor dl; /* data and byte_offset, shape and strides as a host gives them */
    int64_t shape[JOB_DIMS], strides[JOB_DIMS];
    int64_t base; /* element of the block's data at which element 0 lies */
    int64_t count;
    char *block, *want; /* with guards; as it must be afterwards. NULL: another view's */
    size_t bytes;
    int given;
};

struct job_run {
    struct job job;
    int32_t rank, size;
    struct view in, out;
    int64_t in_rows[RANKS_MAX], out_rows[RANKS_MAX];
};

void job_tables(void); /* once, before threads use any of the rest */

/* This rank's tensors and what must become of them. */
void job_prepare(struct job_run *run, const struct job *job, int rank, int size);
/* Make the call of the job's kind. */
fsdp_status job_call(struct job_run *run, fsdp_group *group, fsdp_work **work);
/* The same call as an element of a coalesced one. */
fsdp_collective job_collective(struct job_run *run);
/* After completion: everything is as it must be. Frees the tensors. */
void job_verify(struct job_run *run);

/* All of it, synchronously. */
void job_do(const struct job *job, struct rank *r, fsdp_group *group);

/* Any job; the same on all ranks that have the same state. */
struct job job_random(uint64_t *state, int size);
uint64_t job_bits(uint64_t *state);

int job_op_defined(enum dtype type, fsdp_reduce_op op);
int job_reduces(fsdp_op_kind kind);
int job_has_root(fsdp_op_kind kind);
int job_can_be_uneven(fsdp_op_kind kind);
int job_can_be_in_place(fsdp_op_kind kind);

extern const fsdp_op_kind job_kinds[8];

#endif
