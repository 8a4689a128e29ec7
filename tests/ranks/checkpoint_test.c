/* Checkpoints of several ranks: what any number of ranks has written, any other number reads, and one process without
 * ranks; what is refused; and who hears of a failure. */
#include "checkpoint_host.h"

#include <sys/file.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

TestSuite(checkpoint, .timeout = RANKS_SECONDS * 4);

static char folder[64];

static void begin(void)
{
    host_folder_make(folder);
}

static void end(void)
{
    host_folder_remove(folder);
}

struct job {
    struct specs specs;
    fsdp_save_options options;
    char path[128];
    int again; /* saves one after the other, of seeds that count up */
};

static const struct job plain = {
    .specs = {.list = host_specs, .seed = 7},
    .options = {.struct_size = sizeof(fsdp_save_options), .no_sync = 1},
};

static struct job job_make(fsdp_checkpoint_format format, const char *name)
{
    struct job job = plain;
    job.specs.n = host_n_specs;
    job.options.format = format;
    snprintf(job.path, sizeof job.path, "%s/%s", folder, name);
    return job;
}

static void save(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    for (int i = 0; i <= job->again; i++) {
        struct specs specs = job->specs;
        struct host_dict host;
        specs.seed += (uint64_t)i;
        host_dict_make(&host, &specs, r->rank, r->size, 1);
        OK(fsdp_state_dict_set_json(host.dict, "optimizer", "{\"lr\": 0.25, \"steps\": [1, 2, 9007199254740993]}"));
        fsdp_save *saving = NULL;
        OK(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, job->options.background ? &saving : NULL));
        if (saving) OK(fsdp_save_wait(saving, -1));
        fsdp_save_release(saving);
        host_dict_free(&host);
    }
    fsdp_group_release(group);
}

/* The specs that a load takes: entries of ranks are not read by name. */
static void load(struct rank *r)
{
    const struct job *job = r->argument;
    struct host_dict host;
    fsdp_checkpoint *c;
    host_dict_make(&host, &job->specs, r->rank, r->size, 0);
    OK(fsdp_checkpoint_open(job->path, &c));
    OK(fsdp_checkpoint_load(c, host.dict, NULL));
    host_dict_check(&host, job->specs.seed + (uint64_t)job->again, r->rank);
    const char *name, *text;
    OK(fsdp_state_dict_json(host.dict, 0, &name, &text));
    CHECK(strcmp(text, "{\"lr\":0.25,\"steps\":[1,2,9007199254740993]}") == 0, "JSON is %s", text);
    fsdp_checkpoint_release(c);
    host_dict_free(&host);
}

/* ---- round trips */

static void round_trips(fsdp_checkpoint_format format, int64_t most, const char *name)
{
    for (int n = 1; n <= 4; n++) {
        struct job job = job_make(format, name);
        job.options.max_file_bytes = most;
        job.specs.strided = n % 3;
        ranks_run(n, save, &job);
        host_checkpoint_check(job.path, &job.specs, job.specs.seed, n, format == FSDP_CHECKPOINT_FULL);
        for (int m = 1; m <= 4; m++) {
            job.specs.strided = m % 3;
            ranks_run(m, load, &job);
        }
    }
}

Test(checkpoint, what_n_ranks_write_m_ranks_read, .init = begin, .fini = end)
{
    round_trips(FSDP_CHECKPOINT_SHARDED, 0, "a/new/folder/");
}

Test(checkpoint, one_file_of_whole_tensors_is_read_by_any_number_of_ranks, .init = begin, .fini = end)
{
    round_trips(FSDP_CHECKPOINT_FULL, 0, "model.safetensors");
}

Test(checkpoint, several_files_of_whole_tensors_are_read_by_any_number_of_ranks, .init = begin, .fini = end)
{
    round_trips(FSDP_CHECKPOINT_FULL, 3000000, "full");
}

Test(checkpoint, a_save_takes_the_place_of_the_one_before, .init = begin, .fini = end)
{
    char names[16][256];
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    job.again = 2;
    ranks_run(3, save, &job);
    cr_expect_eq(host_files(job.path, names, 16), 4);
    cr_expect_str_eq(names[0], "manifest.json");
    ranks_run(2, load, &job);
    job.again = 0;
    ranks_run(1, save, &job);
    cr_expect_eq(host_files(job.path, names, 16), 2);
    ranks_run(2, load, &job);
}

