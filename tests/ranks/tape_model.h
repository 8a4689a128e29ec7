/* What is trained on a tape (tape.h), and how: models, a plan of the training, the loop over micro-batches that a host
 * and the oracle share, and the oracle itself, which is one process without libfsdp.
 *
 * A model is a tree of modules; a plan puts each module's parameters into units. A trainer runs the model on one rank's
 * rows and tells its backend when parameters are needed, may go, and when gradients are there. The backend over
 * libfsdp is tape_host.c. */
#ifndef FSDP_TEST_TAPE_MODEL_H
#define FSDP_TEST_TAPE_MODEL_H

#include "fsdp.h"
#include "tape.h"

#define MODULES 16
#define PARAMS 56
#define LAYERS 6
#define ROWS 24 /* of a batch, at most; a row of the attention model is a sequence */
#define SEQUENCE 5
#define WIDE 24 /* the widest row of data */
#define MICROS 6

enum kind { MLP, ATTENTION };
enum optimizer { SGD, ADAM };
enum checkpointing { KEPT, RUN_AGAIN_IN_UNIT, RUN_AGAIN_AROUND_UNIT };

/* What the model is. Modules of the MLP: 0 the model (its own parameter: a gain of the outputs), block_module(),
 * layer_module() (block i has layers 2i and 2i + 1), and the last: an auxiliary output. Of the attention model: 0 the
 * model (the last norm), 1 embedding, for each of two blocks block_module(), attn_module(), ffn_module(), then the
 * head. */
struct shape {
    enum kind kind;
    int layers, width[LAYERS + 1], aux;
    int lora; /* layer 1 has a part of this rank beside its weight */
    int vocabulary, sequence, dim, heads, hidden, tied;
};

/* The whole of a trial: the same on all ranks. All that is zero is as a host would have it that asks for nothing. */
struct plan {
    unsigned long long seed;
    struct shape shape;

    int unit[MODULES]; /* modules with the same number (from 1) form a unit; 0: in the unit of the parent */
    enum checkpointing checkpoint[MODULES];
    int twice[MODULES]; /* blocks whose outputs go through them again */
    int extra
        [MODULES]; /* the module has a parameter that nobody uses: of extra - 1 elements, or of shape (-extra, 0) */
    int frozen[PARAMS], toggled[PARAMS],
        toggle_step;            /* frozen turns to its opposite in toggled ones before that step */
    int shard_dim[PARAMS];      /* used where there is such a dimension */
    enum format master[PARAMS]; /* NONE: f32 */
    int skip_block, skip_every; /* block skip_block - 1 is left out of one step in skip_every (0: never) */
    int aux_every;              /* the auxiliary output counts in the last of so many steps */
    int uneven_use;             /* ranks differ in which biases they use */

    fsdp_strategy strategy, unit_strategy[TAPE_UNITS];
    int replicas; /* of the mesh's first dimension; 0: no mesh; 1 with other than hybrid: a mesh of one dimension */
    int reshard_after_forward, private_unshard;
    int initial;    /* 0: all ranks give values, 1: rank 0 does (sync_module_states), 2: meta, then load_param */
    double divisor; /* 0: the number of ranks */
    enum format param_type, reduce_type, output_type;
    int keep_low_precision_grads, cast;
    int forward_prefetch, backward_prefetch, prefetch_limit, lists;

    int offload; /* shards and gradients in a file */

    enum optimizer optimizer;
    double clip, norm; /* clip: gradients to this norm, of kind `norm`; 0: not */
    int steps, rows;
    char schedule[MICROS + 1]; /* of a step, a letter for each backward: S, N without sync, R without all-reduce */
    int paired;                /* two forwards, then two backwards; 2: the later one goes back first */
    int post_each;             /* post_backward for each call of a module, else once for all of a backward */
    int finish_each;           /* finish_backward after each micro-batch, else once for all */
    int keep_full;             /* reshard_after_backward is off but for the last micro-batch */
    int evaluate;              /* forward alone before and after each step of the optimizer */
    int discard;               /* before each step a backward that is never synced, and dropped by zero_grad */
    int asynchronous, edits, strided, naps, callbacks; /* what ranks do along the way */
    int breaks; /* iterations that a rank leaves by an exception, before each step */
};

