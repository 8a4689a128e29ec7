/* Rank 0's server of a tcp store: one thread that polls a fixed number of connections.
 *
 * The thread owns everything below but three fields: `stop` and the descriptors are also touched by the owner
 * (to stop it) and by a forked child (to close its copies). It blocks nowhere but in poll, holds no lock, and
 * takes no signals.
 *
 * Nothing a client sends is trusted: lengths are checked before memory is made for them, a connection gets no
 * more than a job key's worth until its HELLO has shown the job key, it must do that within HELLO_MS, and
 * when all places are taken the oldest connection that has not done so makes room. A client that breaks a
 * rule loses its connection and changes nothing. A connection has one request in work at a time: reading,
 * waiting for a key (parked), or replying.
 *
 * Meeting: JOIN parks until all ranks are there. If two say the same rank, or world sizes differ, the meeting
 * is over and all who are there or come get the same sentence. A rank whose connection closes before the end
 * may come again.
 *
 * After fork() in rank 0 the child has a copy of all this, frozen wherever the thread was: `in_step` tells
 * whether that was outside poll, in which case the child leaves the memory alone. */
#include "store/tcp_server.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "store/net.h"
#include "store/table.h"
#include "store/wire.h"

#define HELLO_MS 5000
#define ACCEPT_PAUSE_MS 100 /* after running out of descriptors */
#define ACCEPTS_PER_STEP 64
#define NOBODY (-1)
#define GONE (-2)
#define GAVE_UP (-3) /* may come again, but is not who the others wait in vain for */

struct peer {
    atomic_int fd;    /* -1: free */
    int greeted;      /* its HELLO was right */
    int closing;      /* close when the reply is out */
    int parked;       /* 0, or the wire_op that waits */
    int64_t deadline; /* of the HELLO, or of what is parked */
    int32_t rank;     /* joined as, or NOBODY */

    struct wire_request request;
    size_t head_used, body_used;
    unsigned char *body; /* key, value; NULL when both are empty */

    unsigned char *reply; /* NULL: none under way */
    size_t reply_bytes, reply_sent;
};

struct store_server {
    struct store_config config;
    char name[300];
    pthread_t thread;
    atomic_int listener, wake;
    atomic_int stop, in_step;

    struct store_table table;
    int32_t *places; /* per rank: index of its peer, NOBODY, GAVE_UP (meeting), or GONE (after it) */
    int32_t n_joined;
    int complete;
    char conflict[STORE_TEXT_MAX];

    int64_t accept_after;
    int n_peers, n_polled; /* places; those before the last one in use, which are all that poll sees */
    struct peer *peers;
    struct pollfd *polls; /* wake, listener, peers */
};

/* ---- Peers -------------------------------------------------------------------------------------------- */

static void request_done(struct peer *peer)
{
    mem_free(peer->body);
    peer->body = NULL;
    peer->head_used = peer->body_used = 0;
    peer->parked = 0;
}

static void peer_close(struct store_server *server, struct peer *peer)
{
    int fd = atomic_exchange(&peer->fd, -1); /* first forgotten, then closed: a forked child never closes a stranger */
    if (fd < 0) return;
    store_net_close(fd);
    request_done(peer);
    mem_free(peer->reply);
    peer->reply = NULL;
    if (peer->rank != NOBODY) {
        server->places[peer->rank] = server->complete ? GONE : NOBODY;
        if (!server->complete) server->n_joined--;
        peer->rank = NOBODY;
    }
}

static void peer_send(struct store_server *server, struct peer *peer)
{
    while (peer->reply_sent < peer->reply_bytes) {
        ssize_t n = send(atomic_load(&peer->fd), peer->reply + peer->reply_sent, peer->reply_bytes - peer->reply_sent,
                         MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            peer_close(server, peer);
            return;
        }
        peer->reply_sent += (size_t)n;
    }
    mem_free(peer->reply);
    peer->reply = NULL;
    if (peer->closing) peer_close(server, peer);
}

static void peer_reply(struct store_server *server, struct peer *peer, int32_t status, int64_t arg, const void *value,
                       size_t bytes)
{
    struct wire_reply head = {.magic = WIRE_MAGIC, .status = status, .value_bytes = (uint32_t)bytes, .arg = arg};
    wire_swap_reply(&head);
    peer->reply = mem_alloc(sizeof head + bytes);
    if (!peer->reply) {
        peer_close(server, peer);
        return;
    }
    memcpy(peer->reply, &head, sizeof head);
    if (bytes) memcpy(peer->reply + sizeof head, value, bytes); /* before the request, which may hold it, goes */
    request_done(peer);
    peer->reply_bytes = sizeof head + bytes;
    peer->reply_sent = 0;
    peer_send(server, peer);
}

