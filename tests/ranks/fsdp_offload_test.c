/* offload_dir: shards and sharded gradients in a file on disk give the same bits as in memory, leave nothing behind
 * in the folder however the process ends, leave memory when they are not in use, and what is wrong with the folder is
 * said.
 *
 * File systems that are full or read-only are made in a mount namespace of the rank's own, which goes with it; where
 * the kernel doesn't allow that, such a test says so and passes. */
#include "fsdp_host.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(fsdp_offload, .timeout = RANKS_SECONDS + 30);

#define UNITS 3

static char folder[64]; /* the test's own; ranks inherit its name */

static void make_folder(void)
{
    snprintf(folder, sizeof folder, "/tmp/fsdp-offload-XXXXXX");
    cr_assert(mkdtemp(folder));
}

static int entries(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    CHECK(dir, "%s: %s", path, strerror(errno));
    for (struct dirent *e; (e = readdir(dir));) n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return n;
}

/* rmdir succeeds on an empty folder only. */
static void drop_folder(void)
{
    cr_assert_eq(rmdir(folder), 0, "%s: %s", folder, strerror(errno));
}

/* ---- a model in memory and one on disk, trained alike */

struct plan {
    int64_t mesh[2];
    fsdp_model_options options;
    uint64_t seed;
};

static const int64_t shapes[UNITS][2] = {{37, 11}, {3, 700}, {1, 5}};

struct twin {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    DLManagedTensorVersioned *full[UNITS], *shard[UNITS], *grad[UNITS];
};

static void twin_make(const struct plan *plan, fsdp_group *group, const char *where, struct twin *t)
{
    static const char *const dims[] = {"replicate", "shard"};
    fsdp_model_options options = plan->options;
    options.struct_size = sizeof options;
    options.offload_dir = where;
    *t = (struct twin){0};
    if (plan->mesh[0]) {
        OK(fsdp_mesh_create(group, 2, plan->mesh, dims, &t->mesh));
        OK(fsdp_model_create_on_mesh(t->mesh, &options, &t->model));
    } else {
        OK(fsdp_model_create(group, &options, &t->model));
    }
    for (int u = 0; u < UNITS; u++) {
        uint64_t random = plan->seed + (uint64_t)u;
        float *values = malloc((size_t)(shapes[u][0] * shapes[u][1]) * sizeof *values);
        for (int64_t k = 0; k < shapes[u][0] * shapes[u][1]; k++) values[k] = (float)random_real(&random);
        DLTensor full = view(values, DTYPE_F32, 2, shapes[u]);
        char name[16];
        snprintf(name, sizeof name, "u%d", u);
        fsdp_param param = {.struct_size = sizeof param, .name = name, .full = &full};
        OK(fsdp_unit_create(t->model, name, &param, 1, NULL, &t->unit[u]));
        OK(fsdp_unit_param_full(t->unit[u], 0, &t->full[u]));
        OK(fsdp_unit_param_shard(t->unit[u], 0, &t->shard[u]));
        OK(fsdp_unit_param_grad(t->unit[u], 0, &t->grad[u]));
        free(values);
    }
}

static void twin_drop(struct twin *t)
{
    for (int u = 0; u < UNITS; u++) {
        t->full[u]->deleter(t->full[u]);
        t->shard[u]->deleter(t->shard[u]);
        t->grad[u]->deleter(t->grad[u]);
        fsdp_unit_release(t->unit[u]);
    }
    fsdp_model_release(t->model);
    fsdp_mesh_release(t->mesh);
}

static void twin_backward(struct twin *t, int u, uint64_t random, int async, float *g)
{
    for (int64_t k = 0; k < shapes[u][0] * shapes[u][1]; k++) g[k] = (float)random_real(&random);
    DLTensor grad = view(g, DTYPE_F32, 2, shapes[u]);
    const DLTensor *grads[] = {&grad};
    fsdp_work *work = NULL;
    OK(fsdp_unit_pre_backward(t->unit[u]));
    OK(fsdp_unit_post_backward(t->unit[u], grads, 1, async ? &work : NULL));
    fsdp_work_release(work);
}

static void twin_iterate(struct twin *t, struct rank *r, uint64_t seed, int accumulates)
{
    float *g[2][UNITS];
    for (int micro = 0; micro < 2; micro++) {
        OK(fsdp_model_set_gradient_sync(t->model, micro || !accumulates));
        for (int u = 0; u < UNITS; u++) {
            OK(fsdp_unit_pre_forward(t->unit[u]));
            OK(fsdp_unit_post_forward(t->unit[u]));
        }
        for (int u = UNITS - 1; u >= 0; u--)
            twin_backward(t, u, seed + (uint64_t)((micro * UNITS + u) * 8 + r->rank), u % 2,
                          g[micro][u] = malloc((size_t)(shapes[u][0] * shapes[u][1]) * sizeof(float)));
    }
    OK(fsdp_model_finish_backward(t->model));
    for (int k = 0; k < 2 * UNITS; k++) free(g[k / UNITS][k % UNITS]);
}

