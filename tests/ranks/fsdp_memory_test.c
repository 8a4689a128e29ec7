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
        int64_t page = sysconf(_SC_PAGESIZE); /* each unit takes less */
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
        EXPECT(largest_unit, b[0].all);
        EXPECT(shards, sum.shard);
        EXPECT(host_shards, sum.all);
        EXPECT(gradients, sum.trainable_shard);
        EXPECT(host_gradients, r->size * sum.trainable_shard);
        EXPECT(unsharded, 0);
        EXPECT(host_unsharded, 0);
        EXPECT(slots, 0);
        EXPECT(published_bytes, 0);
        EXPECT(reduced_bytes, 0);

        /* One step, twice over every unit. All take one slot in turn, so backward finds the last one's parameters in
         * it, and publishes the others' anew. */
        uint64_t before = operations_of(group);
        for (int i = 0; i < UNITS; i++) {
            OK(fsdp_unit_pre_forward(host[i].unit));
            OK(fsdp_unit_pre_forward(host[i].unit));
            EXPECT(unsharded, page);
            EXPECT(host_unsharded, private ? r->size * page : page);
            OK(fsdp_unit_post_forward(host[i].unit));
        }
        EXPECT(published_bytes, sum.shard);
        CHECK(operations_of(group) == before + UNITS + (private ? 1 : 2), "operations of forward");
        before = operations_of(group);
        for (int i = UNITS - 1; i >= 0; i--) {
            OK(fsdp_unit_pre_backward(host[i].unit));
            CHECK(operations_of(group) == before + 2 * (uint64_t)(UNITS - 1 - i) - (i < 2), "operations of backward");
            OK(give_ones(&host[i], NULL));
        }
        EXPECT(published_bytes, sum.shard + b[0].shard + b[1].shard);
        EXPECT(reduced_bytes, sum.trainable);
        OK(fsdp_model_finish_backward(model));
        EXPECT(slots, 1);
        EXPECT(unsharded, page);
        EXPECT(unsharded_peak, page);
        EXPECT(host_unsharded_peak, private ? r->size * page : page);

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
        EXPECT(gradients, sum.trainable_shard + sum.wide); /* kept for the next time, until a reset */
        EXPECT(reduced_bytes, sum.trainable + sum.wide);
        OK(fsdp_model_set_gradient_sync(model, 0));
        OK(give_ones(&host[0], NULL));
        OK(fsdp_model_zero_grad(model));
        EXPECT(gradients, sum.trainable_shard + sum.wide);
        OK(fsdp_model_reset(model));
        EXPECT(gradients, sum.trainable_shard);
        EXPECT(gradients_peak, sum.trainable_shard + sum.wide);
        EXPECT(slots, 0); /* ranks may have come to hold different ones */
        EXPECT(host_unsharded, 0);
        OK(fsdp_unit_unshard(host[1].unit, NULL));
        EXPECT(slots, 1);

        /* Slots are kept until the model goes, for units to come. What was moved stays counted. */
        int64_t published = memory_of(model).published_bytes;
        for (int i = 0; i < UNITS; i++) host_unit_drop(&host[i]);
        EXPECT(shards, 0);
        EXPECT(host_shards, 0);
        EXPECT(gradients, 0);
        EXPECT(total_parameters, 0);
        EXPECT(slots, 1);
        EXPECT(unsharded, page);
        EXPECT(published_bytes, published);
        EXPECT(reduced_bytes, sum.trainable + sum.wide);
        EXPECT(shards_peak, sum.shard);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_memory, counters_equal_the_arithmetic)
{
    for (int n = 1; n <= 4; n++) ranks_run(n, rank_counters, NULL);
}

/* Every forward publishes, whatever came before; backward takes what forward published. */
static void republish(struct rank *r, fsdp_group *group, int private)
{
    fsdp_model *model = model_make(group, &(fsdp_model_options){.private_unshard = private});
    struct host_unit u;
    host_unit_make(r, model, NULL, second, 2, 0, &u);
    OK(fsdp_unit_pre_forward(u.unit)); /* makes the slot */
    OK(fsdp_unit_reshard(u.unit));
    uint64_t begun = operations_of(group);
    OK(fsdp_unit_pre_forward(u.unit));
    OK(fsdp_unit_pre_forward(u.unit));
    CHECK(operations_of(group) == begun + 1, "the first publishes, the second finds it done");
    OK(fsdp_unit_post_forward(u.unit));
    OK(fsdp_unit_pre_backward(u.unit));
    CHECK(operations_of(group) == begun + 1, "before backward nothing is published");
    OK(fsdp_model_finish_backward(model));
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
    OK(fsdp_unit_pre_backward(u.unit));
    OK(fsdp_unit_pre_forward(u.unit)); /* run again inside backward: what was published for it */
    OK(fsdp_unit_post_forward(u.unit));
    CHECK(state_of(&u) == FSDP_UNIT_UNSHARDED, "resharded before its backward was over");
    OK(fsdp_unit_reshard(u.unit));
    OK(fsdp_unit_pre_forward(u.unit));
    expect_full(&u, 3, "in a forward inside backward");
    CHECK(operations_of(group) == begun + 5, "a forward inside backward published");
    host_unit_drop(&u);
    fsdp_model_release(model);
}

