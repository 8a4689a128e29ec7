/* Point to point: every message arrives whole, at the receive of its tag, in the order of its pair and tag.
 *
 * A message's bytes are made from its source, destination and number, so a receiver knows what it must get.
 */
#include "job.h"

#include "transport/shm/shm.h"

static void setup(void)
{
    job_tables();
}

TestSuite(messages, .init = setup, .timeout = SANITIZED ? 600 : 120);

static const enum way ways[] = {STAGED, DIRECT};

#define BOTH_WAYS(size, fn)                                                                                            \
    do {                                                                                                               \
        ranks_run(size, fn, &ways[0]);                                                                                 \
        ranks_run(size, fn, &ways[1]);                                                                                 \
    } while (0)

static fsdp_group *make_group(struct rank *r)
{
    return rank_group(r, r->argument ? *(const enum way *)r->argument : ANY_ROUTE, 0);
}

/* ---- letters: a message's bytes, with guards */

#define EDGE 16

struct letter {
    DLTensor dl;
    int64_t shape[1];
    uint8_t *block;
    int from, to, number;
};

static uint8_t byte_of(int from, int to, int number, int64_t i)
{
    uint32_t x = (uint32_t)(from * 7 + to * 131 + number * 1009 + 1) * 2654435761u + (uint32_t)i * 40503u;
    return (uint8_t)(x >> 11 ^ x >> 21);
}

static void letter_make(struct letter *l, int from, int to, int number, int64_t bytes, int sending)
{
    *l = (struct letter){.shape = {bytes}, .from = from, .to = to, .number = number};
    l->block = malloc((size_t)bytes + 2 * EDGE);
    CHECK(l->block, "no memory");
    memset(l->block, 0x5a, (size_t)bytes + 2 * EDGE);
    if (sending)
        for (int64_t i = 0; i < bytes; i++) l->block[EDGE + i] = byte_of(from, to, number, i);
    l->dl = (DLTensor){.data = l->block,
                       .device = {kDLCPU, 0},
                       .ndim = 1,
                       .dtype = {kDLUInt, 8, 1},
                       .shape = l->shape,
                       .byte_offset = EDGE};
}

static struct letter *outgoing(struct letter *l, int from, int to, int number, int64_t bytes)
{
    letter_make(l, from, to, number, bytes, 1);
    return l;
}

static struct letter *incoming(struct letter *l, int from, int to, int number, int64_t bytes)
{
    letter_make(l, from, to, number, bytes, 0);
    return l;
}

static void letter_read(struct letter *l)
{
    int64_t bytes = l->shape[0];
    for (int64_t i = 0; i < bytes; i++)
        CHECK(l->block[EDGE + i] == byte_of(l->from, l->to, l->number, i),
              "message %d from %d to %d: byte %lld of %lld differs", l->number, l->from, l->to, (long long)i,
              (long long)bytes);
    for (int i = 0; i < EDGE; i++)
        CHECK(l->block[i] == 0x5a && l->block[EDGE + bytes + i] == 0x5a, "message %d: written outside the tensor",
              l->number);
    free(l->block);
}

static void finish(fsdp_work *work)
{
    OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
}

/* In the entry, one step of the lane, several, and many. */
static const int64_t lengths[] = {0, 1, SHM_EAGER, SHM_EAGER + 1, 4000, 131072, 131073, 1 << 20, (3 << 20) + 7};
#define LENGTHS 9

static void every_length(struct rank *r)
{
    fsdp_group *group = make_group(r);
    struct letter l;
    for (int i = 0; i < LENGTHS; i++) {
        if (r->rank == 0) OK(fsdp_send(group, &outgoing(&l, 0, 1, i, lengths[i])->dl, 1, 5, NULL));
        if (r->rank == 0) letter_read(&l); /* unchanged */
        if (r->rank == 1) OK(fsdp_recv(group, &incoming(&l, 0, 1, i, lengths[i])->dl, 0, 5, NULL));
        if (r->rank == 1) letter_read(&l);
        if (r->rank == 2) continue;
    }
    fsdp_group_release(group);
}

Test(messages, of_every_length)
{
    BOTH_WAYS(2, every_length);
    BOTH_WAYS(3, every_length);
}

/* ---- order */

#define TAGS 20

