/* Ranks that meet, and ranks that can't. Each rank is a forked process with a place in shared memory for its
 * outcome; every one is reaped by its pid, and killed first if it is not done in time, also when the test
 * fails. */
#include <criterion/criterion.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "store/store.h"
#include "store/wire.h"

#define MAX_RANKS 12
#define PATIENCE_MS 8000
#ifdef __SANITIZE_THREAD__
#define TASKS 5 /* ".", "..", the main thread, and the sanitizer's own: one since fork, one since a thread began */
#else
#define TASKS 3
#endif

struct outcome {
    int finished;
    fsdp_status status; /* of the call that the test is about */
    int32_t rank_a;
    char message[1024];
    int64_t number, ms;
};

static struct {
    pid_t pid;
    struct outcome *out;
} ranks[MAX_RANKS];

static char url[160], path[128], folder[64];
static struct outcome *outcomes;

static void setup(void)
{
    outcomes = mmap(NULL, sizeof *outcomes * MAX_RANKS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(outcomes != MAP_FAILED);
    strcpy(folder, "/tmp/fsdp-meet-XXXXXX");
    cr_assert(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/store", folder);
}

static void kill_ranks(void)
{
    for (int i = 0; i < MAX_RANKS; i++)
        if (ranks[i].pid > 0) {
            kill(ranks[i].pid, SIGKILL);
            waitpid(ranks[i].pid, NULL, 0);
            ranks[i].pid = 0;
        }
}

static void teardown(void)
{
    kill_ranks();
    unlink(path);
    rmdir(folder);
}

TestSuite(meet, .init = setup, .fini = teardown, .timeout = 20);
TestSuite(refuse, .init = setup, .fini = teardown, .timeout = 20);
TestSuite(disturb, .init = setup, .fini = teardown, .timeout = 20);

static int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &size) == 0);
    close(fd);
    return ntohs(a.sin_port);
}

static int port;

static void use_tcp(void)
{
    port = free_port();
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
}

static void use_file(void)
{
    snprintf(url, sizeof url, "file://%s", path);
}

#define TCP 0
#define FILES 1

static void use(int kind)
{
    if (kind == TCP)
        use_tcp();
    else
        use_file();
}