/* The plan of a seed; gives the number of ranks. And all of it in words, on standard error. */
int plan_random(struct plan *plan, unsigned long long seed);
void plan_tell(const struct plan *plan, int ranks);

struct model_param {
    char name[48];
    int module, unit, index; /* index: in the unit */
    int ndim, rows, cols;
    long long shape[2];
    long count;
    int tied_to; /* an earlier parameter, or -1 */
    double spread, centre;
};

struct model {
    const struct plan *plan;
    int n_modules, n_params, n_units;
    struct {
        char name[32];
        int parent, first, unit; /* unit: that begins with this module, or -1 */
    } modules[MODULES];
    struct model_param params[PARAMS];
};

int block_module(const struct shape *s, int block);
int layer_module(const struct shape *s, int layer);
int attn_module(int block);
int ffn_module(int block);
int head_module(void);
int module_count(const struct shape *s);
int block_count(const struct shape *s);
/* units 0: no units, each parameter of its own. */
void model_build(struct model *m, const struct plan *plan, int units);
int model_find(const struct model *m, const char *name); /* a parameter, by its name */
/* What parameter p begins with. */
void model_initial(const struct model *m, int p, double *values);
enum format master_format(const struct plan *plan, int p);
enum format full_format(const struct plan *plan, int p);
enum format grad_format(const struct plan *plan, int p);
int frozen_at(const struct plan *plan, int p, int step);

/* Part `index` of n of so many rows. */
void rows_of(int rows, int index, int n, int *begin, int *length);

struct batch {
    int rows, step, rank;
    float x[ROWS * WIDE], target[ROWS * WIDE];
    int ids[ROWS * SEQUENCE], next[ROWS * SEQUENCE];
};

struct trainer;
struct backend {
    void (*pre_forward)(struct trainer *tr, int unit); /* values of the unit's parameters are set after it */
    void (*post_forward)(struct trainer *tr, int unit);
    void (*pre_backward)(struct trainer *tr, int unit);
    void (*post_backward)(struct trainer *tr, struct tape *t, int unit); /* takes the gradients */
    void (*begin_backward)(struct trainer *tr, int nth);                 /* nth: of the step */
    void (*end_backward)(struct trainer *tr, int last);
    /* kind: as of fsdp_unit_cast. */
    void (*cast)(struct trainer *tr, int unit, int kind, float *values, int count);
};

struct trainer {
    const struct plan *plan;
    const struct model *model;
    const struct backend *backend;
    void *owner;
    int rank, size;
    struct tape_param params[PARAMS];
    struct tape_hooks hooks;
    struct tape *tapes[MICROS];
    struct mat *losses[MICROS];
    int waiting[TAPE_UNITS]; /* units whose gradients are not handed out yet */
};

/* Buffers of gradients and the hooks. */
void trainer_init(struct trainer *tr, const struct model *m, const struct backend *backend, void *owner, int rank,
                  int size);
void trainer_drop(struct trainer *tr);
/* Forward and backward of all of a step's micro-batches on this rank's rows. Tapes live until trainer_forget. */
void trainer_micros(struct trainer *tr, int step);
void trainer_forget(struct trainer *tr); /* also after a break: tapes and gradients */
/* The loss of the whole batch of that step, forward alone. */
double trainer_evaluate(struct trainer *tr, int step); /* as rank 0 uses the model */
double loss_factor(const struct plan *plan, int size);

/* One step on n values; the moments are the caller's. */
void optimizer_step(const struct plan *plan, int step, enum format f, void *values, const double *grad, double *first,
                    double *second, long n);

/* ---- the oracle */

struct result {
    double *values[PARAMS]; /* of the parameters after the last step */
    double *losses;         /* of evaluations, two for each step */
    double *norms;          /* of each step's gradients, before clipping */
};

/* size 0: plain: the whole batch at once, no units, f32. Else: what `size` ranks come to, each one's gradients rounded
 * as its plan says, summed in f32 in the order of ranks. */
void oracle_train(const struct plan *plan, int size, struct result *out);
void result_drop(struct result *r);

#endif
