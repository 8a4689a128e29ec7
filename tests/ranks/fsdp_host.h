/* What the FSDP suites share: tensors with known values, units made from a table, and their tensors at hand.
 * For use inside a rank (see ranks.h). */
#ifndef FSDP_TEST_FSDP_HOST_H
#define FSDP_TEST_FSDP_HOST_H

#include "ranks.h"

#include "tensor/dtype.h"

#define HOST_PARAMS 12

/* ---- pseudo-random numbers: the same on all ranks when seeded alike */

uint64_t random_next(uint64_t *state);
int random_below(uint64_t *state, int n);
/* -1 to 1 */
double random_real(uint64_t *state);
/* FSDP_TEST_SEED, or one that differs from run to run. */
uint64_t random_seed(void);

/* ---- tensors */

DLTensor view(void *data, enum dtype type, int ndim, const int64_t *shape);
int64_t elements(const DLTensor *t);
size_t tensor_bytes(const DLTensor *t);
/* Copies as doubles, and back with rounding; any dtype and strides. */
void get_doubles(const DLTensor *t, double *out);
void set_doubles(const DLTensor *t, const double *values);
/* v as the dtype would hold it. */
double rounded(enum dtype type, double v);
/* A host's own managed tensor of zeros. form 0: dense, 1: the first dimension fastest, 2: with gaps and an offset. */
DLManagedTensorVersioned *host_tensor(enum dtype type, int ndim, const int64_t *shape, int form);
/* A small whole number, exact in every dtype, unlike its neighbours'. */
double value_of(enum dtype type, int seed, int64_t element);

/* ---- slots: an oracle of which one a unit gets, from the rules in abi/fsdp.h and plugin/fsdp/slot.c */

#define HOST_SLOTS 16

struct host_slot {
    int number;      /* in the order of making; 0: none */
    int64_t bytes;   /* of whole pages */
    int holder;      /* a unit, from 1; 0: free */
    int64_t content; /* a publication, from 1; 0: nothing of use */
};

struct host_slots {
    int private; /* each rank has its own */
    int made, n;
    int64_t bytes, bytes_peak;
    int64_t publications;
    uint64_t operations; /* what it took of the group: makings, and publications */
    struct host_slot at[HOST_SLOTS];
};

struct host_content { /* of a unit: its slot, held or not, and what it put there last */
    int unit;         /* from 1, each its own */
    int64_t bytes;    /* that it needs */
    int slot;         /* number; 0: none yet */
    int64_t publication;
};

/* It is published anew, in the slot that the rules say. */
void slots_publish(struct host_slots *s, struct host_content *u);
/* Before backward: true when it still lies where it was, and is held again. */
int slots_reuse(struct host_slots *s, struct host_content *u);
void slots_leave(struct host_slots *s, const struct host_content *u);
void slots_end(struct host_slots *s);   /* finish_backward: all are free, and hold nothing of use */
void slots_reset(struct host_slots *s); /* there are none any more */
void slots_expect(const struct host_slots *s, fsdp_model *model, const char *when);

/* ---- units */

struct spec {
    const char *name;
    enum dtype type;
    int ndim;
    int64_t shape[4];
    int frozen;
};

struct host_unit {
    fsdp_unit *unit;
    int n, rank, size;
    const struct spec *specs;
    DLManagedTensorVersioned *full[HOST_PARAMS], *shard[HOST_PARAMS], *grad[HOST_PARAMS]; /* grad NULL: frozen */
};

/* direct_read as in fsdp_group_options. */
fsdp_group *group_make(struct rank *r, int direct_read, int64_t staging_bytes);
fsdp_model *model_make(fsdp_group *group, const fsdp_model_options *options);

/* Parameter i holds value_of(type, seed + i, element). */
fsdp_status unit_try(fsdp_model *model, const char *name, const struct spec *specs, int n, int seed, fsdp_unit **out);
void host_unit_make(struct rank *r, fsdp_model *model, const char *name, const struct spec *specs, int n, int seed,
                    struct host_unit *u);
void host_unit_drop(struct host_unit *u); /* tensors and unit */
int64_t spec_count(const struct spec *spec);
int64_t spec_bytes(const struct spec *spec);
/* What a slot for a unit of these takes: each 64 bytes aligned, in whole pages. */
int64_t specs_slot_bytes(const struct spec *specs, int n);
/* This rank's part of a parameter, in elements. */
void spec_part(const struct spec *spec, int rank, int size, int64_t *begin, int64_t *count);

/* The unit's full views hold the values of `seed`; shards get them, as an optimizer would set them. */
void expect_full(const struct host_unit *u, int seed, const char *when);
int full_is(const struct host_unit *u, int seed);
void set_shards(const struct host_unit *u, int seed);
/* Write over the full views, wholly or here and there. */
void scribble(const struct host_unit *u, uint64_t *random);

fsdp_unit_state state_of(const struct host_unit *u);
fsdp_memory_info memory_of(fsdp_model *model);
uint64_t operations_of(fsdp_group *group);
/* post_backward without any gradient. */
fsdp_status backward_nothing(const struct host_unit *u);
void nap(int64_t us);

#endif
