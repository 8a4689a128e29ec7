/* Sockets of the tcp store. Every descriptor is close-on-exec and non-blocking, every wait has a deadline,
 * and nothing here raises SIGPIPE. */
#ifndef FSDP_STORE_NET_H
#define FSDP_STORE_NET_H

#include <sys/socket.h>
#include <sys/uio.h>

#include "store/store_backend.h"

/* "host:port", or "[address]:port" for IPv6. */
void store_net_name(const struct store_endpoint *at, char *text, size_t size);

/* Listen at `at`. *in_use: it failed because another process has the address. Errors: RENDEZVOUS, SYSTEM. */
fsdp_status store_net_listen(const struct store_endpoint *at, int *fd, int *in_use);

/* One attempt. *retry: it failed in a way that later may not (nobody listens yet). Errors: RENDEZVOUS,
 * TIMEOUT, SYSTEM. */
fsdp_status store_net_connect(const struct store_endpoint *at, int64_t deadline, int *fd, int *retry);

/* All of it: 1; 0: the other side closed or the connection broke; -1: the deadline passed. send changes
 * `parts`. */
int store_net_send(int fd, struct iovec *parts, int n_parts, int64_t deadline);
int store_net_recv(int fd, void *buffer, size_t bytes, int64_t deadline);

/* Make the other side see the end, also when a forked child still has a copy of the descriptor. */
void store_net_close(int fd);

#endif
