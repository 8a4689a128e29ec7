/* See crew.h. */
#include "crew.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct crew_shared *crew;

struct verdict {
    atomic_int finished;
    char text[2048];
};

static struct shared {
    struct crew_shared open;
    struct verdict verdicts[CREW_MAX];
    atomic_int n_keys;
    struct {
        atomic_int set;
        char key[192];
        size_t bytes;
        char value[1200];
    } keys[512];
} * shared;

static struct {
    pid_t pid;
    int mortal;
} ranks[CREW_MAX];
static int threaded;
static _Thread_local int own_rank = -1;

int64_t crew_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void crew_init(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(shared != MAP_FAILED);
    crew = &shared->open;
    memset(ranks, 0, sizeof ranks);
}

static void kill_all(void)
{
    for (int r = 0; r < CREW_MAX; r++) {
        if (ranks[r].pid <= 0) continue;
        kill(ranks[r].pid, SIGKILL);
        waitpid(ranks[r].pid, NULL, 0);
        ranks[r].pid = 0;
    }
}

void crew_fini(void)
{
    kill_all();
    munmap(shared, sizeof *shared);
}

/* ---- verdicts */

void crew_fail(const char *file, int line, const char *cond, const char *fmt, ...)
{
    struct verdict *v = &shared->verdicts[own_rank >= 0 ? own_rank : 0];
    const char *base = strrchr(file, '/');
    size_t used = (size_t)snprintf(v->text, sizeof v->text, "%s:%d: %s: ", base ? base + 1 : file, line, cond);
    va_list args;
    va_start(args, fmt);
    if (used < sizeof v->text) vsnprintf(v->text + used, sizeof v->text - used, fmt, args);
    va_end(args);
    if (threaded) {
        fprintf(stderr, "rank %d: %s\n", own_rank, v->text);
        abort();
    }
    _exit(1);
}

void crew_expect(const char *file, int line, const char *call, fsdp_status got, fsdp_status want,
                 const char *const *texts)
{
    if (got != want)
        crew_fail(file, line, call, "got %s, not %s: %s", fsdp_status_name(got), fsdp_status_name(want),
                  fsdp_last_error());
    for (; *texts; texts++)
        if (!strstr(fsdp_last_error(), *texts))
            crew_fail(file, line, call, "no '%s' in: %s", *texts, fsdp_last_error());
}

/* ---- processes */

static int leaky;

void crew_leaky(void)
{
    leaky = 1;
}

/* The checker of the address sanitizer. What it says is shown only when it found something. */
static int leaks(void)
{
#if defined(__SANITIZE_ADDRESS__)
    extern int __lsan_do_recoverable_leak_check(void);
    int said = memfd_create("leaks", MFD_CLOEXEC), error = dup(2);
    dup2(said, 2);
    int found = __lsan_do_recoverable_leak_check();
    dup2(error, 2);
    char text[4096];
    ssize_t n = found ? pread(said, text, sizeof text, 0) : 0;
    if (n > 0 && write(2, text, (size_t)n) < 0) found = 1;
    close(said);
    close(error);
    return found;
#else
    return 0;
#endif
}

