/* Rank 0's server of a tcp store. */
#ifndef FSDP_STORE_TCP_SERVER_H
#define FSDP_STORE_TCP_SERVER_H

#include "store/store_backend.h"

struct store_server;

/* Listen and serve on a thread of its own. *in_use: another process has the address. */
fsdp_status store_server_start(const struct store_endpoint *at, const struct store_config *config,
                               struct store_server **out, int *in_use);
/* Tell ranks that still wait to meet, close, and join the thread. */
void store_server_stop(struct store_server *server);
/* In a forked child: see abandon in store_backend.h. */
void store_server_abandon(struct store_server *server);

#endif
