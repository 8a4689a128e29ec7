/* What a model holds and moves: the counters against arithmetic, and the kernel's view of the processes. */
#include "fsdp_host.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

TestSuite(fsdp_memory, .timeout = RANKS_SECONDS + 30);

#define MIB ((int64_t)1 << 20)

/* ---- counters */

static const struct spec first[] = {{"w", DTYPE_F32, 2, {5, 3}, 0},
                                    {"frozen", DTYPE_F64, 2, {7, 4}, 1},
                                    {"none", DTYPE_F32, 1, {0}, 0}},
                         second[] = {{"h", DTYPE_BF16, 2, {9, 2}, 0}, {"q", DTYPE_F8E4M3FN, 1, {6}, 0}},
                         third[] = {{"still", DTYPE_F32, 1, {11}, 1}};
static const struct {
    const struct spec *specs;
    int n;
} units[] = {{first, 3}, {second, 2}, {third, 1}};
enum { UNITS = 3 };

struct bytes {
    int64_t all, shard, trainable, trainable_shard, wide; /* wide: of trainable ones as accumulated */
};

static struct bytes bytes_of(const struct spec *specs, int n, int rank, int size)
{
    struct bytes b = {0};
    for (int i = 0; i < n; i++) {
        int64_t begin, count, width = (int64_t)dtype_size(specs[i].type);
        spec_part(&specs[i], rank, size, &begin, &count);
        b.all += spec_bytes(&specs[i]);
        b.shard += count * width;
        if (specs[i].frozen) continue;
        b.trainable += spec_bytes(&specs[i]);
        b.trainable_shard += count * width;
        b.wide += spec_count(&specs[i]) * (specs[i].type == DTYPE_F64 ? 8 : 4);
    }
    return b;
}

#define EXPECT(field, value)                                                                                           \
    do {                                                                                                               \
        fsdp_memory_info info_ = memory_of(model);                                                                     \
        CHECK(info_.field == (value), "%s: " #field " is %lld, not %lld",                                              \
              options->private_unshard ? "private" : "shared", (long long)info_.field, (long long)(value));            \
    } while (0)

static fsdp_status give_ones(const struct host_unit *u, fsdp_work **work)
{
    static char ones[HOST_PARAMS][64];
    DLTensor tensors[HOST_PARAMS];
    const DLTensor *grads[HOST_PARAMS];
    for (int i = 0; i < u->n; i++) {
        tensors[i] = u->full[i]->dl_tensor;
        tensors[i].data = ones[i];
        grads[i] = u->specs[i].frozen ? NULL : &tensors[i];
    }
    return fsdp_unit_post_backward(u->unit, grads, u->n, work);
}