static void peer_tell(struct store_server *server, struct peer *peer, int32_t status, const char *text)
{
    peer_reply(server, peer, status, 0, text, strlen(text));
}

/* ---- Meeting ------------------------------------------------------------------------------------------ */

static void end_meeting(struct store_server *server, int32_t status, const char *text)
{
    for (int i = 0; i < server->n_peers; i++) {
        struct peer *peer = &server->peers[i];
        if (atomic_load(&peer->fd) >= 0 && peer->parked == WIRE_JOIN) peer_tell(server, peer, status, text);
    }
}

static int is_missing(const void *ctx, int32_t rank)
{
    return ((const struct store_server *)ctx)->places[rank] == NOBODY;
}

/* The sentence for ranks that wait in vain, and the first rank missing. */
static int32_t describe_missing(const struct store_server *server, char *text, size_t size)
{
    char ranks[256];
    int32_t first = 0;
    while (first < server->config.world_size - 1 && !is_missing(server, first)) first++;
    store_list_ranks(ranks, sizeof ranks, server->config.world_size, is_missing, server);
    snprintf(text, size,
             "not all of %" PRId32
             " ranks came to tcp store %s in time: missing %s; see their output, or raise timeout_ms",
             server->config.world_size, server->name, ranks);
    return first;
}

static void handle_join(struct store_server *server, struct peer *peer, int64_t deadline)
{
    int32_t rank = (int32_t)(uint32_t)peer->request.arg;
    int32_t world_size = (int32_t)(uint32_t)((uint64_t)peer->request.arg >> 32);
    char text[sizeof server->conflict];
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        peer->closing = 1;
        snprintf(text, sizeof text, "rank %" PRId32 " of world_size %" PRId32 " does not exist", rank, world_size);
        peer_tell(server, peer, FSDP_ERR_RENDEZVOUS, text);
        return;
    }
    if (server->conflict[0]) {
        peer_tell(server, peer, FSDP_ERR_RENDEZVOUS, server->conflict);
        return;
    }
    text[0] = 0;
    if (world_size != server->config.world_size)
        snprintf(text, sizeof text,
                 "ranks disagree on world_size at tcp store %s: rank %" PRId32 " says %" PRId32 ", rank 0 says %" PRId32
                 ": start all ranks with the same",
                 server->name, rank, world_size, server->config.world_size);
    else if (server->places[rank] >= 0)
        snprintf(text, sizeof text,
                 "two processes say they are rank %" PRId32
                 " at tcp store %s%s: give each process its own rank, and each job its own port",
                 rank, server->name,
                 server->complete ? " (or the first has opened a store there before and not released it)" : "");
    if (text[0]) {
        if (!server->complete) {
            memcpy(server->conflict, text, sizeof text);
            end_meeting(server, FSDP_ERR_RENDEZVOUS, text);
        }
        peer_tell(server, peer, FSDP_ERR_RENDEZVOUS, text);
        return;
    }
    if (server->complete) {
        peer_tell(server, peer, WIRE_AGAIN, "");
        return;
    }
    peer->rank = rank;
    server->places[rank] = (int32_t)(peer - server->peers);
    peer->parked = WIRE_JOIN;
    peer->deadline = deadline;
    if (++server->n_joined < server->config.world_size) return;
    server->complete = 1;
    end_meeting(server, FSDP_OK, "");
}

/* ---- Requests ----------------------------------------------------------------------------------------- */

static int same_key(const char *mine, const unsigned char *theirs, size_t bytes)
{
    /* Takes as long for a near miss as for a far one. */
    unsigned different = strlen(mine) != bytes;
    for (size_t i = 0; i < bytes; i++) different |= (unsigned)(unsigned char)mine[i % (strlen(mine) + 1)] ^ theirs[i];
    return !different;
}

static void handle_hello(struct store_server *server, struct peer *peer)
{
    if (same_key(server->config.job_key, peer->body, peer->request.key_bytes)) {
        peer->greeted = 1;
        peer_reply(server, peer, FSDP_OK, 0, NULL, 0);
        return;
    }
    char text[STORE_TEXT_MAX];
    snprintf(text, sizeof text,
             "tcp store %s belongs to a job with another job key: give this job a port of its own, or the "
             "same job key (FSDP_JOB_KEY) to all of its ranks",
             server->name);
    peer->closing = 1;
    peer_tell(server, peer, FSDP_ERR_RENDEZVOUS, text);
}