static void tags_backwards(struct rank *r)
{
    fsdp_group *group = make_group(r);
    for (int k = 0; k < LENGTHS - 1; k++) {
        struct letter l[TAGS];
        fsdp_work *works[TAGS];
        if (r->rank == 0) {
            for (int i = 0; i < TAGS; i++)
                OK(fsdp_send(group, &outgoing(&l[i], 0, 1, i, lengths[k])->dl, 1, i, &works[i]));
            for (int i = 0; i < TAGS; i++) {
                finish(works[i]);
                letter_read(&l[i]);
            }
        } else {
            for (int i = TAGS - 1; i >= 0; i--) {
                OK(fsdp_recv(group, &incoming(&l[i], 0, 1, i, lengths[k])->dl, 0, i, NULL));
                letter_read(&l[i]);
            }
        }
    }
    fsdp_group_release(group);
}

Test(messages, of_different_tags_may_be_received_in_any_order)
{
    BOTH_WAYS(2, tags_backwards);
}

#define OUTSTANDING 150

/* More than a pair has entries for; sizes mixed, so that small ones could overtake large ones if they were
 * let. */
static void many(struct rank *r)
{
    fsdp_group *group = make_group(r);
    static _Thread_local struct letter sent[OUTSTANDING], got[OUTSTANDING];
    fsdp_work *sending[OUTSTANDING], *receiving[OUTSTANDING];
    int other = 1 - r->rank;
    for (int first = 0; first < 2; first++) { /* receives first, then sends first */
        for (int turn = 0; turn < 2; turn++)
            for (int i = 0; i < OUTSTANDING; i++) {
                int64_t bytes = (int64_t[]){0, 10, 200000, 100, 5000}[i % 5];
                if ((turn == 0) == (first == 0))
                    OK(fsdp_recv(group, &incoming(&got[i], other, r->rank, i, bytes)->dl, other, 3, &receiving[i]));
                else
                    OK(fsdp_send(group, &outgoing(&sent[i], r->rank, other, i, bytes)->dl, other, 3, &sending[i]));
            }
        for (int i = OUTSTANDING - 1; i >= 0; i--) {
            finish(receiving[i]);
            finish(sending[i]);
            letter_read(&got[i]);
            letter_read(&sent[i]);
        }
    }
    fsdp_group_release(group);
}

Test(messages, many_under_way_both_ways_keep_their_order)
{
    BOTH_WAYS(2, many);
}

static void from_anyone(struct rank *r)
{
    fsdp_group *group = make_group(r);
    int n = r->size;
    for (int k = 0; k < LENGTHS - 1; k++) {
        if (r->rank == 0) {
            int from[RANKS_MAX] = {0};
            for (int i = 0; i < 3 * (n - 1); i++) {
                struct letter l;
                incoming(&l, 0, 0, 0, lengths[k] + 9);
                OK(fsdp_recv(group, &l.dl, FSDP_ANY_RANK, k, NULL));
                /* Who sent it is in the bytes: each source's arrive in order. */
                int source = -1;
                for (int s = 1; s < n; s++) {
                    int64_t same = 0;
                    while (same < lengths[k] + 9 && l.block[EDGE + same] == byte_of(s, 0, from[s], same)) same++;
                    if (same == lengths[k] + 9) source = s;
                }
                CHECK(source > 0, "message %d is nobody's next one", i);
                l.from = source, l.number = from[source]++;
                letter_read(&l);
            }
            for (int s = 1; s < n; s++) CHECK(from[s] == 3, "%d from rank %d", from[s], s);
        } else {
            for (int i = 0; i < 3; i++) {
                struct letter l;
                OK(fsdp_send(group, &outgoing(&l, r->rank, 0, i, lengths[k] + 9)->dl, 0, k, NULL));
                free(l.block);
            }
        }
    }
    fsdp_group_release(group);
}

Test(messages, from_any_rank)
{
    BOTH_WAYS(2, from_anyone);
    BOTH_WAYS(4, from_anyone);
}

#define WAITING 200

