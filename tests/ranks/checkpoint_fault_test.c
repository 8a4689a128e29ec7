/* Checkpoints whose writers fail or die: at every write, sync, rename and removal; for want of memory at every
 * allocation. Afterwards there is the old checkpoint or the new one, whole, and the next save works and leaves nothing
 * behind.
 *
 * Ranks are forked here, one run after the other, and may die: see run(). What they come to is in `shared`. */
#include "checkpoint_host.h"
#include "disk_fault.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

TestSuite(checkpoint_fault, .timeout = RANKS_SECONDS * 4);

#define TIMEOUT_MS 3000

static const struct spec specs_list[] = {
    {"weight", {kDLFloat, 32, 1}, 2, {300, 1001}, ROWS}, /* of one rank more than a block */
    {"tied", {0, 0, 0}, 0, {0}, TIED},
    {"bias", {kDLFloat, 64, 1}, 1, {7}, ROWS},
    {"copied", {kDLInt, 16, 1}, 2, {5, 3}, COPIED},
    {"rng", {kDLUInt, 8, 1}, 1, {0}, OF_RANK},
};

static const struct spec large_list[] = {
    {"weight", {kDLFloat, 32, 1}, 2, {4000, 1001}, ROWS}, /* 8 blocks a rank */
    {"bias", {kDLFloat, 64, 1}, 1, {7}, ROWS},
};

static char folder[64], path[128], url[128];

/* What one run does. */
static struct {
    int ranks, faulty; /* ranks, and which of them fails */
    enum disk_fault fault;
    int at;
    int none;   /* 1: one process without a group */
    int memory; /* it is memory that fails */
    fsdp_save_options options;
    uint64_t seed;
    int open; /* not a save: it is opened and loaded */
    /* While a save in the background goes on: */
    enum meanwhile { NOTHING, FORK, ABORT, CLOSE } meanwhile; /* on rank `who` */
    int who;
    int timeout_ms;
    struct specs specs;
} job;

struct outcome {
    atomic_int ended, status, hit, leaked;
    char call[16], message[1024], calls[256];
};
static struct outcome *shared;