/* The reply, if the key is there: 1. */
static int answer_key(struct store_server *server, struct peer *peer)
{
    const void *value;
    size_t bytes;
    if (!store_table_get(&server->table, peer->body, peer->request.key_bytes, &value, &bytes)) return 0;
    if (peer->request.op == WIRE_WAIT) bytes = 0;
    peer_reply(server, peer, FSDP_OK, 0, value, bytes);
    return 1;
}

static void wake_waiters(struct store_server *server, const void *key, size_t key_bytes)
{
    for (int i = 0; i < server->n_peers; i++) {
        struct peer *peer = &server->peers[i];
        if (atomic_load(&peer->fd) < 0 || (peer->parked != WIRE_GET && peer->parked != WIRE_WAIT)) continue;
        if (peer->request.key_bytes == key_bytes && memcmp(peer->body, key, key_bytes) == 0) answer_key(server, peer);
    }
}

/* A SET or ADD, whose key the waiters are told of before the request is freed. */
static void handle_change(struct store_server *server, struct peer *peer)
{
    const struct wire_request *request = &peer->request;
    const unsigned char *key = peer->body;
    int64_t sum = 0;
    fsdp_status status =
        request->op == WIRE_SET
            ? store_table_set(&server->table, key, request->key_bytes, key + request->key_bytes, request->value_bytes)
            : store_table_add(&server->table, key, request->key_bytes, request->arg, &sum);
    if (status != FSDP_OK) {
        peer_tell(server, peer, status, err_message());
        return;
    }
    wake_waiters(server, key, request->key_bytes);
    peer_reply(server, peer, FSDP_OK, sum, NULL, 0);
}

static void handle(struct store_server *server, struct peer *peer)
{
    int64_t timeout = peer->request.timeout_ms > 0 ? peer->request.timeout_ms : 0;
    int64_t deadline = store_deadline(timeout);
    switch (peer->request.op) {
    case WIRE_HELLO:
        handle_hello(server, peer);
        return;
    case WIRE_JOIN:
        handle_join(server, peer, deadline);
        return;
    case WIRE_SET:
    case WIRE_ADD:
        handle_change(server, peer);
        return;
    case WIRE_GET:
    case WIRE_WAIT:
        if (answer_key(server, peer)) return;
        peer->parked = peer->request.op;
        peer->deadline = deadline;
        return;
    default:
        peer_close(server, peer);
        return;
    }
}

/* The header is in: may its body follow? Makes room for it. */
static int accept_header(struct store_server *server, struct peer *peer)
{
    struct wire_request *request = &peer->request;
    wire_swap_request(request);
    if (request->magic != WIRE_MAGIC || request->zero != 0) return 0;
    if (request->version != WIRE_VERSION) {
        char text[STORE_TEXT_MAX];
        snprintf(text, sizeof text,
                 "tcp store %s is served by another version of libfsdp (protocol %d, this rank has %u): use "
                 "one version in a job",
                 server->name, WIRE_VERSION, (unsigned)request->version);
        /* Closing with bytes unread would reset the connection and lose the reply: take what a HELLO may
         * have. */
        char rest[STORE_KEY_MAX + 1];
        while (recv(atomic_load(&peer->fd), rest, sizeof rest, 0) < 0 && errno == EINTR) {
        }
        peer->closing = 1;
        peer_tell(server, peer, FSDP_ERR_RENDEZVOUS, text);
        return 1;
    }
    int op = request->op;
    if (op < WIRE_HELLO || op > WIRE_ADD || (op == WIRE_HELLO) == peer->greeted) return 0;
    if (request->value_bytes > (op == WIRE_SET ? STORE_VALUE_MAX : 0)) return 0;
    if ((op >= WIRE_SET && request->key_bytes == 0) || (op == WIRE_JOIN && request->key_bytes != 0)) return 0;
    size_t bytes = request->key_bytes + request->value_bytes;
    if (bytes == 0) return 1;
    peer->body = mem_alloc(bytes);
    return peer->body != NULL;
}