static void rank_counters(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    static const fsdp_model_options both[] = {{.private_unshard = 0}, {.private_unshard = 1}};
    for (int o = 0; o < 2; o++) {
        const fsdp_model_options *options = &both[o];
        int private = options->private_unshard;
        fsdp_model *model = model_make(group, options);
        EXPECT(total_parameters, 0);
        struct host_unit host[UNITS];
        struct bytes b[UNITS], sum = {0};
        for (int i = 0; i < UNITS; i++) {
            host_unit_make(r, model, NULL, units[i].specs, units[i].n, i, &host[i]);
            b[i] = bytes_of(units[i].specs, units[i].n, r->rank, r->size);
            sum.all += b[i].all;
            sum.shard += b[i].shard;
            sum.trainable += b[i].trainable;
            sum.trainable_shard += b[i].trainable_shard;
            sum.wide += b[i].wide;
        }
        EXPECT(total_parameters, sum.all);
        EXPECT(shards, sum.shard);
        EXPECT(gradients, sum.trainable_shard);
        EXPECT(unsharded, private ? 0 : sum.all);
        EXPECT(host_parameters, private ? sum.all : 2 * sum.all);
        EXPECT(published_bytes, 0);
        EXPECT(reduced_bytes, 0);

        /* One step, twice over every unit. Private memory is filled again in backward, shared memory still
         * holds it. */
        for (int i = 0; i < UNITS; i++) {
            OK(fsdp_unit_pre_forward(host[i].unit));
            OK(fsdp_unit_pre_forward(host[i].unit));
            EXPECT(unsharded, private ? b[i].all : sum.all);
            EXPECT(host_parameters, sum.all + (private ? r->size * b[i].all : sum.all));
            OK(fsdp_unit_post_forward(host[i].unit));
        }
        EXPECT(published_bytes, sum.shard);
        uint64_t before = operations_of(group);
        for (int i = UNITS - 1; i >= 0; i--) {
            OK(fsdp_unit_pre_backward(host[i].unit));
            CHECK(private || operations_of(group) == before + (uint64_t)(UNITS - 1 - i) - (i < 2),
                  "backward unsharded anew");
            OK(give_ones(&host[i], NULL));
        }
        EXPECT(published_bytes, (1 + private) * sum.shard);
        EXPECT(reduced_bytes, sum.trainable);
        OK(fsdp_model_finish_backward(model));
        EXPECT(unsharded, private ? 0 : sum.all);
        EXPECT(unsharded_peak, private ? b[0].all > b[1].all ? b[0].all : b[1].all : sum.all);

        /* A frozen unit asks nothing of the peers in backward. */
        before = operations_of(group);
        OK(give_ones(&host[2], NULL));
        fsdp_work *work;
        OK(give_ones(&host[2], &work));
        OK(fsdp_work_wait(work, -1));
        fsdp_work_release(work);
        CHECK(operations_of(group) == before, "a frozen unit was reduced");
        EXPECT(reduced_bytes, sum.trainable);

        /* Without sync: no operation, but buffers, until the reduction that sends them. */
        OK(fsdp_model_set_gradient_sync(model, 0));
        for (int i = 0; i < UNITS; i++) OK(give_ones(&host[i], NULL));
        OK(fsdp_model_finish_backward(model));
        CHECK(operations_of(group) == before, "unsynced gradients were sent");
        EXPECT(gradients, sum.trainable_shard + sum.wide);
        EXPECT(reduced_bytes, sum.trainable);
        OK(fsdp_unit_pre_forward(host[0].unit)); /* after a step, or not? no sync, no step: nothing is published */
        OK(fsdp_unit_post_forward(host[0].unit));
        OK(fsdp_model_set_gradient_sync(model, 1));
        for (int i = 0; i < UNITS; i++) {
            OK(give_ones(&host[i], &work));
            fsdp_work_release(work);
        }
        OK(fsdp_model_finish_backward(model));
        EXPECT(gradients, sum.trainable_shard);
        EXPECT(reduced_bytes, sum.trainable + sum.wide);
        OK(fsdp_model_set_gradient_sync(model, 0));
        OK(give_ones(&host[0], NULL));
        OK(fsdp_model_zero_grad(model));
        EXPECT(gradients, sum.trainable_shard);

        for (int i = 0; i < UNITS; i++) host_unit_drop(&host[i]);
        EXPECT(shards, 0);
        EXPECT(gradients, 0);
        EXPECT(unsharded, 0);
        EXPECT(host_parameters, 0);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_memory, counters_equal_the_arithmetic)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_counters, NULL);
}

/* Shared unsharding: every forward publishes, whatever came before; backward takes what forward published. */
static void rank_republish(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct host_unit u;
    host_unit_make(r, model, NULL, second, 2, 0, &u);
    uint64_t begun = operations_of(group);
    OK(fsdp_unit_pre_forward(u.unit));
    OK(fsdp_unit_pre_forward(u.unit));
    CHECK(operations_of(group) == begun + 1, "the first publishes, the second finds it done");
    OK(fsdp_unit_post_forward(u.unit));
    OK(fsdp_unit_pre_backward(u.unit));
    CHECK(operations_of(group) == begun + 1, "before backward nothing is published");
    OK(fsdp_unit_reshard(u.unit));
    set_shards(&u, 4); /* without a word: an optimizer's step, or a checkpoint */
    OK(fsdp_unit_pre_forward(u.unit));
    CHECK(operations_of(group) == begun + 2, "the next forward publishes");
    expect_full(&u, 4, "changed between two forwards");
    set_shards(&u, 1);
    OK(fsdp_unit_shard_changed(u.unit));
    OK(fsdp_unit_pre_forward(u.unit)); /* unsharded, but of older values */
    CHECK(operations_of(group) == begun + 3, "changed shards are published");
    expect_full(&u, 1, "changed by hand");
    OK(fsdp_unit_reshard(u.unit));
    for (int seed = 2; seed < 4; seed++) { /* also where the unshard before was only waited for */
        set_shards(&u, seed);
        OK(fsdp_unit_shard_changed(u.unit));
        fsdp_work *work;
        OK(fsdp_unit_unshard(u.unit, &work));
        OK(fsdp_work_wait(work, -1));
        fsdp_work_release(work);
        expect_full(&u, seed, "changed after an asynchronous unshard");
    }
    CHECK(operations_of(group) == begun + 5, "each is published");
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_memory, forward_publishes_and_backward_reuses)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_republish, NULL);
}

