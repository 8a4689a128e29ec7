/* The shared-memory transport: making, exchange, failure and leaving. shm.h describes the segment.
 *
 * Making. Rank 0 listens on an abstract unix socket with a random name, which the setup's all_gather spreads, together
 * with what tells whether the ranks share a host. The others connect and send a descriptor of their liveness; rank 0
 * checks who they are, makes the segment, and sends it with all ranks' liveness back. After that the sockets are closed.
 * Then each rank tries to read a secret from each peer's memory: only if all can, from all, is direct reading used.
 *
 * Ownership: a rank owns its mapping and descriptors; the segment lives as long as any rank maps it, and vanishes
 * with the last, however that one ends.
 */
#include "transport/shm/shm.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SHM_MAGIC 0x46534450u
#define SHM_VERSION 1u
#define HANDSHAKE_MS 60000
#define MESSAGE_LANES_BYTES ((size_t)4 << 20)

/* ---- making: what is told */

struct hello { /* spread to all ranks before any connection */
    uint32_t magic, version;
    int32_t rank, size;
    uint32_t uid;
    int32_t direct_read;     /* rank 0's options count */
    int64_t staging_bytes;
    fsdp_status listening; /* rank 0's */
    char host[192];
    char socket_name[48];
};

struct join { /* to rank 0, with a liveness descriptor */
    uint32_t magic;
    int32_t rank;
    uint64_t probe_address, probe_value;
    char socket_name[48]; /* the name is random: whoever knows it was told */
};

struct welcome { /* from rank 0, with the segment and all ranks' liveness */
    uint32_t magic;
    fsdp_status status;
    uint64_t bytes;
    uint64_t probe_addresses[SHM_MAX_RANKS], probe_values[SHM_MAX_RANKS];
    int32_t pids[SHM_MAX_RANKS];
    char message[512];
};

/* ---- layout */

struct layout {
    size_t areas, channels, lanes, lane_bytes, staging, slot_bytes, bytes;
};

static size_t round_up(size_t bytes)
{
    return (bytes + 4095) & ~(size_t)4095;
}

static struct layout layout_of(int size, int64_t staging_bytes)
{
    size_t n = (size_t)size, pairs = n * n;
    struct layout l;
    size_t lane = MESSAGE_LANES_BYTES / pairs & ~(size_t)4095;
    l.lane_bytes = lane < 8192 ? 8192 : lane > ((size_t)256 << 10) ? (size_t)256 << 10 : lane;
    l.slot_bytes = (size_t)staging_bytes / SHM_DEPTH & ~(size_t)4095;
    l.areas = round_up(sizeof(struct segment));
    l.channels = l.areas + round_up(n * sizeof(struct rank_area));
    l.lanes = l.channels + round_up(pairs * sizeof(struct channel));
    l.staging = l.lanes + round_up(pairs * l.lane_bytes);
    l.bytes = l.staging + n * SHM_DEPTH * l.slot_bytes;
    return l;
}

static void attach(struct shm *t, char *base, const struct layout *l)
{
    t->segment = (struct segment *)base;
    t->mapped = l->bytes;
    t->areas = (struct rank_area *)(base + l->areas);
    t->channels = (struct channel *)(base + l->channels);
    t->lanes = base + l->lanes;
    t->staging = base + l->staging;
    t->base.segment_bytes = (int64_t)l->bytes;
}

/* ---- making: rank 0 */

static fsdp_status segment_make(struct shm *t, const struct transport_setup *setup)
{
    struct layout l = layout_of(setup->size, setup->staging_bytes);
    char label[80];
    snprintf(label, sizeof label, "fsdp-%s", t->name);
    fsdp_status status = os_segment_create(label, l.bytes, &t->fd);
    if (status != FSDP_OK)
        return err_prefix(status, "shared segment of %zu bytes for %d ranks (staging_bytes %lld each): ", l.bytes, setup->size,
                          (long long)setup->staging_bytes);
    void *base;
    TRY(os_map_shared(t->fd, 0, l.bytes, &base));
    attach(t, base, &l);
    t->segment->magic = SHM_MAGIC;
    t->segment->size = (uint32_t)setup->size;
    t->segment->crowded = setup->size > os_cpu_count();
    t->segment->slot_bytes = l.slot_bytes;
    t->segment->lane_bytes = l.lane_bytes;
    t->segment->regions_at = l.bytes;
    return FSDP_OK;
}

