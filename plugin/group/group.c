/* Groups: create, split, abort, release. See group.h.
 *
 * Two counts. Users hold references; when the last is dropped the group's queued works come to their end, its threads
 * are joined and it leaves its transport. Works hold only the memory, so a handle stays good after its group has gone.
 */
#include "group/bootstrap.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 600000
#define STAGING_BYTES (512 << 10)
#define STAGING_MIN (64 << 10)
#define STAGING_MAX (256 << 20)

static atomic_llong groups_made;

int group_is(const fsdp_group *group)
{
    return group && ref_is(&group->ref, REF_GROUP);
}

void group_retain(fsdp_group *group)
{
    ref_get(&group->ref);
}

void group_hold(fsdp_group *group)
{
    atomic_fetch_add_explicit(&group->holds, 1, memory_order_relaxed);
}

void group_unhold(fsdp_group *group)
{
    if (atomic_fetch_sub_explicit(&group->holds, 1, memory_order_acq_rel) != 1) return;
    if (!ref_forked(&group->ref)) { /* in a child they may look as if threads that it lacks waited on them */
        lane_destroy(&group->collectives);
        lane_destroy(&group->messages);
        pool_destroy(&group->pool);
        pthread_mutex_destroy(&group->family);
    }
    mem_free(group);
}

fsdp_status group_usable(fsdp_group *group)
{
    if (ref_forked(&group->ref))
        return err(FSDP_ERR_FORKED,
                   "group '%s' was made before fork(): a child process can't use it; make a group of its own",
                   group->name);
    return group->transport->ops->status(group->transport);
}

/* From what a caller gives: 0 is the default. */
static int64_t timeout_within(int64_t timeout_ms)
{
    if (!timeout_ms) return TIMEOUT_MS;
    return timeout_ms < GROUP_TIMEOUT_MOST_MS ? timeout_ms : GROUP_TIMEOUT_MOST_MS;
}

fsdp_status group_set_timeout(fsdp_group *group, int64_t timeout_ms)
{
    TRY(group_usable(group));
    CHECK_ARG(timeout_ms >= 0, "timeout_ms is %lld: give milliseconds, or 0 for the default", (long long)timeout_ms);
    atomic_store(&group->timeout_ms, timeout_within(timeout_ms));
    return FSDP_OK;
}

const char *group_rank_text(const fsdp_group *group, int rank, char text[GROUP_RANK_TEXT])
{
    if (group->origin[0])
        snprintf(text, GROUP_RANK_TEXT, "rank %d (rank %d of '%s')", rank, group->world[rank], group->origin);
    else
        snprintf(text, GROUP_RANK_TEXT, "rank %d", rank);
    return text;
}

/* ---- making */

static fsdp_status options_check(const fsdp_group_options *options, int size)
{
    CHECK_ARG(options->timeout_ms >= 0, "options.timeout_ms is %lld: give milliseconds, or 0 for the default",
              (long long)options->timeout_ms);
    CHECK_ARG(options->staging_bytes == 0 ||
                  (options->staging_bytes >= STAGING_MIN && options->staging_bytes <= STAGING_MAX),
              "options.staging_bytes is %lld: %d to %d, or 0 for the default", (long long)options->staging_bytes,
              STAGING_MIN, STAGING_MAX);
    CHECK_ARG(options->direct_read >= 0 && options->direct_read <= 2, "options.direct_read is %d: 0, 1 or 2",
              options->direct_read);
    CHECK_ARG(options->spin_us >= -1, "options.spin_us is %d: microseconds, 0 for the default, -1 for none",
              options->spin_us);
    CHECK_ARG(!options->name || strlen(options->name) < GROUP_NAME, "options.name is longer than %d bytes",
              GROUP_NAME - 1);
    if (size > GROUP_MAX_RANKS)
        return err(FSDP_ERR_UNSUPPORTED, "%d ranks: a group has at most %d", size, GROUP_MAX_RANKS);
    const char *transport = options->transport;
    if (transport && strcmp(transport, "self") != 0 && strcmp(transport, "shm") != 0)
        return err(FSDP_ERR_UNSUPPORTED, "options.transport is '%s': \"self\" and \"shm\" exist", transport);
    if (transport && strcmp(transport, "self") == 0 && size > 1)
        return err(FSDP_ERR_UNSUPPORTED, "options.transport is 'self', but there are %d ranks: use \"shm\"", size);
    return FSDP_OK;
}

