/* See ranks.h. What ranks tell the test lies in one shared anonymous mapping. The ranks meet through a file
 * in a fresh folder, which is removed with the store; its removal is checked by the test process. */
#include "ranks.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if SANITIZED && !defined(__SANITIZE_THREAD__)
#include <sanitizer/lsan_interface.h>

/* The checker speaks also when nothing leaked (of the thread that forked, which it takes for one of this
 * process). */
static int leaks(void)
{
    int report = memfd_create("leaks", MFD_CLOEXEC), error = dup(2);
    dup2(report, 2);
    int found = __lsan_do_recoverable_leak_check();
    dup2(error, 2);
    char text[4096];
    lseek(report, 0, SEEK_SET);
    for (ssize_t n; found && (n = read(report, text, sizeof text)) > 0;) fwrite(text, 1, (size_t)n, stderr);
    close(report);
    close(error);
    return found;
}
#else
static int leaks(void)
{
    return 0;
}
#endif

const char *const way_names[] = {"any", "staged", "direct"};

struct board {
    char shared[RANKS_SHARED];
    _Atomic int failed;
    char message[2048];
};

static struct board *board;
static _Thread_local int this_rank = -1;
static char url[128];

void rank_fail(const char *file, int line, const char *format, ...)
{
    if (!atomic_exchange(&board->failed, 1)) { /* the first one names the cause */
        int used = snprintf(board->message, sizeof board->message, "rank %d, %s:%d: ", this_rank, file, line);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(board->message + used, sizeof board->message - (size_t)used, format, arguments);
        va_end(arguments);
    }
    _exit(1);
}

struct start {
    struct rank rank;
    rank_fn fn;
};

static void *run_rank(void *argument)
{
    struct start *start = argument;
    struct rank *r = &start->rank;
    this_rank = r->rank;
    fsdp_store_options options = {.struct_size = sizeof options, .world_size = r->size, .rank = r->rank};
    options.timeout_ms = RANKS_SECONDS * 1000;
    OK(fsdp_store_open(url, &options, &r->store));
    start->fn(r);
    fsdp_store_release(r->store);
    return NULL;
}

static int use_threads(void)
{
    const char *threads = getenv("FSDP_TEST_THREADS");
    return threads && threads[0] == '1';
}

/* A process of one rank, or of all as threads. */
static pid_t start_process(struct start *starts, int n)
{
    pid_t pid = fork();
    cr_assert(pid >= 0, "fork: %s", strerror(errno));
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_t threads[RANKS_MAX];
    for (int i = 1; i < n; i++)
        if (pthread_create(&threads[i], NULL, run_rank, &starts[i])) _exit(2);
    run_rank(&starts[0]);
    for (int i = 1; i < n; i++) pthread_join(threads[i], NULL);
    if (leaks()) rank_fail(__FILE__, __LINE__, "memory leaked, see standard error");
    fflush(NULL);
    _exit(0);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Reap all; once one has failed or the time is up, the others get a moment and are then killed. */
static void reap(pid_t *pids, int n, char text[256])
{
    double start = seconds(), limit = RANKS_SECONDS;
    text[0] = 0;
    for (int left = n; left > 0;) {
        struct timespec nap = {0, 500000};
        for (int i = 0; i < n; i++) {
            int status;
            if (pids[i] <= 0 || waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
            pids[i] = 0;
            left--;
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
            if (!text[0]) {
                if (WIFSIGNALED(status))
                    snprintf(text, 256, "process %d was ended by signal %d", i, WTERMSIG(status));
                else
                    snprintf(text, 256, "process %d ended with status %d", i, WEXITSTATUS(status));
            }
            if (limit > seconds() - start + 0.3) limit = seconds() - start + 0.3;
        }
        if (left && seconds() - start > limit) {
            if (!text[0]) snprintf(text, 256, "%d of %d processes not done after %d s", left, n, RANKS_SECONDS);
            for (int i = 0; i < n; i++)
                if (pids[i] > 0) kill(pids[i], SIGKILL);
        }
        if (left) nanosleep(&nap, NULL);
    }
}

char *ranks_run(int size, rank_fn fn, const void *argument)
{
    cr_assert(size >= 1 && size <= RANKS_MAX);
    if (!board) board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(board != MAP_FAILED);
    memset(board, 0, sizeof *board);
    char folder[] = "/tmp/fsdp-ranks-XXXXXX";
    cr_assert(mkdtemp(folder));
    snprintf(url, sizeof url, "file://%s/store", folder);

    struct start starts[RANKS_MAX];
    pid_t pids[RANKS_MAX] = {0};
    int processes = use_threads() ? 1 : size;
    for (int i = 0; i < size; i++)
        starts[i] = (struct start){{.rank = i, .size = size, .argument = argument, .shared = board->shared}, fn};
    for (int i = 0; i < processes; i++) pids[i] = start_process(&starts[i], use_threads() ? size : 1);
    char text[256];
    reap(pids, processes, text);

    char path[128];
    snprintf(path, sizeof path, "%s/store", folder);
    int left_behind = unlink(path) == 0;
    rmdir(folder);
    cr_assert(!text[0], "%d ranks: %s", size, board->failed ? board->message : text);
    cr_assert(!left_behind, "%d ranks: the last store released left its file behind", size);
    return board->shared;
}

fsdp_group *rank_group(struct rank *r, enum way route, int64_t staging)
{
    fsdp_group_options options;
    OK(fsdp_group_options_init(&options, sizeof options));
    options.direct_read = route == STAGED ? 2 : route == DIRECT ? 1 : 0;
    options.staging_bytes = staging;
    options.timeout_ms = RANKS_SECONDS * 1000;
    fsdp_group *group;
    OK(fsdp_group_create(r->store, &options, &group));
    return group;
}