/* Take one connection: who it is. Strangers are turned away without a word. */
static fsdp_status welcome_one(struct shm *t, int fd, const struct hello *hello, struct welcome *welcome, int *fds)
{
    struct join join;
    int liveness = -1;
    pid_t pid;
    uid_t uid;
    if (os_peer_credentials(fd, &pid, &uid) != FSDP_OK || uid != geteuid()) return FSDP_ERR_RENDEZVOUS;
    int64_t soon = os_now_ns() + (int64_t)5000 * 1000000;
    if (os_recv_fds(fd, &join, sizeof join, &liveness, 1, NULL, soon) != FSDP_OK) return FSDP_ERR_RENDEZVOUS;
    int known = join.magic == SHM_MAGIC && memcmp(join.socket_name, hello->socket_name, sizeof join.socket_name) == 0 &&
                join.rank > 0 && join.rank < t->base.size && fds[join.rank] < 0;
    if (!known) {
        os_close(&liveness);
        return FSDP_ERR_RENDEZVOUS;
    }
    fds[join.rank] = fd;
    t->liveness[join.rank] = liveness;
    welcome->pids[join.rank] = pid;
    welcome->probe_addresses[join.rank] = join.probe_address;
    welcome->probe_values[join.rank] = join.probe_value;
    return FSDP_OK;
}

static fsdp_status lead(struct shm *t, const struct transport_setup *setup, int listener, const struct hello *hello,
                        struct welcome *welcome, int64_t deadline)
{
    int fds[SHM_MAX_RANKS], joined = 1;
    for (int r = 0; r < SHM_MAX_RANKS; r++) fds[r] = -1;
    fsdp_status status = segment_make(t, setup);

    while (joined < setup->size) {
        int fd;
        fsdp_status accepted = os_accept(listener, deadline, &fd);
        if (accepted != FSDP_OK) {
            char missing[128] = "";
            size_t used = 0;
            for (int r = 1; r < setup->size && used < sizeof missing - 12; r++)
                if (fds[r] < 0) used += (size_t)snprintf(missing + used, sizeof missing - used, used ? ", %d" : "%d", r);
            if (status == FSDP_OK) status = err_prefix(accepted, "group '%s', waiting for rank %s: ", t->name, missing);
            break;
        }
        if (welcome_one(t, fd, hello, welcome, fds) == FSDP_OK)
            joined++;
        else
            os_close(&fd);
    }

    fsdp_error_info failure;
    if (status != FSDP_OK) err_save(&failure);
    welcome->magic = SHM_MAGIC;
    welcome->status = status;
    welcome->bytes = t->mapped;
    welcome->pids[0] = getpid();
    welcome->probe_addresses[0] = (uintptr_t)&t->probe;
    welcome->probe_values[0] = t->probe;
    if (status != FSDP_OK) snprintf(welcome->message, sizeof welcome->message, "%.500s", failure.message);

    int pass[SHM_MAX_RANKS + 1];
    memcpy(pass, t->liveness, sizeof(int) * (size_t)setup->size);
    pass[setup->size] = t->fd;
    for (int r = 1; r < setup->size; r++) {
        if (fds[r] < 0) continue;
        /* A rank that has gone meanwhile is found by the first wait. */
        if (status == FSDP_OK && os_send_fds(fds[r], welcome, sizeof *welcome, pass, setup->size + 1) != FSDP_OK)
            LOG(FSDP_LOG_WARN, "group '%s': rank %d left while the group was being made", t->name, r);
        if (status != FSDP_OK) (void)os_send_fds(fds[r], welcome, sizeof *welcome, NULL, 0);
        os_close(&fds[r]);
    }
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

/* ---- making: the others */

static fsdp_status follow(struct shm *t, const struct transport_setup *setup, const struct hello *first,
                          struct welcome *welcome, int64_t deadline)
{
    struct layout l = layout_of(setup->size, setup->staging_bytes);
    struct join join = {
        .magic = SHM_MAGIC, .rank = setup->rank, .probe_address = (uintptr_t)&t->probe, .probe_value = t->probe};
    memcpy(join.socket_name, first->socket_name, sizeof join.socket_name);
    int fd, got[SHM_MAX_RANKS + 1], n_got = 0;
    TRY(os_connect(first->socket_name, deadline, &fd));
    fsdp_status status = os_send_fds(fd, &join, sizeof join, &t->liveness[setup->rank], 1);
    if (status == FSDP_OK) status = os_recv_fds(fd, welcome, sizeof *welcome, got, setup->size + 1, &n_got, deadline);
    os_close(&fd);
    TRY(status);
    if (welcome->magic != SHM_MAGIC)
        return err(FSDP_ERR_RENDEZVOUS, "group '%s': rank 0 answered in another protocol: do all ranks load the same libfsdp?",
                   t->name);
    welcome->message[sizeof welcome->message - 1] = 0;
    if (welcome->status != FSDP_OK || n_got == 0) /* a failure comes without descriptors */
        return err(welcome->status ? welcome->status : FSDP_ERR_RENDEZVOUS, "rank 0 reported: %s", welcome->message);