static fsdp_status make(fsdp_store *store, const fsdp_group_options *options, int32_t rank, int32_t size,
                        fsdp_status (*all_gather)(void *, const void *, size_t, void *), struct bootstrap *bootstrap,
                        fsdp_group **out)
{
    fsdp_group *group = mem_alloc(sizeof *group);
    if (!group) return mem_none("a group", sizeof *group);
    ref_init(&group->ref, REF_GROUP);
    atomic_init(&group->holds, 1);
    group->rank = rank;
    group->size = size;
    for (int32_t r = 0; r < size; r++) group->world[r] = r;
    int64_t timeout_ms = timeout_within(options->timeout_ms);
    atomic_init(&group->timeout_ms, timeout_ms);
    group->options = *options;
    group->options.timeout_ms = 0;
    group->options.name = group->options.transport = NULL;
    if (options->name)
        snprintf(group->name, sizeof group->name, "%s", options->name);
    else
        snprintf(group->name, sizeof group->name, "group%lld", atomic_fetch_add(&groups_made, 1));
    bootstrap->name = group->name;
    bootstrap->deadline_ns = os_now_ns() + timeout_ms * 1000000;
    pool_init(&group->pool);
    pthread_mutex_init(&group->family, NULL);
    lane_init(&group->collectives, group, collectives_advance, NULL);
    lane_init(&group->messages, group, messages_advance, messages_nudge);

    struct transport_setup setup = {
        .rank = rank,
        .size = size,
        .name = group->name,
        .timeout_ms = timeout_ms,
        .staging_bytes = options->staging_bytes ? options->staging_bytes : STAGING_BYTES,
        .direct_read = options->direct_read,
        .spin_us = options->spin_us,
        .all_gather = all_gather,
        .context = bootstrap,
    };
    const struct transport_ops *ops = size == 1 ? &transport_self : &transport_shm;
    fsdp_status status = ops->create(&setup, &group->transport);
    if (status != FSDP_OK) {
        group_unhold(group);
        return status;
    }
    if (store) store_retain(store);
    group->store = store;
    *out = group;
    return FSDP_OK;
}

/* The environment's FSDP_DIRECT_READ (0 or 1) stands in where the options leave the choice. */
static void options_from_environment(fsdp_group_options *options)
{
    const char *direct = getenv("FSDP_DIRECT_READ");
    if (options->direct_read == 0 && direct && direct[0] && !direct[1]) {
        if (direct[0] == '0') options->direct_read = 2;
        if (direct[0] == '1') options->direct_read = 1;
    }
    if (direct && *direct && strcmp(direct, "0") != 0 && strcmp(direct, "1") != 0)
        LOG(FSDP_LOG_WARN, "the environment's FSDP_DIRECT_READ is '%s': 0 (never) and 1 (always) mean something",
            direct);
}

fsdp_status group_create(fsdp_store *store, const fsdp_group_options *given, fsdp_group **out)
{
    fsdp_group_options options = *given;
    int32_t rank = store ? store_rank(store) : 0, size = store ? store_world_size(store) : 1;
    TRY(options_check(&options, size));
    options_from_environment(&options);
    struct bootstrap bootstrap = {.rank = rank, .size = size, .store = store};
    if (store) bootstrap.number = store_next_group(store);
    return make(store, &options, rank, size, bootstrap_store, &bootstrap, out);
}

