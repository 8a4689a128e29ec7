/* Making a group over shared memory. All of it is told to all, so that whatever stops one rank is every rank's error,
 * soon and in that rank's words.
 *
 *   1. Each rank gets what it needs of its own: descriptors, its liveness; rank 0 the segment and an abstract unix
 *      socket with a random name. How that went is spread by the setup's all_gather, with what tells whether ranks
 *      share a host.
 *   2. The others connect and send their liveness. Rank 0 checks who they are, and sends back the segment and all
 *      ranks' liveness. They map it and answer how that went; rank 0's verdict on all answers ends it, and the sockets
 *      are closed. A connection that closes is a rank that ended. One that ends before it connects is found by its pid.
 *   3. Each rank tries to read a secret from each peer's memory: only if all can, from all, is direct reading used.
 */
#include "transport/shm/shm.h"

#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SHM_MAGIC 0x46534450u
#define SHM_VERSION 2u
#define HANDSHAKE_MS 60000
#define GRACE_NS ((int64_t)1000 * 1000000) /* rank 0's verdict comes after its own deadline */
#define LOOK_NS ((int64_t)50 * 1000000)
#define MESSAGE_LANES_BYTES ((size_t)4 << 20)

/* ---- what is told */

struct hello { /* spread to all ranks before any connection */
    uint32_t magic, version;
    int32_t rank, size;
    uint32_t uid;
    int32_t direct_read, crowded; /* rank 0's count */
    int64_t staging_bytes;
    int32_t pid;
    uint32_t pid_namespace;
    fsdp_status status; /* of step 1 */
    char message[400];
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
    uint32_t magic, unused;
    uint64_t bytes;
    uint64_t probe_addresses[SHM_MAX_RANKS], probe_values[SHM_MAX_RANKS];
    int32_t pids[SHM_MAX_RANKS];
};

struct verdict { /* a rank's answer to the welcome, and rank 0's on all of them; instead of a welcome, the end */
    uint32_t magic;
    fsdp_status status;
    int32_t rank; /* whom it is about */
    char message[500];
};

static void verdict_fill(struct verdict *v, fsdp_status status, int rank)
{
    *v = (struct verdict){.magic = SHM_MAGIC, .status = status, .rank = rank};
    if (status != FSDP_OK) snprintf(v->message, sizeof v->message, "%.490s", err_message());
}

/* Another rank's failure as this one's. A message that names its rank already is passed on as it is. */
static fsdp_status verdict_take(struct verdict *v)
{
    v->message[sizeof v->message - 1] = 0;
    if (v->status == FSDP_OK) return FSDP_OK;
    if (strstr(v->message, " reported: ") || v->status == FSDP_ERR_PEER_LOST || v->status == FSDP_ERR_TIMEOUT)
        err(v->status, "%s", v->message);
    else
        err(v->status, "rank %d reported: %s", v->rank, v->message);
    err_operation(FSDP_OP_NONE, 0, v->rank, -1);
    return v->status;
}

static fsdp_status ended(const struct shm *t, int rank)
{
    err(FSDP_ERR_PEER_LOST,
        "group '%s': rank %d has ended, or given up, while the group was being made: see its output", t->name, rank);
    err_operation(FSDP_OP_NONE, 0, rank, -1);
    return FSDP_ERR_PEER_LOST;
}

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
    t->lane_bytes = l->lane_bytes;
    t->staging = base + l->staging;
    t->slot_bytes = l->slot_bytes;
    t->regions_at = l->bytes;
    t->base.segment_bytes = (int64_t)l->bytes;
}