void crew_start_one(int rank, crew_fn fn)
{
    cr_assert(rank < CREW_MAX);
    pid_t pid = fork();
    cr_assert(pid >= 0, "fork: %s", strerror(errno));
    if (pid > 0) {
        ranks[rank].pid = pid;
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    own_rank = rank;
    fn(rank);
    atomic_store(&shared->verdicts[rank].finished, 1);
    CHECK(leaky || !leaks(), "memory leaked: see standard error");
    _exit(0);
}

void crew_start(int n, crew_fn fn)
{
    for (int r = 0; r < n; r++) crew_start_one(r, fn);
}

void crew_mortal(int rank)
{
    ranks[rank].mortal = 1;
}

pid_t crew_pid(int rank)
{
    return ranks[rank].pid;
}

void crew_kill(int rank)
{
    crew_mortal(rank);
    atomic_store(&crew->event_ns, now_ns());
    kill(ranks[rank].pid, SIGKILL);
}

void crew_join(int patience_ms)
{
    char trouble[4096] = "";
    size_t used = 0;
    int64_t until = crew_now_ms() + patience_ms;
    for (;;) {
        int left = 0;
        for (int r = 0; r < CREW_MAX; r++) {
            if (ranks[r].pid <= 0) continue;
            int status;
            if (waitpid(ranks[r].pid, &status, WNOHANG) == 0) {
                left++;
                continue;
            }
            ranks[r].pid = 0;
            int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            if ((ranks[r].mortal && killed) || (status == 0 && shared->verdicts[r].finished)) continue;
            used += (size_t)snprintf(trouble + used, sizeof trouble - used, "rank %d ended with %x: %.900s\n", r,
                                     (unsigned)status, shared->verdicts[r].text);
        }
        if (!left) break;
        if (crew_now_ms() > until) {
            for (int r = 0; r < CREW_MAX; r++)
                if (ranks[r].pid > 0 && used < sizeof trouble - 64)
                    used += (size_t)snprintf(trouble + used, sizeof trouble - used, "rank %d is not done after %d ms\n",
                                             r, patience_ms);
            break;
        }
        usleep(1000);
    }
    kill_all();
    memset(ranks, 0, sizeof ranks);
    for (int r = 0; r < CREW_MAX; r++) shared->verdicts[r].finished = 0;
    cr_assert(used == 0, "%s", trouble);
}

void crew_run(int n, int patience_ms, crew_fn fn)
{
    crew_start(n, fn);
    crew_join(patience_ms);
}

struct thread {
    int rank;
    crew_fn fn;
};

static void *thread_main(void *argument)
{
    struct thread *thread = argument;
    own_rank = thread->rank;
    thread->fn(thread->rank);
    return NULL;
}

void crew_threads(int n, crew_fn fn)
{
    pthread_t ids[CREW_MAX];
    struct thread threads[CREW_MAX];
    threaded = 1;
    for (int r = 0; r < n; r++) {
        threads[r] = (struct thread){r, fn};
        cr_assert(pthread_create(&ids[r], NULL, thread_main, &threads[r]) == 0);
    }
    for (int r = 0; r < n; r++) pthread_join(ids[r], NULL);
    threaded = 0;
}

/* ---- time and meeting points */

void crew_die(void)
{
    atomic_store(&crew->event_ns, now_ns());
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

int64_t crew_ms_since_event(void)
{
    return (now_ns() - atomic_load(&crew->event_ns)) / 1000000;
}

void crew_sleep_ms(int ms)
{
    usleep((useconds_t)ms * 1000);
}

void crew_raise(int flag)
{
    atomic_fetch_add(&crew->flags[flag], 1);
}

void crew_await(int flag, int count)
{
    int64_t until = crew_now_ms() + 60000;
    while (atomic_load(&crew->flags[flag]) < count) {
        CHECK(crew_now_ms() < until, "flag %d stays at %d, not %d", flag, atomic_load(&crew->flags[flag]), count);
        usleep(200);
    }
}

/* ---- the store: an append-only table */

static int32_t table_set(void *user, const char *key, const void *value, size_t bytes)
{
    char whole[192];
    snprintf(whole, sizeof whole, "%s/%s", (const char *)user, key);
    int at = atomic_fetch_add(&shared->n_keys, 1);
    if (at >= (int)(sizeof shared->keys / sizeof *shared->keys) || bytes > sizeof shared->keys[0].value) return -1;
    memcpy(shared->keys[at].key, whole, sizeof whole);
    memcpy(shared->keys[at].value, value, bytes);
    shared->keys[at].bytes = bytes;
    atomic_store(&shared->keys[at].set, 1);
    return 0;
}

static int32_t table_get(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes, int64_t timeout_ms)
{
    char whole[192];
    snprintf(whole, sizeof whole, "%s/%s", (const char *)user, key);
    for (int64_t until = crew_now_ms() + timeout_ms;;) {
        for (int i = 0; i < atomic_load(&shared->n_keys); i++) {
            if (!atomic_load(&shared->keys[i].set) || strcmp(shared->keys[i].key, whole) != 0) continue;
            *bytes = shared->keys[i].bytes;
            if (*bytes > capacity) return -1;
            memcpy(buffer, shared->keys[i].value, *bytes);
            return 0;
        }
        if (crew_now_ms() > until) return 1;
        usleep(100);
    }
}

int crew_told(const char *name, const char *key)
{
    char buffer[1200];
    size_t bytes;
    return table_get((void *)(uintptr_t)name, key, buffer, sizeof buffer, &bytes, 0) == 0;
}

static int32_t table_add(void *user, const char *key, int64_t amount, int64_t *result)
{
    return -1; /* groups don't need it */
}

static int32_t table_wait(void *user, const char *key, int64_t timeout_ms)
{
    char buffer[1200];
    size_t bytes;
    return table_get(user, key, buffer, sizeof buffer, &bytes, timeout_ms);
}

fsdp_store *crew_store(const char *name, int rank, int n, int64_t timeout_ms)
{
    /* Names live for ever: in a forked child nobody is told to free them. */
    static char names[256][16];
    static atomic_int used;
    char *kept = names[atomic_fetch_add(&used, 1) % 256];
    snprintf(kept, sizeof names[0], "%s", name);
    fsdp_store_callbacks callbacks = {.struct_size = sizeof callbacks,
                                      .user = kept,
                                      .set = table_set,
                                      .get = table_get,
                                      .add = table_add,
                                      .wait = table_wait};
    fsdp_store_options options = {
        .struct_size = sizeof options, .rank = rank, .world_size = n, .timeout_ms = timeout_ms};
    fsdp_store *store = NULL;
    OK(fsdp_store_from_callbacks(&callbacks, &options, &store));
    return store;
}

fsdp_group_options crew_options(int64_t timeout_ms, int32_t direct_read)
{
    return (fsdp_group_options){.struct_size = sizeof(fsdp_group_options),
                                .name = "crew",
                                .timeout_ms = timeout_ms,
                                .direct_read = direct_read};
}

fsdp_group *crew_group(int rank, int n, const fsdp_group_options *options)
{
    fsdp_store *store = crew_store("s", rank, n, 20000);
    fsdp_group *group = NULL;
    OK(fsdp_group_create(store, options, &group));
    fsdp_store_release(store);
    return group;
}

/* ---- tensors */

DLTensor *crew_tensor(void *data, DLDataType dtype, int64_t count)
{
    static _Thread_local struct {
        DLTensor tensor;
        int64_t shape[1];
    } pool[16];
    static _Thread_local int next;
    int i = next++ % 16;
    pool[i].shape[0] = count;
    pool[i].tensor = (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = dtype, .shape = pool[i].shape};
    return &pool[i].tensor;
}

float *crew_floats(int64_t count, float value)
{
    float *p = mmap(NULL, (size_t)count * sizeof *p + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED, "no memory");
    for (int64_t i = 0; i < count; i++) p[i] = value;
    return p;
}

void crew_group_works(fsdp_group *group, int rank, int n)
{
    float in[5], out[5] = {0};
    for (int i = 0; i < 5; i++) in[i] = (float)(rank + 1) * (float)(i + 1);
    OK(fsdp_all_reduce(group, crew_tensor(in, F32, 5), crew_tensor(out, F32, 5), FSDP_SUM, NULL));
    for (int i = 0; i < 5; i++) CHECK(out[i] == (float)(n * (n + 1) / 2 * (i + 1)), "out[%d] is %g", i, (double)out[i]);
}

int crew_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}