/* ---- the kernel's view */

static int64_t from_file(const char *path, const char *key)
{
    char line[256];
    int64_t value = -1;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) value = strtoll(line + strlen(key), NULL, 10);
    if (f) fclose(f);
    return value;
}

static int64_t pss_bytes(void)
{
    return from_file("/proc/self/smaps_rollup", "Pss:") * 1024;
}

/* The sum over the ranks, at a moment when all stand still. */
static int64_t host_bytes(struct rank *r, fsdp_group *group)
{
    int64_t all[RANKS_MAX] = {0}, sum = 0, shape[] = {1}, out_shape[] = {r->size};
    OK(fsdp_barrier(group, NULL));
    int64_t mine = pss_bytes();
    OK(fsdp_barrier(group, NULL));
    DLTensor in = view(&mine, DTYPE_I64, 1, shape), out = view(all, DTYPE_I64, 1, out_shape);
    OK(fsdp_all_gather(group, &in, &out, NULL));
    for (int i = 0; i < r->size; i++) sum += all[i];
    return sum;
}

static void rank_pss(struct rank *r)
{
    enum { FULL = 64 };
    static const struct spec specs[] = {{"w", DTYPE_F32, 2, {4096, 4096}, 1}}; /* frozen: no gradients to count */
    fsdp_group *group = group_make(r, 0, 0);
    float *ones = malloc(FULL * MIB);
    memset(ones, 0x3f, FULL * MIB);
    for (int private = 0; private < 2; private ++) {
        fsdp_model *model = model_make(group, &(fsdp_model_options){.private_unshard = private});
        int64_t empty = host_bytes(r, group);
        DLTensor full = view(ones, DTYPE_F32, 2, specs[0].shape);
        fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = &full, .frozen = 1};
        fsdp_unit *unit;
        OK(fsdp_unit_create(model, NULL, &param, 1, NULL, &unit));
        DLManagedTensorVersioned *w;
        OK(fsdp_unit_param_full(unit, 0, &w));
        int64_t sharded = host_bytes(r, group) - empty;
        OK(fsdp_unit_unshard(unit, NULL));
        double sum = 0;
        for (int64_t k = 0; k < 4096 * 4096; k += 512) sum += (double)((float *)w->dl_tensor.data)[k];
        CHECK(sum > 0, "values");
        int64_t unsharded = host_bytes(r, group) - empty;
        if (r->rank == 0) memset(w->dl_tensor.data, 1, 16 * MIB); /* a private edit is memory */
        int64_t edited = host_bytes(r, group) - empty;
        OK(fsdp_unit_reshard(unit));
        int64_t resharded = host_bytes(r, group) - empty;
        w->deleter(w);
        fsdp_unit_release(unit);
        int64_t released = host_bytes(r, group) - empty;
        fsdp_model_release(model);
        /* shards: FULL in all. Shared: one copy more a host, for the unit's life. Private: one a rank, while
         * unsharded. */
        int64_t copies = private ? r->size : 1, kept = private ? 0 : 1, slack = 3;
        const struct {
            const char *when;
            int64_t got, want;
        } stages[] = {
            {"sharded", sharded, FULL + (private ? 0 : kept * FULL)},
            {"unsharded", unsharded, FULL + copies * FULL},
            {"edited", edited, FULL + copies * FULL + (private ? 0 : 16)},
            {"resharded", resharded, FULL + kept * FULL},
            {"released", released, 0},
        };
        for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
            double got = (double)stages[i].got / (double)MIB;
            int early =
                i == 0 && !private && got < FULL + slack; /* reserved, not touched: the kernel may not count it */
            CHECK(early || (got > (double)(stages[i].want - slack) && got < (double)(stages[i].want + slack)),
                  "%s, %s: %.1f MiB on the host, not %lld", private ? "private" : "shared", stages[i].when, got,
                  (long long)stages[i].want);
        }
    }
    free(ones);
    fsdp_group_release(group);
}

Test(fsdp_memory, full_parameters_are_held_once_a_host_and_given_back)
{
    if (SANITIZED) cr_skip("the sanitizer's own memory moves");
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_pss, NULL);
}