static void begin(void)
{
    shared = mmap(NULL, 8 * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    host_folder_make(folder);
    snprintf(path, sizeof path, "%s/c", folder);
    memset(&job, 0, sizeof job);
    job.options.struct_size = sizeof job.options;
    job.timeout_ms = TIMEOUT_MS;
    job.specs = (struct specs){.list = specs_list, .n = sizeof specs_list / sizeof *specs_list};
}

static void end(void)
{
    host_folder_remove(folder);
    munmap(shared, 8 * sizeof *shared);
}

/* ---- memory that fails */

static atomic_int armed, blocks, refused;

static void *counted_alloc(size_t bytes, void *user)
{
    if (atomic_load(&armed) > 0 && atomic_fetch_sub(&armed, 1) == 1) {
        atomic_store(&refused, 1);
        return NULL;
    }
    void *p = malloc(bytes);
    if (p) memset(p, 0xa5, bytes);
    if (p) atomic_fetch_add(&blocks, 1);
    return p;
}

static void counted_free(void *p, void *user)
{
    atomic_fetch_sub(&blocks, 1);
    free(p);
}

/* ---- a rank */

/* A child has the handle, and neither the thread nor a say in what becomes of the files. It lives on for longer. */
static pid_t fork_child(fsdp_save *saving, struct host_dict *host)
{
    pid_t child = fork();
    if (child) return child;
    fsdp_save_info info = {.struct_size = sizeof info};
    int fine = fsdp_save_wait(saving, -1) == FSDP_ERR_FORKED && fsdp_save_query(saving, &info) == FSDP_ERR_FORKED;
    fsdp_save_release(saving);
    host_dict_free(host);
    for (int i = 0; i < 10 && fine; i++) usleep(100000);
    if (SANITIZED) _exit(fine ? 7 : 8); /* what the parent's threads have looks leaked here */
    exit(fine ? 7 : 8);
}

static fsdp_status while_it_goes_on(fsdp_group **group, struct host_dict *host, fsdp_save *saving)
{
    pid_t child = 0;
    usleep(200000); /* the first block, or the second */
    if (job.meanwhile == FORK) child = fork_child(saving, host);
    if (job.meanwhile == ABORT) fsdp_group_abort(*group, "the test's word");
    if (job.meanwhile == CLOSE) {
        fsdp_group_release(*group);
        *group = NULL;
    }
    fsdp_status status = fsdp_save_wait(saving, -1);
    if (child > 0) {
        int ended = 0;
        waitpid(child, &ended, 0);
        if (!WIFEXITED(ended) || WEXITSTATUS(ended) != 7) _exit(5);
    }
    return status;
}

static fsdp_status call(fsdp_group **group, struct host_dict *host, int rank)
{
    if (job.open) {
        fsdp_checkpoint *c = NULL;
        fsdp_status status = fsdp_checkpoint_open(path, &c);
        if (status == FSDP_OK) status = fsdp_checkpoint_load(c, host->dict, NULL);
        fsdp_checkpoint_release(c);
        return status;
    }
    fsdp_save *saving = NULL;
    fsdp_status status = fsdp_checkpoint_save(*group, host->dict, path, &job.options, &saving);
    if (status == FSDP_OK && job.meanwhile && (rank == job.who || job.who < 0))
        status = while_it_goes_on(group, host, saving);
    else if (status == FSDP_OK)
        status = fsdp_save_wait(saving, -1);
    fsdp_save_release(saving);
    return status;
}

static void rank_main(int rank)
{
    struct outcome *o = &shared[rank];
    fsdp_store *store = NULL;
    fsdp_group *group = NULL;
    struct host_dict host;
    struct specs specs = job.specs;
    specs.seed = job.seed;
    if (fsdp_set_allocator(counted_alloc, counted_free, NULL) != FSDP_OK) _exit(3);
    if (!job.none) {
        fsdp_store_options so = {.struct_size = sizeof so, .world_size = job.ranks, .rank = rank, .timeout_ms = 20000};
        fsdp_group_options go = {.struct_size = sizeof go, .timeout_ms = job.timeout_ms};
        if (fsdp_store_open(url, &so, &store) || fsdp_group_create(store, &go, &group)) {
            snprintf(o->message, sizeof o->message, "meeting: %s", fsdp_last_error());
            _exit(4);
        }
    }
    int before = atomic_load(&blocks);
    memset(disk_fault_calls, 0, sizeof disk_fault_calls);
    host_dict_make(&host, &specs, rank, job.ranks, !job.open);
    if (rank == job.faulty && job.memory) atomic_store(&armed, job.at);
    if (rank == job.faulty && !job.memory) disk_fault_set(job.fault, job.at);
    fsdp_status status = call(&group, &host, rank);
    disk_fault_set(DISK_SOUND, 0);
    snprintf(o->calls, sizeof o->calls, "%s", disk_fault_calls);
    atomic_store(&armed, 0);
    atomic_store(&o->hit, rank == job.faulty && (job.memory ? atomic_load(&refused) : o->hit));
    atomic_store(&o->status, status);
    if (status != FSDP_OK) snprintf(o->message, sizeof o->message, "%s", fsdp_last_error());
    host_dict_free(&host);
    /* A background save ends its own group on its thread. */
    for (int i = 0; i < 200 && atomic_load(&blocks) != before; i++) usleep(5000);
    atomic_store(&o->leaked, status == FSDP_OK || job.memory ? atomic_load(&blocks) - before : 0);
    fsdp_group_release(group);
    fsdp_store_release(store);
    atomic_store(&o->ended, 1);
    _exit(0);
}

/* disk_fault's note of the call must survive the process: it is told as it happens. */
static void note(const char *call_name)
{
    struct outcome *o = &shared[job.faulty];
    snprintf(o->call, sizeof o->call, "%s", call_name);
    atomic_store(&o->hit, 1);
}

/* All ranks to their ends. 1: the fault was met. */
static int run(void)
{
    static int number;
    pid_t pids[8];
    memset(shared, 0, 8 * sizeof *shared);
    snprintf(url, sizeof url, "file://%s/store-%d", folder, number++);
    disk_fault_on_hit = note;
    for (int r = 0; r < job.ranks; r++) {
        pids[r] = fork();
        cr_assert(pids[r] >= 0);
        if (pids[r]) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        rank_main(r);
    }
    int dead = 0;
    time_t until = time(NULL) + (SANITIZED ? 60 : 15);
    for (int r = 0; r < job.ranks; r++) {
        int status = 0;
        pid_t got;
        while (!(got = waitpid(pids[r], &status, WNOHANG)) && time(NULL) < until) usleep(500);
        if (!got) {
            kill(pids[r], SIGKILL);
            waitpid(pids[r], &status, 0);
            cr_assert_fail("rank %d hangs: fault at %d", r, job.at);
        }
        int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && r == job.faulty;
        cr_assert(killed || (status == 0 && shared[r].ended), "rank %d ended with %x (fault at %d, %s): %s", r, status,
                  job.at, shared[job.faulty].call, shared[r].message);
        dead |= killed;
    }
    cr_assert(!dead || job.fault == DISK_KILLS || job.fault == DISK_TEARS);
    return shared[job.faulty].hit;
}

/* ---- what must be true */

static void sound_run(uint64_t seed)
{
    job.seed = seed;
    enum disk_fault fault = job.fault;
    int memory = job.memory;
    job.fault = DISK_SOUND;
    job.memory = 0;
    run();
    for (int r = 0; r < job.ranks; r++) cr_assert_eq(shared[r].status, FSDP_OK, "rank %d: %s", r, shared[r].message);
    job.fault = fault;
    job.memory = memory;
}

static int seed_there(void)
{
    struct specs specs = job.specs;
    const uint64_t seeds[] = {1, 2};
    char why[1100] = "";
    int found = host_checkpoint_seed(path, &specs, seeds, 2, why, sizeof why);
    cr_assert(found >= 0, "neither the old nor the new checkpoint is there (%s %d, rank %d, call %s): %s",
              job.memory ? "memory" : "disk", job.at, job.faulty, shared[job.faulty].call, why);
    return found + 1;
}

/* Files that are not of the checkpoint that is there. */
static int strays(void)
{
    char names[64][256];
    int n = host_files(path, names, 64), stray = 0;
    if (strstr(path, ".safetensors")) { /* one file, beside stores */
        n = host_files(folder, names, 64);
        for (int i = 0; i < n; i++) stray += strncmp(names[i], "store-", 6) != 0;
        return stray - 1;
    }
    fsdp_checkpoint *c;
    fsdp_checkpoint_info info = {.struct_size = sizeof info};
    cr_assert_eq(fsdp_checkpoint_open(path, &c), FSDP_OK);
    fsdp_checkpoint_query(c, &info);
    fsdp_checkpoint_release(c);
    return n - (int)info.n_files - (info.format == FSDP_CHECKPOINT_SHARDED || info.n_files > 1);
}

/* A save over another fails at the k-th call, for every k. before, after: max_file_bytes of the two. */
static void at_every_call(int64_t before, int64_t after)
{
    int met = 1, k, olds = 0, news = 0, there = 2;
    host_folder_remove(path);
    for (k = 1; met; k++) {
        cr_assert_lt(k, 300);
        job.options.max_file_bytes = before;
        if (there == 2) { /* else it is there still, beside what the last one left */
            sound_run(1);
            cr_expect_eq(seed_there(), 1);
            cr_expect_eq(strays(), 0, "files stay behind after the next save (%d)", k);
        }
        job.options.max_file_bytes = after;
        job.seed = 2;
        job.at = k;
        met = run();
        there = seed_there();
        *(there == 1 ? &olds : &news) += 1;
        for (int r = 0; r < job.ranks; r++) {
            if (r == job.faulty && !shared[r].ended) continue; /* it died */
            if (shared[r].status == FSDP_OK)
                cr_expect_eq(there, 2, "rank %d says that it has saved, but the old one is there (%d, %s)", r, k,
                             shared[job.faulty].call);
            else
                cr_expect(strlen(shared[r].message) > 10, "no message");
            cr_expect_eq(shared[r].leaked, 0, "rank %d: %d blocks leaked (%d, %s)", r, shared[r].leaked, k,
                         shared[job.faulty].call);
            if (!met) cr_expect_eq(shared[r].status, FSDP_OK, "%s", shared[r].message);
        }
        if (job.fault == DISK_FAILS && strcmp(shared[job.faulty].call, "unlinkat") != 0 && there == 1)
            cr_expect_eq(strays(), 0, "files stay behind (%d, %s)", k, shared[job.faulty].call);
        if (!met) cr_expect_eq(strays(), 0);
    }
    cr_expect(k > 4 && olds > 0 && news > 0, "%d runs, %d with the old, %d with the new", k, olds, news);
}

static void all_faults(void)
{
    for (job.fault = DISK_FAILS; job.fault <= DISK_TEARS; job.fault++) at_every_call(0, 0);
}

/* What is written is on the disk before it gets its name, the names of all files before the manifest has its, and that
 * before anything of the old checkpoint goes. */
Test(checkpoint_fault, each_thing_is_on_the_disk_before_the_next_relies_on_it, .init = begin, .fini = end)
{
    static const struct {
        fsdp_checkpoint_format format;
        int64_t most;
        int ranks;
        const char *first, *over, *of_rank_1;
    } cases[] = {
        {FSDP_CHECKPOINT_SHARDED, 0, 1, "wsrswsrs", "wsrswsrsu", ""},
        {FSDP_CHECKPOINT_SHARDED, 0, 2, "wsrswsrs", "wsrswsrsuu", "wsrs"},
        {FSDP_CHECKPOINT_FULL, 0, 1, "wsrs", "wsrs", ""},
        {FSDP_CHECKPOINT_FULL, 0, 2, "wsrs", "wsrs", ""},
        {FSDP_CHECKPOINT_FULL, 100000, 1, "wsrwsrswsrs", "wsrwsrswsrsuu", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (job.options.no_sync = 0; job.options.no_sync < 2; job.options.no_sync++) {
            job.options.format = cases[i].format;
            job.options.max_file_bytes = cases[i].most;
            job.ranks = cases[i].ranks;
            for (int save = 0; save < 2; save++) {
                const char *want[] = {save ? cases[i].over : cases[i].first, cases[i].of_rank_1};
                sound_run(1);
                for (int r = 0; r < job.ranks; r++) {
                    char expected[64] = "";
                    for (const char *c = want[r]; *c; c++)
                        if (*c != 's' || !job.options.no_sync) strncat(expected, c, 1);
                    cr_expect_str_eq(shared[r].calls, expected, "case %zu, rank %d, save %d: %s, not %s", i, r, save,
                                     shared[r].calls, expected);
                }
            }
            host_folder_remove(path);
        }
}

Test(checkpoint_fault, one_process_at_every_call, .init = begin, .fini = end)
{
    job.ranks = job.none = 1;
    all_faults();
}

Test(checkpoint_fault, rank_0_of_two_at_every_call, .init = begin, .fini = end)
{
    job.ranks = 2;
    all_faults();
}

Test(checkpoint_fault, rank_1_of_two_at_every_call, .init = begin, .fini = end)
{
    job.ranks = 2;
    job.faulty = 1;
    all_faults();
}

Test(checkpoint_fault, in_the_background_at_every_call, .init = begin, .fini = end)
{
    job.ranks = 2;
    job.options.background = 1;
    job.fault = DISK_FAILS;
    at_every_call(0, 0);
    job.faulty = 1;
    job.fault = DISK_KILLS;
    at_every_call(0, 0);
}

Test(checkpoint_fault, whole_tensors_at_every_call, .init = begin, .fini = end)
{
    job.options.format = FSDP_CHECKPOINT_FULL;
    job.ranks = job.none = 1;
    snprintf(path, sizeof path, "%s/c.safetensors", folder);
    all_faults();
    snprintf(path, sizeof path, "%s/c", folder);
    static const int64_t most[] = {0, 100000};
    for (int i = 0; i < 4; i++) {
        job.fault = i == 1 ? DISK_FAILS : DISK_KILLS;
        at_every_call(most[i / 2], most[i % 2]);
    }
}

Test(checkpoint_fault, whole_tensors_of_two_ranks_at_every_call, .init = begin, .fini = end)
{
    job.options.format = FSDP_CHECKPOINT_FULL;
    job.ranks = 2;
    job.fault = DISK_FAILS;
    at_every_call(0, 100000);
}

/* Ranks are not taken for dead because they have much to write: here, for three times the group's timeout; nor because
 * one call of the system takes longer than that. */
static void slow_runs(enum disk_fault fault, int faulty_ranks)
{
    job.ranks = 2;
    job.fault = fault;
    job.specs = (struct specs){.list = large_list, .n = sizeof large_list / sizeof *large_list};
    job.timeout_ms = SANITIZED ? 600 : 400;
    job.seed = 2;
    for (job.faulty = 0; job.faulty < faulty_ranks; job.faulty++)
        for (job.options.background = 0; job.options.background < 2; job.options.background++) {
            run();
            for (int r = 0; r < 2; r++) cr_expect_eq(shared[r].status, FSDP_OK, "rank %d: %s", r, shared[r].message);
            cr_expect_eq(seed_there(), 2);
            cr_expect_eq(strays(), 0);
            host_folder_remove(path);
        }
}

Test(checkpoint_fault, ranks_wait_for_one_whose_disk_is_slow, .init = begin, .fini = end)
{
    slow_runs(DISK_SLOW, 2);
}

Test(checkpoint_fault, ranks_wait_for_one_whose_disk_stalls, .init = begin, .fini = end)
{
    slow_runs(DISK_STALLS, 2);
}

Test(checkpoint_fault, ranks_wait_while_rank_0_writes_whole_tensors, .init = begin, .fini = end)
{
    job.options.format = FSDP_CHECKPOINT_FULL;
    slow_runs(DISK_SLOW, 1);
    job.options.max_file_bytes = 1000000;
    slow_runs(DISK_STALLS, 1);
}

/* A save goes on in the background, slowly. */
static void meanwhile(enum meanwhile what, int who, int faulty)
{
    job.ranks = 2;
    job.specs = (struct specs){.list = large_list, .n = sizeof large_list / sizeof *large_list};
    job.options.background = 1;
    job.meanwhile = NOTHING;
    sound_run(1);
    job.meanwhile = what;
    job.who = who;
    job.faulty = faulty;
    job.fault = DISK_SLOW;
    job.seed = 2;
    run();
}

Test(checkpoint_fault, a_process_may_fork_while_a_save_goes_on, .init = begin, .fini = end)
{
    for (int full = 0; full < 2; full++) {
        job.options.format = full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED;
        meanwhile(FORK, 0, 0);
        for (int r = 0; r < 2; r++) cr_expect_eq(shared[r].status, FSDP_OK, "rank %d: %s", r, shared[r].message);
        cr_expect_eq(seed_there(), 2);
        cr_expect_eq(strays(), 0);
        host_folder_remove(path);
    }
}

Test(checkpoint_fault, aborting_the_group_ends_a_save_and_leaves_the_old_checkpoint, .init = begin, .fini = end)
{
    for (int kind = 0; kind < 4; kind++) {
        job.options.format = kind < 2 ? FSDP_CHECKPOINT_SHARDED : FSDP_CHECKPOINT_FULL;
        int64_t begun = time(NULL);
        meanwhile(ABORT, kind % 2, kind == 1); /* the one that writes slowly, or the other one */
        cr_expect_leq(time(NULL) - begun, 8);
        for (int r = 0; r < 2; r++) {
            cr_expect_eq(shared[r].status, FSDP_ERR_ABORTED, "rank %d: %d %s", r, shared[r].status, shared[r].message);
            cr_expect(strstr(shared[r].message, "the test's word"), "rank %d: %s", r, shared[r].message);
        }
        cr_expect_eq(seed_there(), 1);
        job.meanwhile = NOTHING;
        sound_run(2);
        cr_expect_eq(seed_there(), 2);
        cr_expect_eq(strays(), 0);
        host_folder_remove(path);
    }
}

Test(checkpoint_fault, a_save_goes_on_without_the_group_that_it_was_given, .init = begin, .fini = end)
{
    meanwhile(CLOSE, -1, 0);
    for (int r = 0; r < 2; r++) cr_expect_eq(shared[r].status, FSDP_OK, "rank %d: %s", r, shared[r].message);
    cr_expect_eq(seed_there(), 2);
    cr_expect_eq(strays(), 0);
}

/* ---- memory */

static void at_every_allocation(void)
{
    int met = 1, k;
    job.memory = 1;
    host_folder_remove(path);
    sound_run(1);
    for (k = 1; met; k++) {
        cr_assert_lt(k, 3000);
        job.seed = 2;
        job.at = k;
        met = run();
        for (int r = 0; r < job.ranks; r++) {
            cr_expect_eq(shared[r].leaked, 0, "rank %d: %d blocks leaked (allocation %d)", r, shared[r].leaked, k);
            if (shared[r].status == FSDP_OK) continue;
            cr_expect(met, "%s", shared[r].message);
            cr_expect(r != job.faulty || shared[r].status == FSDP_ERR_NOMEM, "allocation %d: %s", k, shared[r].message);
            cr_expect(strlen(shared[r].message) > 10);
        }
        if (job.open) continue;
        int there = seed_there();
        if (shared[0].status == FSDP_OK) cr_expect_eq(there, 2);
        if (there == 2) sound_run(1);
    }
    cr_expect(k > 10, "%d allocations", k);
}

Test(checkpoint_fault, saving_at_every_allocation, .init = begin, .fini = end)
{
    job.ranks = job.none = 1;
    at_every_allocation();
    job.options.background = 1;
    at_every_allocation();
}

Test(checkpoint_fault, saving_of_two_ranks_at_every_allocation_of_one, .init = begin, .fini = end)
{
    job.ranks = 2;
    job.none = 0;
    job.faulty = 1;
    at_every_allocation();
}

Test(checkpoint_fault, saving_whole_tensors_at_every_allocation, .init = begin, .fini = end)
{
    job.options.format = FSDP_CHECKPOINT_FULL;
    job.options.max_file_bytes = 100000;
    job.ranks = job.none = 1;
    at_every_allocation();
}

Test(checkpoint_fault, opening_at_every_allocation, .init = begin, .fini = end)
{
    job.ranks = job.none = 1;
    for (int full = 0; full < 3; full++) {
        job.options.format = full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED;
        job.options.max_file_bytes = full == 2 ? 100000 : 0;
        host_folder_remove(path);
        job.open = job.memory = 0;
        sound_run(1);
        job.open = 1;
        int met = 1;
        job.memory = 1;
        for (job.at = 1; met; job.at++) {
            met = run();
            cr_expect_eq(shared[0].leaked, 0, "%d blocks leaked (allocation %d)", shared[0].leaked, job.at);
            cr_expect_eq(shared[0].status, met ? FSDP_ERR_NOMEM : FSDP_OK, "allocation %d: %s", job.at,
                         shared[0].message);
        }
        cr_expect_gt(job.at, 10);
    }
}
