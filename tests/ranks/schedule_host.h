/* What the suites of the schedule share: models of units with one parameter each, on groups and meshes, whose values
 * tell which unit and which version of it they are, so that a full view which shows another unit's or an old version's
 * values is found whatever should have been there; and scripts of hooks. For use inside a rank (see ranks.h). */
#ifndef FSDP_TEST_SCHEDULE_HOST_H
#define FSDP_TEST_SCHEDULE_HOST_H

#include "fsdp_host.h"

#define UNITS 6
#define VERSIONS 1000

extern const int64_t sizes[UNITS]; /* elements of their parameters */

/* What a run is about: the same on all ranks. */
struct plan {
    int64_t mesh[2]; /* replicate, shard; 0: a group alone */
    fsdp_model_options options;
    int units;
    fsdp_strategy strategy[UNITS];
    int32_t reshard[UNITS];
    const char *script;
    uint64_t seed;
};

struct host {
    struct rank *r;
    const struct plan *plan;
    fsdp_group *group;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    DLManagedTensorVersioned *full[UNITS], *shard[UNITS], *grad[UNITS];
    int64_t version[UNITS]; /* in the shards */
    double sum[UNITS];      /* the gradient, all of whose elements are equal */
    void *held[256];        /* gradients that reductions may still read */
    int n_held, async;
};

void host_make(struct rank *r, const struct plan *plan, struct host *h);
void unit_drop(struct host *h, int u);
void host_drop(struct host *h);

/* ---- values */

/* The version of unit u that its full view shows; -1: something else. */
int64_t shown(const struct host *h, int u);
/* Into the shards, as an optimizer would. */
void set_version(struct host *h, int u, int64_t version);
void full_values(int u, int64_t version, float *out);
void expect_version(const struct host *h, int u, const char *when);

/* ---- hooks */

fsdp_unit_state state(const struct host *h, int u);
int ahead(const struct host *h, int u);                     /* unsharded, or about to be */
fsdp_status post_backward(struct host *h, int u, int size); /* a gradient of `size` times (rank + 1) everywhere */
void expect_gradients(const struct host *h, const char *when);
void forget_gradients(struct host *h); /* when no reduction reads them any more */
void zero(struct host *h);
/* An optimizer's step, if the gradients are right. */
void step_all(struct host *h, const char *when);

/* One step of a script: f, g before and after forward of the unit whose digit follows, b, p before and after its
 * backward, e the end of backward. */
fsdp_status hook(struct host *h, const char *step);
const char *next(const char *step);
/* A whole script, with a look at what forward and backward see. */
void play(struct host *h, const char *script);

#define FORWARD4 "f0g0f1g1f2g2f3g3"
#define TRAIN4 FORWARD4 "b3p3b2p2b1p1b0p0e"

#endif