static void to_oneself(struct rank *r)
{
    fsdp_group *group = make_group(r);
    for (int k = 0; k < LENGTHS; k++) {
        struct letter a, b, c, d;
        fsdp_work *works[2];
        OK(fsdp_send(group, &outgoing(&a, r->rank, r->rank, 1, lengths[k])->dl, r->rank, 2, &works[0]));
        OK(fsdp_send(group, &outgoing(&b, r->rank, r->rank, 2, lengths[k])->dl, r->rank, 2, &works[1]));
        OK(fsdp_recv(group, &incoming(&c, r->rank, r->rank, 1, lengths[k])->dl, r->rank, 2, NULL));
        OK(fsdp_recv(group, &incoming(&d, r->rank, r->rank, 2, lengths[k])->dl, FSDP_ANY_RANK, 2, NULL));
        finish(works[0]);
        finish(works[1]);
        /* The receive first. */
        struct letter e, f;
        OK(fsdp_recv(group, &incoming(&e, r->rank, r->rank, 3, lengths[k])->dl, r->rank, 4, &works[0]));
        OK(fsdp_send(group, &outgoing(&f, r->rank, r->rank, 3, lengths[k])->dl, r->rank, 4, NULL));
        finish(works[0]);
        letter_read(&a), letter_read(&b), letter_read(&c), letter_read(&d), letter_read(&e), letter_read(&f);
    }
    /* Receives that wait keep their order while sends come one by one. */
    for (int round = 0; round < 5; round++) {
        static _Thread_local struct letter got[WAITING], sent[WAITING];
        fsdp_work *receiving[WAITING], *sending[WAITING];
        for (int i = 0; i < WAITING; i++)
            OK(fsdp_recv(group, &incoming(&got[i], r->rank, r->rank, i, 100 + i)->dl, i % 4 ? r->rank : FSDP_ANY_RANK,
                         6, &receiving[i]));
        for (int i = 0; i < WAITING; i++)
            OK(fsdp_send(group, &outgoing(&sent[i], r->rank, r->rank, i, 100 + i)->dl, r->rank, 6, &sending[i]));
        for (int i = 0; i < WAITING; i++) {
            finish(receiving[i]);
            finish(sending[i]);
            letter_read(&got[i]), letter_read(&sent[i]);
        }
    }
    /* Different dtypes: both sides are told, and nothing is written. */
    int64_t shape[] = {4};
    float x[4] = {1, 2, 3, 4};
    int32_t y[4] = {5, 6, 7, 8};
    DLTensor out = {.data = x, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape}, in = out;
    in.data = y, in.dtype.code = kDLInt;
    fsdp_work *work;
    OK(fsdp_send(group, &out, r->rank, 1, &work));
    REFUSED(fsdp_recv(group, &in, r->rank, 1, NULL), FSDP_ERR_MISMATCH, "int32");
    REFUSED(fsdp_work_wait(work, -1), FSDP_ERR_MISMATCH, "float32");
    fsdp_work_release(work);
    CHECK(y[0] == 5 && y[3] == 8, "a refused message was written");
    fsdp_group_release(group);
}

Test(messages, to_oneself)
{
    ranks_run(1, to_oneself, NULL);
    BOTH_WAYS(2, to_oneself);
}

/* ---- both ways at once */

static void exchange(struct rank *r)
{
    fsdp_group *group = make_group(r);
    int other = 1 - r->rank;
    int64_t bytes = SANITIZED ? 1 << 20 : (16 << 20) + 3;
    struct letter a, b;
    fsdp_work *work;
    OK(fsdp_send(group, &outgoing(&a, r->rank, other, 0, bytes)->dl, other, 0, &work));
    OK(fsdp_recv(group, &incoming(&b, other, r->rank, 0, bytes)->dl, other, 0, NULL));
    finish(work);
    letter_read(&a), letter_read(&b);
    fsdp_group_release(group);
}

Test(messages, large_ones_cross)
{
    BOTH_WAYS(2, exchange);
}

static void ring(struct rank *r)
{
    fsdp_group *group = make_group(r);
    int next = (r->rank + 1) % r->size, before = (r->rank + r->size - 1) % r->size;
    for (int k = 0; k < LENGTHS; k++) {
        struct letter a, b;
        fsdp_collective calls[2] = {{.struct_size = sizeof *calls, .kind = FSDP_OP_SEND, .peer = next, .tag = k},
                                    {.struct_size = sizeof *calls, .kind = FSDP_OP_RECV, .peer = before, .tag = k}};
        calls[0].input = &outgoing(&a, r->rank, next, k, lengths[k])->dl;
        calls[1].output = &incoming(&b, before, r->rank, k, lengths[k])->dl;
        fsdp_collective turned[2] = {calls[1], calls[0]};
        fsdp_work *work = NULL;
        OK(fsdp_coalesced(group, k % 2 ? calls : turned, 2, k % 3 ? NULL : &work));
        if (work) finish(work);
        letter_read(&a), letter_read(&b);
    }
    fsdp_group_release(group);
}

Test(messages, around_a_ring_in_one_call)
{
    ranks_run(1, ring, NULL);
    BOTH_WAYS(2, ring);
    BOTH_WAYS(3, ring);
    ranks_run(8, ring, &ways[0]);
}