static int64_t entries_in(const char *folder)
{
    int64_t n = 0;
    DIR *d = opendir(folder);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

static int64_t lines_in(const char *path)
{
    int64_t n = 0;
    FILE *f = fopen(path, "r");
    for (int c; f && (c = fgetc(f)) != EOF;) n += c == '\n';
    if (f) fclose(f);
    return n;
}

/* 500 iterations with asynchronous hooks and accumulation, in which a unit comes and goes. */
static void rank_growth(struct rank *r)
{
    static const struct spec stays[] = {{"w", DTYPE_F32, 2, {65, 64}, 0}, {"v", DTYPE_BF16, 1, {9}, 0}};
    static const struct spec goes[] = {{"x", DTYPE_F32, 2, {1000, 17}, 0}};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct host_unit u, passing;
    host_unit_make(r, model, "stays", stays, 2, 0, &u);
    char *memory = calloc(1, 65 * 64 * 4);
    int64_t pss = 0, fds = 0, maps = 0;
    for (int i = 0; i < 500; i++) {
        fsdp_work *work;
        if (i % 10 == 0) {
            host_unit_make(r, model, "goes", goes, 1, 0, &passing);
            OK(fsdp_unit_unshard(passing.unit, &work));
            fsdp_work_release(work);
            host_unit_drop(&passing);
        }
        OK(fsdp_model_set_gradient_sync(model, i % 3 == 2));
        OK(fsdp_unit_unshard(u.unit, &work));
        fsdp_work_release(work);
        OK(fsdp_unit_pre_forward(u.unit));
        memset(u.full[0]->dl_tensor.data, i, 5000);
        OK(fsdp_unit_post_forward(u.unit));
        OK(fsdp_unit_pre_backward(u.unit));
        DLTensor t = view(memory, DTYPE_F32, 2, stays[0].shape);
        const DLTensor *grads[] = {&t, NULL};
        OK(fsdp_unit_post_backward(u.unit, grads, 2, &work));
        fsdp_work_release(work);
        OK(fsdp_model_finish_backward(model));
        if (i % 50 == 49) OK(fsdp_model_reset(model));
        if (i == 99) {
            pss = pss_bytes();
            fds = entries_in("/proc/self/fd");
            maps = lines_in("/proc/self/maps");
        }
    }
    OK(fsdp_barrier(group, NULL));
    int64_t grown = pss_bytes() - pss;
    OK(fsdp_barrier(group, NULL)); /* a rank that lets go of shared pages makes them the other's alone */
    CHECK(SANITIZED || grown < 256 * 1024, "grew by %lld bytes", (long long)grown);
    int alone = !getenv("FSDP_TEST_THREADS"); /* other ranks in this process open and close, too */
    CHECK(!alone || entries_in("/proc/self/fd") == fds, "%lld descriptors",
          (long long)(entries_in("/proc/self/fd") - fds));
    CHECK(SANITIZED || lines_in("/proc/self/maps") - maps < 8, "%lld mappings",
          (long long)(lines_in("/proc/self/maps") - maps));
    fsdp_memory_info info = memory_of(model);
    CHECK(info.unsharded == 65 * 64 * 4 + 18, "%lld unsharded bytes are left", (long long)info.unsharded);
    free(memory);
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_memory, iterations_do_not_grow)
{
    ranks_run(2, rank_growth, NULL);
}

/* ---- memory runs out on one rank while a unit is made: all hear of it, nothing is left, and the next one is
 * made */

static void rank_exhausted(struct rank *r)
{
    static const struct spec specs[] = {{"w", DTYPE_F32, 2, {2048, 1024}, 0}}; /* 8 MiB */
    fsdp_group *group = group_make(r, 0, 0);
    for (int private = 0; private < 2; private ++)
        for (int poor = 0; poor < r->size; poor++) {
            fsdp_model *model = model_make(group, &(fsdp_model_options){.private_unshard = private});
            int refusals = 0, made = 0;
            /* Enough for the first mapping, for the second, ... */
            for (int64_t room = 0; room < 64 * MIB && !made; room += 2 * MIB) {
                float *values = calloc(2048 * 1024, sizeof *values);
                DLTensor full = view(values, DTYPE_F32, 2, specs[0].shape);
                fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = &full};
                int64_t maps = lines_in("/proc/self/maps");
                struct rlimit before, now;
                getrlimit(RLIMIT_AS, &before);
                now = before;
                now.rlim_cur = (rlim_t)(from_file("/proc/self/status", "VmSize:") * 1024 + MIB / 2 + room);
                fsdp_unit *unit = NULL;
                if (r->rank == poor) setrlimit(RLIMIT_AS, &now);
                fsdp_status status = fsdp_unit_create(model, "large", &param, 1, NULL, &unit);
                setrlimit(RLIMIT_AS, &before);
                free(values);
                made = status == FSDP_OK;
                if (made) {
                    fsdp_unit_release(unit);
                    continue;
                }
                refusals++;
                CHECK(status == FSDP_ERR_NOMEM && !unit, "%s", fsdp_last_error());
                CHECK(r->rank == poor || strstr(fsdp_last_error(), "reported"), "%s", fsdp_last_error());
                CHECK(lines_in("/proc/self/maps") <= maps, "mappings are left after a refusal");
                fsdp_memory_info info = memory_of(model);
                CHECK(info.shards == 0 && info.unsharded == 0, "something is left after a refusal");
            }
            CHECK(made && refusals >= 2, "%d refusals", refusals);
            fsdp_model_release(model);
        }
    fsdp_group_release(group);
}