/* 1: the part is whole; 0: more must come; -1: the connection is over. */
static int receive(struct peer *peer, void *buffer, size_t bytes, size_t *used)
{
    while (*used < bytes) {
        ssize_t n = recv(atomic_load(&peer->fd), (char *)buffer + *used, bytes - *used, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        if (n <= 0) return -1;
        *used += (size_t)n;
    }
    return 1;
}

static void peer_read(struct store_server *server, struct peer *peer)
{
    if (peer->head_used < sizeof peer->request) {
        int got = receive(peer, &peer->request, sizeof peer->request, &peer->head_used);
        if (got < 0 || (got > 0 && !accept_header(server, peer))) peer_close(server, peer);
        if (got <= 0 || atomic_load(&peer->fd) < 0 || peer->reply || peer->head_used == 0) return;
    }
    size_t bytes = peer->request.key_bytes + peer->request.value_bytes;
    int got = receive(peer, peer->body, bytes, &peer->body_used);
    if (got < 0) peer_close(server, peer);
    if (got > 0) handle(server, peer);
}

/* ---- The thread --------------------------------------------------------------------------------------- */

/* The lowest free place, if need be that of the connection that has gone longest without a HELLO. Lowest, since poll
 * refuses more entries than the process may have descriptors, be they in use or not: see prepare. */
static struct peer *find_place(struct store_server *server)
{
    struct peer *oldest = NULL;
    for (int i = 0; i < server->n_peers; i++) {
        struct peer *peer = &server->peers[i];
        if (atomic_load(&peer->fd) < 0) return peer;
        if (!peer->greeted && (!oldest || peer->deadline < oldest->deadline)) oldest = peer;
    }
    if (oldest) peer_close(server, oldest);
    return oldest;
}

static void accept_peers(struct store_server *server)
{
    for (int i = 0; i < ACCEPTS_PER_STEP; i++) {
        int fd = accept4(atomic_load(&server->listener), NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
                server->accept_after = store_now_ms() + ACCEPT_PAUSE_MS;
            return;
        }
        struct peer *peer = find_place(server);
        if (!peer) {
            close(fd);
            continue;
        }
        peer->greeted = peer->closing = 0;
        peer->rank = NOBODY;
        peer->deadline = store_now_ms() + HELLO_MS;
        atomic_store(&peer->fd, fd);
    }
}

static void expire(struct store_server *server, int64_t now)
{
    for (int i = 0; i < server->n_peers; i++) {
        struct peer *peer = &server->peers[i];
        if (atomic_load(&peer->fd) < 0 || now < peer->deadline) continue;
        if (peer->parked == WIRE_JOIN) {
            char text[STORE_TEXT_MAX];
            int32_t first = describe_missing(server, text, sizeof text);
            server->places[peer->rank] = GAVE_UP;
            server->n_joined--;
            peer->rank = NOBODY;
            peer_reply(server, peer, FSDP_ERR_TIMEOUT, first, text, strlen(text));
        } else if (peer->parked) {
            peer_reply(server, peer, FSDP_ERR_TIMEOUT, 0, NULL, 0);
        } else if (!peer->greeted) {
            peer_close(server, peer);
        }
    }
}

/* Fills the poll array up to the last place in use; how long to poll. */
static int prepare(struct store_server *server)
{
    int64_t now = store_now_ms(), next = now + 60000;
    server->polls[0] = (struct pollfd){.fd = atomic_load(&server->wake), .events = POLLIN};
    int listening = now >= server->accept_after;
    server->polls[1] = (struct pollfd){.fd = listening ? atomic_load(&server->listener) : -1, .events = POLLIN};
    if (!listening && server->accept_after < next) next = server->accept_after;
    server->n_polled = 0;
    for (int i = 0; i < server->n_peers; i++) {
        const struct peer *peer = &server->peers[i];
        int fd = atomic_load(&peer->fd);
        if (fd >= 0) server->n_polled = i + 1;
        short events = peer->reply ? POLLOUT : peer->parked ? POLLRDHUP : POLLIN;
        server->polls[2 + i] = (struct pollfd){.fd = fd, .events = events};
        if (fd >= 0 && (peer->parked || !peer->greeted) && peer->deadline < next) next = peer->deadline;
    }
    return next > now ? (int)(next - now) : 0;
}

static void step(struct store_server *server)
{
    for (int i = 0; i < server->n_polled; i++) {
        struct peer *peer = &server->peers[i];
        short happened = server->polls[2 + i].revents;
        /* A step may have closed or answered a peer whose events were seen before. */
        if (!happened || atomic_load(&peer->fd) != server->polls[2 + i].fd) continue;
        if (peer->reply)
            peer_send(server, peer);
        else if (peer->parked && (happened & (POLLRDHUP | POLLHUP | POLLERR)))
            peer_close(server, peer);
        else if (!peer->parked && (server->polls[2 + i].events & POLLIN))
            peer_read(server, peer);
    }
    if (server->polls[1].revents) accept_peers(server);
    expire(server, store_now_ms());
}

static void *serve(void *arg)
{
    struct store_server *server = arg;
    while (!atomic_load(&server->stop)) {
        int wait_ms = prepare(server);
        atomic_store(&server->in_step, 0);
        int n = poll(server->polls, (nfds_t)server->n_polled + 2, wait_ms);
        atomic_store(&server->in_step, 1);
        if (n >= 0)
            step(server);
        else if (errno != EINTR)
            store_sleep_ms(10); /* out of kernel memory: it may pass */
    }
    char text[STORE_TEXT_MAX];
    describe_missing(server, text, sizeof text);
    if (!server->complete) end_meeting(server, FSDP_ERR_TIMEOUT, text);
    return NULL;
}

/* ---- Life --------------------------------------------------------------------------------------------- */

static void close_if_open(atomic_int *fd)
{
    int was = atomic_exchange(fd, -1);
    if (was >= 0) close(was);
}

static void server_free(struct store_server *server)
{
    for (int i = 0; server->peers && i < server->n_peers; i++) {
        mem_free(server->peers[i].body);
        mem_free(server->peers[i].reply);
    }
    store_table_free(&server->table);
    mem_free(server->polls);
    mem_free(server->peers);
    mem_free(server->places);
    mem_free(server);
}

static fsdp_status server_new(const struct store_config *config, struct store_server **out)
{
    struct store_server *server = mem_alloc(sizeof *server);
    if (!server) return mem_none("a tcp store's server", sizeof *server);
    server->config = *config;
    atomic_init(&server->listener, -1);
    atomic_init(&server->wake, -1);
    server->n_peers = config->world_size * 4 + 16;
    size_t n = (size_t)server->n_peers;
    server->places = mem_array((size_t)config->world_size, sizeof *server->places);
    server->peers = mem_array(n, sizeof *server->peers);
    server->polls = mem_array(n + 2, sizeof *server->polls);
    if (!server->places || !server->peers || !server->polls) {
        server->n_peers = 0;
        server_free(server);
        return mem_none("a tcp store's connections", n * sizeof *server->peers);
    }
    for (int32_t rank = 0; rank < config->world_size; rank++) server->places[rank] = NOBODY;
    for (int i = 0; i < server->n_peers; i++) {
        atomic_init(&server->peers[i].fd, -1);
        server->peers[i].rank = NOBODY;
    }
    *out = server;
    return FSDP_OK;
}

/* The thread takes no signals: the host's handlers stay on the host's threads. */
static int start_thread(struct store_server *server)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int why = pthread_create(&server->thread, NULL, serve, server);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (why == 0) pthread_setname_np(server->thread, "fsdp-store");
    return why;
}