static fsdp_status segment_make(struct shm *t, const struct transport_setup *setup)
{
    struct layout l = layout_of(setup->size, setup->staging_bytes);
    char label[80];
    void *base = NULL;
    snprintf(label, sizeof label, "fsdp-%s", t->name);
    fsdp_status status = os_segment_create(label, l.bytes, &t->fd);
    if (status == FSDP_OK) status = os_map_shared(t->fd, 0, l.bytes, &base);
    if (status != FSDP_OK)
        return err_prefix(status, "shared segment of %zu bytes for %d ranks (staging_bytes %lld each): ", l.bytes,
                          setup->size, (long long)setup->staging_bytes);
    attach(t, base, &l);
    return FSDP_OK;
}

/* ---- rank 0 */

/* Take one connection: who it is. Strangers are turned away without a word. */
static int admit(struct shm *t, int fd, const struct hello *hello, struct welcome *welcome, int *fds, int64_t deadline)
{
    struct join join;
    int liveness = -1;
    pid_t pid;
    uid_t uid;
    int64_t soon = os_now_ns() + GRACE_NS;
    if (os_peer_credentials(fd, &pid, &uid) != FSDP_OK || uid != geteuid()) return 0;
    if (os_recv_fds(fd, &join, sizeof join, &liveness, 1, NULL, soon < deadline ? soon : deadline) != FSDP_OK) return 0;
    int known = join.magic == SHM_MAGIC && memcmp(join.socket_name, hello->socket_name, sizeof join.socket_name) == 0 &&
                join.rank > 0 && join.rank < t->base.size && fds[join.rank] < 0;
    if (!known) {
        os_close(&liveness);
        return 0;
    }
    fds[join.rank] = fd;
    t->liveness[join.rank] = liveness;
    welcome->pids[join.rank] = pid;
    welcome->probe_addresses[join.rank] = join.probe_address;
    welcome->probe_values[join.rank] = join.probe_value;
    return 1;
}

static fsdp_status admit_all(struct shm *t, int listener, const struct hello *all, struct welcome *welcome, int *fds,
                             int *culprit, int64_t deadline)
{
    for (int joined = 1; joined < t->base.size;) {
        int64_t look = os_now_ns() + LOOK_NS;
        int fd;
        fsdp_status status = os_accept(listener, look < deadline ? look : deadline, &fd);
        if (status == FSDP_OK) {
            if (admit(t, fd, all, welcome, fds, deadline))
                joined++;
            else
                os_close(&fd);
            continue;
        }
        char missing[128] = "";
        size_t used = 0;
        for (int r = t->base.size - 1; r > 0; r--) {
            if (fds[r] >= 0) continue;
            *culprit = r;
            if (all[r].pid_namespace == all[0].pid_namespace && os_process_ended(all[r].pid)) return ended(t, r);
        }
        for (int r = 1; r < t->base.size && used < sizeof missing - 12; r++)
            if (fds[r] < 0) used += (size_t)snprintf(missing + used, sizeof missing - used, used ? ", %d" : "%d", r);
        if (status != FSDP_ERR_TIMEOUT) *culprit = 0;
        if (status != FSDP_ERR_TIMEOUT || os_now_ns() >= deadline)
            return err_prefix(status, "group '%s', waiting for rank %s: ", t->name, missing);
    }
    return FSDP_OK;
}

