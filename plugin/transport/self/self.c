/* The transport of a group of one: every transfer is a copy or a reduction of one source, in this process. It is also
 * what keeps the vtable honest: nothing above it asks how many ranks there are. */
#include "transport/transport.h"

#include "base/mem.h"
#include "base/os.h"
#include "tensor/kernel.h"

#include <string.h>

struct self {
    struct transport base;
    struct call_header header;
    char payload[TRANSPORT_PAYLOAD];
    _Atomic uint32_t bell;
};

static fsdp_status self_create(const struct transport_setup *setup, struct transport **out)
{
    if (setup->size != 1)
        return err(FSDP_ERR_UNSUPPORTED, "group '%s': the self transport takes one rank, not %d", setup->name,
                   setup->size);
    struct self *t = mem_alloc(sizeof *t);
    if (!t) return mem_none("a group's transport", sizeof *t);
    t->base.ops = &transport_self;
    t->base.size = 1;
    t->base.process = os_process();
    *out = &t->base;
    return FSDP_OK;
}

static void self_destroy(struct transport *base)
{
    mem_free(base);
}

static fsdp_status self_exchange(struct transport *base, const struct call_header *mine, const void *payload,
                                 size_t bytes, const struct transfer *transfer, struct deadline deadline)
{
    struct self *t = (struct self *)base;
    TRY(transport_status(base));
    t->header = *mine;
    if (bytes) memcpy(t->payload, payload, bytes);
    return FSDP_OK;
}

static const struct call_header *self_header_of(struct transport *base, int rank)
{
    return &((struct self *)base)->header;
}

static const void *self_payload_of(struct transport *base, int rank)
{
    return ((struct self *)base)->payload;
}

static fsdp_status self_move(struct transport *base, const struct transfer *transfer, struct deadline deadline)
{
    for (int32_t i = 0; i < transfer->n_pieces; i++) {
        const struct piece *p = &transfer->pieces[i];
        if (!p->out) continue;
        if (transfer->shape == TRANSFER_REDUCE) {
            const void *source = p->in;
            size_t n = (size_t)p->in_split.count, bytes = n * dtype_size(p->out_type);
            int stream = bytes >= KERNEL_STREAM_BYTES, sums = transfer->op == FSDP_SUM || transfer->op == FSDP_AVG;
            if (source && sums && p->type != DTYPE_BOOL && transfer->divisor == 1 && !transfer->accumulate) {
                if (p->out == p->in) continue;
                if (p->type == p->out_type)
                    kernel_copy(p->out, p->in, bytes, stream);
                else
                    kernel_cast(p->out_type, p->out, p->type, p->in, n, stream);
                continue;
            }
            struct kernel_reduce how = {.op = transfer->op,
                                        .src_type = p->type,
                                        .dst_type = p->out_type,
                                        .n_src = 1,
                                        .scale = 1,
                                        .divisor = transfer->divisor,
                                        .accumulate = transfer->accumulate,
                                        .stream = stream};
            kernel_reduce(&how, p->out, &source, n);
        } else if (p->out != p->in && p->in) {
            size_t bytes = (size_t)p->out_split.count * dtype_size(p->type);
            kernel_copy(p->out, p->in, bytes, bytes >= KERNEL_STREAM_BYTES);
        }
    }
    return FSDP_OK;
}

static fsdp_status self_sync(struct transport *base, struct deadline deadline)
{
    return transport_status(base);
}

/* Messages to oneself are matched by the group, for every transport; to others there are none. */
static fsdp_status self_message_step(struct transport *base, struct message *m, int *done, int *moved)
{
    *done = *moved = 0;
    return transport_status(base);
}

static uint32_t self_message_ticket(struct transport *base)
{
    return atomic_load_explicit(&((struct self *)base)->bell, memory_order_acquire);
}

static void self_message_nudge(struct transport *base)
{
    struct self *t = (struct self *)base;
    atomic_fetch_add_explicit(&t->bell, 1, memory_order_seq_cst);
    os_futex_wake(&t->bell);
}

static void self_message_wait(struct transport *base, uint32_t ticket, int64_t most_ns)
{
    struct self *t = (struct self *)base;
    os_futex_wait(&t->bell, ticket, most_ns);
}

static fsdp_status self_message_check(struct transport *base, const struct message *m, struct deadline deadline)
{
    return transport_status(base);
}

/* A region is a segment of its own, so that private views of it work as they do between ranks. */
static fsdp_status self_region_reserve(struct transport *base, size_t bytes, struct region *out)
{
    size_t want = os_page_round(bytes ? bytes : 1);
    *out = (struct region){.bytes = want, .fd = -1};
    return os_segment_create("fsdp-self", want, &out->fd);
}

static fsdp_status self_region_map(struct transport *base, struct region *region)
{
    void *at;
    TRY(os_map_shared(region->fd, 0, region->bytes, &at));
    region->shared = at;
    return FSDP_OK;
}

static void self_region_release(struct transport *base, struct region *region)
{
    os_unmap(region->shared, region->bytes);
    region->shared = NULL;
    if (region->fd >= 0 && base->process == os_process()) /* a view that still shows it keeps nothing */
        os_segment_discard(region->fd, 0, region->bytes);
    os_close(&region->fd);
}

const struct transport_ops transport_self = {
    .name = "self",
    .create = self_create,
    .destroy = self_destroy,
    .exchange = self_exchange,
    .header_of = self_header_of,
    .payload_of = self_payload_of,
    .move = self_move,
    .sync = self_sync,
    .message_step = self_message_step,
    .message_ticket = self_message_ticket,
    .message_nudge = self_message_nudge,
    .message_wait = self_message_wait,
    .message_check = self_message_check,
    .region_reserve = self_region_reserve,
    .region_map = self_region_map,
    .region_release = self_region_release,
    .status = transport_status,
};
