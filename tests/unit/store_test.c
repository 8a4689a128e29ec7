/* Stores as one process sees them: addresses, launchers' variables, keys and values on every backend, files
 * that are not what they should be, host callbacks, memory that runs out. Criterion runs each test in a
 * process of its own, so the environment may be changed at will. */
#include <criterion/criterion.h>

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "store/address.h"
#include "store/store.h"
#include "store/table.h"

#define SAYS(text) cr_assert(strstr(err_message(), text), "expected '%s' in: %s", text, err_message())

#define FAILS(call, wanted, text)                                                                                      \
    do {                                                                                                               \
        fsdp_status got_ = (call);                                                                                     \
        cr_assert(got_ == (wanted), "expected %s, got %s: %s", err_status_name(wanted), err_status_name(got_),         \
                  err_message());                                                                                      \
        SAYS(text);                                                                                                    \
    } while (0)

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        fsdp_status got_ = (call);                                                                                     \
        cr_assert(got_ == FSDP_OK, "%s: %s", err_status_name(got_), err_message());                                    \
    } while (0)

static fsdp_store_options options_of(int32_t rank, int32_t world_size, int64_t timeout_ms)
{
    return (fsdp_store_options){
        .struct_size = sizeof(fsdp_store_options), .rank = rank, .world_size = world_size, .timeout_ms = timeout_ms};
}

static void clear_environment(void)
{
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "FSDP_MASTER_PORT",
                                        "FSDP_STORE",
                                        "FSDP_JOB_KEY",
                                        "TORCHELASTIC_USE_AGENT_STORE",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMIX_RANK",
                                        "PMIX_NAMESPACE",
                                        "OMPI_MCA_ess_base_jobid",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NUM_NODES",
                                        "XDG_RUNTIME_DIR"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

static void set_variables(const char *assignments)
{
    clear_environment();
    char copy[512];
    snprintf(copy, sizeof copy, "%s", assignments);
    for (char *save = NULL, *one = strtok_r(copy, " ", &save); one; one = strtok_r(NULL, " ", &save)) {
        char *equals = strchr(one, '=');
        *equals = 0;
        setenv(one, equals + 1, 1);
    }
}

static int entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

/* Descriptors, threads and blocks are as they were. */
static int fds_before, tasks_before;

static void *nothing(void *argument)
{
    return argument;
}

static void remember(void)
{
    /* The thread sanitizer starts a thread of its own with the first of the program. */
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, nothing, NULL), 0);
    pthread_join(thread, NULL);
    fds_before = entries("/proc/self/fd");
    tasks_before = entries("/proc/self/task");
}

static void nothing_is_left(void)
{
    OK(mem_set_allocator(NULL, NULL, NULL)); /* refused while blocks are live */
    cr_assert_eq(entries("/proc/self/fd"), fds_before, "descriptors leaked");
    /* A joined thread may stay in the list for a moment. */
    for (int i = 0; i < 1000 && entries("/proc/self/task") != tasks_before; i++) usleep(1000);
    cr_assert_eq(entries("/proc/self/task"), tasks_before, "threads leaked");
}

static char folder[64];

static const char *path_in_folder(const char *name)
{
    static char path[128];
    if (!folder[0]) {
        strcpy(folder, "/tmp/fsdp-store-XXXXXX");
        cr_assert(mkdtemp(folder));
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void remove_folder(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    if (folder[0]) cr_assert_eq(system(command), 0);
}

static int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &size) == 0);
    close(fd);
    return ntohs(a.sin_port);
}

static const char *tcp_url(int port)
{
    static char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    return url;
}

/* ---- Addresses ---------------------------------------------------------------------------------------- */

Test(store_url, good_ones_are_read)
{
    struct store_address a;
    OK(store_url_parse("tcp://node-1.example:29500?rank=3&world_size=4", &a));
    cr_assert_eq(a.scheme, STORE_TCP);
    cr_assert_str_eq(a.endpoint.host, "node-1.example");
    cr_assert_eq(a.endpoint.port, 29500);
    cr_assert(a.rank == 3 && a.world_size == 4);
    OK(store_url_parse("tcp://[fe80::1]:1/?world_size=1&rank=0", &a));
    cr_assert_str_eq(a.endpoint.host, "fe80::1");
    cr_assert(a.endpoint.port == 1 && a.rank == 0 && a.world_size == 1);
    OK(store_url_parse("tcp://localhost:65535", &a));
    cr_assert_eq(a.world_size, 0);
    OK(store_url_parse("file:///tmp/a%20b%25/c?rank=0&world_size=2", &a));
    cr_assert_eq(a.scheme, STORE_FILE);
    cr_assert_str_eq(a.path, "/tmp/a b%/c");
    OK(store_url_parse("env://", &a));
    cr_assert_eq(a.scheme, STORE_ENV);
}

