/* A tcp store as every rank sees it: a client of rank 0's server (tcp_server.c). Rank 0 starts the server,
 * and is a client like the others, through loopback.
 *
 * A rank has a few connections, made when they are needed: a request has one to itself until its reply is
 * there, so threads of a rank that wait for keys do not hold up one that sets them. The first is kept for
 * life, since it stands for this rank at the server. `lock` guards which connections are busy, and is not
 * held while one is used.
 *
 * Every wait is bounded twice: the server answers when the time is up, and the client stops listening
 * MARGIN_MS later. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "store/net.h"
#include "store/tcp_server.h"
#include "store/wire.h"

#define MAX_CONNECTIONS 4
#define MARGIN_MS 500
#define HELLO_REPLY_MS 5000 /* a server that is there answers sooner */
#define NAME_MS 10000       /* how long a host name may stay unknown */
#define PROBE_MS 1000       /* who has rank 0's port? */
#define PAUSE_MS 100        /* between attempts, at most */

struct connection {
    atomic_int fd; /* -1: none */
    int busy;      /* under lock */
};

struct tcp {
    struct store_backend base;
    struct store_config config;
    struct store_endpoint endpoint;
    char name[300];
    struct store_server *server; /* rank 0 */
    pthread_mutex_t lock;
    pthread_cond_t freed;
    struct connection connections[MAX_CONNECTIONS];
};

struct answer {
    int32_t status;
    int64_t arg;
    size_t bytes;              /* of the value */
    char text[STORE_TEXT_MAX]; /* why, when status is not OK */
};

/* ---- One request on one connection -------------------------------------------------------------------- */

enum talk { TALK_DONE, TALK_CLOSED, TALK_LATE, TALK_GARBLED };

static enum talk receive_value(int fd, struct answer *answer, void *buffer, size_t capacity, int64_t deadline)
{
    char discard[1024];
    int fits = answer->status == FSDP_OK ? answer->bytes <= capacity : answer->bytes < sizeof answer->text;
    char *to = answer->status == FSDP_OK ? buffer : answer->text;
    int rc = 1;
    if (fits) {
        if (answer->bytes) rc = store_net_recv(fd, to, answer->bytes, deadline);
    } else {
        for (size_t left = answer->bytes, n; left && rc == 1; left -= n) {
            n = left < sizeof discard ? left : sizeof discard;
            rc = store_net_recv(fd, discard, n, deadline);
        }
    }
    for (char *c = answer->text; *c; c++) /* it goes to a terminal */
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    return rc == 1 ? TALK_DONE : rc == 0 ? TALK_CLOSED : TALK_LATE;
}

static enum talk talk(int fd, struct wire_request request, const char *key, const void *value, void *buffer,
                      size_t capacity, int64_t deadline, struct answer *answer)
{
    size_t key_bytes = key ? strlen(key) : 0, value_bytes = request.value_bytes;
    request.magic = WIRE_MAGIC;
    request.version = WIRE_VERSION;
    request.key_bytes = (uint8_t)key_bytes;
    wire_swap_request(&request);
    struct iovec parts[] = {
        {&request, sizeof request}, {(void *)(uintptr_t)key, key_bytes}, {(void *)(uintptr_t)value, value_bytes}};
    int rc = store_net_send(fd, parts, 3, deadline);
    struct wire_reply reply;
    if (rc == 1) rc = store_net_recv(fd, &reply, sizeof reply, deadline);
    if (rc != 1) return rc == 0 ? TALK_CLOSED : TALK_LATE;

    wire_swap_reply(&reply);
    if (reply.magic != WIRE_MAGIC || reply.zero != 0 || reply.value_bytes > STORE_VALUE_MAX ||
        reply.status < WIRE_AGAIN || reply.status > FSDP_ERR_INTERNAL)
        return TALK_GARBLED;
    memset(answer, 0, sizeof *answer);
    answer->status = reply.status;
    answer->arg = reply.arg;
    answer->bytes = reply.value_bytes;
    return receive_value(fd, answer, buffer, capacity, deadline);
}

static fsdp_status err_lost(const struct tcp *self)
{
    err(FSDP_ERR_PEER_LOST,
        "tcp store %s is closed: rank 0 has ended or released its store; keep rank 0's store until all ranks "
        "are done",
        self->name);
    err_operation(FSDP_OP_NONE, 0, 0, -1);
    return FSDP_ERR_PEER_LOST;
}