static void rank_republish(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int private = 0; private < 2; private ++) republish(r, group, private);
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

struct stages { /* what the host holds against what it should, in MiB */
    struct rank *r;
    fsdp_group *group;
    fsdp_model *model;
    int64_t empty; /* bytes, before there was a model */
};

/* The ranks' PSS together: shards, slots as the counters say, and what was edited. */
static void stage(const struct stages *s, const char *when, int64_t shards, int64_t slots, int64_t edits)
{
    fsdp_memory_info info = memory_of(s->model);
    int64_t copies = info.unsharded ? info.host_unsharded / info.unsharded : 0;
    double got = (double)(host_bytes(s->r, s->group) - s->empty) / (double)MIB, want = (double)(shards + edits);
    CHECK(info.host_shards == shards * MIB, "%s: %lld bytes of shards", when, (long long)info.host_shards);
    CHECK(info.unsharded == slots * MIB, "%s: slots of %lld bytes", when, (long long)info.unsharded);
    want += (double)(slots * copies);
    CHECK(got > want - 3 && got < want + 3, "%s, %lld copies: %.1f MiB on the host, not %.0f", when, (long long)copies,
          got, want);
}

/* Without values of its own: its shards are written here. */
static void meta_unit(fsdp_model *model, const struct spec *spec, struct host_unit *u)
{
    DLTensor t = view(NULL, spec->type, spec->ndim, spec->shape);
    fsdp_param param = {.struct_size = sizeof param, .name = spec->name, .full = &t, .frozen = spec->frozen, .meta = 1};
    *u = (struct host_unit){.n = 1};
    OK(fsdp_unit_create(model, spec->name, &param, 1, NULL, &u->unit));
    OK(fsdp_unit_param_full(u->unit, 0, &u->full[0]));
    OK(fsdp_unit_param_shard(u->unit, 0, &u->shard[0]));
    memset(u->shard[0]->dl_tensor.data, 0x3f, tensor_bytes(&u->shard[0]->dl_tensor));
}

static void touch(const struct host_unit *u)
{
    const DLTensor *t = &u->full[0]->dl_tensor;
    double sum = 0;
    for (int64_t k = 0; k < elements(t); k += 512) sum += (double)((float *)t->data)[k];
    CHECK(sum > 0, "values");
}

static void pss(struct rank *r, fsdp_group *group, int private)
{
    static const struct spec large[] = {{"w", DTYPE_F32, 2, {3072, 4096}, 1}}, /* 48 MiB; frozen: no gradients */
        medium[] = {{"v", DTYPE_F32, 2, {2048, 4096}, 1}}, small[] = {{"u", DTYPE_F32, 2, {1024, 4096}, 1}};
    struct stages s = {.r = r, .group = group, .empty = host_bytes(r, group)};
    s.model = model_make(group, &(fsdp_model_options){.private_unshard = private});
    struct host_unit u[3];
    meta_unit(s.model, small, &u[0]);
    meta_unit(s.model, large, &u[1]);
    meta_unit(s.model, medium, &u[2]);
    stage(&s, "sharded", 96, 0, 0);
    for (int i = 0; i < 3; i++) {
        OK(fsdp_unit_unshard(u[i].unit, NULL));
        touch(&u[i]);
        stage(&s, "one in turn", 96, i ? 48 : 16, 0); /* what was too small is gone, whoever still shows it */
        OK(fsdp_unit_reshard(u[i].unit));
    }
    OK(fsdp_unit_unshard(u[1].unit, NULL));
    if (r->rank == 0) memset(u[1].full[0]->dl_tensor.data, 1, 12 * MIB); /* a private edit is memory */
    stage(&s, "edited", 96, 48, 12);
    OK(fsdp_unit_unshard(u[2].unit, NULL));
    touch(&u[2]);
    stage(&s, "two at once", 96, 48 + 32, 12);
    OK(fsdp_unit_reshard(u[1].unit));
    OK(fsdp_unit_unshard(u[1].unit, NULL)); /* where edits are dropped */
    OK(fsdp_unit_reshard(u[1].unit));
    OK(fsdp_unit_reshard(u[2].unit));
    stage(&s, "resharded", 96, 48 + 32, 0);
    for (int i = 0; i < 3; i++) host_unit_drop(&u[i]);
    stage(&s, "without units", 0, 48 + 32, 0);
    fsdp_model_release(s.model);
    s.model = model_make(group, NULL);
    stage(&s, "without the model", 0, 0, 0);
    fsdp_model_release(s.model);
}

static void rank_pss(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int private = 0; private < 2; private ++) pss(r, group, private);
    fsdp_group_release(group);
}