fsdp_status store_server_start(const struct store_endpoint *at, const struct store_config *config,
                               struct store_server **out, int *in_use)
{
    struct store_server *server = NULL;
    *in_use = 0;
    TRY(server_new(config, &server));
    store_net_name(at, server->name, sizeof server->name);

    int fd;
    fsdp_status status = store_net_listen(at, &fd, in_use);
    if (status != FSDP_OK) goto fail;
    atomic_store(&server->listener, fd);
    fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) {
        status = err_sys(FSDP_ERR_SYSTEM, errno, "a tcp store's server can't be made");
        goto fail;
    }
    atomic_store(&server->wake, fd);
    int why = start_thread(server);
    if (why != 0) {
        status = err_sys(FSDP_ERR_SYSTEM, why, "a tcp store's thread can't be started");
        goto fail;
    }
    *out = server;
    return FSDP_OK;

fail:
    close_if_open(&server->wake);
    close_if_open(&server->listener);
    server_free(server);
    return status;
}

void store_server_stop(struct store_server *server)
{
    uint64_t one = 1;
    atomic_store(&server->stop, 1);
    while (write(atomic_load(&server->wake), &one, sizeof one) < 0 && errno == EINTR) {
    }
    pthread_join(server->thread, NULL);

    for (int i = 0; i < server->n_peers; i++) peer_close(server, &server->peers[i]);
    shutdown(atomic_load(&server->listener), SHUT_RDWR); /* frees the port though a forked child may have a copy */
    close_if_open(&server->listener);
    close_if_open(&server->wake);
    server_free(server);
}

void store_server_abandon(struct store_server *server)
{
    close_if_open(&server->listener);
    close_if_open(&server->wake);
    for (int i = 0; i < server->n_peers; i++) close_if_open(&server->peers[i].fd);
    if (!atomic_load(&server->in_step)) server_free(server);
}