static fsdp_status lead(struct shm *t, int listener, const struct hello *all, struct welcome *welcome, int64_t deadline)
{
    int fds[SHM_MAX_RANKS], pass[SHM_MAX_RANKS + 1], culprit = 0, size = t->base.size;
    struct verdict verdict;
    for (int r = 0; r < SHM_MAX_RANKS; r++) fds[r] = -1;
    fsdp_status status = admit_all(t, listener, all, welcome, fds, &culprit, deadline);

    welcome->magic = SHM_MAGIC;
    welcome->bytes = t->mapped;
    welcome->pids[0] = getpid();
    welcome->probe_addresses[0] = (uintptr_t)&t->probe;
    welcome->probe_values[0] = t->probe;
    memcpy(pass, t->liveness, sizeof(int) * (size_t)size);
    pass[size] = t->fd;
    /* All are sent to before any is waited for; and all answers are read, as closing a socket with one unread would
     * drop the verdict. */
    int welcomed = 1;
    for (; welcomed < size && status == FSDP_OK; welcomed++) {
        culprit = welcomed;
        status = os_send_fds(fds[culprit], welcome, sizeof *welcome, pass, size + 1);
        if (status == FSDP_ERR_PEER_LOST) status = ended(t, culprit);
    }
    fsdp_error_info failure;
    err_save(&failure);
    for (int r = 1; r < welcomed; r++) {
        fsdp_status answer = os_recv_fds(fds[r], &verdict, sizeof verdict, NULL, 0, NULL, deadline);
        if (answer == FSDP_ERR_PEER_LOST)
            answer = ended(t, r);
        else if (answer != FSDP_OK)
            answer = err_prefix(answer, "group '%s', waiting for rank %d: ", t->name, r);
        else
            answer = verdict_take(&verdict);
        if (answer == FSDP_OK || status != FSDP_OK) continue;
        status = answer;
        culprit = r;
        err_save(&failure);
    }

    if (status != FSDP_OK) {
        (void)err_restore(&failure);
        err_operation(FSDP_OP_NONE, 0, culprit, -1);
        err_save(&failure);
    }
    verdict_fill(&verdict, status, status == FSDP_OK ? -1 : culprit);
    for (int r = 1; r < size; r++) {
        if (fds[r] < 0) continue;
        /* One that has gone meanwhile is found by the first wait. */
        if (os_send_fds(fds[r], &verdict, sizeof verdict, NULL, 0) != FSDP_OK)
            LOG(FSDP_LOG_INFO, "group '%s': rank %d left while the group was being made", t->name, r);
        os_close(&fds[r]);
    }
    return status == FSDP_OK ? FSDP_OK : err_restore(&failure);
}

/* ---- the others */

static fsdp_status take_welcome(struct shm *t, const struct welcome *welcome, int *got, const struct layout *l)
{
    int size = t->base.size;
    for (int r = 0; r < size; r++) {
        if (r == t->base.rank)
            os_close(&got[r]);
        else
            t->liveness[r] = got[r];
    }
    t->fd = got[size];
    size_t actual;
    void *base;
    TRY(os_segment_size(t->fd, &actual));
    if (welcome->bytes != l->bytes || actual < l->bytes)
        return err(FSDP_ERR_RENDEZVOUS,
                   "group '%s': rank 0 laid out %llu bytes, this rank %zu: do all ranks load the same libfsdp?",
                   t->name, (unsigned long long)welcome->bytes, l->bytes);
    TRY(os_map_shared(t->fd, 0, l->bytes, &base));
    attach(t, base, l);
    return FSDP_OK;
}

/* Over the connection, up to the verdict. */
static fsdp_status follow_on(struct shm *t, int fd, const struct transport_setup *setup, const struct hello *first,
                             struct welcome *welcome, int64_t deadline)
{
    struct layout l = layout_of(setup->size, setup->staging_bytes);
    struct join join = {
        .magic = SHM_MAGIC, .rank = setup->rank, .probe_address = (uintptr_t)&t->probe, .probe_value = t->probe};
    memcpy(join.socket_name, first->socket_name, sizeof join.socket_name);
    TRY(os_send_fds(fd, &join, sizeof join, &t->liveness[setup->rank], 1));