static int entries(const char *name)
{
    DIR *dir = opendir(name);
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

typedef fsdp_status (*rank_fn)(int32_t rank, struct outcome *out);

/* The i-th process runs fn(rank). It fails if it leaves a descriptor, thread or block behind. */
static void start_rank(int i, int32_t rank, rank_fn fn)
{
    ranks[i].out = &outcomes[i];
    memset(ranks[i].out, 0, sizeof *ranks[i].out);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid > 0) {
        ranks[i].pid = pid;
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct outcome *out = ranks[i].out;
    int fds = entries("/proc/self/fd");
    int64_t start = store_now_ms();
    out->status = fn(rank, out);
    out->ms = store_now_ms() - start;
    fsdp_error_info info;
    err_save(&info);
    out->rank_a = info.rank_a;
    if (out->status != FSDP_OK) strcpy(out->message, info.message);
    /* A joined thread may stay in the list for a moment. */
    for (int k = 0; k < 1000 && entries("/proc/self/task") > TASKS; k++) usleep(1000);
    int fds_now = entries("/proc/self/fd"), tasks_now = entries("/proc/self/task");
    int clean = mem_set_allocator(NULL, NULL, NULL) == FSDP_OK && fds_now == fds && tasks_now <= TASKS;
    if (!clean)
        snprintf(out->message, sizeof out->message, "leaked: descriptors %d -> %d, threads %d, memory: %s", fds,
                 fds_now, tasks_now - 2, err_message());
    out->finished = 1;
    _exit(clean ? 0 : 1);
}

static void finish_rank(int i)
{
    int64_t deadline = store_now_ms() + PATIENCE_MS;
    int status = -1;
    pid_t got = 0;
    while (got == 0 && store_now_ms() < deadline) {
        got = waitpid(ranks[i].pid, &status, WNOHANG);
        if (got == 0) usleep(1000);
    }
    cr_assert(got == ranks[i].pid, "process %d is not done after %d ms", i, PATIENCE_MS);
    ranks[i].pid = 0;
    cr_assert(status == 0 && ranks[i].out->finished, "process %d ended with %x: %s", i, (unsigned)status,
              ranks[i].out->message);
}

static void run_ranks(int n, rank_fn fn)
{
    for (int i = 0; i < n; i++) start_rank(i, i, fn);
    for (int i = 0; i < n; i++) finish_rank(i);
}

static void expect(int i, fsdp_status status, const char *text)
{
    cr_assert(outcomes[i].status == status && strstr(outcomes[i].message, text),
              "process %d: expected %s with '%s', got %s: %s", i, err_status_name(status), text,
              err_status_name(outcomes[i].status), outcomes[i].message);
}

static void expect_all(int n, fsdp_status status, const char *text)
{
    for (int i = 0; i < n; i++) expect(i, status, text);
}

static fsdp_status open_as(int32_t rank, int32_t world_size, int64_t timeout_ms, const char *job_key,
                           fsdp_store **store)
{
    fsdp_store_options o = {
        .struct_size = sizeof o, .rank = rank, .world_size = world_size, .timeout_ms = timeout_ms, .job_key = job_key};
    *store = NULL;
    return store_open(url, &o, store);
}

/* All ranks call it; nobody passes before all have. */
static fsdp_status barrier(fsdp_store *store, const char *name)
{
    int64_t n;
    char done[64];
    snprintf(done, sizeof done, "%s/done", name);
    TRY(store_add(store, name, 1, &n));
    if (n == store_world_size(store)) TRY(store_set(store, done, "", 0));
    return store_wait(store, done);
}

/* A barrier, then a release in which rank 0, which serves, is the last by a little. */
static fsdp_status leave(fsdp_store *store, fsdp_status status)
{
    if (status == FSDP_OK) status = barrier(store, "leave");
    if (store && store_rank(store) == 0) usleep(20000);
    store_release(store);
    return status;
}

/* ---- Meeting ------------------------------------------------------------------------------------------ */

static fsdp_status count_together(fsdp_store *store, int64_t *total)
{
    int32_t rank = store_rank(store), n = store_world_size(store), value = rank * 11;
    char key[32];
    for (int i = 0; i < 50; i++) TRY(store_add(store, "total", rank + 1, total));
    snprintf(key, sizeof key, "value/%d", rank);
    TRY(store_set(store, key, &value, sizeof value));
    for (int32_t other = 0; other < n; other++) {
        size_t bytes;
        snprintf(key, sizeof key, "value/%d", other);
        TRY(store_get(store, key, &value, sizeof value, &bytes));
        if (bytes != sizeof value || value != other * 11) return err(FSDP_ERR_INTERNAL, "a wrong value");
    }
    TRY(barrier(store, "counted"));
    return store_add(store, "total", 0, total);
}

static fsdp_status meet_8(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    TRY(open_as(rank, 8, 5000, "job", &store));
    return leave(store, count_together(store, &out->number));
}

Test(meet, eight_ranks)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(8, meet_8);
        expect_all(8, FSDP_OK, "");
        for (int i = 0; i < 8; i++) cr_assert_eq(outcomes[i].number, 50 * 36, "kind %d: adds got lost", kind);
    }
    cr_assert_neq(access(path, F_OK), 0, "the file is gone");
}

static fsdp_status meet_with_few_descriptors(int32_t rank, struct outcome *out)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return err(FSDP_ERR_SYSTEM, "getrlimit");
    limit.rlim_cur = 40; /* more than 8 ranks need, less than the server has places for */
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return err(FSDP_ERR_SYSTEM, "setrlimit");
    return meet_8(rank, out);
}

Test(meet, eight_ranks_that_may_have_40_descriptors)
{
    use_tcp();
    run_ranks(8, meet_with_few_descriptors);
    expect_all(8, FSDP_OK, "");
    cr_assert_eq(outcomes[0].number, 50 * 36);
}

