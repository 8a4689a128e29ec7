/* What the suites of units and values share: parameters cut along any dimension, tied, frozen or meta, units made of
 * them, and an oracle that finds a shard's elements one by one. For use inside a rank (see ranks.h). */
#ifndef FSDP_TEST_UNIT_HOST_H
#define FSDP_TEST_UNIT_HOST_H

#include "fsdp_host.h"

#define KIT_PARAMS 12
#define KIT_ELEMENTS 128 /* of the largest parameter, as far as values are looked at */

struct par {
    const char *name;
    enum dtype type;
    int ndim;
    int64_t shape[3];
    int dim; /* that is sharded */
    int frozen, meta;
    int tied; /* index + 1 of an earlier one whose memory this is; 0: its own */
    uint64_t id;
};

/* A unit with its tensors at hand. A parameter that is tied has those of the earlier one. */
struct kit {
    fsdp_unit *unit;
    const struct par *pars;
    int n;
    int rank, size; /* among those that the parameters are sharded over */
    DLManagedTensorVersioned *full[KIT_PARAMS], *shard[KIT_PARAMS], *grad[KIT_PARAMS]; /* grad NULL: frozen */
};

int64_t par_count(const struct par *p);
/* The elements of rank's shard, in their order there: where each is in the whole. Rows of `dim` in chunks of
 * ceil(rows / size). */
int64_t par_places(const struct par *p, int rank, int size, int64_t *places);

/* Parameter i holds kit_value(.., seed, ..). */
double kit_value(const struct par *pars, int i, int seed, int64_t k);
fsdp_status kit_try(fsdp_model *model, const char *name, const struct par *pars, int n, int seed,
                    const fsdp_unit_options *options, fsdp_unit **unit);
void kit_make(fsdp_model *model, const char *name, const struct par *pars, int n, int seed,
              const fsdp_unit_options *options, struct kit *kit);
void kit_drop(struct kit *kit);
fsdp_unit_info kit_query(const struct kit *kit);
fsdp_param_info kit_param(const struct kit *kit, int i);
fsdp_unit_state kit_state(const struct kit *kit);

/* Full views, or shards, hold the values of `seed`. */
void kit_expect_full(const struct kit *kit, int seed, const char *when);
void kit_expect_shards(const struct kit *kit, int seed, const char *when);
void kit_set_shards(const struct kit *kit, int seed);

/* Rank r's gradient: whole numbers, so that sums are exact in every dtype and order. */
double kit_gradient(int r, int i, int64_t k);
/* Give them for the parameters in `mask` (bits). */
fsdp_status kit_give(const struct kit *kit, int r, unsigned mask, fsdp_work **work);
/* Each sharded gradient holds `times` the sum over ranks 0 to n - 1, divided by n, of what kit_give gave; of tied ones,
 * that of all in the mask. */
void kit_expect_grads(const struct kit *kit, int n, unsigned mask, double times, const char *when);
/* One step, forward and backward, by the hooks, ending with finish_backward. */
void kit_step(fsdp_model *model, const struct kit *kit, int r, unsigned mask);

/* A model of one of several layouts, over a mesh of 2 x 2 where that is hybrid. */
enum layout { LAYOUT_SHARED, LAYOUT_PRIVATE, LAYOUT_NO_SHARD, LAYOUT_HYBRID, LAYOUT_HYBRID_PRIVATE, LAYOUTS };
extern const char *const layout_names[];
/* NULL: not for this number of ranks. options: NULL, or what else is wanted. */
fsdp_model *layout_model(fsdp_group *group, enum layout layout, const fsdp_model_options *options);

#endif