    int got[SHM_MAX_RANKS + 1], n_got = 0;
    union {
        struct welcome welcome;
        struct verdict verdict;
    } answer;
    fsdp_status status = os_recv_fds(fd, &answer, sizeof answer.welcome, got, setup->size + 1, &n_got, deadline);
    if (status == FSDP_OK && n_got == 0 && answer.verdict.magic == SHM_MAGIC && answer.verdict.status != FSDP_OK)
        return verdict_take(&answer.verdict); /* the end, instead of a welcome */
    if (status == FSDP_ERR_PEER_LOST) return status;
    if (status == FSDP_OK && (n_got == 0 || answer.welcome.magic != SHM_MAGIC))
        status = err(FSDP_ERR_RENDEZVOUS, "rank 0 answered in another protocol: do all ranks load the same libfsdp?");
    if (status == FSDP_OK) {
        *welcome = answer.welcome;
        status = take_welcome(t, welcome, got, &l);
    }
    struct verdict verdict;
    verdict_fill(&verdict, status, setup->rank);
    if (status == FSDP_OK) {
        TRY(os_send_fds(fd, &verdict, sizeof verdict, NULL, 0));
    } else {
        fsdp_error_info failure;
        err_save(&failure);
        (void)os_send_fds(fd, &verdict, sizeof verdict, NULL, 0);
        return err_restore(&failure);
    }
    TRY(os_recv_fds(fd, &verdict, sizeof verdict, NULL, 0, NULL, deadline));
    return verdict_take(&verdict);
}

static fsdp_status follow(struct shm *t, const struct transport_setup *setup, const struct hello *first,
                          struct welcome *welcome, int64_t deadline)
{
    int fd;
    fsdp_status status = os_connect(first->socket_name, deadline, &fd);
    if (status == FSDP_OK) {
        status = follow_on(t, fd, setup, first, welcome, deadline + GRACE_NS);
        os_close(&fd);
    }
    fsdp_error_info info;
    err_save(&info);
    return status == FSDP_ERR_PEER_LOST && info.rank_a < 0 ? ended(t, 0) : status;
}

/* ---- together */

static fsdp_status meet(struct shm *t, uint32_t step, struct deadline deadline)
{
    shm_publish(WORD(t, t->base.rank, joined), step);
    for (int r = 0; r < t->base.size; r++) TRY(shm_wait(t, WORD(t, r, joined), step, r, deadline));
    return FSDP_OK;
}

static fsdp_status probe_peers(struct shm *t, int32_t wanted, const struct welcome *welcome, struct deadline deadline)
{
    uint32_t ok = wanted != 2;
    int failed = 0, failed_rank = -1, me = t->base.rank;
    for (int r = 0; ok && r < t->base.size; r++) {
        uint64_t value = 0;
        failed = os_read_peer(t->pids[r], welcome->probe_addresses[r], &value, sizeof value);
        if (failed == 0 && value == welcome->probe_values[r]) continue;
        ok = 0;
        failed_rank = r;
    }
    t->areas[me].probe_ok = ok;
    TRY(meet(t, 1, deadline));
    int all = 1, refused = me;
    for (int r = 0; r < t->base.size; r++) {
        if (t->areas[r].probe_ok == 1) continue;
        all = 0;
        if (ok) refused = r;
    }
    t->base.direct_read = all;
    t->use_direct = all && (wanted == 1 || t->crowded);
    if (all || wanted != 1) return FSDP_OK;
    char whose[24] = "its peers'";
    if (failed_rank >= 0) snprintf(whose, sizeof whose, "rank %d's", failed_rank);
    return err_sys(
        FSDP_ERR_UNSUPPORTED, failed ? failed : EPERM,
        "group '%s': direct_read is required, but rank %d may not read %s memory (see yama's ptrace_scope, seccomp, "
        "user namespaces); leave direct_read at 0 to use staging",
        t->name, refused, whose);
}

/* Step 1: what this rank needs of its own. */
static fsdp_status prepare(struct shm *t, const struct transport_setup *setup, struct hello *mine, int *listener)
{
    int size = setup->size, me = setup->rank;
    TRY(os_descriptors_check(me == 0 ? 2 * size : size + 4, "making a group"));
    TRY(os_liveness_fd(&t->liveness[me], &t->liveness_keep));
    if (me != 0) return FSDP_OK;
    uint64_t name[2];
    os_random(name, sizeof name);
    snprintf(mine->socket_name, sizeof mine->socket_name, "fsdp-%016llx%016llx", (unsigned long long)name[0],
             (unsigned long long)name[1]);
    TRY(os_listen(mine->socket_name, size, listener));
    return segment_make(t, setup);
}

