/* A host of libfsdp that trains a tape_model.h model as a plan says: units, hooks, optimizer. For use inside a rank. */
#ifndef FSDP_TEST_TAPE_HOST_H
#define FSDP_TEST_TAPE_HOST_H

#include "fsdp_host.h"
#include "tape_model.h"

#include <setjmp.h>

struct host_param {
    DLManagedTensorVersioned *full, *shard, *grad; /* grad NULL: frozen from the beginning */
    fsdp_param_info info;
    enum format master, wide, low; /* of shard, full view, sharded gradient */
    float *values;                 /* what the tape reads when the full view isn't f32 */
    double *first, *second;        /* the optimizer's, of the shard */
};

struct tape_host {
    struct rank *r;
    const struct plan *plan;
    struct model model;
    struct trainer trainer;
    fsdp_group *group;
    fsdp_mesh *mesh;
    fsdp_model *fsdp;
    fsdp_unit *units[TAPE_UNITS];
    fsdp_unit_info infos[TAPE_UNITS]; /* as made */
    struct host_param params[PARAMS];
    int valid[TAPE_UNITS], in_backward[TAPE_UNITS]; /* valid: by the callbacks */
    int step, micro, discarding, clean;             /* clean: gradients are as after zero_grad */
    double losses[2];                               /* of the last step, before and after the optimizer */
    double norm;                                    /* of the last step's gradients, where they are clipped */
    uint64_t own;                                   /* this rank's random numbers */
    /* An exception: after so many hooks (0: none), or when a hook fails. */
    int fuse, may_fail;
    fsdp_status status;
    jmp_buf raised;
};

struct tape_host *tape_host_new(struct rank *r, const struct plan *plan);
void tape_host_drop(struct tape_host *h);
/* zero_grad, all micro-batches, the optimizer's step; with evaluations and what else the plan wants. */
void tape_host_step(struct tape_host *h);
/* The micro-batches of a step up to an exception: CALLBACK when it is this rank's own, after `fuse` hooks, MISMATCH
 * when another's stopped it, or OK. */
fsdp_status tape_host_break(struct tape_host *h, int fuse);
/* After it. Checks what reset promises. */
void tape_host_reset(struct tape_host *h);
/* The largest difference between the trained parameters and what they should be. */
double tape_host_difference(struct tape_host *h, const struct result *r);
fsdp_unit_info tape_host_unit(struct tape_host *h, int unit);
/* A parameter's unit. */
int tape_host_unit_of(struct tape_host *h, const char *param);

#endif