Test(fsdp_memory, the_host_holds_shards_and_slots_and_nothing_else)
{
    if (SANITIZED) cr_skip("the sanitizer's own memory moves");
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_pss, NULL);
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
    for (int i = 0; i < 503; i++) {
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
        if (i % 50 == 48) OK(fsdp_model_reset(model)); /* slots are made anew in the next two iterations */
        if (i == 102) {
            pss = pss_bytes();
            fds = entries_in("/proc/self/fd");
            maps = lines_in("/proc/self/maps");
        }
    }
    OK(fsdp_barrier(group, NULL)); /* as at 102: two iterations after a reset, the passing unit gone */
    int64_t grown = pss_bytes() - pss;
    OK(fsdp_barrier(group, NULL)); /* a rank that lets go of shared pages makes them the other's alone */
    CHECK(SANITIZED || grown < 256 * 1024, "grew by %lld bytes", (long long)grown);
    int alone = !getenv("FSDP_TEST_THREADS"); /* other ranks in this process open and close, too */
    CHECK(!alone || entries_in("/proc/self/fd") == fds, "%lld descriptors",
          (long long)(entries_in("/proc/self/fd") - fds));
    CHECK(SANITIZED || lines_in("/proc/self/maps") - maps < 8, "%lld mappings",
          (long long)(lines_in("/proc/self/maps") - maps));
    fsdp_memory_info info = memory_of(model);
    CHECK(info.slots == 2 && info.unsharded == specs_slot_bytes(stays, 2) + specs_slot_bytes(goes, 1),
          "%lld slots of %lld bytes", (long long)info.slots, (long long)info.unsharded);
    free(memory);
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_memory, iterations_do_not_grow)
{
    ranks_run(2, rank_growth, NULL);
}

/* ---- memory runs out on one rank while a unit is made, or a slot for its first unshard: all hear of it, nothing is
 * left, and the next try goes through */

static void refused_for_memory(struct rank *r, int poor, fsdp_status status)
{
    CHECK(status == FSDP_ERR_NOMEM, "%s: %s", fsdp_status_name(status), fsdp_last_error());
    CHECK(r->rank == poor || strstr(fsdp_last_error(), "reported"), "%s", fsdp_last_error());
}

static void limit_space(int64_t more, struct rlimit *before)
{
    getrlimit(RLIMIT_AS, before);
    struct rlimit now = *before;
    now.rlim_cur = (rlim_t)(from_file("/proc/self/status", "VmSize:") * 1024 + more);
    setrlimit(RLIMIT_AS, &now);
}

/* values: 8 MiB */
static void exhaust(struct rank *r, fsdp_group *group, int private, int poor, float *values)
{
    static const int64_t shape[] = {2048, 1024};
    fsdp_model *model = model_make(group, &(fsdp_model_options){.private_unshard = private});
    int refused_units = 0, refused_slots = 0, done = 0;
    /* Enough for the first mapping, for the second, ... */
    for (int64_t room = 0; room < 64 * MIB && !done; room += 2 * MIB) {
        DLTensor tensor = view(values, DTYPE_F32, 2, shape);
        fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = &tensor};
        int64_t maps = lines_in("/proc/self/maps");
        struct rlimit before;
        fsdp_unit *unit = NULL;
        if (r->rank == poor) limit_space(MIB / 2 + room, &before);
        fsdp_status made = fsdp_unit_create(model, "large", &param, 1, NULL, &unit);
        fsdp_status unsharded = made == FSDP_OK ? fsdp_unit_unshard(unit, NULL) : FSDP_OK;
        if (r->rank == poor) setrlimit(RLIMIT_AS, &before);
        done = made == FSDP_OK && unsharded == FSDP_OK;
        refused_units += made != FSDP_OK;
        refused_slots += unsharded != FSDP_OK;
        if (made != FSDP_OK) {
            CHECK(!unit, "an output was written");
            refused_for_memory(r, poor, made);
        } else if (unsharded != FSDP_OK) {
            refused_for_memory(r, poor, unsharded);
            CHECK(memory_of(model).slots == 0 && memory_of(model).unsharded == 0, "a slot is left after a refusal");
        }
        if (refused_slots == 1 && unsharded != FSDP_OK) { /* the same unit, with room */
            OK(fsdp_unit_unshard(unit, NULL));
            DLManagedTensorVersioned *full;
            OK(fsdp_unit_param_full(unit, 0, &full));
            CHECK(memcmp(full->dl_tensor.data, values, 8 * MIB) == 0, "values after a refusal");
            full->deleter(full);
            fsdp_model_release(model); /* the unit keeps it until it goes: then the slot does, too */
            fsdp_unit_release(unit);
            unit = NULL;
            model = model_make(group, &(fsdp_model_options){.private_unshard = private});
        }
        fsdp_unit_release(unit);
        CHECK(done || lines_in("/proc/self/maps") <= maps, "mappings are left after a refusal");
        CHECK(memory_of(model).shards == 0, "shards are left after a refusal");
    }
    CHECK(done && refused_units >= 2 && refused_slots >= 1, "%d units refused, %d slots", refused_units, refused_slots);
    fsdp_model_release(model);
}

static void rank_exhausted(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    float *values = malloc(8 * MIB);
    for (int k = 0; k < 2 * MIB; k++) values[k] = (float)(k % 1000);
    for (int private = 0; private < 2; private ++)
        for (int poor = 0; poor < r->size; poor++) exhaust(r, group, private, poor, values);
    free(values);
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