static void expect_equal(const DLTensor *a, const DLTensor *b, const char *what, int iteration, int u)
{
    CHECK(tensor_bytes(a) == tensor_bytes(b) && (!tensor_bytes(a) || memcmp(a->data, b->data, tensor_bytes(a)) == 0),
          "iteration %d: unit %d's %s on disk is not what it is in memory", iteration, u, what);
}

static void twin_step(struct twin *t)
{
    for (int u = 0; u < UNITS; u++) {
        float *shard = t->shard[u]->dl_tensor.data;
        const float *grad = t->grad[u]->dl_tensor.data;
        for (int64_t k = 0; k < elements(&t->shard[u]->dl_tensor); k++) shard[k] -= 0.1f * grad[k];
    }
}

static void rank_twins(struct rank *r)
{
    const struct plan *plan = r->argument;
    fsdp_group *group = group_make(r, 0, 0);
    struct twin memory, disk;
    twin_make(plan, group, NULL, &memory);
    twin_make(plan, group, folder, &disk);
    for (int iteration = 0; iteration < 4; iteration++) {
        double norms[2];
        twin_iterate(&memory, r, plan->seed + (uint64_t)iteration * 977, iteration % 2);
        twin_iterate(&disk, r, plan->seed + (uint64_t)iteration * 977, iteration % 2);
        for (int u = 0; u < UNITS; u++)
            expect_equal(&memory.grad[u]->dl_tensor, &disk.grad[u]->dl_tensor, "gradient", iteration, u);
        OK(fsdp_model_clip_grad_norm(memory.model, 0.5, 2, 1, &norms[0]));
        OK(fsdp_model_clip_grad_norm(disk.model, 0.5, 2, 1, &norms[1]));
        CHECK(norms[0] == norms[1] && norms[0] > 0, "iteration %d: norms %.17g and %.17g", iteration, norms[0],
              norms[1]);
        twin_step(&memory);
        twin_step(&disk);
        if (iteration != 1) OK(fsdp_model_zero_grad(memory.model));
        if (iteration != 1) OK(fsdp_model_zero_grad(disk.model));
        for (int u = 0; u < UNITS; u++) {
            expect_equal(&memory.shard[u]->dl_tensor, &disk.shard[u]->dl_tensor, "shard", iteration, u);
            OK(fsdp_unit_unshard(memory.unit[u], NULL));
            OK(fsdp_unit_unshard(disk.unit[u], NULL));
            expect_equal(&memory.full[u]->dl_tensor, &disk.full[u]->dl_tensor, "full view", iteration, u);
            OK(fsdp_unit_reshard(memory.unit[u]));
            OK(fsdp_unit_reshard(disk.unit[u]));
        }
    }
    fsdp_memory_info a = memory_of(memory.model), b = memory_of(disk.model);
    CHECK(a.shards == b.shards && a.gradients == b.gradients, "what is on disk is counted otherwise");
    CHECK(entries(folder) == 0, "the files in offload_dir have names");
    twin_drop(&memory);
    twin_drop(&disk);
    fsdp_group_release(group);
}

Test(fsdp_offload, shards_on_disk_give_the_same_bits_as_in_memory)
{
    make_folder();
    for (int s = FSDP_FULL_SHARD; s <= FSDP_HYBRID_SHARD_GRAD_OP; s++)
        for (int n = 1; n <= 4; n++) {
            struct plan plan = {.options = {.strategy = s,
                                            .private_unshard = n == 3,
                                            .forward_prefetch = n % 3,
                                            .backward_prefetch = n % 3},
                                .seed = random_seed()};
            if (s >= FSDP_HYBRID_SHARD && n != 4) continue;
            if (n == 4) plan.mesh[0] = plan.mesh[1] = 2;
            ranks_run(n, rank_twins, &plan);
        }
    drop_folder();
}

/* ---- memory */

#define LARGE ((int64_t)4 << 20) /* elements */

static fsdp_status large_unit(fsdp_model *model, int64_t rows, fsdp_unit **unit)
{
    DLTensor full = view(NULL, DTYPE_F32, 1, &rows);
    fsdp_param param = {.struct_size = sizeof param, .name = "large", .full = &full, .meta = 1};
    return fsdp_unit_create(model, "large", &param, 1, NULL, unit);
}

static fsdp_model *model_in(fsdp_group *group, const char *where)
{
    fsdp_model_options options = {.offload_dir = where};
    return model_make(group, &options);
}