/* What options leave at zero is as the parent's. */
static void inherit(fsdp_group_options *options, fsdp_group *parent, char *name, size_t size)
{
    const fsdp_group_options *from = &parent->options;
    if (!options->timeout_ms) options->timeout_ms = atomic_load(&parent->timeout_ms);
    if (!options->staging_bytes) options->staging_bytes = from->staging_bytes;
    if (!options->direct_read) options->direct_read = from->direct_read;
    if (!options->spin_us) options->spin_us = from->spin_us;
    if (options->name) return;
    snprintf(name, size, "%s/%llu", parent->name, (unsigned long long)atomic_fetch_add(&parent->splits, 1));
    if (strlen(name) < GROUP_NAME) options->name = name;
}

struct seat {
    int32_t color, key;
};

fsdp_status group_split(fsdp_group *parent, int32_t color, int32_t key, const fsdp_group_options *given,
                        fsdp_group **out)
{
    CHECK_ARG(color >= -1, "color is %d: 0 or above, or -1 to take part in no group", color);
    fsdp_group_options options = given ? *given : parent->options;
    TRY(options_check(&options, 1)); /* the size is not known yet; "self" is checked again below */
    char name[GROUP_NAME + 24];
    inherit(&options, parent, name, sizeof name);

    /* All memory first: a rank that has none must not leave the others waiting. */
    struct seat mine = {color, key}, seats[GROUP_MAX_RANKS];
    int32_t ranks[GROUP_MAX_RANKS];
    fsdp_work *first = NULL, *second = NULL;
    char *all = mem_array((size_t)parent->size, BOOTSTRAP_BYTES);
    fsdp_status status = all ? FSDP_OK : mem_none("splitting a group", (size_t)parent->size * BOOTSTRAP_BYTES);
    if (status == FSDP_OK) status = group_prepare(parent, &first);
    if (status == FSDP_OK) status = group_prepare(parent, &second);
    if (status == FSDP_OK)
        status = group_exchange_prepared(parent, &first, FSDP_OP_SPLIT, SPLIT_SEATS, &mine, sizeof mine, seats);

    /* Members of this colour, ordered by key, then by rank. */
    struct bootstrap bootstrap = {.parent = parent, .parent_ranks = ranks, .exchange = second, .all = all, .rank = -1};
    for (int r = 0; status == FSDP_OK && r < parent->size; r++) {
        if (seats[r].color != color || color < 0) continue;
        int at = bootstrap.size++;
        for (; at > 0 && seats[ranks[at - 1]].key > seats[r].key; at--) ranks[at] = ranks[at - 1];
        ranks[at] = r;
    }
    for (int r = 0; r < bootstrap.size; r++)
        if (ranks[r] == parent->rank) bootstrap.rank = r;

    fsdp_group *group = NULL;
    int meets = 0; /* whether any colour needs the transport's meeting, in which all of the parent take part */
    for (int r = 0; status == FSDP_OK && r < parent->size; r++)
        for (int other = 0; other < r; other++) meets |= seats[r].color >= 0 && seats[r].color == seats[other].color;
    int agreed = status == FSDP_OK;
    if (status == FSDP_OK) status = options_check(&options, bootstrap.size);
    if (status == FSDP_OK && bootstrap.size > 0)
        status = make(NULL, &options, bootstrap.rank, bootstrap.size, bootstrap_parent, &bootstrap, &group);
    if (agreed && meets && bootstrap.round == 0) {
        /* A rank that has no need to meet, or failed before it, still takes its place in the parent's order. */
        fsdp_error_info failure;
        err_save(&failure);
        fsdp_status met =
            group_exchange_prepared(parent, &bootstrap.exchange, FSDP_OP_SPLIT, SPLIT_MEETING, NULL, 0, NULL);
        if (status == FSDP_OK)
            status = met;
        else
            (void)err_restore(&failure);
    }
    work_release(first);
    work_release(bootstrap.exchange);
    mem_free(all);
    if (status != FSDP_OK) {
        if (group) group_release(group);
        return err_prefix(status, "splitting group '%s': ", parent->name);
    }
    if (group && parent->store) {
        store_retain(parent->store);
        group->store = parent->store;
    }
    if (group) {
        for (int r = 0; r < group->size; r++) group->world[r] = parent->world[ranks[r]];
        memcpy(group->origin, parent->origin[0] ? parent->origin : parent->name, GROUP_NAME);
    }
    *out = group;
    return FSDP_OK;
}