static fsdp_status err_late(const struct tcp *self, int64_t timeout_ms)
{
    return err(FSDP_ERR_TIMEOUT,
               "tcp store %s did not answer within %" PRId64 " ms: is rank 0 stopped, or its host down?", self->name,
               timeout_ms);
}

static fsdp_status err_garbled(const struct tcp *self)
{
    return err(FSDP_ERR_RENDEZVOUS,
               "what answers at %s is not a store of libfsdp: choose a port that no other service has "
               "(MASTER_PORT, FSDP_MASTER_PORT or the URL)",
               self->name);
}

/* ---- Connections -------------------------------------------------------------------------------------- */

enum link { LINK_OPEN, LINK_RETRY, LINK_REFUSED, LINK_FAILED };

/* Connect and say hello. RETRY: not now; REFUSED: a store's server said no; FAILED: no store, or no socket.
 * All but OPEN leave a record. */
static enum link open_link(const struct tcp *self, int64_t deadline, int *out)
{
    int fd, retry;
    fsdp_status status = store_net_connect(&self->endpoint, deadline, &fd, &retry);
    if (status != FSDP_OK) return retry ? LINK_RETRY : LINK_FAILED;

    struct wire_request hello = {.op = WIRE_HELLO};
    struct answer answer;
    int64_t patience = store_now_ms() + HELLO_REPLY_MS;
    enum link link = LINK_RETRY;
    switch (talk(fd, hello, self->config.job_key, NULL, NULL, 0, patience < deadline ? patience : deadline, &answer)) {
    case TALK_DONE:
        if (answer.status == FSDP_OK) {
            *out = fd;
            return LINK_OPEN;
        }
        err(answer.status < 0 ? FSDP_ERR_RENDEZVOUS : answer.status, "%s", answer.text);
        link = LINK_REFUSED;
        break;
    case TALK_GARBLED:
        err_garbled(self);
        link = LINK_FAILED;
        break;
    case TALK_CLOSED:
    case TALK_LATE:
        err(FSDP_ERR_TIMEOUT, "what listens at %s does not answer as a store of libfsdp does", self->name);
        break;
    }
    store_net_close(fd);
    return link;
}

static struct connection *find_connection(struct tcp *self, int open)
{
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        struct connection *c = &self->connections[i];
        if (!c->busy && (atomic_load(&c->fd) >= 0) == open) return c;
    }
    return NULL;
}

static void put_connection(struct tcp *self, struct connection *connection, int healthy)
{
    if (!healthy) {
        int fd = atomic_exchange(&connection->fd, -1);
        if (fd >= 0) store_net_close(fd);
    }
    pthread_mutex_lock(&self->lock);
    connection->busy = 0;
    pthread_cond_signal(&self->freed);
    pthread_mutex_unlock(&self->lock);
}

/* One to use alone: an idle one, else a new one, else whichever is given back first. */
static fsdp_status take_connection(struct tcp *self, int64_t deadline, struct connection **out)
{
    struct timespec until = {.tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000};
    struct connection *c;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        c = find_connection(self, 1);
        if (!c) c = find_connection(self, 0);
        if (c || store_now_ms() >= deadline) break;
        pthread_cond_timedwait(&self->freed, &self->lock, &until);
    }
    if (c) c->busy = 1;
    pthread_mutex_unlock(&self->lock);
    if (!c)
        return err(FSDP_ERR_TIMEOUT, "all %d connections to tcp store %s were waiting for keys until the time was up",
                   MAX_CONNECTIONS, self->name);
    *out = c;
    if (atomic_load(&c->fd) >= 0) return FSDP_OK;

    int fd;
    enum link link = open_link(self, deadline, &fd);
    if (link == LINK_OPEN) {
        atomic_store(&c->fd, fd);
        return FSDP_OK;
    }
    put_connection(self, c, 0);
    if (link == LINK_RETRY) return err_lost(self);
    fsdp_error_info info;
    err_save(&info);
    return info.status;
}

/* ---- Meeting ------------------------------------------------------------------------------------------ */

static enum talk send_join(const struct tcp *self, int fd, int64_t deadline, struct answer *answer)
{
    uint64_t who = (uint64_t)(uint32_t)self->config.world_size << 32 | (uint32_t)self->config.rank;
    int64_t left = deadline - store_now_ms();
    struct wire_request request = {.op = WIRE_JOIN, .arg = (int64_t)who, .timeout_ms = left > 0 ? left : 0};
    return talk(fd, request, NULL, NULL, NULL, 0, deadline + MARGIN_MS, answer);
}

