/* What a tcp store's clients and server say to each other: a fixed header in little-endian order, then a key
 * and a value whose lengths the header gives and the receiver bounds. One request at a time on a connection,
 * each with one reply.
 *
 * A connection's first request is HELLO; anything else there, and anything malformed, ends the connection. */
#ifndef FSDP_STORE_WIRE_H
#define FSDP_STORE_WIRE_H

#include <endian.h>

#include "store/store_backend.h"

#define WIRE_MAGIC 0x50445346u /* "FSDP" */
#define WIRE_VERSION 1

enum wire_op {
    WIRE_HELLO = 1, /* key: the job key */
    WIRE_JOIN,      /* arg: rank + (world_size << 32). Answered when all ranks have joined, or it fails */
    WIRE_SET,
    WIRE_GET,  /* answered when the key is there, or timeout_ms has passed */
    WIRE_WAIT, /* the same without the value */
    WIRE_ADD   /* arg: the amount; answered with the sum */
};

struct wire_request {
    uint32_t magic;
    uint8_t op, key_bytes;
    uint16_t version;
    uint32_t value_bytes, zero;
    int64_t arg, timeout_ms;
};

#define WIRE_AGAIN (-1) /* JOIN: the ranks here met before and are not all gone; connect anew later */

struct wire_reply {
    uint32_t magic;
    int32_t status; /* fsdp_status; when not OK the value is a sentence. Or WIRE_AGAIN */
    uint32_t value_bytes, zero;
    int64_t arg;
};

_Static_assert(sizeof(struct wire_request) == 32, "no padding");
_Static_assert(sizeof(struct wire_reply) == 24, "no padding");

/* Between host and wire order; its own inverse. */
static inline void wire_swap_request(struct wire_request *r)
{
    r->magic = htole32(r->magic);
    r->version = htole16(r->version);
    r->value_bytes = htole32(r->value_bytes);
    r->arg = (int64_t)htole64((uint64_t)r->arg);
    r->timeout_ms = (int64_t)htole64((uint64_t)r->timeout_ms);
}

static inline void wire_swap_reply(struct wire_reply *r)
{
    r->magic = htole32(r->magic);
    r->status = (int32_t)htole32((uint32_t)r->status);
    r->value_bytes = htole32(r->value_bytes);
    r->arg = (int64_t)htole64((uint64_t)r->arg);
}

#endif
