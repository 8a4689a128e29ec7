/* A layout, as layout.c makes it, and gather.c and scatter.c move tensors by it. */
#ifndef FSDP_STATE_LAYOUT_H
#define FSDP_STATE_LAYOUT_H

#include "state/state.h"

#define RUNS 376 /* of entries that one exchange compares */
#define TOLD_TEXT 500

/* What a rank tells: how it fared, and what it has. */
struct report {
    fsdp_status status;
    int32_t absent; /* scatter: root has nothing for this entry */
    int64_t n;
    uint64_t hash, options, path;
    char text[TOLD_TEXT]; /* of the failure, or of an entry; the path */
    uint32_t runs[RUNS];
};
_Static_assert(sizeof(struct report) <= TRANSPORT_PAYLOAD, "what a rank tells must fit into an exchange");

#define SHORT_REPORT offsetof(struct report, runs)

/* A transfer that is made before it is needed. */
struct step {
    struct step *next;
    fsdp_work *work;
    struct piece *piece;
    int64_t *at;           /* N + 1 */
    struct report *mine;   /* without `runs` */
    struct report *failed; /* the layout's: of the first rank that failed */
    int32_t failed_rank;   /* -1: none */
    int32_t absent;
    int32_t root;
    int64_t moves; /* elements, over all ranks */
};

struct state_layout {
    const fsdp_state_dict *dict;
    fsdp_group *group; /* NULL: one process */
    fsdp_op_kind kind;
    int rank, size;
    int32_t root;
    int64_t *place;   /* N + 1 for N entries: where one's numbers begin in a rank's; those without values have none */
    int64_t *numbers; /* all ranks', one after the other: of an entry: copies, copy, corner, extents */
    struct box *boxes;
    const struct box **list;
    struct step *steps; /* those that wait, */
    int64_t n_steps;
    struct report failed; /* and what the one that runs was told */
    char *scratch;
    size_t scratch_bytes;
};

struct part {
    int32_t copies, copy;
    struct box box;
};

static inline int state_has_values(const struct state_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && entry->tied_to < 0;
}

static inline int layout_gets_whole(const struct state_layout *layout)
{
    return layout->root == STATE_ROOT_ALL || layout->root == layout->rank;
}

/* A part lies as it is sent: in rows, of the dtype in files. */
static inline int layout_as_it_travels(const struct state_entry *entry)
{
    return entry->data.contiguous && entry->data.type == entry->type;
}

/* What rank r has of entry `index`. */
void layout_part(const struct state_layout *layout, int r, int64_t index, struct part *out);
/* Where the parts with this number of copy begin, one after the other in rank order; all elements of them. */
int64_t layout_cut(const struct state_layout *layout, int64_t index, int32_t copy, int64_t *at);
/* Whether the first copies, one after the other, are the whole as it lies. */
int layout_in_order(const struct state_layout *layout, int64_t index);

/* Take a step that was made, and make another, if there is none then: its failure is told by this one. number: which
 * entry it is for, the same on all ranks. */
struct step *layout_step_begin(struct state_layout *layout, int64_t number, fsdp_status status,
                               fsdp_error_info *failure);
fsdp_status layout_step_run(struct state_layout *layout, struct step *step, const fsdp_error_info *failure);
void layout_step_free(struct step *step);
/* Have so many steps, which then can't fail for want of memory. Collective: an error is everyone's. */
fsdp_status layout_steps_reserve(struct state_layout *layout, int64_t n, fsdp_status status);

#endif