    for (int r = 0; r < setup->size; r++) {
        if (r == setup->rank)
            os_close(&got[r]);
        else
            t->liveness[r] = got[r];
    }
    t->fd = got[setup->size];
    size_t actual;
    TRY(os_segment_size(t->fd, &actual));
    if (welcome->bytes != l.bytes || actual < l.bytes)
        return err(FSDP_ERR_RENDEZVOUS, "group '%s': rank 0 laid out %llu bytes, this rank %zu: do all ranks load the same libfsdp?",
                   t->name, (unsigned long long)welcome->bytes, l.bytes);
    void *base;
    TRY(os_map_shared(t->fd, 0, l.bytes, &base));
    attach(t, base, &l);
    return FSDP_OK;
}

/* ---- making: together */

static fsdp_status meet(struct shm *t, uint32_t step, struct deadline deadline)
{
    shm_publish(WORD(t, t->base.rank, joined), step);
    for (int r = 0; r < t->base.size; r++) TRY(shm_wait(t, WORD(t, r, joined), step, r, deadline));
    return FSDP_OK;
}

static fsdp_status probe_peers(struct shm *t, int32_t wanted, const struct welcome *welcome, struct deadline deadline)
{
    uint32_t ok = wanted != 2;
    int failed = 0, failed_rank = -1;
    for (int r = 0; ok && r < t->base.size; r++) {
        uint64_t value = 0;
        failed = os_read_peer(t->pids[r], welcome->probe_addresses[r], &value, sizeof value);
        if (failed == 0 && value == welcome->probe_values[r]) continue;
        ok = 0;
        failed_rank = r;
    }
    t->areas[t->base.rank].probe_ok = ok;
    TRY(meet(t, 2, deadline));
    int all = 1;
    for (int r = 0; r < t->base.size; r++) {
        if (t->areas[r].probe_ok == 1) continue;
        all = 0;
        if (failed_rank < 0) failed_rank = r;
    }
    if (!all && wanted == 1)
        return err_sys(FSDP_ERR_UNSUPPORTED, failed ? failed : 1,
                       "group '%s': direct_read is required, but reading between this process and rank %d is refused (see yama's "
                       "ptrace_scope, seccomp, user namespaces); leave direct_read at 0 to use staging",
                       t->name, failed_rank);
    t->base.direct_read = all;
    if (t->base.rank == 0) t->segment->direct_read = !all ? 0 : wanted == 1 ? 2 : 1;
    return meet(t, 3, deadline);
}

static fsdp_status make(struct shm *t, const struct transport_setup *given)
{
    struct transport_setup setup = *given;
    int listener = -1;
    struct hello mine = {.magic = SHM_MAGIC, .version = SHM_VERSION, .rank = setup.rank, .size = setup.size, .uid = geteuid(),
                         .direct_read = setup.direct_read, .staging_bytes = setup.staging_bytes};
    os_host_name(mine.host, sizeof mine.host);
    os_random(&t->probe, sizeof t->probe);
    if (setup.rank == 0) {
        uint64_t name[2];
        os_random(name, sizeof name);
        snprintf(mine.socket_name, sizeof mine.socket_name, "fsdp-%016llx%016llx", (unsigned long long)name[0],
                 (unsigned long long)name[1]);
        mine.listening = os_listen(mine.socket_name, setup.size, &listener);
    }
    fsdp_error_info listen_failure;
    err_save(&listen_failure);

    struct hello *all = mem_array((size_t)setup.size, sizeof *all);
    struct welcome *welcome = mem_alloc(sizeof *welcome);
    fsdp_status status = all && welcome ? FSDP_OK : mem_none("group set-up", sizeof *welcome);
    if (status == FSDP_OK) status = setup.all_gather(setup.context, &mine, sizeof mine, all);

    for (int r = 0; status == FSDP_OK && r < setup.size; r++) {
        all[r].host[sizeof all[r].host - 1] = all[r].socket_name[sizeof all[r].socket_name - 1] = 0;
        if (all[r].magic != SHM_MAGIC || all[r].version != SHM_VERSION)
            status = err(FSDP_ERR_RENDEZVOUS, "group '%s': rank %d speaks another protocol: do all ranks load the same libfsdp?",
                         t->name, r);
        else if (strcmp(all[r].host, all[0].host) != 0)
            status = err(FSDP_ERR_UNSUPPORTED,
                         "group '%s': rank 0 and rank %d are on different hosts or network namespaces (%s, %s): the shm transport "
                         "needs one host",
                         t->name, r, all[0].host, all[r].host);
        else if (all[r].uid != all[0].uid)
            status = err(FSDP_ERR_UNSUPPORTED, "group '%s': rank 0 runs as user %u, rank %d as user %u: they must be the same",
                         t->name, all[0].uid, r, all[r].uid);
    }
    if (status == FSDP_OK && all[0].listening != FSDP_OK)
        status = setup.rank == 0 ? err_restore(&listen_failure)
                                 : err(all[0].listening, "group '%s': rank 0 could not open its socket", t->name);

    if (status == FSDP_OK) {
        setup.direct_read = all[0].direct_read;
        setup.staging_bytes = all[0].staging_bytes;
    }
    int64_t shake = setup.timeout_ms < HANDSHAKE_MS ? setup.timeout_ms : HANDSHAKE_MS;
    struct deadline deadline = {.at_ns = os_now_ns() + shake * 1000000, .timeout_ms = shake, .doing = "making the group"};
    if (status == FSDP_OK)
        status = setup.rank == 0 ? lead(t, &setup, listener, &all[0], welcome, deadline.at_ns)
                                 : follow(t, &setup, &all[0], welcome, deadline.at_ns);
    os_close(&listener);
    if (status == FSDP_OK) {
        for (int r = 0; r < setup.size; r++) t->pids[r] = welcome->pids[r];
        status = meet(t, 1, deadline);
        if (status == FSDP_OK) status = probe_peers(t, setup.direct_read, welcome, deadline);
    }
    mem_free(all);
    mem_free(welcome);
    return status;
}

static void shm_destroy(struct transport *base);

static fsdp_status shm_create(const struct transport_setup *setup, struct transport **out)
{
    struct shm *t = mem_alloc_aligned(sizeof *t, 64);
    if (!t) return mem_none("a group's transport", sizeof *t);
    t->base.ops = &transport_shm;
    t->base.rank = setup->rank;
    t->base.process = os_process();
    t->base.size = setup->size;
    t->fd = t->liveness_keep = -1;
    for (int r = 0; r < SHM_MAX_RANKS; r++) t->liveness[r] = -1;
    snprintf(t->name, sizeof t->name, "%s", setup->name);

    fsdp_status status = os_liveness_fd(&t->liveness[setup->rank], &t->liveness_keep);
    if (status == FSDP_OK) status = make(t, setup);
    if (status != FSDP_OK) {
        shm_destroy(&t->base);
        return status;
    }
    /* Spinning pays when every rank has a processor of its own; otherwise the peer may need this one. */
    t->spin_ns = setup->spin_us > 0 ? (int64_t)setup->spin_us * 1000
                 : setup->spin_us < 0 || t->segment->crowded ? 0
                                                             : 100000;
    LOG(FSDP_LOG_INFO, "group '%s': rank %d of %d over shared memory, direct reads %s, %s", t->name, setup->rank, setup->size,
        t->base.direct_read ? "allowed" : "not used", t->segment->crowded ? "more ranks than processors" : "a processor each");
    *out = &t->base;
    return FSDP_OK;
}

/* ---- leaving and failing */

static void wake_all(struct shm *t)
{
    struct rank_area *area = &t->areas[t->base.rank];
    struct word *words[] = {&area->joined, &area->posted, &area->staged, &area->reduced, &area->consumed, &area->done};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) shm_wake(words[i]);
    for (int r = 0; r < t->base.size; r++) {
        atomic_fetch_add_explicit(&t->areas[r].bell.value, 1, memory_order_seq_cst);
        shm_wake(&t->areas[r].bell);
    }
}