Test(store_url, bad_ones_are_refused_with_the_reason)
{
    static const char *const cases[][2] = {
        {"", "empty"},
        {"http://a:1", "expected env://"},
        {"env://x", "not understood"},
        {"tcp://", "no port"},
        {"tcp://host", "no port"},
        {"tcp://:80", "no host"},
        {"tcp://host:0", "port 0"},
        {"tcp://host:65536", "65536"},
        {"tcp://host:12x", "12x"},
        {"tcp://host:-1", "-1"},
        {"tcp://host: 1", "' 1'"},
        {"tcp://a/b:1", "not a host name"},
        {"tcp://user@a:1", "not a host name"},
        {"tcp://::1:29500", "brackets"},
        {"tcp://[::1:29500", "closing"},
        {"tcp://[::1]29500", "no port"},
        {"file://relative", "absolute"},
        {"file:///", "absolute"},
        {"file:///a%2", "escape"},
        {"file:///a%00b", "escape"},
        {"tcp://a:1?rank=0", "not world_size"},
        {"tcp://a:1?world_size=2", "not rank"},
        {"tcp://a:1?rank=2&world_size=2", "out of range"},
        {"tcp://a:1?rank=-1&world_size=2", "'-1'"},
        {"tcp://a:1?rank=x&world_size=2", "'x'"},
        {"tcp://a:1?rank=0&world_size=0", "'0'"},
        {"tcp://a:1?rank=0&world_size=99999999999999999999", "99999999999999999999"},
        {"tcp://a:1?rank=0&rank=1&world_size=2", "twice"},
        {"tcp://a:1?rank", "no value"},
        {"tcp://a:1?timeout=3", "unknown parameter 'timeout'"},
    };
    struct store_address a;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        FAILS(store_url_parse(cases[i][0], &a), FSDP_ERR_INVALID, cases[i][1]);
    char *longest = malloc(10001);
    memset(longest, 'a', 10000);
    longest[10000] = 0;
    FAILS(store_url_parse(longest, &a), FSDP_ERR_INVALID, "10000");
    memcpy(longest, "tcp://", 6);
    strcpy(longest + 400, ":1");
    FAILS(store_url_parse(longest, &a), FSDP_ERR_INVALID, "host name has 394");
    free(longest);
}

/* ---- Launchers ---------------------------------------------------------------------------------------- */