/* Everybody to everybody, some of everything, in one call. */
static void storm(struct rank *r)
{
    fsdp_group *group = make_group(r);
    uint64_t state = 4711;
    static _Thread_local struct letter letters[400];
    static _Thread_local fsdp_collective calls[400];
    for (int round = 0; round < (SANITIZED ? 4 : 15); round++) {
        int n = 0, in_call = (int)(job_bits(&state) % 2);
        fsdp_work *works[400];
        for (int number = 0; number < 120; number++) {
            int from = (int)(job_bits(&state) % (uint64_t)r->size), to = (int)(job_bits(&state) % (uint64_t)r->size);
            int tag = (int)(job_bits(&state) % 3);
            int64_t bytes = lengths[job_bits(&state) % (LENGTHS - 2)];
            if (from == r->rank) {
                calls[n] =
                    (fsdp_collective){.struct_size = sizeof *calls, .kind = FSDP_OP_SEND, .peer = to, .tag = tag};
                calls[n].input = &outgoing(&letters[n], from, to, number, bytes)->dl;
                n++;
            }
            if (to == r->rank) {
                calls[n] =
                    (fsdp_collective){.struct_size = sizeof *calls, .kind = FSDP_OP_RECV, .peer = from, .tag = tag};
                calls[n].output = &incoming(&letters[n], from, to, number, bytes)->dl;
                n++;
            }
        }
        for (int i = 0; i < n && !in_call; i++)
            if (calls[i].kind == FSDP_OP_SEND)
                OK(fsdp_send(group, calls[i].input, calls[i].peer, calls[i].tag, &works[i]));
            else
                OK(fsdp_recv(group, calls[i].output, calls[i].peer, calls[i].tag, &works[i]));
        if (in_call) OK(fsdp_coalesced(group, calls, n, NULL));
        for (int i = n - 1; i >= 0; i--) {
            if (!in_call) finish(works[i]);
            letter_read(&letters[i]);
        }
    }
    fsdp_group_release(group);
}

Test(messages, everybody_to_everybody)
{
    ranks_run(1, storm, NULL);
    BOTH_WAYS(2, storm);
    BOTH_WAYS(4, storm);
}

/* ---- strides, and messages beside collectives */

static void strided(struct rank *r)
{
    fsdp_group *group = make_group(r);
    for (int64_t n = 2; n < 300; n = n * 3 + 1) {
        int32_t *m = calloc((size_t)(n * n), sizeof *m);
        CHECK(m, "no memory");
        int64_t shape[] = {n, n}, turned[] = {1, n}, back[] = {-n, -1}, column[] = {n};
        DLTensor t = {.data = m, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLInt, 32, 1}, .shape = shape};
        if (r->rank == 0) {
            for (int64_t i = 0; i < n * n; i++) m[i] = (int32_t)i + 1;
            t.strides = turned; /* the transpose */
            OK(fsdp_send(group, &t, 1, 0, NULL));
            t.strides = back, t.data = m + n * n - 1; /* last element first */
            OK(fsdp_send(group, &t, 1, 0, NULL));
            t.data = m + 1, t.ndim = 1, t.strides = column; /* column 1 */
            OK(fsdp_send(group, &t, 1, 0, NULL));
        } else {
            OK(fsdp_recv(group, &t, 0, 0, NULL));
            for (int64_t i = 0; i < n * n; i++)
                CHECK(m[i] == i % n * n + i / n + 1, "transposed: %lld is %d", (long long)i, m[i]);
            t.strides = turned;
            OK(fsdp_recv(group, &t, 0, 0, NULL));
            for (int64_t i = 0; i < n * n; i++)
                CHECK(m[i] == n * n - (i % n * n + i / n), "reversed, into a transpose: %lld is %d", (long long)i,
                      m[i]);
            memset(m, 0, (size_t)(n * n) * sizeof *m);
            t.ndim = 1, t.strides = column;
            OK(fsdp_recv(group, &t, 0, 0, NULL));
            for (int64_t i = 0; i < n * n; i++)
                CHECK(m[i] == (i % n ? 0 : i / n * n + 2), "column: %lld is %d", (long long)i, m[i]);
        }
        free(m);
    }
    fsdp_group_release(group);
}

Test(messages, with_strides)
{
    BOTH_WAYS(2, strided);
}

static void beside(struct rank *r)
{
    fsdp_group *group = make_group(r);
    struct job job = {.kind = FSDP_OP_ALL_REDUCE, .type = DTYPE_F32, .count = 50000, .seed = 2};
    struct job_run run;
    job_prepare(&run, &job, r->rank, r->size);
    fsdp_work *work = NULL;
    struct letter l;
    if (r->rank == 0) OK(job_call(&run, group, &work)); /* rank 1 does not come to it before it has the message */
    if (r->rank == 0) OK(fsdp_send(group, &outgoing(&l, 0, 1, 0, 300000)->dl, 1, 0, NULL));
    if (r->rank == 1) OK(fsdp_recv(group, &incoming(&l, 0, 1, 0, 300000)->dl, 0, 0, NULL));
    if (r->rank == 1) OK(job_call(&run, group, &work));
    finish(work);
    letter_read(&l);
    job_verify(&run);
    fsdp_group_release(group);
}