/* ---- life */

void group_query(fsdp_group *group, fsdp_group_info *info)
{
    struct transport *t = group->transport;
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
    info->rank = group->rank;
    info->size = group->size;
    fsdp_error_info kept; /* asking is no failure of this thread's */
    err_save(&kept);
    info->status = t->ops->status(t);
    (void)err_restore(&kept);
    info->direct_read = t->direct_read;
    snprintf(info->transport, sizeof info->transport, "%s", t->ops->name);
    snprintf(info->name, sizeof info->name, "%s", group->name);
    info->operations = atomic_load_explicit(&group->operations, memory_order_relaxed);
    info->bytes_moved = atomic_load_explicit(&t->bytes_moved, memory_order_relaxed);
    info->segment_bytes = t->segment_bytes;
    info->timeout_ms = atomic_load(&group->timeout_ms);
}

void group_adopt(fsdp_group *parent, fsdp_group *child)
{
    group_hold(parent);
    child->parent = parent;
    pthread_mutex_lock(&parent->family);
    child->next = parent->children;
    parent->children = child;
    pthread_mutex_unlock(&parent->family);
}

static void leave_family(fsdp_group *child)
{
    fsdp_group *parent = child->parent;
    if (!parent) return;
    if (!ref_forked(&parent->ref)) {
        pthread_mutex_lock(&parent->family);
        fsdp_group **at = &parent->children;
        while (*at && *at != child) at = &(*at)->next;
        if (*at) *at = child->next;
        pthread_mutex_unlock(&parent->family);
    }
    group_unhold(parent);
}

/* One child that has not been told, held; NULL: none is left. */
static fsdp_group *next_child(fsdp_group *parent)
{
    fsdp_group *found = NULL;
    pthread_mutex_lock(&parent->family);
    for (fsdp_group *child = parent->children; child && !found; child = child->next) {
        if (child->told) continue;
        child->told = 1;
        if (ref_try_get(&child->ref)) found = child;
    }
    pthread_mutex_unlock(&parent->family);
    return found;
}

void group_abort(fsdp_group *group, const char *reason)
{
    fsdp_error_info info, kept;
    err_save(&kept);
    err(FSDP_ERR_ABORTED, "group '%s' was aborted by rank %d: %s", group->name, group->rank,
        reason && *reason ? reason : "no reason given");
    err_operation(FSDP_OP_NONE, 0, group->rank, -1);
    err_save(&info);
    (void)err_restore(&kept);
    transport_fail(group->transport, &info);
    group->transport->ops->message_nudge(group->transport);
    for (fsdp_group *child; (child = next_child(group));) {
        group_abort(child, reason);
        group_release(child);
    }
}

static void leave(fsdp_group *group)
{
    if (!ref_forked(&group->ref)) {
        lane_stop(&group->collectives);
        lane_stop(&group->messages);
    }
    group->transport->ops->destroy(group->transport);
    group->transport = NULL;
    if (group->store) store_release(group->store);
    group_unhold(group);
}

static void *leave_elsewhere(void *group)
{
    leave(group);
    return NULL;
}

void group_release(fsdp_group *group)
{
    if (!group || !ref_put(&group->ref)) return;
    leave_family(group);
    /* A completion callback runs on the thread that advances the lane, which can't wait for its own end. */
    int own = !ref_forked(&group->ref) &&
              (lane_is_advanced_here(&group->collectives) || lane_is_advanced_here(&group->messages));
    pthread_t thread;
    if (!own) {
        leave(group);
    } else if (os_thread_start(&thread, leave_elsewhere, group) == 0) {
        pthread_detach(thread);
    } else {
        LOG(FSDP_LOG_ERROR, "group '%s': no thread to leave it from a callback: it is aborted and its memory kept",
            group->name);
        group_abort(group, "released in a callback, without memory for a thread");
    }
}