static fsdp_status err_join(const struct answer *answer)
{
    err(answer->status, "%s", answer->text);
    if (answer->status == FSDP_ERR_TIMEOUT) err_operation(FSDP_OP_NONE, 0, (int32_t)answer->arg, -1);
    return answer->status;
}

/* One attempt. *again: it may go better later, and a record says what was wrong this time. */
static fsdp_status try_meet(struct tcp *self, int64_t deadline, int *again)
{
    int fd;
    enum link link = open_link(self, deadline, &fd);
    *again = link == LINK_RETRY;
    if (link != LINK_OPEN) {
        fsdp_error_info info;
        err_save(&info);
        return info.status;
    }
    struct answer answer;
    enum talk result = send_join(self, fd, deadline, &answer);
    if (result == TALK_DONE && answer.status == FSDP_OK) {
        atomic_store(&self->connections[0].fd, fd);
        return FSDP_OK;
    }
    store_net_close(fd);
    switch (result) {
    case TALK_LATE:
        return err_late(self, self->config.timeout_ms);
    case TALK_GARBLED:
        return err_garbled(self);
    case TALK_CLOSED:
        *again = 1;
        return err_lost(self);
    case TALK_DONE:
        break;
    }
    if (answer.status != WIRE_AGAIN) return err_join(&answer);
    *again = 1;
    return err(FSDP_ERR_TIMEOUT,
               "the ranks at tcp store %s have met before, and rank 0 has not released that store: release "
               "it, or start this job at another port",
               self->name);
}

static fsdp_status meet(struct tcp *self, int64_t deadline)
{
    int64_t start = store_now_ms();
    for (int64_t pause = 2;; pause = pause * 2 < PAUSE_MS ? pause * 2 : PAUSE_MS) {
        int again;
        fsdp_status status = try_meet(self, deadline, &again);
        if (status == FSDP_OK || !again) return status;
        int64_t now = store_now_ms();
        if (status == FSDP_ERR_RENDEZVOUS && (now - start >= NAME_MS || now >= deadline))
            return status; /* no such host */
        if (now >= deadline) break;
        store_sleep_ms(pause < deadline - now ? pause : deadline - now);
    }
    char last[sizeof((fsdp_error_info *)0)->message];
    snprintf(last, sizeof last, "%s", err_message());
    err(FSDP_ERR_TIMEOUT,
        "rank %" PRId32 " did not find rank 0 at tcp store %s within %" PRId64
        " ms: start rank 0 there, or correct the address (the last attempt: %.400s)",
        self->config.rank, self->name, self->config.timeout_ms, last);
    err_operation(FSDP_OP_NONE, 0, 0, -1);
    return FSDP_ERR_TIMEOUT;
}

/* Rank 0's port is taken. If it is by a rank 0 of this same job, both are told so; else the record stays as
 * it is. */
static fsdp_status ask_who_has_the_port(const struct tcp *self)
{
    fsdp_error_info info;
    err_save(&info);
    int64_t deadline = store_now_ms() + PROBE_MS;
    int fd;
    enum link link = open_link(self, deadline, &fd);
    if (link == LINK_REFUSED) return FSDP_ERR_RENDEZVOUS;
    if (link == LINK_OPEN) {
        struct answer answer;
        enum talk result = send_join(self, fd, deadline, &answer);
        store_net_close(fd);
        if (result == TALK_DONE && answer.status == FSDP_ERR_RENDEZVOUS) return err_join(&answer);
    }
    return err_restore(&info);
}

/* ---- Keys --------------------------------------------------------------------------------------------- */

static fsdp_status call(struct tcp *self, struct wire_request request, const char *key, const void *value, void *buffer,
                        size_t capacity, int64_t timeout_ms, struct answer *answer)
{
    int64_t deadline = store_deadline(timeout_ms);
    struct connection *connection;
    TRY(take_connection(self, deadline, &connection));
    int64_t left = deadline - store_now_ms();
    request.timeout_ms = left > 0 ? left : 0;
    enum talk result =
        talk(atomic_load(&connection->fd), request, key, value, buffer, capacity, deadline + MARGIN_MS, answer);
    put_connection(self, connection, result == TALK_DONE);
    switch (result) {
    case TALK_CLOSED:
        return err_lost(self);
    case TALK_LATE:
        return err_late(self, timeout_ms);
    case TALK_GARBLED:
        return err_garbled(self);
    case TALK_DONE:
        break;
    }
    if (answer->status == FSDP_OK) return FSDP_OK;
    if (answer->status == FSDP_ERR_TIMEOUT) return store_err_key_timeout(key, timeout_ms);
    return err(answer->status < 0 ? FSDP_ERR_INTERNAL : answer->status, "%s", answer->text);
}