static fsdp_status rank_0_late(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    if (rank == 0) usleep(300000);
    TRY(open_as(rank, 3, 5000, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(meet, rank_0_may_be_late)
{
    use_tcp();
    run_ranks(3, rank_0_late);
    expect_all(3, FSDP_OK, "");
    cr_assert(outcomes[1].ms >= 250);
}

static fsdp_status five_times(int32_t rank, struct outcome *out)
{
    for (int i = 0; i < 5; i++) {
        fsdp_store *store;
        TRY(open_as(rank, 3, 5000, NULL, &store));
        fsdp_status status = store_add(store, "n", 1, &out->number);
        if (status == FSDP_OK) status = barrier(store, "done");
        if (rank == 0) usleep(20000); /* the others, already gone, come to the old store first */
        store_release(store);
        if (status != FSDP_OK) return status;
        if (out->number > 3) return err(FSDP_ERR_INTERNAL, "a key of an earlier store");
    }
    return FSDP_OK;
}

Test(meet, again_at_the_same_address)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(3, five_times);
        expect_all(3, FSDP_OK, "");
    }
}

static fsdp_status exchange_large(int32_t rank, struct outcome *out)
{
    static unsigned char mine[STORE_VALUE_MAX], theirs[STORE_VALUE_MAX];
    fsdp_store *store;
    size_t bytes = 0;
    (void)out;
    TRY(open_as(rank, 2, 5000, NULL, &store));
    fsdp_status status = FSDP_OK;
    for (int round = 0; round < 20 && status == FSDP_OK; round++) {
        char key[32];
        memset(mine, rank + round, sizeof mine);
        snprintf(key, sizeof key, "%d/%d", rank, round);
        status = store_set(store, key, mine, sizeof mine);
        snprintf(key, sizeof key, "%d/%d", 1 - rank, round);
        if (status == FSDP_OK) status = store_get(store, key, theirs, sizeof theirs, &bytes);
        memset(mine, 1 - rank + round, sizeof mine);
        if (status == FSDP_OK && (bytes != sizeof mine || memcmp(mine, theirs, bytes) != 0))
            status = err(FSDP_ERR_INTERNAL, "a wrong value");
    }
    return leave(store, status);
}

Test(meet, values_may_be_large)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(2, exchange_large);
        expect_all(2, FSDP_OK, "");
    }
}

static fsdp_status set_late(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    char buffer[16];
    size_t bytes;
    TRY(open_as(rank, 3, 5000, NULL, &store));
    int64_t start = store_now_ms();
    if (rank == 0) usleep(200000);
    fsdp_status status = rank == 0   ? store_set(store, "k", "late", 4)
                         : rank == 1 ? store_get(store, "k", buffer, sizeof buffer, &bytes)
                                     : store_wait(store, "k");
    out->number = store_now_ms() - start;
    return leave(store, status);
}

Test(meet, get_and_wait_until_the_key_is_set)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(3, set_late);
        expect_all(3, FSDP_OK, "");
        for (int i = 0; i < 3; i++) cr_assert(outcomes[i].number >= 150 && outcomes[i].number < 2000);
    }
}