/* Kilobytes of the mapping around `at` that this process holds. */
static long resident(const void *at)
{
    char line[512];
    unsigned long from, to;
    long kb = -1;
    int here = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps, "smaps: %s", strerror(errno));
    while (kb < 0 && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) here = (uintptr_t)at >= from && (uintptr_t)at < to;
        if (here) sscanf(line, "Rss: %ld kB", &kb);
    }
    fclose(maps);
    return kb;
}

static int descriptors(void)
{
    return entries("/proc/self/fd");
}

static void rank_resident(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    int before = descriptors();
    fsdp_model *model = model_in(group, folder);
    fsdp_unit *unit;
    DLManagedTensorVersioned *shard, *grad;
    OK(large_unit(model, LARGE, &unit));
    OK(fsdp_unit_param_shard(unit, 0, &shard));
    OK(fsdp_unit_param_grad(unit, 0, &grad));
    float *values = shard->dl_tensor.data, *ones = malloc((size_t)LARGE * sizeof *ones);
    int64_t count = elements(&shard->dl_tensor), whole = count * 4 / 1024;
    for (int64_t k = 0; k < LARGE; k++) ones[k] = 1;
    for (int64_t k = 0; k < count; k++) values[k] = (float)k;
    CHECK(resident(values) >= whole, "what was just written is in memory");
    OK(fsdp_unit_pre_forward(unit));
    CHECK(resident(values) < whole / 4, "%ld of %lld kB of the shards stay in memory once they are published",
          resident(values), (long long)whole);
    OK(fsdp_unit_pre_backward(unit));
    DLTensor given = view(ones, DTYPE_F32, 1, (int64_t[]){LARGE});
    OK(fsdp_unit_post_backward(unit, (const DLTensor *[]){&given}, 1, NULL));
    OK(fsdp_model_finish_backward(model));
    CHECK(resident(grad->dl_tensor.data) < whole / 4, "%ld of %lld kB of the gradients stay in memory after backward",
          resident(grad->dl_tensor.data), (long long)whole);
    for (int64_t k = 0; k < count; k += 511) {
        CHECK(values[k] == (float)k, "a shard's element %lld is %g", (long long)k, (double)values[k]);
        CHECK(((float *)grad->dl_tensor.data)[k] == 1, "a gradient's element %lld is wrong", (long long)k);
    }
    CHECK(entries(folder) == 0, "the files in offload_dir have names");
    shard->deleter(shard);
    grad->deleter(grad);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    CHECK(descriptors() <= before + 1 || r->size == 1, "%d descriptors were open, and %d are", before, descriptors());
    free(ones);
    fsdp_group_release(group);
}

Test(fsdp_offload, what_is_not_in_use_leaves_memory)
{
    make_folder();
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_resident, NULL);
    drop_folder();
}

/* ---- the folder */

/* A file system of this rank's own over the test's folder; 0: not allowed here. */
static int mount_own(const char *options, unsigned long flags)
{
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", folder, "tmpfs", flags, options)) {
        fprintf(stderr, "no mounts here: %s\n", strerror(errno));
        return 0;
    }
    return 1;
}

/* With what is refused gone, the same model makes units. */
static void expect_usable(fsdp_model *model, int64_t rows)
{
    fsdp_unit *unit;
    OK(large_unit(model, rows, &unit));
    OK(fsdp_unit_unshard(unit, NULL));
    fsdp_unit_release(unit);
}

static void rank_missing(struct rank *r)
{
    char path[128];
    fsdp_unit *unit;
    fsdp_group *group = group_make(r, 0, 0);
    snprintf(path, sizeof path, "%s/none", folder);
    fsdp_model *model = model_in(group, path);
    REFUSED(large_unit(model, 1000, &unit), FSDP_ERR_SYSTEM, "offload_dir");
    CHECK(strstr(fsdp_last_error(), path) && strstr(fsdp_last_error(), "No such file"), "%s", fsdp_last_error());
    OK(fsdp_barrier(group, NULL));
    if (r->rank == 0) mkdir(path, 0700);
    OK(fsdp_barrier(group, NULL));
    expect_usable(model, 1000);
    fsdp_model_release(model);
    OK(fsdp_barrier(group, NULL));
    if (r->rank == 0) rmdir(path);

    /* A file; and wrong on one rank alone, which all are told of. */
    snprintf(path, sizeof path, "%s/file%d", folder, r->rank);
    close(open(path, O_CREAT | O_RDWR, 0600));
    model = model_in(group, path);
    REFUSED(large_unit(model, 1000, &unit), FSDP_ERR_SYSTEM, "Not a directory");
    fsdp_model_release(model);
    int last = r->rank == r->size - 1;
    model = model_in(group, last ? path : folder);
    REFUSED(large_unit(model, 1000, &unit), FSDP_ERR_SYSTEM, last ? "Not a directory" : "reported");
    fsdp_model_release(model);
    unlink(path);
    fsdp_group_release(group);
}

