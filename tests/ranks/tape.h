/* A small tape autograd over float32 matrices: the host's framework in the tests. Nothing here knows of libfsdp.
 *
 * A tape records operations in the order in which they are made and goes back through them. Matrices are row-major;
 * sums are made in double and rounded once, so that how rows are dealt out to ranks changes results by round-off only.
 * A parameter is memory of somebody else's, read at each use, in forward and in backward: what it holds at that moment
 * is what counts, as with a framework's tensors.
 *
 * Modules: between tape_enter and tape_leave lies one call of a module that somebody wants to know about. The hooks are
 * called as forward reaches these places, and as backward does: before the first operation behind tape_leave gets
 * its turn, when the call's output has a gradient, and when all operations of the call have had theirs, which is when
 * the gradients of its inputs and parameters are complete. Calls nest.
 *
 * A hook may leave by longjmp: all memory is the tape's, tape_free frees it whatever was under way. */
#ifndef FSDP_TEST_TAPE_H
#define FSDP_TEST_TAPE_H

#include <stddef.h>

struct tape;

struct mat {
    int rows, cols;
    float *v, *g; /* values; gradient, NULL until some has come */
    int needs_grad;
    struct tape_param *param; /* whose values and gradient these are, or NULL */
};

/* grad: complete when the calls that use the parameter are; the owner of the struct takes it and sets it to zero. */
struct tape_param {
    const char *name;
    int rows, cols;
    const float *value; /* NULL: not to be read now */
    float *grad;        /* rows * cols, added to */
    int frozen;         /* no gradient */
    int used;           /* some gradient has come */
};

#define TAPE_UNITS 16

/* unit: the number that tape_enter was given. In leave_backward, `fired` says whether enter_backward was called for
 * this call, `remaining` how many calls of the unit on this tape are still to come in this backward. */
struct tape_hooks {
    void *user;
    void (*pre_forward)(void *user, struct tape *t, int unit);
    void (*post_forward)(void *user, struct tape *t, int unit);
    void (*enter_backward)(void *user, struct tape *t, int unit);
    void (*leave_backward)(void *user, struct tape *t, int unit, int fired, int remaining);
};

/* record 0: forward only (evaluation). */
struct tape *tape_new(int record);
void tape_free(struct tape *t);
/* Zeroed memory that lives as long as the outermost tape. */
void *tape_memory(struct tape *t, size_t bytes);

struct mat *tape_input(struct tape *t, int rows, int cols, const float *values);
struct mat *tape_use(struct tape *t, struct tape_param *p);

struct mat *tape_matmul(struct tape *t, struct mat *a, struct mat *b);    /* a b */
struct mat *tape_matmul_nt(struct tape *t, struct mat *a, struct mat *b); /* a b^T */
struct mat *tape_add(struct tape *t, struct mat *a, struct mat *b);
struct mat *tape_add_row(struct tape *t, struct mat *a, struct mat *row); /* to each row of a */
struct mat *tape_mul(struct tape *t, struct mat *a, struct mat *b);       /* elements */
struct mat *tape_mul_row(struct tape *t, struct mat *a, struct mat *row); /* each row of a by it */
struct mat *tape_scale(struct tape *t, struct mat *a, double factor);
struct mat *tape_tanh(struct tape *t, struct mat *a);
struct mat *tape_gelu(struct tape *t, struct mat *a);
/* Of each row; causal: row i has its first i + 1 entries, the others are 0. */
struct mat *tape_softmax(struct tape *t, struct mat *a, int causal);
/* Each row to mean 0 and variance 1, times gain plus bias. */
struct mat *tape_layer_norm(struct tape *t, struct mat *a, struct mat *gain, struct mat *bias);
struct mat *tape_slice(struct tape *t, struct mat *a, int row, int rows, int col, int cols);
/* A matrix of n blocks, block i at (at[2 * i], at[2 * i + 1]), which cover it. */
struct mat *tape_join(struct tape *t, int rows, int cols, int n, struct mat *const *blocks, const int *at);
struct mat *tape_embed(struct tape *t, struct mat *table, int n, const int *ids); /* row ids[i] of the table */
/* Element by element through a function that rounds; gradients pass as they are. */
struct mat *tape_round(struct tape *t, struct mat *a, void (*rounding)(void *user, float *values, int count),
                       void *user);
/* Losses, 1 by 1: half the squared error, and the cross entropy of softmaxed rows, summed over rows. */
struct mat *tape_squared_error(struct tape *t, struct mat *a, const float *targets);
struct mat *tape_cross_entropy(struct tape *t, struct mat *a, const int *targets);

typedef struct mat *(*tape_fn)(struct tape *t, void *user, struct mat *x);

/* y = fn(x) as one call of a module. x may be NULL (the module has inputs of its own). */
struct mat *tape_call(struct tape *t, const struct tape_hooks *hooks, int unit, tape_fn fn, void *user, struct mat *x);
/* y = fn(x), of which only y is kept; backward runs fn again. */
struct mat *tape_checkpoint(struct tape *t, tape_fn fn, void *user, struct mat *x);

/* Gradients of loss times factor, added up in parameters. A tape goes back once. */
void tape_backward(struct tape *t, struct mat *loss, double factor);

/* ---- number formats, by arithmetic of their own (nothing of the library's) */

enum format { FORMAT_NONE, FORMAT_F32, FORMAT_F64, FORMAT_BF16, FORMAT_F16, FORMATS };
extern const char *const format_names[];
size_t format_size(enum format f);
/* v rounded to nearest even. */
double format_round(enum format f, double v);
double format_get(enum format f, const void *data, long at);
void format_set(enum format f, void *data, long at, double v); /* rounds */

#endif
