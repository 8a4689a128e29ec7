/* See bootstrap.c. */
#ifndef FSDP_GROUP_BOOTSTRAP_H
#define FSDP_GROUP_BOOTSTRAP_H

#include "group/group.h"

enum { SPLIT_SEATS, SPLIT_MEETING }; /* the two exchanges of a split, by hash */

struct bootstrap {
    const char *name;
    int32_t rank, size; /* in the new group */
    int64_t number;     /* of the group among its store's or parent's */
    fsdp_store *store;
    int64_t deadline_ns; /* for the store, os_now_ns() */
    int32_t round;
    fsdp_group *parent;
    const int32_t *parent_ranks; /* of the new group's ranks */
    fsdp_work *exchange;         /* made beforehand, as is room for what all ranks of the parent give */
    char *all;
};

#define BOOTSTRAP_BYTES 1024 /* at most, from each rank */

/* Both are transport_setup.all_gather with a struct bootstrap as context. */
fsdp_status bootstrap_store(void *context, const void *in, size_t bytes, void *out);
fsdp_status bootstrap_parent(void *context, const void *in, size_t bytes, void *out);

#endif