Test(fsdp_memory, a_rank_without_memory_is_heard_by_all)
{
    if (SANITIZED) cr_skip("sanitizers need the address space");
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_exhausted, NULL);
}

/* Every allocation fails once, on a group of one: an error, nothing leaked, and the next try succeeds. */
static struct {
    _Atomic int until; /* allocations that succeed before the one that fails; -1: all do */
    _Atomic int blocks;
} heap = {.until = -1};

static void *heap_alloc(size_t bytes, void *user)
{
    if (heap.until == 0) {
        heap.until = -1;
        return NULL;
    }
    if (heap.until > 0) heap.until--;
    heap.blocks++;
    return malloc(bytes);
}

static void heap_free(void *block, void *user)
{
    heap.blocks--;
    free(block);
}

static fsdp_status live_once(fsdp_group *group, int private)
{
    static const struct spec specs[] = {{"w", DTYPE_F32, 2, {5, 3}, 0}, {"b", DTYPE_BF16, 1, {4}, 0}};
    fsdp_model_options options = {.struct_size = sizeof options, .private_unshard = private};
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    DLManagedTensorVersioned *full = NULL;
    fsdp_work *works[3] = {NULL};
    float memory[40] = {0};
    int64_t strides[] = {6, 2};
    DLTensor w = view(memory, DTYPE_F32, 2, specs[0].shape), b = view(memory, DTYPE_BF16, 1, specs[1].shape);
    w.strides = strides;
    const DLTensor *grads[] = {&w, &b};
    fsdp_param params[] = {{.struct_size = sizeof *params, .name = "w", .full = &w},
                           {.struct_size = sizeof *params, .name = "b", .full = &b}};
    fsdp_status status = fsdp_model_create(group, &options, &model);
    if (status == FSDP_OK) status = fsdp_unit_create(model, NULL, params, 2, NULL, &unit);
    if (status == FSDP_OK) status = fsdp_unit_param_full(unit, 0, &full);
    for (int m = 0; m < 3 && status == FSDP_OK; m++) {
        status = fsdp_model_set_gradient_sync(model, m == 1);
        if (status == FSDP_OK) status = fsdp_unit_unshard(unit, m ? &works[0] : NULL);
        fsdp_work_release(works[0]);
        works[0] = NULL;
        if (status == FSDP_OK) status = fsdp_unit_post_backward(unit, grads, 2, m ? &works[m] : NULL);
        if (status == FSDP_OK) status = fsdp_model_finish_backward(model);
    }
    if (status == FSDP_OK) status = fsdp_model_reset(model);
    for (int i = 0; i < 3; i++) fsdp_work_release(works[i]);
    if (full) full->deleter(full);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    return status;
}

Test(fsdp_memory, every_allocation_may_fail)
{
    cr_assert(fsdp_set_allocator(heap_alloc, heap_free, NULL) == FSDP_OK);
    for (int private = 0; private < 2; private ++) {
        fsdp_group *group;
        cr_assert(fsdp_group_create(NULL, NULL, &group) == FSDP_OK);
        cr_assert(live_once(group, private) == FSDP_OK, "%s", fsdp_last_error());
        int failed = 0, blocks = heap.blocks;
        for (int at = 0;; at++) {
            heap.until = at;
            fsdp_status status = live_once(group, private);
            int used = heap.until < 0;
            heap.until = -1;
            for (int i = 0; i < 1000 && heap.blocks > blocks; i++) nap(100); /* works let go on the progress thread */
            cr_assert(heap.blocks == blocks, "%d blocks are left after allocation %d failed", heap.blocks - blocks, at);
            if (!used) break;
            failed++;
            cr_assert(status == FSDP_ERR_NOMEM, "allocation %d: %s", at, fsdp_last_error());
        }
        cr_assert(failed > 20, "only %d allocations", failed);
        fsdp_group_release(group);
    }
    cr_assert(heap.blocks == 0, "%d blocks are left", heap.blocks);
}
