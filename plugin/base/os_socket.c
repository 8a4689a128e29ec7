/* Abstract unix sockets that carry descriptors between the ranks of one host: see os.h. They exist while a group is
 * made; nothing of the data path uses them. */
#include "base/os.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 160

static fsdp_status address_make(const char *name, struct sockaddr_un *address, socklen_t *length)
{
    size_t n = strlen(name);
    if (n + 1 > sizeof address->sun_path)
        return err(FSDP_ERR_INTERNAL, "socket name '%s' is longer than %zu bytes", name, sizeof address->sun_path - 1);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name, n); /* the leading zero byte makes it abstract */
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
    return FSDP_OK;
}

fsdp_status os_listen(const char *name, int backlog, int *out)
{
    struct sockaddr_un address;
    socklen_t length = 0;
    TRY(address_make(name, &address, &length));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return err_sys(FSDP_ERR_SYSTEM, errno, "unix socket");
    if (bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, backlog) != 0) {
        int failed = errno;
        close(fd);
        return err_sys(FSDP_ERR_SYSTEM, failed, "can't listen on the abstract unix socket '%s'", name);
    }
    *out = fd;
    return FSDP_OK;
}

/* Wait until fd is ready for `events`. */
static fsdp_status ready(int fd, short events, int64_t deadline, const char *what)
{
    for (;;) {
        int64_t left = deadline - os_now_ns();
        if (left <= 0) return err(FSDP_ERR_TIMEOUT, "timed out waiting to %s", what);
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, (int)(left / 1000000 > 1000 ? 1000 : left / 1000000 + 1));
        if (n > 0) return FSDP_OK;
        if (n < 0 && errno != EINTR) return err_sys(FSDP_ERR_SYSTEM, errno, "poll on a unix socket");
    }
}

fsdp_status os_accept(int listener, int64_t deadline, int *out)
{
    for (;;) {
        TRY(ready(listener, POLLIN, deadline, "accept a rank's connection"));
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) {
            *out = fd;
            return FSDP_OK;
        }
        if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED)
            return err_sys(FSDP_ERR_SYSTEM, errno, "accept on a unix socket");
    }
}

fsdp_status os_connect(const char *name, int64_t deadline, int *out)
{
    struct sockaddr_un address;
    socklen_t length = 0;
    TRY(address_make(name, &address, &length));
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fd < 0) return err_sys(FSDP_ERR_SYSTEM, errno, "unix socket");
        if (connect(fd, (struct sockaddr *)&address, length) == 0) {
            *out = fd;
            return FSDP_OK;
        }
        int failed = errno;
        close(fd);
        /* EAGAIN: the backlog is full. The listener exists before its name is told: refused means that it has gone. */
        if (failed == ECONNREFUSED) return err(FSDP_ERR_PEER_LOST, "the first rank's socket '%s' has gone", name);
        if (failed != EAGAIN && failed != EINTR)
            return err_sys(FSDP_ERR_SYSTEM, failed, "can't connect to the first rank's socket '%s'", name);
        if (os_now_ns() > deadline)
            return err(FSDP_ERR_TIMEOUT, "timed out connecting to the first rank's socket '%s'", name);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
}

fsdp_status os_peer_credentials(int fd, pid_t *pid, uid_t *uid)
{
    struct ucred who;
    socklen_t length = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
        return err_sys(FSDP_ERR_SYSTEM, errno, "SO_PEERCRED");
    *pid = who.pid;
    *uid = who.uid;
    return FSDP_OK;
}

fsdp_status os_send_fds(int fd, const void *data, size_t bytes, const int *fds, int n_fds)
{
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } control;
    if (n_fds > MAX_FDS) return err(FSDP_ERR_INTERNAL, "%d descriptors in one message", n_fds);
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)n_fds);
    }
    ssize_t n;
    do n = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return err_sys(errno == EPIPE || errno == ECONNRESET ? FSDP_ERR_PEER_LOST : FSDP_ERR_SYSTEM, errno,
                       "sending to another rank while making the group");
    return FSDP_OK;
}

fsdp_status os_recv_fds(int fd, void *data, size_t bytes, int *fds, int n_fds, int *got, int64_t deadline)
{
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } control;
    TRY(ready(fd, POLLIN, deadline, "receive from another rank while making the group"));
    struct iovec part = {.iov_base = data, .iov_len = bytes};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return err_sys(errno == ECONNRESET ? FSDP_ERR_PEER_LOST : FSDP_ERR_SYSTEM, errno,
                       "receiving from another rank while making the group");

    int count = 0, all[MAX_FDS];
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        int more = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        if (more > MAX_FDS - count) more = MAX_FDS - count;
        memcpy(all + count, CMSG_DATA(c), sizeof(int) * (size_t)more);
        count += more;
    }
    int fits = (count == n_fds && (size_t)n == bytes) || (got && count == 0 && n > 0);
    if (!fits || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
        for (int i = 0; i < count; i++) close(all[i]);
        if (n == 0) return err(FSDP_ERR_PEER_LOST, "a rank ended while the group was being made");
        if (message.msg_flags & MSG_CTRUNC)
            return err(FSDP_ERR_SYSTEM, "no room for %d more file descriptors: raise `ulimit -n`", n_fds);
        return err(FSDP_ERR_RENDEZVOUS,
                   "unexpected message while making the group (%zd bytes, %d descriptors; wanted %zu and %d): do all "
                   "ranks load "
                   "the same libfsdp?",
                   n, count, bytes, n_fds);
    }
    if (count) memcpy(fds, all, sizeof(int) * (size_t)count);
    if (got) *got = count;
    return FSDP_OK;
}

void os_close(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}