static fsdp_status meet_by_environment(int32_t rank, struct outcome *out)
{
    char text[16];
    (void)out;
    snprintf(text, sizeof text, "%d", rank);
    setenv("OMPI_COMM_WORLD_RANK", text, 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    setenv("PMIX_NAMESPACE", "a-test", 1);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    fsdp_store *store;
    TRY(fsdp_store_open("env://", NULL, &store));
    return leave(store, store_rank(store) == rank ? FSDP_OK : err(FSDP_ERR_INTERNAL, "another's rank"));
}

Test(meet, under_a_launcher_that_gives_no_address)
{
    run_ranks(2, meet_by_environment);
    expect_all(2, FSDP_OK, "");
    cr_assert_eq(entries(folder), 2, "the file is gone");
}

/* ---- Refusals ----------------------------------------------------------------------------------------- */

static fsdp_status join_only(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    TRY(open_as(rank, 8, 400, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(refuse, ranks_that_do_not_come_are_listed)
{
    static const int32_t come[] = {0, 1, 4, 6};
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        for (int i = 0; i < 4; i++) start_rank(i, come[i], join_only);
        for (int i = 0; i < 4; i++) finish_rank(i);
        for (int i = 0; i < 4; i++) {
            expect(i, FSDP_ERR_TIMEOUT, "missing 2-3, 5, 7");
            cr_assert(outcomes[i].ms >= 300 && outcomes[i].ms < 2500);
        }
        cr_assert_eq(outcomes[0].rank_a, 2);
    }
    cr_assert_neq(access(path, F_OK), 0, "the file is gone");
}

static fsdp_status join_patiently(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    TRY(open_as(rank, 8, rank == 0 ? 400 : 6000, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(refuse, when_rank_0_gives_up_the_others_are_told)
{
    use_tcp();
    for (int i = 0; i < 3; i++) start_rank(i, i, join_patiently);
    for (int i = 0; i < 3; i++) finish_rank(i);
    expect_all(3, FSDP_ERR_TIMEOUT, "missing 3-7");
    cr_assert(outcomes[1].ms < 3000);
}

static fsdp_status join_alone(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)rank;
    (void)out;
    return open_as(1, 2, 300, NULL, &store);
}

Test(refuse, an_address_where_nobody_listens)
{
    use_tcp();
    run_ranks(1, join_alone);
    expect(0, FSDP_ERR_TIMEOUT, url + 6);
    expect(0, FSDP_ERR_TIMEOUT, "Connection refused");
    cr_assert(outcomes[0].ms >= 290 && outcomes[0].ms < 1500 && outcomes[0].rank_a == 0);
}

static fsdp_status with_own_key(int32_t rank, struct outcome *out)
{
    static const char *const keys[] = {"job", "job", "another job", "jo", "jobb", ""};
    fsdp_store *store;
    (void)out;
    if (rank >= 2) usleep(150000); /* rank 0 is there */
    TRY(open_as(rank > 1 ? 1 : rank, 3, 800, keys[rank], &store));
    return leave(store, FSDP_OK);
}

Test(refuse, another_jobs_key)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(6, with_own_key);
        for (int i = 2; i < 6; i++) {
            expect(i, FSDP_ERR_RENDEZVOUS, "another job key");
            cr_assert(outcomes[i].ms < 700);
        }
        expect(0, FSDP_ERR_TIMEOUT, "missing 2"); /* undisturbed by the strangers */
        expect(1, FSDP_ERR_TIMEOUT, "missing 2");
    }
}

static int32_t twice;

static fsdp_status join_twice(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    TRY(open_as(rank == 3 ? twice : rank, 4, 3000, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(refuse, two_processes_with_one_rank)
{
    for (int kind = TCP; kind <= FILES; kind++)
        for (twice = 0; twice < 2; twice++) {
            char text[64];
            use(kind);
            snprintf(text, sizeof text, "two processes say they are rank %d", twice);
            for (int i = 0; i < 4; i++) {
                start_rank(i, i, join_twice);
                usleep(30000);
            }
            for (int i = 0; i < 4; i++) finish_rank(i);
            expect_all(4, FSDP_ERR_RENDEZVOUS, text);
            for (int i = 0; i < 4; i++) cr_assert(outcomes[i].ms < 2000);
        }
    cr_assert_neq(access(path, F_OK), 0, "the file is gone");
}

static fsdp_status join_sized(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    if (rank == 1) usleep(50000);
    TRY(open_as(rank, rank == 1 ? 3 : 4, 3000, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(refuse, ranks_that_disagree_on_the_world)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(3, join_sized);
        expect_all(3, FSDP_ERR_RENDEZVOUS, "disagree on world_size");
        expect_all(3, FSDP_ERR_RENDEZVOUS, "rank 1 says 3");
        expect_all(3, FSDP_ERR_RENDEZVOUS, "says 4");
    }
}

static fsdp_status hold(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    out->number = 0;
    TRY(open_as(rank, 2, 3000, "first", &store));
    out->number = 1;
    for (;;) pause();
}

static void wait_for(const volatile int64_t *number)
{
    for (int i = 0; i < 3000 && !*number; i++) usleep(1000);
    cr_assert(*number);
}

static fsdp_status intrude_as_rank_0(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)rank;
    (void)out;
    return open_as(0, 2, 300, "second", &store);
}

static fsdp_status intrude(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    return open_as(rank, 2, 300, rank == 0 ? "first" : "second", &store);
}

Test(refuse, an_address_that_another_job_uses)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        for (int i = 0; i < 2; i++) start_rank(i, i, hold);
        for (int i = 0; i < 2; i++) wait_for(&outcomes[i].number);
        for (int i = 0; i < 2; i++) start_rank(2 + i, i, intrude);
        start_rank(4, 0, intrude_as_rank_0);
        for (int i = 0; i < 3; i++) finish_rank(2 + i);
        expect(4, FSDP_ERR_RENDEZVOUS, "another job key");
        expect(2, FSDP_ERR_RENDEZVOUS, "two processes say they are rank 0");
        expect(3, FSDP_ERR_RENDEZVOUS, "another job key");
        kill_ranks();
    }
}

static fsdp_status meet_2(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    TRY(open_as(rank, 2, 3000, "second", &store));
    return leave(store, count_together(store, &out->number));
}

Test(meet, where_a_killed_job_was)
{
    for (int kind = TCP; kind <= FILES; kind++)
        for (int n = 1; n <= 2; n++) { /* killed while meeting, and after */
            use(kind);
            for (int i = 0; i < n; i++) start_rank(i, i, hold);
            if (n == 2) wait_for(&outcomes[1].number);
            usleep(100000);
            if (kind == FILES) cr_assert_eq(access(path, F_OK), 0);
            kill_ranks();
            run_ranks(2, meet_2);
            expect_all(2, FSDP_OK, "");
            cr_assert_eq(outcomes[0].number, 150, "keys of the killed job");
        }
}

Test(refuse, a_place_whose_process_died_under_a_living_job)
{
    use_file();
    for (int i = 0; i < 2; i++) start_rank(i, i, hold);
    for (int i = 0; i < 2; i++) wait_for(&outcomes[i].number);
    kill(ranks[0].pid, SIGKILL);
    waitpid(ranks[0].pid, NULL, 0);
    ranks[0].pid = 0;
    start_rank(2, 0, intrude);
    finish_rank(2);
    expect(2, FSDP_ERR_RENDEZVOUS, "exists from an earlier job");
}

/* ---- Disturbances ------------------------------------------------------------------------------------- */

static int connect_raw(void)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int i = 0; i < 3000; i++) {
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
        usleep(1000);
    }
    cr_assert_fail("nobody listens");
    return -1;
}

static struct wire_request request_of(int op, uint8_t key_bytes, uint32_t value_bytes)
{
    struct wire_request r = {.magic = WIRE_MAGIC,
                             .op = (uint8_t)op,
                             .key_bytes = key_bytes,
                             .version = WIRE_VERSION,
                             .value_bytes = value_bytes};
    wire_swap_request(&r);
    return r;
}

static void say(int fd, const void *bytes, size_t n)
{
    (void)!send(fd, bytes, n, MSG_NOSIGNAL);
}

/* The server closes the connection, without or after a reply. */
static void expect_closed(int fd)
{
    char buffer[1024];
    struct timeval patience = {.tv_sec = 7};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t n;
    do n = recv(fd, buffer, sizeof buffer, 0);
    while (n > 0);
    cr_assert(n == 0 || errno == ECONNRESET, "still open");
    close(fd);
}

static fsdp_status work_on(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    TRY(open_as(rank, 2, 5000, "job", &store));
    fsdp_status status = FSDP_OK;
    out->number = 1;
    for (int64_t stop = store_now_ms() + 1200, n; store_now_ms() < stop && status == FSDP_OK;) {
        status = store_add(store, "n", 1, &n);
        usleep(500);
    }
    return leave(store, status);
}

Test(disturb, garbage_at_the_port)
{
    use_tcp();
    for (int i = 0; i < 2; i++) start_rank(i, i, work_on);
    wait_for(&outcomes[0].number);

    unsigned char noise[4096];
    srand(7);
    for (int i = 0; i < 100; i++) {
        int fd = connect_raw();
        for (size_t k = 0; k < sizeof noise; k++) noise[k] = (unsigned char)rand();
        say(fd, noise, sizeof(struct wire_request) + (size_t)rand() % (sizeof noise - sizeof(struct wire_request)));
        expect_closed(fd);
    }
    /* Well-formed but not allowed: before HELLO, a wrong HELLO, and lengths that promise too much. */
    struct wire_request bad[] = {
        request_of(WIRE_SET, 1, 1),     request_of(WIRE_GET, 1, 0),         request_of(WIRE_JOIN, 0, 0),
        request_of(WIRE_HELLO, 3, 1),   request_of(WIRE_HELLO, 0, ~0u),     request_of(0, 0, 0),
        request_of(WIRE_ADD, 255, ~0u), request_of(WIRE_HELLO + 200, 0, 0), request_of(WIRE_HELLO, 0, 0),
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = connect_raw();
        say(fd, &bad[i], sizeof bad[i]);
        expect_closed(fd);
    }
    struct wire_request hello = request_of(WIRE_HELLO, 3, 0), strange = hello;
    strange.magic ^= 1;
    int stranger = connect_raw();
    say(stranger, &strange, sizeof strange);
    cr_assert_leq(recv(stranger, noise, 1, 0), 0, "an answer to what is no store's client");
    close(stranger);
    /* The same from one that knows the job key. */
    struct wire_request worse[] = {
        request_of(WIRE_SET, 1, STORE_VALUE_MAX + 1),
        request_of(WIRE_SET, 0, 1),
        request_of(WIRE_GET, 1, 1),
        request_of(WIRE_JOIN, 1, 0),
        request_of(WIRE_HELLO, 3, 0),
        request_of(WIRE_SET, 1, ~0u),
    };
    for (size_t i = 0; i < sizeof worse / sizeof *worse; i++) {
        struct wire_reply reply;
        int fd = connect_raw();
        say(fd, &hello, sizeof hello);
        say(fd, "job", 3);
        cr_assert_eq(recv(fd, &reply, sizeof reply, MSG_WAITALL), sizeof reply);
        cr_assert_eq(reply.status, 0);
        say(fd, &worse[i], sizeof worse[i]);
        expect_closed(fd);
    }
    /* Ranks that do not exist, and one that came twice. */
    static const uint64_t who[] = {(UINT64_C(2) << 32) | 2, UINT64_C(0xffffffff00000000), (UINT64_C(2) << 32) | 1,
                                   (UINT64_C(2) << 32) | 0xffffffff, (UINT64_C(3) << 32) | 2};
    for (size_t i = 0; i < sizeof who / sizeof *who; i++) {
        struct wire_request join = request_of(WIRE_JOIN, 0, 0);
        struct wire_reply reply;
        join.arg = (int64_t)htole64(who[i]);
        int fd = connect_raw();
        say(fd, &hello, sizeof hello);
        say(fd, "job", 3);
        cr_assert_eq(recv(fd, &reply, sizeof reply, MSG_WAITALL), sizeof reply);
        say(fd, &join, sizeof join);
        cr_assert_eq(recv(fd, &reply, sizeof reply, MSG_WAITALL), sizeof reply);
        cr_assert_eq((int32_t)le32toh((uint32_t)reply.status), FSDP_ERR_RENDEZVOUS);
        close(fd);
    }
    for (int i = 0; i < 2; i++) finish_rank(i);
    expect_all(2, FSDP_OK, "");
}

Test(disturb, half_messages_and_crowds)
{
    use_tcp();
    struct wire_request hello = request_of(WIRE_HELLO, 3, 0);
    int crowd[600];
    start_rank(0, 0, work_on);
    for (int i = 0; i < 600; i++) { /* far more than the server has places for; rank 1 still gets one */
        crowd[i] = connect_raw();
        say(crowd[i], &hello, (size_t)(i % (int)sizeof hello));
    }
    start_rank(1, 1, work_on);
    for (int i = 0; i < 2; i++) finish_rank(i);
    expect_all(2, FSDP_OK, "");
    for (int i = 0; i < 600; i++) close(crowd[i]);
}

Test(disturb, another_version_is_told_so)
{
    use_tcp();
    start_rank(0, 0, hold);
    struct wire_request hello = request_of(WIRE_HELLO, 3, 0);
    struct wire_reply reply;
    char text[STORE_TEXT_MAX] = "";
    hello.version = htole16(99);
    int fd = connect_raw();
    say(fd, &hello, sizeof hello);
    say(fd, "key", 3);
    cr_assert_eq(recv(fd, &reply, sizeof reply, MSG_WAITALL), sizeof reply);
    wire_swap_reply(&reply);
    cr_assert(reply.value_bytes > 0 && reply.value_bytes < sizeof text);
    cr_assert_eq(recv(fd, text, reply.value_bytes, MSG_WAITALL), (ssize_t)reply.value_bytes);
    cr_assert(reply.status == FSDP_ERR_RENDEZVOUS && strstr(text, "another version"), "%s", text);
    expect_closed(fd);
}

/* A process that answers each connection with `answer`, or only accepts. */
static const char *answer;

static fsdp_status serve_something_else(int32_t rank, struct outcome *out)
{
    (void)rank;
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(fd, 8) != 0) _exit(2);
    out->number = 1;
    for (;;) {
        int peer = accept(fd, NULL, NULL);
        if (answer) say(peer, answer, strlen(answer));
    }
}

Test(refuse, a_port_that_another_service_has)
{
    static const char *const answers[] = {"HTTP/1.1 400 Bad Request\r\n\r\n", NULL};
    static const char *const texts[] = {"is not a store of libfsdp", "does not answer as a store"};
    for (int i = 0; i < 2; i++) {
        use_tcp();
        answer = answers[i];
        start_rank(1, 0, serve_something_else);
        wait_for(&outcomes[1].number);
        run_ranks(1, join_alone);
        expect(0, answer ? FSDP_ERR_RENDEZVOUS : FSDP_ERR_TIMEOUT, texts[i]);
        start_rank(0, 0, intrude);
        finish_rank(0);
        expect(0, FSDP_ERR_RENDEZVOUS, "port is in use");
        kill_ranks();
    }
}

static fsdp_status outlive_rank_0(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    int64_t n;
    (void)out;
    TRY(open_as(rank, 2, 3000, NULL, &store));
    fsdp_status status = store_add(store, "n", 1, &n);
    if (rank == 0) {
        usleep(100000);
        store_release(store);
        return status;
    }
    if (status == FSDP_OK) status = store_wait(store, "never");
    if (status == FSDP_ERR_PEER_LOST) status = store_add(store, "n", 1, &n);
    store_release(store);
    return status;
}

Test(disturb, rank_0_goes_while_others_wait)
{
    use_tcp();
    run_ranks(2, outlive_rank_0);
    expect(0, FSDP_OK, "");
    expect(1, FSDP_ERR_PEER_LOST, "rank 0 has ended or released its store");
    cr_assert(outcomes[1].ms < 1500 && outcomes[1].rank_a == 0);
}

static fsdp_status fork_and_release(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    TRY(open_as(rank, 2, 3000, NULL, &store));
    pid_t child = fork();
    if (child == 0) {
        int refused = store_wait(store, "k") == FSDP_ERR_FORKED;
        store_release(store);
        _exit(refused ? 0 : 1);
    }
    int ended = -1;
    waitpid(child, &ended, 0);
    out->number = ended;
    fsdp_status status = barrier(store, "after");
    return leave(store, status);
}

Test(disturb, a_forked_child_releases)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(2, fork_and_release);
        expect_all(2, FSDP_OK, "");
        cr_assert(outcomes[0].number == 0 && outcomes[1].number == 0);
    }
    cr_assert_neq(access(path, F_OK), 0, "the last rank removes the file");
}