static void shm_destroy(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    if (t->segment) {
        if (base->process == os_process()) {
            atomic_store_explicit(&t->areas[base->rank].left, 1, memory_order_seq_cst);
            wake_all(t);
        }
        os_unmap(t->segment, t->mapped);
    }
    for (int r = 0; r < SHM_MAX_RANKS; r++) os_close(&t->liveness[r]);
    os_close(&t->liveness_keep);
    os_close(&t->fd);
    mem_free_aligned(t->table);
    mem_free_aligned(t->scratch);
    mem_free_aligned(t);
}

static void shm_tell_failure(struct transport *base)
{
    struct shm *t = (struct shm *)base;
    if (!t->segment) return;
    struct rank_area *area = &t->areas[base->rank];
    /* Once for a group's life: transport_fail calls this for the first failure only. */
    area->fault = base->failure;
    atomic_store_explicit(&area->fault_set, 1, memory_order_release);
    atomic_store_explicit(&t->segment->faulted, 1, memory_order_seq_cst);
    wake_all(t);
}

/* ---- exchange */

static fsdp_status shm_exchange(struct transport *base, const struct call_header *mine, const void *payload, size_t bytes,
                                const struct transfer *transfer, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    TRY(shm_status(base));
    t->route = shm_route(t, transfer);
    uint32_t number = t->sequence + 1;
    struct rank_area *area = &t->areas[base->rank];
    struct slot *slot = &area->slots[number % 2];
    slot->header = *mine;
    slot->longest = 0;
    slot->payload_bytes = bytes;
    if (bytes) memcpy(slot->payload, payload, bytes);
    switch (t->route) {
    case ROUTE_INLINE: shm_inline_fill(t, slot, transfer); break;
    case ROUTE_STAGE:
        slot->longest = shm_stage_longest(t, transfer);
        TRY(shm_stage_first(t, transfer, deadline));
        break;
    case ROUTE_DIRECT: TRY(shm_direct_offer(t, slot, transfer)); break;
    default: break;
    }
    t->sequence = number;
    shm_publish(&area->posted, number);
    for (int step = 0; step < base->size; step++) {
        int r = (base->rank + step) % base->size;
        if (r != base->rank) TRY(shm_wait(t, WORD(t, r, posted), number, r, deadline));
        t->seen[r] = &t->areas[r].slots[number % 2];
    }
    return FSDP_OK;
}