/* One file after several, several after one: each takes the place of all that was there. */
Test(checkpoint, whole_tensors_may_be_saved_into_one_file_after_several, .init = begin, .fini = end)
{
    char names[16][256];
    struct job job = job_make(FSDP_CHECKPOINT_FULL, "c");
    for (int i = 0; i < 5; i++) {
        job.options.max_file_bytes = i % 2 ? 3000000 : 0;
        job.specs.seed++;
        ranks_run(2, save, &job);
        host_checkpoint_check(job.path, &job.specs, job.specs.seed, 2, 1);
        int n = host_files(job.path, names, 16);
        cr_expect(i % 2 ? n > 2 : n == 1, "%d files", n);
    }
}

/* ---- in the background */

Test(checkpoint, a_save_in_the_background_writes_what_was_there_at_the_call, .init = begin, .fini = end)
{
    for (int full = 0; full < 2; full++) {
        struct job job = job_make(full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED, full ? "full" : "sharded");
        job.options.background = 1;
        job.again = 1;
        ranks_run(3, save, &job);
        host_checkpoint_check(job.path, &job.specs, job.specs.seed + 1, 3, full);
    }
}

static void save_and_go_on(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    fsdp_save *saving;
    host_dict_make(&host, &job->specs, r->rank, r->size, 1);
    OK(fsdp_state_dict_set_json(host.dict, "optimizer", "{\"lr\": 0.25, \"steps\": [1, 2, 9007199254740993]}"));
    OK(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, &saving));
    /* Training goes on: values change, collectives run, the dict is let go of. */
    for (int i = 0; i < host.specs->n; i++)
        if (host.parts[i].count) memset(host.parts[i].data, 0x55, 1);
    OK(fsdp_state_dict_set_json(host.dict, "optimizer", "null"));
    host_dict_free(&host);
    for (int i = 0; i < 50; i++) {
        float one = 1, sum;
        int64_t shape[] = {1};
        DLTensor in = {.data = &one, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape};
        DLTensor out = in;
        out.data = &sum;
        OK(fsdp_all_reduce(group, &in, &out, FSDP_SUM, NULL));
        CHECK(sum == (float)r->size, "a sum of %g", (double)sum);
    }
    fsdp_save_info info = {.struct_size = sizeof info};
    OK(fsdp_save_wait(saving, -1));
    OK(fsdp_save_query(saving, &info));
    CHECK(info.done && info.status == FSDP_OK, "not done");
    CHECK(info.written_bytes == info.total_bytes, "%lld of %lld bytes", (long long)info.written_bytes,
          (long long)info.total_bytes);
    fsdp_save_release(saving);
    fsdp_group_release(group);
}

Test(checkpoint, training_goes_on_while_a_save_is_written, .init = begin, .fini = end)
{
    for (int full = 0; full < 2; full++) {
        struct job job = job_make(full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED, full ? "full" : "sharded");
        job.options.background = 1;
        ranks_run(3, save_and_go_on, &job);
        host_checkpoint_check(job.path, &job.specs, job.specs.seed, 3, full);
        ranks_run(2, load, &job);
    }
}

/* ---- two at once, and what is in the way */

static void refused_by_lock(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    host_dict_make(&host, &job->specs, r->rank, r->size, 1);
    REFUSED(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, NULL), FSDP_ERR_STATE, "under way");
    host_dict_free(&host);
    fsdp_group_release(group);
}

Test(checkpoint, of_two_saves_into_one_folder_one_is_refused_on_all_ranks, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    ranks_run(2, save, &job);
    int fd = open(job.path, O_RDONLY | O_DIRECTORY);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    ranks_run(2, refused_by_lock, &job);
    close(fd);
    host_checkpoint_check(job.path, &job.specs, job.specs.seed, 2, 0);
    ranks_run(2, save, &job);
}

static void refused(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    host_dict_make(&host, &job->specs, r->rank, r->size, 1);
    REFUSED(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, NULL), FSDP_ERR_INVALID, "another path");
    host_dict_free(&host);
    fsdp_group_release(group);
}

static void write_file(const char *path, const char *name, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s/%s", path, name);
    FILE *f = fopen(full, "w");
    cr_assert(f);
    fputs(text, f);
    fclose(f);
}