/* Everybody's step 1 went well, and all are on one host. The same verdict on all ranks. */
static fsdp_status check_all(const struct shm *t, struct hello *all)
{
    for (int r = 0; r < t->base.size; r++) {
        struct hello *h = &all[r];
        h->host[sizeof h->host - 1] = h->socket_name[sizeof h->socket_name - 1] = h->message[sizeof h->message - 1] = 0;
        if (h->magic == 0)
            return err(FSDP_ERR_RENDEZVOUS, "group '%s': rank %d could not take part: see its output", t->name, r);
        if (h->magic != SHM_MAGIC || h->version != SHM_VERSION)
            return err(FSDP_ERR_RENDEZVOUS,
                       "group '%s': rank %d speaks another protocol: do all ranks load the same libfsdp?", t->name, r);
        if (h->status != FSDP_OK) {
            if (r == t->base.rank)
                err(h->status, "group '%s': %s", t->name, h->message);
            else
                err(h->status, "group '%s': rank %d reported: %s", t->name, r, h->message);
            err_operation(FSDP_OP_NONE, 0, r, -1);
            return h->status;
        }
        if (strcmp(h->host, all[0].host) != 0)
            return err(FSDP_ERR_UNSUPPORTED,
                       "group '%s': rank 0 and rank %d are on different hosts or network namespaces (%s, %s): the shm "
                       "transport "
                       "needs one host",
                       t->name, r, all[0].host, h->host);
        if (h->uid != all[0].uid)
            return err(FSDP_ERR_UNSUPPORTED,
                       "group '%s': rank 0 runs as user %u, rank %d as user %u: they must be the same", t->name,
                       all[0].uid, r, h->uid);
    }
    return FSDP_OK;
}

fsdp_status shm_join(struct shm *t, const struct transport_setup *given)
{
    struct transport_setup setup = *given;
    struct hello mine = {.magic = SHM_MAGIC,
                         .version = SHM_VERSION,
                         .rank = setup.rank,
                         .size = setup.size,
                         .uid = geteuid(),
                         .direct_read = setup.direct_read,
                         .crowded = setup.size > os_cpu_count(),
                         .staging_bytes = setup.staging_bytes,
                         .pid = getpid(),
                         .pid_namespace = os_pid_namespace()};
    /* On the stack: nothing may fail on one rank alone between here and the verdict. */
    struct hello all[SHM_MAX_RANKS];
    struct welcome welcome = {0};
    int listener = -1;
    os_host_name(mine.host, sizeof mine.host);
    os_random(&t->probe, sizeof t->probe);
    mine.status = prepare(t, &setup, &mine, &listener);
    if (mine.status != FSDP_OK) snprintf(mine.message, sizeof mine.message, "%.390s", err_message());

    fsdp_status status = setup.all_gather(setup.context, &mine, sizeof mine, all);
    if (status == FSDP_OK) status = check_all(t, all);
    if (status == FSDP_OK) {
        setup.direct_read = all[0].direct_read;
        setup.staging_bytes = all[0].staging_bytes;
        t->crowded = all[0].crowded;
        int64_t ms = setup.timeout_ms < HANDSHAKE_MS ? setup.timeout_ms : HANDSHAKE_MS;
        struct deadline deadline = {.at_ns = os_now_ns() + ms * 1000000, .timeout_ms = ms, .doing = "making the group"};
        status = setup.rank == 0 ? lead(t, listener, all, &welcome, deadline.at_ns)
                                 : follow(t, &setup, &all[0], &welcome, deadline.at_ns);
        os_close(&listener);
        for (int r = 0; r < setup.size; r++) t->pids[r] = welcome.pids[r];
        if (status == FSDP_OK) status = probe_peers(t, setup.direct_read, &welcome, deadline);
    }
    os_close(&listener);
    return status;
}