Test(messages, do_not_queue_behind_collectives)
{
    BOTH_WAYS(2, beside);
}

/* ---- what does not match */

static void unlike(struct rank *r)
{
    fsdp_group *group = make_group(r);
    for (int big = 0; big < 2; big++) {
        int64_t n = big ? 100000 : 4, shape[] = {n}, more[] = {n + 1};
        char *data = calloc((size_t)n + 1, 8);
        CHECK(data, "no memory");
        DLTensor f32 = {.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape},
                 i32 = f32, longer = f32;
        i32.dtype.code = kDLInt, longer.shape = more;
        memset(data, r->rank ? 1 : 2, ((size_t)n + 1) * 8);
        fsdp_error_info info = {.struct_size = sizeof info};
        if (r->rank == 0) {
            REFUSED(fsdp_send(group, &f32, 1, 7, NULL), FSDP_ERR_MISMATCH, "int32");
            OK(fsdp_last_error_info(&info));
            CHECK(info.operation == FSDP_OP_SEND && info.rank_a == 0 && info.rank_b == 1, "operation %d, ranks %d, %d",
                  info.operation, info.rank_a, info.rank_b);
            REFUSED(fsdp_send(group, &f32, 1, 7, NULL), FSDP_ERR_MISMATCH, "float32");
        } else {
            REFUSED(fsdp_recv(group, &i32, 0, 7, NULL), FSDP_ERR_MISMATCH, "float32");
            OK(fsdp_last_error_info(&info));
            CHECK(info.operation == FSDP_OP_RECV, "operation %d", info.operation);
            REFUSED(fsdp_recv(group, &longer, FSDP_ANY_RANK, 7, NULL), FSDP_ERR_MISMATCH, "float32");
            for (size_t i = 0; i < ((size_t)n + 1) * 8; i++) CHECK(data[i] == 1, "a refused message was written");
        }
        struct letter l; /* and the group goes on */
        if (r->rank == 0) OK(fsdp_send(group, &outgoing(&l, 0, 1, 0, 300000)->dl, 1, 7, NULL));
        if (r->rank == 1) OK(fsdp_recv(group, &incoming(&l, 0, 1, 0, 300000)->dl, 0, 7, NULL));
        letter_read(&l);
        free(data);
    }
    OK(fsdp_barrier(group, NULL));
    struct letter l;
    REFUSED(fsdp_send(group, &outgoing(&l, 0, 1, 0, 4)->dl, 2, 0, NULL), FSDP_ERR_INVALID, "dst");
    REFUSED(fsdp_send(group, &l.dl, FSDP_ANY_RANK, 0, NULL), FSDP_ERR_INVALID, "dst");
    REFUSED(fsdp_send(group, &l.dl, 1, -1, NULL), FSDP_ERR_INVALID, "tag");
    REFUSED(fsdp_recv(group, &l.dl, -2, 0, NULL), FSDP_ERR_INVALID, "src");
    REFUSED(fsdp_recv(group, NULL, 0, 0, NULL), FSDP_ERR_INVALID, "tensor");
    free(l.block);
    fsdp_group_release(group);
}

Test(messages, of_another_dtype_or_length_are_refused_on_both_sides)
{
    BOTH_WAYS(2, unlike);
}

/* ---- accounts */

static void accounts(struct rank *r)
{
    fsdp_group *group = make_group(r);
    const int64_t bytes = (1 << 20) + 3;
    struct letter l;
    if (r->rank == 0) OK(fsdp_send(group, &outgoing(&l, 0, 1, 0, bytes)->dl, 1, 0, NULL));
    if (r->rank == 1) OK(fsdp_recv(group, &incoming(&l, 0, 1, 0, bytes)->dl, 0, 0, NULL));
    letter_read(&l);
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    int staged = *(const enum way *)r->argument == STAGED;
    CHECK((int64_t)info.bytes_moved == (staged || r->rank ? bytes : 0), "%llu bytes",
          (unsigned long long)info.bytes_moved);
    CHECK(info.operations == 0, "a message was counted as a collective");
    fsdp_group_release(group);
}

Test(messages, bytes_moved_counts_each_byte_once)
{
    BOTH_WAYS(2, accounts);
}