Test(fsdp_offload, a_folder_that_is_none_is_told_by_name)
{
    make_folder();
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_missing, NULL);
    drop_folder();
}

static void rank_read_only(struct rank *r)
{
    fsdp_unit *unit;
    fsdp_group *group = group_make(r, 0, 0);
    if (mount_own("size=1m", MS_RDONLY)) {
        fsdp_model *model = model_in(group, folder);
        REFUSED(large_unit(model, 1000, &unit), FSDP_ERR_SYSTEM, "Read-only");
        CHECK(strstr(fsdp_last_error(), folder), "%s", fsdp_last_error());
        CHECK(mount(NULL, folder, NULL, MS_REMOUNT, NULL) == 0, "%s", strerror(errno));
        OK(fsdp_barrier(group, NULL));
        expect_usable(model, 1000);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_offload, a_read_only_folder_is_told)
{
    make_folder();
    ranks_run(2, rank_read_only, NULL);
    drop_folder();
}

static void rank_full(struct rank *r)
{
    fsdp_unit *unit;
    fsdp_group *group = group_make(r, 0, 0);
    if (mount_own("size=1m", 0)) {
        fsdp_model *model = model_in(group, folder);
        struct statvfs before, after;
        statvfs(folder, &before);
        REFUSED(large_unit(model, LARGE, &unit), FSDP_ERR_NOMEM, "No space left");
        CHECK(strstr(fsdp_last_error(), folder), "%s", fsdp_last_error());
        statvfs(folder, &after);
        CHECK(before.f_bfree == after.f_bfree, "a unit that was refused keeps space");
        /* The shards fit, their gradients don't. */
        REFUSED(large_unit(model, 160000 * r->size, &unit), FSDP_ERR_NOMEM, "No space left");
        statvfs(folder, &after);
        CHECK(before.f_bfree == after.f_bfree, "half a unit that was refused keeps space");
        expect_usable(model, 100000 * r->size);
        statvfs(folder, &after);
        CHECK(before.f_bfree == after.f_bfree, "a unit that has gone keeps space");
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_offload, a_full_disk_is_told_before_anything_is_written)
{
    make_folder();
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_full, NULL);
    drop_folder();
}

static void rank_limited(struct rank *r)
{
    fsdp_unit *unit;
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_in(group, folder);
    struct rlimit limit = {1 << 20, RLIM_INFINITY};
    OK(fsdp_barrier(group, NULL));
    if (r->rank == r->size - 1) setrlimit(RLIMIT_FSIZE, &limit); /* one rank's; all are told */
    OK(fsdp_barrier(group, NULL));
    REFUSED(large_unit(model, LARGE, &unit), FSDP_ERR_NOMEM, "ulimit -f");
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_offload, a_file_size_limit_is_told)
{
    make_folder();
    for (int n = 1; n <= 2; n++) ranks_run(n, rank_limited, NULL);
    drop_folder();
}

/* A process that is killed leaves no file and keeps no space. */
static void rank_killed(struct rank *r)
{
    int mounted = mount_own("size=16m", 0), ready[2];
    struct statvfs before, during, after;
    char byte;
    CHECK(pipe(ready) == 0, "pipe: %s", strerror(errno));
    statvfs(folder, &before);
    pid_t child = fork();
    if (child == 0) {
        fsdp_group *group;
        fsdp_unit *unit;
        alarm(RANKS_SECONDS);
        OK(fsdp_group_create(NULL, NULL, &group));
        OK(large_unit(model_in(group, folder), 1 << 20, &unit));
        OK(fsdp_unit_pre_forward(unit));
        CHECK(write(ready[1], "x", 1) == 1, "pipe");
        for (;;) pause();
    }
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 1, "the child has died");
    statvfs(folder, &during);
    CHECK(entries(folder) == 0, "the files in offload_dir have names");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    statvfs(folder, &after);
    CHECK(entries(folder) == 0, "a killed process left files in offload_dir");
    if (!mounted) return;
    uint64_t used = (uint64_t)(before.f_bfree - during.f_bfree) * before.f_bsize;
    CHECK(used >= 2 << 22, "shards and gradients take only %llu bytes there", (unsigned long long)used);
    CHECK(after.f_bfree == before.f_bfree, "a killed process keeps space");
}

Test(fsdp_offload, a_killed_process_leaves_nothing_in_the_folder)
{
    make_folder();
    ranks_run(1, rank_killed, NULL);
    drop_folder();
}