Test(store_env, each_launcher_names_its_ranks)
{
    static const struct {
        const char *variables;
        enum store_launcher launcher;
        int32_t rank, world_size;
    } cases[] = {
        {"", LAUNCHER_NONE, 0, 1},
        {"RANK= WORLD_SIZE=", LAUNCHER_NONE, 0, 1},
        {"RANK=1 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=10", LAUNCHER_TORCHRUN, 1, 4},
        {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 PMI_RANK=0 PMI_SIZE=1", LAUNCHER_OPENMPI, 2, 3},
        {"PMIX_RANK=1 OMPI_COMM_WORLD_SIZE=3", LAUNCHER_OPENMPI, 1, 3},
        {"PMIX_RANK=1", LAUNCHER_NONE, 0, 1},
        {"PMI_RANK=5 PMI_SIZE=6 SLURM_PROCID=0 SLURM_NTASKS=2", LAUNCHER_PMI, 5, 6},
        {"SLURM_PROCID=1 SLURM_NTASKS=2", LAUNCHER_SLURM, 1, 2},
        {"SLURM_PROCID=1", LAUNCHER_NONE, 0, 1},
        {"SLURM_NTASKS=8", LAUNCHER_NONE, 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum store_launcher launcher;
        int32_t rank, world_size;
        set_variables(cases[i].variables);
        OK(store_env_identity(&launcher, &rank, &world_size));
        cr_assert(launcher == cases[i].launcher && rank == cases[i].rank && world_size == cases[i].world_size, "%s",
                  cases[i].variables);
    }
}

Test(store_env, broken_variables_are_named)
{
    static const char *const cases[][2] = {
        {"RANK=0", "WORLD_SIZE is not"},
        {"WORLD_SIZE=2", "RANK is not"},
        {"RANK=0 WORLD_SIZE=two", "WORLD_SIZE is 'two'"},
        {"RANK=0x1 WORLD_SIZE=2", "RANK is '0x1'"},
        {"RANK=-1 WORLD_SIZE=2", "RANK is '-1'"},
        {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE is '0'"},
        {"RANK=2 WORLD_SIZE=2", "RANK is 2 but WORLD_SIZE is 2"},
        {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"},
        {"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not"},
        {"PMI_SIZE=2", "PMI_RANK is not"},
        {"SLURM_PROCID=a SLURM_NTASKS=2", "SLURM_PROCID is 'a'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_store *store;
        set_variables(cases[i][0]);
        FAILS(fsdp_store_open("env://", NULL, &store), FSDP_ERR_RENDEZVOUS, cases[i][1]);
    }
}

Test(store_env, where_to_meet)
{
    static const struct {
        const char *variables;
        const char *host;
        int port;
    } cases[] = {
        {"MASTER_ADDR=h MASTER_PORT=29500", "h", 29500},
        {"MASTER_ADDR=[::1] MASTER_PORT=29500", "::1", 29500},
        {"MASTER_ADDR=::1 MASTER_PORT=29500", "::1", 29500},
        {"MASTER_ADDR=h MASTER_PORT=29500 FSDP_MASTER_PORT=7", "h", 7},
        {"MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True", "h", 29501},
        {"MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True", "h", 65534},
        {"MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=False", "h", 29500},
        {"MASTER_ADDR=h MASTER_PORT=29500 FSDP_MASTER_PORT=7 TORCHELASTIC_USE_AGENT_STORE=True", "h", 7},
        {"MASTER_ADDR=h MASTER_PORT=29500 FSDP_STORE=tcp://x:3", "x", 3},
    };
    struct store_address a;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        set_variables(cases[i].variables);
        OK(store_env_address(LAUNCHER_TORCHRUN, 2, &a));
        cr_assert(a.scheme == STORE_TCP && strcmp(a.endpoint.host, cases[i].host) == 0 &&
                      a.endpoint.port == cases[i].port,
                  "%s gave %s %d", cases[i].variables, a.endpoint.host, a.endpoint.port);
    }
}

Test(store_env, nowhere_to_meet)
{
    static const struct {
        const char *variables;
        enum store_launcher launcher;
        const char *text;
    } cases[] = {
        {"", LAUNCHER_TORCHRUN, "MASTER_ADDR is not set (torchrun"},
        {"", LAUNCHER_PMI, "MASTER_ADDR is not set (this launcher does not"},
        {"MASTER_ADDR=h", LAUNCHER_TORCHRUN, "MASTER_PORT is not set"},
        {"MASTER_ADDR=h MASTER_PORT=x", LAUNCHER_TORCHRUN, "MASTER_PORT is 'x'"},
        {"MASTER_ADDR=h MASTER_PORT=0", LAUNCHER_TORCHRUN, "MASTER_PORT is '0'"},
        {"MASTER_ADDR=h FSDP_MASTER_PORT=99999", LAUNCHER_TORCHRUN, "FSDP_MASTER_PORT is '99999'"},
        {"FSDP_STORE=env://", LAUNCHER_TORCHRUN, "FSDP_STORE is 'env://'"},
        {"PMIX_NAMESPACE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1", LAUNCHER_OPENMPI, "MASTER_ADDR"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE=2", LAUNCHER_OPENMPI, "MASTER_ADDR"},
        {"SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2", LAUNCHER_SLURM, "MASTER_ADDR"},
    };
    struct store_address a;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        set_variables(cases[i].variables);
        FAILS(store_env_address(cases[i].launcher, 2, &a), FSDP_ERR_RENDEZVOUS, cases[i].text);
    }
    set_variables("FSDP_STORE=tcp://nothing");
    FAILS(store_env_address(LAUNCHER_TORCHRUN, 2, &a), FSDP_ERR_INVALID, "FSDP_STORE: url");
}

Test(store_env, a_launcher_on_one_host_needs_no_address)
{
    struct store_address a, b, c;
    set_variables("PMIX_NAMESPACE=77 OMPI_COMM_WORLD_LOCAL_SIZE=2");
    OK(store_env_address(LAUNCHER_OPENMPI, 2, &a));
    OK(store_env_address(LAUNCHER_OPENMPI, 2, &b));
    setenv("PMIX_NAMESPACE", "78", 1);
    OK(store_env_address(LAUNCHER_OPENMPI, 2, &c));
    cr_assert(a.scheme == STORE_FILE && strncmp(a.path, "/tmp/libfsdp-", 13) == 0);
    cr_assert_str_eq(a.path, b.path);
    cr_assert_str_neq(a.path, c.path);
    set_variables("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1");
    OK(store_env_address(LAUNCHER_SLURM, 2, &a));
    cr_assert_eq(a.scheme, STORE_FILE);

    path_in_folder("");
    setenv("XDG_RUNTIME_DIR", folder, 1);
    OK(store_env_address(LAUNCHER_SLURM, 2, &a));
    cr_assert_eq(strncmp(a.path, folder, strlen(folder)), 0);
    chmod(folder, 0777);
    OK(store_env_address(LAUNCHER_SLURM, 2, &a));
    cr_assert_eq(strncmp(a.path, "/tmp/libfsdp-", 13), 0, "a folder that others write to is not used");
    remove_folder();
}

/* ---- Opening ------------------------------------------------------------------------------------------ */

Test(store_open, options_are_checked)
{
    fsdp_store *store;
    clear_environment();
    fsdp_store_options o = options_of(2, 2, 0);
    FAILS(store_open("env://", &o, &store), FSDP_ERR_INVALID, "options->rank 2 is out of range");
    o = options_of(-1, 2, 0);
    FAILS(store_open("env://", &o, &store), FSDP_ERR_INVALID, "options->rank -1");
    o = options_of(0, -1, 0);
    FAILS(store_open("env://", &o, &store), FSDP_ERR_INVALID, "options->world_size is -1");
    o = options_of(0, 1, -5);
    FAILS(store_open("env://", &o, &store), FSDP_ERR_INVALID, "timeout_ms is -5");
    o = options_of(0, 2, 0);
    FAILS(store_open("tcp://localhost:1?rank=1&world_size=2", &o, &store), FSDP_ERR_INVALID,
          "rank 1 of 2 but options says");
    FAILS(store_open("env://", &o, &store), FSDP_ERR_RENDEZVOUS, "MASTER_ADDR");
    FAILS(fsdp_store_open("tcp://localhost:1", NULL, &store), FSDP_ERR_INVALID, "nothing says which rank");
    FAILS(fsdp_store_open("file:///tmp/x", NULL, &store), FSDP_ERR_INVALID, "nothing says which rank");
    FAILS(fsdp_store_open("", NULL, &store), FSDP_ERR_INVALID, "url is empty");
    char key[300];
    memset(key, 'k', sizeof key);
    key[256] = 0;
    o = options_of(0, 1, 0);
    o.job_key = key;
    FAILS(store_open("env://", &o, &store), FSDP_ERR_INVALID, "job_key has 256");
    setenv("FSDP_JOB_KEY", key, 1);
    FAILS(fsdp_store_open("env://", NULL, &store), FSDP_ERR_INVALID, "FSDP_JOB_KEY has 256");
    setenv("FSDP_JOB_KEY", "", 1);
    set_variables("RANK=0 WORLD_SIZE=2 FSDP_STORE=tcp://localhost:1?rank=1&world_size=2");
    FAILS(fsdp_store_open("env://", NULL, &store), FSDP_ERR_INVALID, "launcher or options say rank 0 of 2");
}

Test(store_open, one_rank_needs_nothing)
{
    static const char *const cases[] = {"", "RANK=0 WORLD_SIZE=1", "SLURM_NTASKS=8",
                                        "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h", "FSDP_STORE=tcp://nowhere.invalid:1"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_store *store;
        set_variables(cases[i]);
        OK(fsdp_store_open("env://", NULL, &store));
        cr_assert(store_rank(store) == 0 && store_world_size(store) == 1);
        cr_assert_eq(store->timeout_ms, 300000);
        store_release(store);
    }
}

Test(store_open, a_store_is_counted)
{
    fsdp_store *store;
    clear_environment();
    remember();
    OK(fsdp_store_open("env://", NULL, &store));
    cr_assert(store_is(store) && !store_is(NULL));
    cr_assert_eq(store_next_group(store), 0);
    cr_assert_eq(store_next_group(store), 1);
    store_retain(store);
    store_release(store);
    cr_assert(store_is(store));
    OK(store_set(store, "a", "b", 1));
    store_release(store);
    store_release(NULL);
    nothing_is_left();
}

/* ---- Keys and values, on every backend ---------------------------------------------------------------- */

static fsdp_store *open_alone(int kind, int64_t timeout_ms)
{
    fsdp_store *store;
    fsdp_store_options o = options_of(0, 1, timeout_ms);
    char url[160];
    clear_environment();
    if (kind == 0) strcpy(url, "env://");
    if (kind == 1) snprintf(url, sizeof url, "tcp://localhost:%d", free_port());
    if (kind == 2) snprintf(url, sizeof url, "file://%s", path_in_folder("store"));
    OK(store_open(url, &o, &store));
    return store;
}

#define KINDS 3

Test(store_keys, come_back_as_they_were_set, .timeout = 10)
{
    static char big[65536], back[65536];
    for (size_t i = 0; i < sizeof big; i++) big[i] = (char)(i * 7 + i / 256);
    for (int kind = 0; kind < KINDS; kind++) {
        fsdp_store *store = open_alone(kind, 2000);
        size_t bytes = 9;
        int64_t sum;
        char key[256];
        memset(key, 'k', 255);
        key[255] = 0;
        OK(store_set(store, key, big, sizeof big));
        OK(store_get(store, key, back, sizeof back, &bytes));
        cr_assert(bytes == sizeof big && memcmp(big, back, bytes) == 0);
        OK(store_set(store, key, "short", 5));
        OK(store_get(store, key, back, sizeof back, &bytes));
        cr_assert(bytes == 5 && memcmp(back, "short", 5) == 0);
        OK(store_set(store, "empty", NULL, 0));
        OK(store_get(store, "empty", NULL, 0, &bytes));
        cr_assert_eq(bytes, 0);
        OK(store_wait(store, "empty"));

        OK(store_add(store, "n", 5, &sum));
        OK(store_add(store, "n", -7, &sum));
        cr_assert_eq(sum, -2);
        OK(store_get(store, "n", back, sizeof back, &bytes));
        cr_assert(bytes == 2 && memcmp(back, "-2", 2) == 0);
        OK(store_set(store, "m", "41", 2));
        OK(store_add(store, "m", 1, &sum));
        cr_assert_eq(sum, 42);
        for (int i = 0; i < 500; i++) {
            snprintf(key, sizeof key, "key-%d", i);
            OK(store_set(store, key, &i, sizeof i));
        }
        for (int i = 0, j; i < 500; i++) {
            snprintf(key, sizeof key, "key-%d", i);
            OK(store_get(store, key, &j, sizeof j, &bytes));
            cr_assert_eq(i, j);
        }
        store_release(store);
    }
    remove_folder();
}

Test(store_keys, wrong_use_is_refused, .timeout = 30)
{
    for (int kind = 0; kind < KINDS; kind++) {
        fsdp_store *store = open_alone(kind, 300);
        static char big[65537], key[257];
        char buffer[4] = "abc";
        size_t bytes = 0;
        int64_t sum = 77;
        memset(key, 'k', 256);
        FAILS(store_set(store, key, "", 0), FSDP_ERR_INVALID, "too long");
        FAILS(store_set(store, "", "", 0), FSDP_ERR_INVALID, "key is empty");
        FAILS(fsdp_store_wait(store, NULL), FSDP_ERR_INVALID, "key is NULL");
        FAILS(fsdp_store_set(store, "k", NULL, 1), FSDP_ERR_INVALID, "value is NULL");
        FAILS(store_set(store, "k", big, sizeof big), FSDP_ERR_INVALID, "65537 bytes");
        FAILS(fsdp_store_get(store, "k", NULL, 1, &bytes), FSDP_ERR_INVALID, "buffer is NULL");
        FAILS(fsdp_store_get(store, "k", buffer, 1, NULL), FSDP_ERR_INVALID, "bytes is NULL");
        FAILS(fsdp_store_add(store, "k", 1, NULL), FSDP_ERR_INVALID, "result is NULL");

        OK(store_set(store, "k", "value", 5));
        FAILS(store_get(store, "k", buffer, 4, &bytes), FSDP_ERR_INVALID, "has 5 bytes but capacity is 4");
        cr_assert(bytes == 5 && strcmp(buffer, "abc") == 0);
        FAILS(store_add(store, "k", 1, &sum), FSDP_ERR_INVALID, "decimal integer");
        OK(store_set(store, "max", "9223372036854775807", 19));
        FAILS(store_add(store, "max", 1, &sum), FSDP_ERR_INVALID, "64 bits");
        cr_assert_eq(sum, 77);
        FAILS(store_get(store, "never", buffer, 4, &bytes), FSDP_ERR_TIMEOUT, "'never' was not set within 300 ms");
        FAILS(store_wait(store, "never"), FSDP_ERR_TIMEOUT, "'never'");
        OK(store_set(store, "k", "v", 1));
        store_release(store);
    }
    remove_folder();
}

static void *wait_for_go(void *store)
{
    return (void *)(intptr_t)store_wait(store, "go");
}

Test(store_keys, threads_of_a_rank_wait_for_one_another, .timeout = 10)
{
    for (int kind = 0; kind < KINDS; kind++) {
        fsdp_store *store = open_alone(kind, 5000);
        pthread_t threads[3];
        int64_t start = store_now_ms();
        for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, wait_for_go, store);
        usleep(30000);
        OK(store_set(store, "go", "", 0));
        for (int i = 0; i < 3; i++) {
            void *status;
            pthread_join(threads[i], &status);
            cr_assert_eq((fsdp_status)(intptr_t)status, FSDP_OK);
        }
        cr_assert(store_now_ms() - start < 2000, "nobody was woken");
        store_release(store);
    }
    remove_folder();
}

Test(store_keys, a_forked_child_is_refused_and_harms_nothing, .timeout = 10)
{
    for (int kind = 0; kind < KINDS; kind++) {
        fsdp_store *store = open_alone(kind, 2000);
        OK(store_set(store, "k", "v", 1));
        usleep(20000); /* the server's thread is back in poll, so the child may free all */
        pid_t child = fork();
        if (child == 0) {
            char buffer[8];
            size_t bytes;
            int64_t sum;
            int right = store_set(store, "k", "w", 1) == FSDP_ERR_FORKED && strstr(err_message(), "forked child") &&
                        store_get(store, "k", buffer, 8, &bytes) == FSDP_ERR_FORKED &&
                        store_add(store, "n", 1, &sum) == FSDP_ERR_FORKED && store_wait(store, "k") == FSDP_ERR_FORKED;
            store_release(store);
            right = right && mem_set_allocator(NULL, NULL, NULL) == FSDP_OK;
            _exit(right ? 0 : 1);
        }
        int status;
        cr_assert(waitpid(child, &status, 0) == child && status == 0, "kind %d", kind);
        char buffer[8];
        size_t bytes;
        OK(store_get(store, "k", buffer, 8, &bytes));
        cr_assert(bytes == 1 && buffer[0] == 'v');
        store_release(store);
    }
    remove_folder();
}

/* The same for what host programs call: a child may release a store of its parent's, and nothing else. */
Test(store_keys, a_forked_child_is_told_by_every_call, .timeout = 10)
{
    for (int kind = 0; kind < KINDS; kind++) {
        fsdp_store *store = open_alone(kind, 2000);
        usleep(20000); /* the server's thread is back in poll, so the child may free all */
        pid_t child = fork();
        if (child == 0) {
            fsdp_group *group = NULL;
            char buffer[8];
            size_t bytes;
            int64_t sum;
            int32_t rank = -1, world_size = -1;
            const fsdp_status got[] = {fsdp_store_identity(store, &rank, &world_size),
                                       fsdp_store_set(store, "k", "w", 1),
                                       fsdp_store_get(store, "k", buffer, 8, &bytes),
                                       fsdp_store_add(store, "n", 1, &sum),
                                       fsdp_store_wait(store, "k"),
                                       fsdp_store_retain(store),
                                       fsdp_group_create(store, NULL, &group)};
            int right = strstr(fsdp_last_error(), "store was made before fork()") && !group && rank == -1;
            for (size_t i = 0; i < sizeof got / sizeof *got; i++) right = right && got[i] == FSDP_ERR_FORKED;
            fsdp_store_release(store);
            _exit(right ? 0 : 1);
        }
        int status;
        cr_assert(waitpid(child, &status, 0) == child && status == 0, "kind %d", kind);
        int32_t rank, world_size;
        OK(fsdp_store_identity(store, &rank, &world_size));
        cr_assert(rank == 0 && world_size == 1);
        fsdp_store_release(store);
    }
    remove_folder();
}

/* ---- Out of memory ------------------------------------------------------------------------------------ */

static int allocations_left;

static void *stingy_alloc(size_t bytes, void *user)
{
    (void)user;
    return __atomic_sub_fetch(&allocations_left, 1, __ATOMIC_SEQ_CST) < 0 ? NULL : malloc(bytes);
}

static void stingy_free(void *block, void *user)
{
    (void)user;
    free(block);
}

Test(store_memory, any_allocation_may_fail, .timeout = 20)
{
    char urls[KINDS][160];
    strcpy(urls[0], "env://");
    strcpy(urls[1], tcp_url(free_port()));
    snprintf(urls[2], sizeof urls[2], "file://%s", path_in_folder("store"));
    clear_environment();
    remember();
    for (int kind = 0; kind < KINDS; kind++) {
        int opened = 0, worked = 0;
        for (int n = 0; n < 60; n++) {
            fsdp_store *store = NULL;
            fsdp_store_options o = options_of(0, 1, 150);
            OK(mem_set_allocator(stingy_alloc, stingy_free, NULL));
            allocations_left = n;
            fsdp_status status = store_open(urls[kind], &o, &store);
            if (status == FSDP_OK) {
                opened++;
                worked += store_set(store, "k", "v", 1) == FSDP_OK && store_wait(store, "k") == FSDP_OK;
            } else {
                cr_assert(status == FSDP_ERR_NOMEM || status == FSDP_ERR_TIMEOUT, "%s", err_message());
            }
            store_release(store);
            nothing_is_left();
        }
        cr_assert(opened > worked && worked > 0, "%s: %d opened, %d worked", urls[kind], opened, worked);
    }
    remove_folder();
}

/* ---- TCP
 * ---------------------------------------------------------------------------------------------------------
 */

Test(store_tcp, an_address_that_can_not_be_listened_at, .timeout = 10)
{
    fsdp_store *store;
    fsdp_store_options o = options_of(0, 1, 300);
    remember();
    FAILS(store_open("tcp://192.0.2.77:29511", &o, &store), FSDP_ERR_RENDEZVOUS, "not an address of this machine");
    FAILS(store_open("tcp://no.such.host.invalid:29511", &o, &store), FSDP_ERR_RENDEZVOUS, "can't be resolved");
    nothing_is_left();
}

Test(store_tcp, a_port_in_use, .timeout = 10)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int other = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert(bind(other, (struct sockaddr *)&a, sizeof a) == 0 && listen(other, 1) == 0);
    getsockname(other, (struct sockaddr *)&a, &size);
    remember();
    fsdp_store *store;
    fsdp_store_options o = options_of(0, 1, 300);
    FAILS(store_open(tcp_url(ntohs(a.sin_port)), &o, &store), FSDP_ERR_RENDEZVOUS, "port is in use");
    SAYS("127.0.0.1:");
    SAYS("FSDP_MASTER_PORT");
    nothing_is_left();
    close(other);
}

Test(store_tcp, localhost_is_loopback_only, .timeout = 30)
{
    static const char *const hosts[] = {"localhost", "127.0.0.1", "[::1]"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        fsdp_store *store = NULL;
        fsdp_store_options o = options_of(0, 1, 5000);
        char url[64], line[256], want[64];
        int port = free_port(), seen = 0;
        snprintf(url, sizeof url, "tcp://%s:%d", hosts[i], port);
        fsdp_status status = store_open(url, &o, &store);
        if (status != FSDP_OK && i == 2) continue; /* a machine without IPv6 */
        OK(status);
        FILE *table = fopen(i == 2 ? "/proc/net/tcp6" : "/proc/net/tcp", "r");
        snprintf(want, sizeof want, "%s:%04X", i == 2 ? "00000000000000000000000001000000" : "0100007F",
                 (unsigned)port);
        while (table && fgets(line, sizeof line, table)) seen += strstr(line, want) && strstr(line, " 0A ");
        fclose(table);
        cr_assert_eq(seen, 1, "%s", url);
        store_release(store);
    }
}

/* ---- Files -------------------------------------------------------------------------------------------- */

static fsdp_status open_file(const char *name)
{
    fsdp_store *store = NULL;
    fsdp_store_options o = options_of(0, 1, 200);
    char url[160];
    snprintf(url, sizeof url, "file://%s", path_in_folder(name));
    fsdp_status status = store_open(url, &o, &store);
    if (status == FSDP_OK) store_release(store);
    return status;
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    FILE *f = fopen(path_in_folder(name), "w");
    cr_assert(fwrite(data, 1, bytes, f) == bytes);
    fclose(f);
    chmod(path_in_folder(name), 0600);
}

Test(store_file, what_is_not_a_store_is_left_alone, .timeout = 10)
{
    struct stat st;
    remember();
    cr_assert_eq(symlink("/tmp/elsewhere", path_in_folder("link")), 0);
    FAILS(open_file("link"), FSDP_ERR_RENDEZVOUS, "symbolic link");
    cr_assert_eq(mkfifo(path_in_folder("fifo"), 0600), 0);
    FAILS(open_file("fifo"), FSDP_ERR_RENDEZVOUS, "not a regular file");
    FAILS(open_file("."), FSDP_ERR_SYSTEM, "can't be opened");
    FAILS(open_file("no/such"), FSDP_ERR_SYSTEM, "No such file");
    write_file("text", "a text that somebody still needs", 32);
    FAILS(open_file("text"), FSDP_ERR_RENDEZVOUS, "not a store file");
    write_file("short", "abc", 3);
    FAILS(open_file("short"), FSDP_ERR_RENDEZVOUS, "not a store file");
    cr_assert(stat(path_in_folder("short"), &st) == 0 && st.st_size == 3);
    write_file("open", "", 0);
    chmod(path_in_folder("open"), 0666);
    FAILS(open_file("open"), FSDP_ERR_RENDEZVOUS, "written by other users");
    if (geteuid() == 0) {
        write_file("theirs", "", 0);
        cr_assert_eq(chown(path_in_folder("theirs"), 12345, 12345), 0);
        FAILS(open_file("theirs"), FSDP_ERR_RENDEZVOUS, "belongs to user 12345");
    }
    nothing_is_left();
    remove_folder();
}

Test(store_file, is_private_and_goes_with_its_last_rank, .timeout = 10)
{
    struct stat st;
    fsdp_store *store = open_alone(2, 500);
    cr_assert(stat(path_in_folder("store"), &st) == 0 && (st.st_mode & 0777) == 0600);
    store_release(store);
    cr_assert_neq(stat(path_in_folder("store"), &st), 0);
    remove_folder();
}

Test(store_file, a_full_disk_leaves_nothing, .timeout = 10)
{
    struct rlimit limit = {.rlim_cur = 0, .rlim_max = RLIM_INFINITY};
    path_in_folder("");
    remember();
    signal(SIGXFSZ, SIG_IGN);
    for (; limit.rlim_cur < 48; limit.rlim_cur += 8) { /* the job's record, then this rank's */
        setrlimit(RLIMIT_FSIZE, &limit);
        FAILS(open_file("store"), FSDP_ERR_SYSTEM, "can't be written");
        cr_assert_neq(access(path_in_folder("store"), F_OK), 0);
    }
    limit.rlim_cur = RLIM_INFINITY;
    setrlimit(RLIMIT_FSIZE, &limit);
    OK(open_file("store"));
    nothing_is_left();

    struct stat st;
    fsdp_store *store = open_alone(2, 500);
    cr_assert_eq(stat(path_in_folder("store"), &st), 0);
    limit.rlim_cur = (rlim_t)st.st_size + 10; /* room for a part of a record */
    setrlimit(RLIMIT_FSIZE, &limit);
    FAILS(store_set(store, "k", "v", 1), FSDP_ERR_SYSTEM, "can't be written");
    limit.rlim_cur = RLIM_INFINITY;
    setrlimit(RLIMIT_FSIZE, &limit);
    OK(store_set(store, "k", "v", 1));
    OK(store_wait(store, "k"));
    store_release(store);
    remove_folder();
}

Test(store_file, damage_is_an_error_wherever_it_is, .timeout = 20)
{
    fsdp_store *store = open_alone(2, 200);
    OK(store_set(store, "key", "value", 5));
    int fd = open(path_in_folder("store"), O_RDWR);
    unsigned char good[512], bad;
    ssize_t size = pread(fd, good, sizeof good, 0);
    cr_assert(size > 60 && size < 300);
    remember();
    int blocks = 0;
    for (ssize_t at = 0; at < size; at++) {
        for (int bit = 0; bit < 8; bit += 3) {
            bad = good[at] ^ (unsigned char)(1 << bit);
            cr_assert_eq(pwrite(fd, &bad, 1, at), 1);
            FAILS(open_file("store"), FSDP_ERR_RENDEZVOUS, "store file");
            blocks += strstr(err_message(), "two processes") != NULL;
        }
        cr_assert_eq(pwrite(fd, &good[at], 1, at), 1);
    }
    cr_assert_eq(blocks, 0, "a damaged file was believed");
    FAILS(open_file("store"), FSDP_ERR_RENDEZVOUS, "two processes say they are rank 0");
    for (ssize_t cut = 1; cut < size; cut++) {
        cr_assert_eq(ftruncate(fd, cut), 0);
        fsdp_status status = open_file("store");
        cr_assert(status == FSDP_ERR_RENDEZVOUS, "cut at %zd: %s", cut, err_message());
        cr_assert_eq(pwrite(fd, good, (size_t)size, 0), size);
    }
    cr_assert_eq(pwrite(fd, "garbage at the end, longer than a header", 40, size), 40);
    FAILS(store_set(store, "k", "v", 1), FSDP_ERR_RENDEZVOUS, "damaged at byte");
    FAILS(store_wait(store, "k"), FSDP_ERR_RENDEZVOUS, "no record begins there");
    cr_assert_eq(ftruncate(fd, size - 1), 0);
    FAILS(store_wait(store, "k"), FSDP_ERR_RENDEZVOUS, "shorter");
    cr_assert_eq(entries("/proc/self/fd"), fds_before);
    close(fd);
    store_release(store);
    remove_folder();
}

/* ---- Host callbacks ----------------------------------------------------------------------------------- */

struct host {
    int32_t code;
    int released;
    size_t reports;
    int64_t timeout_ms;
    char key[64];
};

static int32_t host_set(void *user, const char *key, const void *value, size_t bytes)
{
    struct host *host = user;
    (void)value;
    (void)bytes;
    strcpy(host->key, key);
    return host->code;
}

static int32_t host_get(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes, int64_t timeout_ms)
{
    struct host *host = user;
    strcpy(host->key, key);
    host->timeout_ms = timeout_ms;
    *bytes = host->reports;
    if (host->code == 0 && host->reports <= capacity) memset(buffer, 'x', host->reports);
    return host->code;
}

static int32_t host_add(void *user, const char *key, int64_t amount, int64_t *result)
{
    strcpy(((struct host *)user)->key, key);
    *result = amount + 1;
    return ((struct host *)user)->code;
}

static int32_t host_wait(void *user, const char *key, int64_t timeout_ms)
{
    struct host *host = user;
    strcpy(host->key, key);
    host->timeout_ms = timeout_ms;
    return host->code;
}

static void host_release(void *user)
{
    ((struct host *)user)->released++;
}

static fsdp_store_callbacks callbacks_of(struct host *host)
{
    return (fsdp_store_callbacks){.struct_size = sizeof(fsdp_store_callbacks),
                                  .user = host,
                                  .set = host_set,
                                  .get = host_get,
                                  .add = host_add,
                                  .wait = host_wait,
                                  .release = host_release};
}

Test(store_callbacks, are_called_and_their_answers_passed_on)
{
    struct host host = {.reports = 3};
    fsdp_store_callbacks callbacks = callbacks_of(&host);
    fsdp_store_options o = options_of(1, 3, 1234);
    fsdp_store *store;
    char buffer[4] = "";
    size_t bytes;
    int64_t sum;
    remember();
    OK(store_from_callbacks(&callbacks, &o, &store));
    memset(&callbacks, 0xff, sizeof callbacks); /* the struct was copied */
    cr_assert(store_rank(store) == 1 && store_world_size(store) == 3);
    OK(store_set(store, "s", "v", 1));
    cr_assert_str_eq(host.key, "s");
    OK(store_get(store, "g", buffer, 4, &bytes));
    cr_assert(bytes == 3 && strcmp(buffer, "xxx") == 0 && host.timeout_ms == 1234);
    OK(store_add(store, "a", 4, &sum));
    cr_assert_eq(sum, 5);
    host.timeout_ms = 0;
    OK(store_wait(store, "w"));
    cr_assert(host.timeout_ms == 1234 && strcmp(host.key, "w") == 0);
    store_retain(store);
    store_release(store);
    cr_assert_eq(host.released, 0);
    store_release(store);
    cr_assert_eq(host.released, 1);
    nothing_is_left();
}

Test(store_callbacks, fail_each_in_its_way)
{
    struct host host = {0};
    fsdp_store_callbacks callbacks = callbacks_of(&host);
    fsdp_store_options o = options_of(0, 2, 50);
    fsdp_store *store;
    char buffer[4];
    size_t bytes = 99;
    int64_t sum = 99;
    OK(store_from_callbacks(&callbacks, &o, &store));
    host.code = 1;
    FAILS(store_set(store, "k1", "", 0), FSDP_ERR_TIMEOUT, "set('k1') reported that its time is up");
    FAILS(store_get(store, "k2", buffer, 4, &bytes), FSDP_ERR_TIMEOUT, "get('k2')");
    FAILS(store_add(store, "k3", 1, &sum), FSDP_ERR_TIMEOUT, "add('k3')");
    FAILS(store_wait(store, "k4"), FSDP_ERR_TIMEOUT, "wait('k4')");
    host.code = -9;
    FAILS(store_set(store, "k1", "", 0), FSDP_ERR_CALLBACK, "set('k1') failed with -9");
    FAILS(store_get(store, "k2", buffer, 4, &bytes), FSDP_ERR_CALLBACK, "get('k2') failed");
    FAILS(store_add(store, "k3", 1, &sum), FSDP_ERR_CALLBACK, "add('k3') failed");
    FAILS(store_wait(store, "k4"), FSDP_ERR_CALLBACK, "wait('k4') failed");
    cr_assert(bytes == 99 && sum == 99, "outputs are left alone");
    host.reports = 5;
    FAILS(store_get(store, "k2", buffer, 4, &bytes), FSDP_ERR_INVALID, "has 5 bytes but capacity is 4");
    cr_assert_eq(bytes, 5);
    host.code = 0;
    FAILS(store_get(store, "k2", buffer, 4, &bytes), FSDP_ERR_CALLBACK, "it must fail");
    store_release(store);
}

Test(store_callbacks, must_all_be_there)
{
    struct host host = {0};
    fsdp_store *store;
    fsdp_store_options o = options_of(0, 2, 50);
    remember();
    for (int i = 0; i < 4; i++) {
        fsdp_store_callbacks callbacks = callbacks_of(&host);
        if (i == 0) callbacks.set = NULL;
        if (i == 1) callbacks.get = NULL;
        if (i == 2) callbacks.add = NULL;
        if (i == 3) callbacks.wait = NULL;
        FAILS(fsdp_store_from_callbacks(&callbacks, &o, &store), FSDP_ERR_INVALID, "set, get, add and wait");
    }
    fsdp_store_callbacks callbacks = callbacks_of(&host);
    FAILS(fsdp_store_from_callbacks(&callbacks, NULL, &store), FSDP_ERR_INVALID, "options is NULL");
    o.world_size = 0;
    FAILS(fsdp_store_from_callbacks(&callbacks, &o, &store), FSDP_ERR_INVALID, "required");
    o.world_size = 2;
    FAILS(fsdp_store_from_callbacks(NULL, &o, &store), FSDP_ERR_INVALID, "callbacks is NULL");
    cr_assert_eq(host.released, 0);
    callbacks.release = NULL;
    OK(store_from_callbacks(&callbacks, &o, &store));
    store_release(store);
    nothing_is_left();
}

Test(store_callbacks, release_is_the_parents, .timeout = 10)
{
    struct host host = {0};
    fsdp_store_callbacks callbacks = callbacks_of(&host);
    fsdp_store_options o = options_of(0, 2, 50);
    fsdp_store *store;
    OK(store_from_callbacks(&callbacks, &o, &store));
    pid_t child = fork();
    if (child == 0) {
        int right = store_wait(store, "k") == FSDP_ERR_FORKED && !host.key[0];
        store_release(store);
        _exit(right && host.released == 0 ? 0 : 1);
    }
    int status;
    cr_assert(waitpid(child, &status, 0) == child && status == 0);
    store_release(store);
    cr_assert_eq(host.released, 1);
}