static fsdp_status leave_child_behind(int32_t rank, struct outcome *out)
{
    for (int i = 0; i < 2; i++) {
        fsdp_store *store;
        TRY(open_as(rank, 2, 3000, NULL, &store));
        if (i == 0) {
            pid_t child = fork(); /* keeps every descriptor, as a worker of a data loader does */
            if (child == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                sleep(3);
                _exit(0);
            }
            out->number = child;
        }
        TRY(leave(store, FSDP_OK));
    }
    kill((pid_t)out->number, SIGKILL);
    waitpid((pid_t)out->number, NULL, 0);
    return FSDP_OK;
}

Test(disturb, a_forked_child_keeps_nothing_open)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        run_ranks(2, leave_child_behind);
        expect_all(2, FSDP_OK, "");
        cr_assert(outcomes[0].ms < 2500);
    }
}

static fsdp_status die_or_join(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    (void)out;
    TRY(open_as(rank, 3, rank == 1 ? 5000 : 700, NULL, &store));
    return leave(store, FSDP_OK);
}

Test(disturb, a_rank_that_dies_while_meeting_is_missing)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        start_rank(1, 1, die_or_join);
        start_rank(0, 0, die_or_join);
        usleep(200000);
        kill(ranks[1].pid, SIGKILL);
        waitpid(ranks[1].pid, NULL, 0);
        ranks[1].pid = 0;
        finish_rank(0);
        expect(0, FSDP_ERR_TIMEOUT, "missing 1-2");
    }
}

static fsdp_status come_again(int32_t rank, struct outcome *out)
{
    fsdp_store *store;
    TRY(open_as(rank, 3, 5000, NULL, &store));
    return leave(store, count_together(store, &out->number));
}

Test(disturb, a_rank_that_died_while_meeting_may_come_again)
{
    for (int kind = TCP; kind <= FILES; kind++) {
        use(kind);
        start_rank(0, 0, come_again);
        start_rank(1, 1, come_again);
        usleep(150000);
        kill(ranks[1].pid, SIGKILL);
        waitpid(ranks[1].pid, NULL, 0);
        start_rank(2, 2, come_again);
        usleep(50000);
        start_rank(1, 1, come_again);
        for (int i = 0; i < 3; i++) finish_rank(i);
        expect_all(3, FSDP_OK, "");
    }
}