Test(checkpoint, another_kind_of_checkpoint_and_foreign_files_are_not_written_over, .init = begin, .fini = end)
{
    struct job sharded = job_make(FSDP_CHECKPOINT_SHARDED, "c"), full = job_make(FSDP_CHECKPOINT_FULL, "c");
    ranks_run(2, save, &sharded);
    ranks_run(2, refused, &full);
    host_checkpoint_check(sharded.path, &sharded.specs, sharded.specs.seed, 2, 0);

    struct job one = job_make(FSDP_CHECKPOINT_FULL, "d"), over = job_make(FSDP_CHECKPOINT_SHARDED, "d");
    ranks_run(2, save, &one);
    ranks_run(2, refused, &over);
    one.options.max_file_bytes = 2000000;
    ranks_run(2, save, &one);
    ranks_run(2, refused, &over);
    host_checkpoint_check(one.path, &one.specs, one.specs.seed, 2, 1);

    static const char *const names[] = {"weights.safetensors", "model.safetensors", "model.safetensors.index.json",
                                        "manifest.json"};
    for (int i = 0; i < 4; i++)
        for (int whole = 0; whole < 2; whole++) {
            char name[8] = {'e', (char)('0' + i), 0}, found[4][256];
            struct job job = job_make(whole ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED, name);
            mkdir(job.path, 0777);
            write_file(job.path, names[i], "{\"weight_map\": {}}");
            ranks_run(2, refused, &job);
            cr_expect_eq(host_files(job.path, found, 4), 1);
        }
}

Test(checkpoint, what_dead_saves_left_is_removed_and_nothing_else, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    char names[16][256];
    ranks_run(2, save, &job);
    write_file(job.path, ".rank-00001-of-00004.0123456789abcdef.safetensors.partial", "x");
    write_file(job.path, ".manifest.json.partial", "x");
    write_file(job.path, "rank-00003-of-00004.0123456789abcdef.safetensors", "x");
    write_file(job.path, "config.json", "{}");
    write_file(job.path, ".hidden", "");
    ranks_run(2, save, &job);
    cr_expect_eq(host_files(job.path, names, 16), 5);
    cr_expect_str_eq(names[0], ".hidden");
    cr_expect_str_eq(names[1], "config.json");
    host_checkpoint_check(job.path, &job.specs, job.specs.seed, 2, 0);
}

/* ---- ranks that don't agree */

static void other_names(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    struct specs specs = job->specs;
    if (r->rank == 1) specs.n -= 1;
    host_dict_make(&host, &specs, r->rank, r->size, 1);
    CHECK(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, NULL) == FSDP_ERR_MISMATCH, "%s",
          fsdp_last_error());
    host_dict_free(&host);
    fsdp_group_release(group);
}

Test(checkpoint, ranks_with_different_names_are_told_so_and_nothing_is_written, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    ranks_run(2, other_names, &job);
    cr_expect(access(job.path, F_OK) != 0, "a folder was made");
}

static void other_paths(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    char mine[256];
    snprintf(mine, sizeof mine, "%s%s", job->path, r->rank == 1 ? "-of-1" : "");
    host_dict_make(&host, &job->specs, r->rank, r->size, 1);
    REFUSED(fsdp_checkpoint_save(group, host.dict, mine, &job->options, NULL), FSDP_ERR_MISMATCH, "/c-of-1'");
    CHECK(strstr(fsdp_last_error(), "/c'") && strstr(fsdp_last_error(), "path"), "%s", fsdp_last_error());
    fsdp_save_options other = job->options;
    other.no_sync = r->rank == 1 ? !other.no_sync : other.no_sync;
    REFUSED(fsdp_checkpoint_save(group, host.dict, job->path, &other, NULL), FSDP_ERR_MISMATCH, "different options");
    host_dict_free(&host);
    fsdp_group_release(group);
}

Test(checkpoint, ranks_with_different_paths_are_told_both_and_nothing_is_written, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    ranks_run(3, other_paths, &job);
    cr_expect(access(job.path, F_OK) != 0, "a folder was made");
}

/* Two ranks with parts as if they were three: a third is missing. */
static void gaps(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    host_dict_make(&host, &job->specs, r->rank, 3, 1);
    REFUSED(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, NULL), FSDP_ERR_INVALID, "embed.weight");
    host_dict_free(&host);
    fsdp_group_release(group);
}

Test(checkpoint, parts_that_leave_gaps_are_refused_on_all_ranks, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "c");
    ranks_run(2, gaps, &job);
    cr_expect(access(job.path, F_OK) != 0, "a folder was made");
}

static void no_room(struct rank *r)
{
    const struct job *job = r->argument;
    fsdp_group *group = rank_group(r, ANY_ROUTE, 0);
    struct host_dict host;
    host_dict_make(&host, &job->specs, r->rank, r->size, 1);
    REFUSED(fsdp_checkpoint_save(group, host.dict, job->path, &job->options, NULL), FSDP_ERR_SYSTEM, "not a folder");
    host_dict_free(&host);
    fsdp_group_release(group);
}

Test(checkpoint, a_failure_of_rank_0_is_told_on_all, .init = begin, .fini = end)
{
    struct job job = job_make(FSDP_CHECKPOINT_SHARDED, "file/below");
    write_file(folder, "file", "");
    ranks_run(3, no_room, &job);
}