static const struct call_header *shm_header_of(struct transport *base, int rank)
{
    return &((struct shm *)base)->seen[rank]->header;
}

static const void *shm_payload_of(struct transport *base, int rank)
{
    return ((struct shm *)base)->seen[rank]->payload;
}

static fsdp_status shm_move(struct transport *base, const struct transfer *transfer, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    switch (t->route) {
    case ROUTE_INLINE: shm_inline_move(t, transfer); return FSDP_OK;
    case ROUTE_STAGE: return shm_stage_move(t, transfer, deadline);
    case ROUTE_DIRECT: return shm_direct_move(t, transfer, deadline);
    default: return FSDP_OK;
    }
}

static fsdp_status shm_sync(struct transport *base, struct deadline deadline)
{
    struct shm *t = (struct shm *)base;
    shm_publish(WORD(t, base->rank, done), ++t->dones);
    for (int r = 0; r < base->size; r++)
        if (r != base->rank) TRY(shm_wait(t, WORD(t, r, done), t->dones, r, deadline));
    return FSDP_OK;
}

const struct transport_ops transport_shm = {
    .name = "shm",
    .create = shm_create,
    .destroy = shm_destroy,
    .exchange = shm_exchange,
    .header_of = shm_header_of,
    .payload_of = shm_payload_of,
    .move = shm_move,
    .sync = shm_sync,
    .message_step = shm_message_step,
    .message_ticket = shm_message_ticket,
    .message_nudge = shm_message_nudge,
    .message_wait = shm_message_wait,
    .message_check = shm_message_check,
    .region_reserve = shm_region_reserve,
    .region_map = shm_region_map,
    .region_release = shm_region_release,
    .status = shm_status,
    .fail = shm_tell_failure,
};
