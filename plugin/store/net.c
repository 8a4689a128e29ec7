/* Sockets of the tcp store: see net.h. No state; names are resolved anew for each attempt, since in a cluster
 * the name of rank 0's host may come up after its peers. "localhost" is 127.0.0.1 without asking a resolver,
 * so that it is loopback on any machine and the same for all ranks. */
#include "store/net.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BACKLOG 1024

void store_net_name(const struct store_endpoint *at, char *text, size_t size)
{
    snprintf(text, size, strchr(at->host, ':') ? "[%s]:%u" : "%s:%u", at->host, (unsigned)at->port);
}

static int resolve(const struct store_endpoint *at, int flags, struct addrinfo **list)
{
    const char *host = strcmp(at->host, "localhost") == 0 ? "127.0.0.1" : at->host;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    char port[8];
    snprintf(port, sizeof port, "%u", (unsigned)at->port);
    return getaddrinfo(host, port, &hints, list);
}

static fsdp_status err_resolve(const char *name, int code)
{
    return err(FSDP_ERR_RENDEZVOUS,
               "the host of tcp store %s can't be resolved: %s; give a name or address that all ranks can resolve",
               name, gai_strerror(code));
}

static int open_socket(const struct addrinfo *a)
{
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1;
    if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

fsdp_status store_net_listen(const struct store_endpoint *at, int *out, int *in_use)
{
    char name[300];
    store_net_name(at, name, sizeof name);
    struct addrinfo *list = NULL;
    *in_use = 0;
    int code = resolve(at, AI_PASSIVE, &list);
    if (code != 0) return err_resolve(name, code);

    int fd = -1, why = 0;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int on = 1;
        fd = open_socket(a);
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
            break;
        if (why != EADDRINUSE) why = errno;
        if (fd >= 0) close(fd);
        fd = -1;
    }
    freeaddrinfo(list);
    if (fd >= 0) {
        *out = fd;
        return FSDP_OK;
    }
    if (why == EADDRINUSE) {
        *in_use = 1;
        return err(FSDP_ERR_RENDEZVOUS,
                   "rank 0 can't listen at tcp store %s because the port is in use: another job or service has it; "
                   "choose a free port (MASTER_PORT, FSDP_MASTER_PORT or the URL), or end what uses it",
                   name);
    }
    if (why == EADDRNOTAVAIL)
        return err(FSDP_ERR_RENDEZVOUS,
                   "rank 0 can't listen at tcp store %s because that is not an address of this machine: give "
                   "rank 0's host",
                   name);
    return err_sys(FSDP_ERR_SYSTEM, why, "rank 0 can't listen at tcp store %s", name);
}

/* 1 ready, 0 not before the deadline. */
static int await(int fd, short events, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - store_now_ms();
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, left <= 0 ? 0 : left > 60000 ? 60000 : (int)left);
        if (n > 0) return 1;
        if (n == 0 && left <= 0) return 0;
        if (n < 0 && errno != EINTR) return 1; /* let the call that follows say what is wrong */
    }
}

/* 0, or why not. */
static int connect_one(const struct addrinfo *a, int64_t deadline, int *out)
{
    int fd = open_socket(a);
    if (fd < 0) return errno;
    int why = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (why == EINPROGRESS || why == EINTR) {
        socklen_t size = sizeof why;
        if (!await(fd, POLLOUT, deadline))
            why = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size) != 0)
            why = errno;
    }
    /* A port of the ephemeral range with nobody on it can connect to itself. */
    struct sockaddr_storage here, there;
    socklen_t here_size = sizeof here, there_size = sizeof there;
    memset(&here, 0, sizeof here);
    memset(&there, 0, sizeof there);
    if (why == 0 && getsockname(fd, (struct sockaddr *)&here, &here_size) == 0 &&
        getpeername(fd, (struct sockaddr *)&there, &there_size) == 0 && memcmp(&here, &there, sizeof here) == 0)
        why = ECONNREFUSED;
    if (why == 0)
        *out = fd;
    else
        close(fd);
    return why;
}

fsdp_status store_net_connect(const struct store_endpoint *at, int64_t deadline, int *fd, int *retry)
{
    char name[300];
    store_net_name(at, name, sizeof name);
    struct addrinfo *list = NULL;
    int code = resolve(at, 0, &list);
    *retry = code == EAI_AGAIN || code == EAI_NONAME;
    if (code != 0) return err_resolve(name, code);

    int why = 0;
    for (struct addrinfo *a = list; a; a = a->ai_next) {
        why = connect_one(a, deadline, fd);
        if (why == 0) break;
    }
    freeaddrinfo(list);
    if (why == 0) return FSDP_OK;
    *retry = why == ECONNREFUSED || why == ETIMEDOUT || why == EHOSTUNREACH || why == ENETUNREACH ||
             why == ECONNRESET || why == EADDRNOTAVAIL || why == ECONNABORTED;
    return err_sys(*retry ? FSDP_ERR_TIMEOUT : FSDP_ERR_SYSTEM, why, "tcp store %s can't be reached", name);
}

int store_net_send(int fd, struct iovec *parts, int n_parts, int64_t deadline)
{
    while (n_parts > 0) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n_parts};
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!await(fd, POLLOUT, deadline)) return -1;
            continue;
        }
        if (n < 0) return 0;
        while (n_parts > 0 && (size_t)n >= parts->iov_len) {
            n -= (ssize_t)parts->iov_len;
            parts++;
            n_parts--;
        }
        if (n_parts > 0) {
            parts->iov_base = (char *)parts->iov_base + n;
            parts->iov_len -= (size_t)n;
        }
    }
    return 1;
}

int store_net_recv(int fd, void *buffer, size_t bytes, int64_t deadline)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = recv(fd, (char *)buffer + done, bytes - done, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!await(fd, POLLIN, deadline)) return -1;
            continue;
        }
        if (n <= 0) return 0;
        done += (size_t)n;
    }
    return 1;
}

void store_net_close(int fd)
{
    shutdown(fd, SHUT_RDWR);
    close(fd);
}