static fsdp_status tcp_set(struct store_backend *base, const char *key, const void *value, size_t bytes)
{
    struct wire_request request = {.op = WIRE_SET, .value_bytes = (uint32_t)bytes};
    struct answer answer;
    struct tcp *self = (struct tcp *)base;
    return call(self, request, key, value, NULL, 0, self->config.timeout_ms, &answer);
}

static fsdp_status tcp_get(struct store_backend *base, const char *key, void *buffer, size_t capacity, size_t *bytes,
                           int64_t timeout_ms)
{
    struct wire_request request = {.op = WIRE_GET};
    struct answer answer;
    TRY(call((struct tcp *)base, request, key, NULL, buffer, capacity, timeout_ms, &answer));
    *bytes = answer.bytes;
    return answer.bytes <= capacity ? FSDP_OK : store_err_too_large(key, answer.bytes, capacity);
}

static fsdp_status tcp_add(struct store_backend *base, const char *key, int64_t amount, int64_t *result)
{
    struct wire_request request = {.op = WIRE_ADD, .arg = amount};
    struct answer answer;
    struct tcp *self = (struct tcp *)base;
    TRY(call(self, request, key, NULL, NULL, 0, self->config.timeout_ms, &answer));
    *result = answer.arg;
    return FSDP_OK;
}

static fsdp_status tcp_wait(struct store_backend *base, const char *key)
{
    struct wire_request request = {.op = WIRE_WAIT};
    struct answer answer;
    struct tcp *self = (struct tcp *)base;
    return call(self, request, key, NULL, NULL, 0, self->config.timeout_ms, &answer);
}

/* ---- Life --------------------------------------------------------------------------------------------- */

/* The server stops first, so that its last words count rank 0 as present. */
static void tcp_close(struct store_backend *base)
{
    struct tcp *self = (struct tcp *)base;
    if (self->server) store_server_stop(self->server);
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        int fd = atomic_exchange(&self->connections[i].fd, -1);
        if (fd >= 0) store_net_close(fd);
    }
    pthread_cond_destroy(&self->freed);
    pthread_mutex_destroy(&self->lock);
    mem_free(self);
}

/* close, not shutdown: the connections are the parent's. The struct is whole at any time, so `torn` does not
 * matter. */
static void tcp_abandon(struct store_backend *base, int torn)
{
    struct tcp *self = (struct tcp *)base;
    (void)torn;
    if (self->server) store_server_abandon(self->server);
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        int fd = atomic_load(&self->connections[i].fd);
        if (fd >= 0) close(fd);
    }
    mem_free(self);
}

static const struct store_backend_ops tcp_ops = {
    .name = "tcp",
    .set = tcp_set,
    .get = tcp_get,
    .add = tcp_add,
    .wait = tcp_wait,
    .close = tcp_close,
    .abandon = tcp_abandon,
};

static struct tcp *tcp_new(const struct store_endpoint *at, const struct store_config *config)
{
    struct tcp *self = mem_alloc(sizeof *self);
    if (!self) return NULL;
    self->base.ops = &tcp_ops;
    self->config = *config;
    self->endpoint = *at;
    store_net_name(at, self->name, sizeof self->name);
    for (int i = 0; i < MAX_CONNECTIONS; i++) atomic_init(&self->connections[i].fd, -1);
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&self->freed, &attr);
    pthread_condattr_destroy(&attr);
    return self;
}

fsdp_status store_tcp_open(const struct store_endpoint *at, const struct store_config *config,
                           struct store_backend **out)
{
    struct tcp *self = tcp_new(at, config);
    if (!self) return mem_none("a store", sizeof *self);
    int64_t deadline = store_deadline(config->timeout_ms);
    fsdp_status status = FSDP_OK;
    if (config->rank == 0) {
        int in_use;
        status = store_server_start(at, config, &self->server, &in_use);
        if (in_use) status = ask_who_has_the_port(self);
    }
    if (status == FSDP_OK) status = meet(self, deadline);
    if (status == FSDP_OK) {
        *out = &self->base;
        return FSDP_OK;
    }
    fsdp_error_info info;
    err_save(&info);
    tcp_close(&self->base);
    return err_restore(&info);
}
