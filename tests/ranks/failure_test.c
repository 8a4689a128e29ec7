/* Ranks that are late, stopped, killed, aborted or forked, and machines that refuse what the library asks
 * for: everybody else gets a status and a sentence that names the culprit, within a bound, and other groups
 * go on. */
#include "crew.h"

#include <dirent.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/os.h"
#include "group/group.h"
#include "transport/shm/shm.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#define LARGE (4 << 20) /* floats: 16 MiB */
#define SOON_MS 1000    /* a death is noticed within this */

TestSuite(timeouts, .init = crew_init, .fini = crew_fini, .timeout = 120);
TestSuite(death, .init = crew_init, .fini = crew_fini, .timeout = 180);
TestSuite(aborts, .init = crew_init, .fini = crew_fini, .timeout = 120);
TestSuite(forks, .init = crew_init, .fini = crew_fini, .timeout = 120);
TestSuite(limits, .init = crew_init, .fini = crew_fini, .timeout = 120);
TestSuite(hostile, .init = crew_init, .fini = crew_fini, .timeout = 120);

static int32_t direct;
static int64_t size;

static fsdp_status reduce(fsdp_group *group, float *data, int64_t count, fsdp_work **work)
{
    DLTensor *t = crew_tensor(data, F32, count);
    return fsdp_all_reduce(group, t, t, FSDP_SUM, work);
}

static int32_t culprit(void)
{
    fsdp_error_info info = {.struct_size = sizeof info};
    OK(fsdp_last_error_info(&info));
    return info.rank_a;
}

/* Noticed in time, and told who it was. */
static void expect_lost(fsdp_status got, int rank, const char *how, const char *doing)
{
    int64_t ms = crew_ms_since_event();
    char who[24];
    snprintf(who, sizeof who, "rank %d ", rank);
    EXPECT(got, FSDP_ERR_PEER_LOST, who, how, doing);
    CHECK(culprit() == rank, "rank_a is %d: %s", culprit(), fsdp_last_error());
    CHECK(ms < SOON_MS, "noticed after %lld ms", (long long)ms);
    int64_t most = atomic_load(&crew->numbers[0]);
    while (ms > most && !atomic_compare_exchange_weak(&crew->numbers[0], &most, ms)) {
    }
}

static void tell_time(const char *what)
{
    fprintf(stderr, "TIME %-46s noticed after at most %lld ms\n", what, (long long)atomic_load(&crew->numbers[0]));
    atomic_store(&crew->numbers[0], 0);
}

static void again(void)
{
    crew_fini();
    crew_init();
}

/* ---- Time is up
 * -------------------------------------------------------------------------------------------------- */

/* Rank 1 does not call; the others say so in time, and rank 1 then learns it at once. */
static void late(int rank)
{
    fsdp_group_options options = crew_options(300, direct);
    fsdp_group *group = crew_group(rank, 3, &options);
    float *data = crew_floats(size, 1);
    OK(fsdp_barrier(group, NULL));
    int64_t begin = crew_now_ms();
    if (rank == 1) {
        crew_await(0, 2);
        begin = crew_now_ms();
    }
    fsdp_status got = reduce(group, data, size, NULL);
    int64_t ms = crew_now_ms() - begin;
    EXPECT(got, FSDP_ERR_TIMEOUT, "300 ms", "all_reduce", "rank 1");
    CHECK(culprit() == 1, "rank_a is %d: %s", culprit(), fsdp_last_error());
    CHECK(rank == 1 ? ms < 100 : ms >= 290 && ms < 2300, "it took %lld ms", (long long)ms);
    crew_raise(0);
    begin = crew_now_ms();
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "rank 1"); /* it stays failed */
    EXPECT(fsdp_send(group, crew_tensor(data, F32, 1), (rank + 1) % 3, 0, NULL), FSDP_ERR_TIMEOUT, "rank 1");
    CHECK(crew_now_ms() - begin < 100, "failing again took %lld ms", (long long)(crew_now_ms() - begin));
    fsdp_group_release(group);
}

Test(timeouts, a_rank_that_does_not_call)
{
    static const int64_t sizes[] = {4, 1 << 18};
    for (int s = 0; s < 2; s++)
        for (direct = 1; direct <= 2; direct++) {
            size = sizes[s];
            again();
            crew_run(3, 8000, late);
        }
}

/* The late rank's very first call after it, of a kind that could succeed alone since all peers posted. */
static void late_barrier(int rank)
{
    fsdp_group_options options = crew_options(200, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    if (rank == 1) crew_await(0, 1);
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_TIMEOUT, "rank 1");
    crew_raise(0);
    fsdp_group_release(group);
}

Test(timeouts, a_late_barrier)
{
    crew_run(2, 8000, late_barrier);
}

static void late_message(int rank)
{
    fsdp_group_options options = crew_options(300, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float data[4] = {0};
    if (rank == 1) {
        crew_await(0, 1);
        EXPECT(fsdp_recv(group, crew_tensor(data, F32, 4), 0, 5, NULL), FSDP_ERR_TIMEOUT, "rank 1", "tag 5");
    } else {
        int64_t begin = crew_now_ms();
        EXPECT(fsdp_send(group, crew_tensor(data, F32, 4), 1, 5, NULL), FSDP_ERR_TIMEOUT, "rank 1", "tag 5", "send");
        CHECK(culprit() == 1, "rank_a is %d", culprit());
        CHECK(crew_now_ms() - begin < 2300, "it took %lld ms", (long long)(crew_now_ms() - begin));
        crew_raise(0);
    }
    fsdp_group_release(group);
}

Test(timeouts, a_message_nobody_takes)
{
    crew_run(2, 8000, late_message);
}

static void any_message(int rank)
{
    fsdp_group_options options = crew_options(300, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float data[4] = {0};
    if (rank == 0) {
        EXPECT(fsdp_recv(group, crew_tensor(data, F32, 4), FSDP_ANY_RANK, 5, NULL), FSDP_ERR_TIMEOUT, "any rank",
               "tag 5");
        crew_raise(0);
    } else {
        crew_await(0, 1);
    }
    fsdp_group_release(group);
}

Test(timeouts, a_message_from_anyone)
{
    crew_run(2, 8000, any_message);
}

/* Other messages flow all the while: that must not hide the one that doesn't. */
static void traffic(int rank)
{
    fsdp_group_options options = crew_options(500, 0);
    fsdp_group *group = crew_group(rank, 3, &options);
    float lone[4] = {0}, data[4] = {0};
    fsdp_work *work = NULL;
    int64_t begin = crew_now_ms();
    if (rank == 2) { /* only present */
        crew_await(0, 2);
    } else {
        if (rank == 0) OK(fsdp_recv(group, crew_tensor(lone, F32, 4), 2, 9, &work));
        fsdp_status got = FSDP_OK;
        while (got == FSDP_OK && crew_now_ms() < begin + 4000) {
            DLTensor *t = crew_tensor(data, F32, 4);
            got = rank == 0 ? fsdp_send(group, t, 1, 1, NULL) : fsdp_recv(group, t, 0, 1, NULL);
            if (got == FSDP_OK) got = rank == 0 ? fsdp_recv(group, t, 1, 1, NULL) : fsdp_send(group, t, 0, 1, NULL);
        }
        EXPECT(got, FSDP_ERR_TIMEOUT, "tag 9", "rank 2");
        CHECK(crew_now_ms() - begin < 2500, "it took %lld ms", (long long)(crew_now_ms() - begin));
        if (work) EXPECT(fsdp_work_wait(work, -1), FSDP_ERR_TIMEOUT, "tag 9", "rank 2");
        fsdp_work_release(work);
        crew_raise(0);
    }
    fsdp_group_release(group);
}

Test(timeouts, a_message_beside_many_others)
{
    crew_run(3, 10000, traffic);
}

/* A stopped rank is late, not dead. */
static void stopped(int rank)
{
    fsdp_group_options options = crew_options(400, direct);
    fsdp_group *group = crew_group(rank, 3, &options);
    float *data = crew_floats(size, 1);
    for (int i = 0;; i++) {
        if (i == 5) crew_raise(0);
        fsdp_status got = reduce(group, data, size, NULL);
        if (got == FSDP_OK) {
            CHECK(i < 1000000, "nothing happened");
            continue;
        }
        EXPECT(got, FSDP_ERR_TIMEOUT, "rank 2");
        CHECK(rank == 2 || culprit() == 2, "rank_a is %d: %s", culprit(), fsdp_last_error());
        break;
    }
    int64_t ms = crew_ms_since_event();
    CHECK(rank == 2 || ms < 2400, "noticed after %lld ms", (long long)ms);
    crew_raise(1);
    fsdp_group_release(group);
}

Test(timeouts, a_stopped_rank)
{
    static const int64_t sizes[] = {4, 1 << 20};
    for (int s = 0; s < 2; s++)
        for (direct = 1; direct <= 2; direct++) {
            size = sizes[s];
            again();
            crew_start(3, stopped);
            crew_await(0, 3);
            atomic_store(&crew->event_ns, os_now_ns());
            kill(crew_pid(2), SIGSTOP);
            crew_await(1, 2);
            kill(crew_pid(2), SIGCONT);
            crew_join(8000);
        }
}

/* The wait's own time is no failure of the operation. */
static void patience(int rank)
{
    fsdp_group_options options = crew_options(10000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    float data[4] = {1, 1, 1, 1};
    fsdp_work *work = NULL;
    int32_t done = 7;
    if (rank == 1) {
        crew_await(0, 1);
        OK(reduce(group, data, 4, NULL));
    } else {
        OK(reduce(group, data, 4, &work));
        OK(fsdp_work_test(work, &done));
        CHECK(done == 0, "done is %d", done);
        EXPECT(fsdp_work_wait(work, 0), FSDP_ERR_PENDING, "goes on");
        int64_t begin = crew_now_ms();
        EXPECT(fsdp_work_wait(work, 120), FSDP_ERR_PENDING, "120 ms", "goes on");
        int64_t ms = crew_now_ms() - begin;
        CHECK(ms >= 119 && ms < 1000, "it took %lld ms", (long long)ms);
        crew_raise(0);
        OK(fsdp_work_wait(work, 5000));
        OK(fsdp_work_wait(work, -1));
        OK(fsdp_work_test(work, &done));
        CHECK(done == 1, "done is %d", done);
        fsdp_work_release(work);
    }
    CHECK(data[3] == 2, "data is %g", (double)data[3]);
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(timeouts, of_a_wait_only)
{
    crew_run(2, 8000, patience);
}

/* Nobody comes to make the group: the group's own timeout counts, not the store's. */
static void alone(int rank)
{
    fsdp_group_options options = crew_options(300, 0);
    fsdp_store *store = crew_store("alone", 0, 2, 20000);
    fsdp_group *group = NULL;
    int64_t begin = crew_now_ms();
    EXPECT(fsdp_group_create(store, &options, &group), FSDP_ERR_TIMEOUT, "rank 1", "crew");
    CHECK(!group && crew_now_ms() - begin < 2300, "it took %lld ms", (long long)(crew_now_ms() - begin));
    fsdp_store_release(store);
}

Test(timeouts, of_making_a_group)
{
    crew_run(1, 24000, alone);
}

/* ---- Death
 * ------------------------------------------------------------------------------------------------------- */

/* How the survivors wait: spinning or asleep; on 2 processors both are seen. */
static int32_t spin;

static fsdp_group *mortal_group(int rank, int n)
{
    fsdp_group_options options = crew_options(20000, direct);
    options.spin_us = spin;
    return crew_group(rank, n, &options);
}

static void die_before(int rank)
{
    fsdp_group *group = mortal_group(rank, 4);
    OK(fsdp_barrier(group, NULL));
    if (rank == 2) crew_die();
    while (atomic_load(&crew->event_ns) == 0) {
    }
    crew_sleep_ms(30);
    expect_lost(fsdp_barrier(group, NULL), 2, "has ended", "barrier");
    int64_t begin = crew_now_ms();
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_PEER_LOST, "rank 2");
    CHECK(crew_now_ms() - begin < 100, "failing again took %lld ms", (long long)(crew_now_ms() - begin));
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    CHECK(info.status == FSDP_ERR_PEER_LOST, "failed is %d", info.status);
    fsdp_group_release(group);
}

Test(death, before_a_call)
{
    crew_start(4, die_before);
    crew_mortal(2);
    crew_join(8000);
    tell_time("before a call");
}

static void die_while_waiting(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    OK(fsdp_barrier(group, NULL));
    if (rank == 0) {
        crew_await(0, 2);
        crew_sleep_ms(spin < 0 ? 200 : 20);
        crew_die();
    }
    crew_raise(0);
    expect_lost(fsdp_barrier(group, NULL), 0, "has ended", "barrier");
    fsdp_group_release(group);
}

Test(death, while_others_wait)
{
    static const int32_t spins[] = {-1, 1000000};
    for (int i = 0; i < 2; i++) {
        spin = spins[i];
        again();
        crew_start(3, die_while_waiting);
        crew_mortal(0);
        crew_join(8000);
        tell_time(spin < 0 ? "while others sleep" : "while others spin");
    }
}

/* Killed from outside at any moment of large transfers, over and over. */
static void die_in_transfer(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    float *in = crew_floats(LARGE, 1), *out = crew_floats(LARGE, 0);
    int64_t part = LARGE / 3;
    fsdp_status got = FSDP_OK;
    OK(fsdp_barrier(group, NULL));
    crew_raise(0);
    for (int i = 0; got == FSDP_OK; i++) {
        switch (i % 4) {
        case 0:
            got = reduce(group, in, LARGE, NULL);
            break;
        case 1:
            got = fsdp_all_gather(group, crew_tensor(in, F32, part), crew_tensor(out, F32, 3 * part), NULL);
            break;
        case 2:
            got =
                fsdp_reduce_scatter(group, crew_tensor(in, F32, 3 * part), crew_tensor(out, F32, part), FSDP_AVG, NULL);
            break;
        default:
            got = fsdp_all_to_all(group, crew_tensor(in, F32, 3 * part), crew_tensor(out, F32, 3 * part), NULL);
            break;
        }
    }
    expect_lost(got, 1, "has ended", " ");
    fsdp_group_release(group);
}

Test(death, in_a_transfer)
{
    for (int i = 0; i < (SANITIZED ? 4 : 16); i++) {
        direct = i % 2 ? 1 : 2;
        spin = 0;
        again();
        crew_start(3, die_in_transfer);
        crew_await(0, 3);
        usleep((useconds_t)(1000 + i * 3700));
        crew_kill(1);
        crew_join(10000);
    }
    tell_time("in a transfer (last)");
}

/* Three operations queued on the collective lane, and messages pending: every waiter of each is told. */
static void die_with_queue(int rank)
{
    fsdp_group *group = mortal_group(rank, 4);
    fsdp_group *others = NULL;
    OK(fsdp_group_split(group, rank == 3 ? 1 : 0, rank, NULL, &others));
    OK(fsdp_barrier(group, NULL));
    if (rank == 3) {
        crew_await(0, 3);
        crew_sleep_ms(20);
        crew_die();
    }
    fsdp_work *works[6];
    float *data = crew_floats(3 * 4096, 1);
    float message[256] = {0};
    for (int i = 0; i < 3; i++) OK(reduce(group, data + i * 4096, 4096, &works[i]));
    OK(fsdp_send(group, crew_tensor(message, F32, 64), 3, 1, &works[3]));
    OK(fsdp_recv(group, crew_tensor(message + 64, F32, 64), 3, 1, &works[4]));
    OK(fsdp_recv(group, crew_tensor(message + 128, F32, 64), FSDP_ANY_RANK, 2, &works[5]));
    crew_raise(0);
    static const int sequence[] = {2, 5, 0, 4, 1, 3};
    for (int i = 0; i < 6; i++) {
        fsdp_status got = fsdp_work_wait(works[sequence[i]], 5000);
        EXPECT(got, FSDP_ERR_PEER_LOST, "rank 3");
        CHECK(culprit() == 3, "operation %d: rank_a is %d: %s", sequence[i], culprit(), fsdp_last_error());
        fsdp_work_release(works[sequence[i]]);
    }
    int64_t ms = crew_ms_since_event();
    CHECK(ms < SOON_MS, "noticed after %lld ms", (long long)ms);
    int64_t most = atomic_load(&crew->numbers[0]);
    while (ms > most && !atomic_compare_exchange_weak(&crew->numbers[0], &most, ms)) {
    }
    for (int i = 0; i < 20; i++) crew_group_works(others, rank, 3); /* which goes on */
    fsdp_group_release(group);
    crew_group_works(others, rank, 3);
    fsdp_group_release(others);
}

Test(death, with_operations_queued)
{
    crew_start(4, die_with_queue);
    crew_mortal(3);
    crew_join(10000);
    tell_time("with a queue and messages");
}

/* Messages only: nobody waits in a collective. A large one dies half-way. */
static void die_in_message(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    float *data = crew_floats(LARGE, 1);
    OK(fsdp_barrier(group, NULL));
    int turn = 0;
    fsdp_status got = FSDP_OK;
    crew_raise(0);
    while (got == FSDP_OK) {
        DLTensor *t = crew_tensor(data, F32, LARGE);
        got = rank == 2 ? fsdp_recv(group, t, turn++ % 2, 0, NULL) : fsdp_send(group, t, 2, 0, NULL);
    }
    int dead = (int)atomic_load(&crew->numbers[1]);
    expect_lost(got, dead, "has ended", " ");
    fsdp_group_release(group);
}

Test(death, in_a_message)
{
    for (int i = 0; i < (SANITIZED ? 4 : 8); i++) {
        direct = i % 2 ? 1 : 2;
        again();
        int dead = i / 2 % 2 ? 2 : 0;
        atomic_store(&crew->numbers[1], dead);
        crew_start(3, die_in_message);
        crew_await(0, 3);
        usleep((useconds_t)(3000 + i * 2900));
        crew_kill(dead);
        crew_join(10000);
    }
    tell_time("in a message (last)");
}

/* A grandchild holds all of the dead rank's descriptors and memory: the rank is dead all the same. */
static void die_with_child(int rank)
{
    fsdp_group *group = mortal_group(rank, 2);
    OK(fsdp_barrier(group, NULL));
    if (rank == 1) {
        pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, 0);
            for (int i = 0; i < 600 && atomic_load(&crew->flags[3]) == 0; i++) crew_sleep_ms(10);
            _exit(0);
        }
        crew_await(0, 1);
        crew_sleep_ms(20);
        crew_die();
    }
    crew_raise(0);
    expect_lost(fsdp_barrier(group, NULL), 1, "has ended", "barrier");
    crew_raise(3);
    fsdp_group_release(group);
}

Test(death, with_a_child_that_lives)
{
    crew_start(2, die_with_child);
    crew_mortal(1);
    crew_join(8000);
    tell_time("with a child that lives");
}

/* While the group is made: before, between and after the steps. */
static int die_after_us;

static void die_in_making(int rank)
{
    fsdp_store *store = crew_store("making", rank, 3, 20000);
    fsdp_group_options options = crew_options(1500, direct);
    fsdp_group *group = NULL;
    crew_raise(0);
    crew_await(0, 3);
    if (rank == 0) crew_raise(1);
    fsdp_status got = fsdp_group_create(store, &options, &group);
    if (rank == 1) { /* it was in before it was killed */
        for (;;) pause();
    }
    if (got == FSDP_OK) got = fsdp_barrier(group, NULL);
    int64_t ms = crew_ms_since_event();
    CHECK(got != FSDP_OK, "no failure");
    CHECK(strstr(fsdp_last_error(), "rank 1"), "%s: %s", fsdp_status_name(got), fsdp_last_error());
    if (crew_told("making", "fsdp/group0/0/1")) {
        CHECK(got == FSDP_ERR_PEER_LOST, "%s: %s", fsdp_status_name(got), fsdp_last_error());
        CHECK(culprit() == 1, "rank_a is %d: %s", culprit(), fsdp_last_error());
        CHECK(ms < SOON_MS, "noticed after %lld ms: %s", (long long)ms, fsdp_last_error());
    } else { /* it has told nobody that it is there, so its end can't be told from being late */
        CHECK(got == FSDP_ERR_TIMEOUT && ms < 3500, "%s after %lld ms: %s", fsdp_status_name(got), (long long)ms,
              fsdp_last_error());
    }
    fsdp_group_release(group);
    fsdp_store_release(store);
}

Test(death, while_the_group_is_made)
{
    for (int i = 0; i < (SANITIZED ? 6 : 30); i++) {
        die_after_us = i * 50;
        again();
        crew_start(3, die_in_making);
        crew_await(1, 1);
        usleep((useconds_t)die_after_us);
        crew_kill(1);
        crew_join(12000);
    }
}

static void die_in_split(int rank)
{
    fsdp_group *group = mortal_group(rank, 4);
    fsdp_group *half = NULL;
    OK(fsdp_barrier(group, NULL));
    crew_raise(0);
    if (rank == 0) {
        crew_await(0, 4);
        crew_raise(1);
    }
    fsdp_status got = FSDP_OK;
    for (int i = 0; got == FSDP_OK; i++) {
        got = fsdp_group_split(group, rank % 2, 0, NULL, &half);
        if (got == FSDP_OK) got = fsdp_barrier(half, NULL);
        fsdp_group_release(half);
        half = NULL;
        if (got != FSDP_OK && (rank % 2) == 0) { /* the other half notices in the parent */
            break;
        }
    }
    CHECK(strstr(fsdp_last_error(), "rank "), "%s", fsdp_last_error());
    int64_t ms = crew_ms_since_event();
    EXPECT(got, FSDP_ERR_PEER_LOST, "rank");
    CHECK(ms < SOON_MS, "noticed after %lld ms: %s", (long long)ms, fsdp_last_error());
    fsdp_group_release(group);
}

Test(death, in_a_split)
{
    for (int i = 0; i < (SANITIZED ? 4 : 12); i++) {
        again();
        crew_start(4, die_in_split);
        crew_await(1, 1);
        usleep((useconds_t)(i * 1700));
        crew_kill(3);
        crew_join(12000);
    }
}

/* ---- Leaving
 * ----------------------------------------------------------------------------------------------------- */

static void leave_early(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    OK(fsdp_barrier(group, NULL));
    if (rank == 0) {
        atomic_store(&crew->event_ns, os_now_ns());
        fsdp_group_release(group);
        crew_await(0, 2);
        return;
    }
    expect_lost(fsdp_barrier(group, NULL), 0, "released the group", "barrier");
    crew_raise(0);
    fsdp_group_release(group);
}

Test(death, a_rank_that_releases)
{
    crew_run(3, 8000, leave_early);
}

static void leave_message(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    float data[4] = {0};
    OK(fsdp_barrier(group, NULL));
    if (rank) {
        crew_await(0, 1);
        crew_sleep_ms(30);
        atomic_store(&crew->event_ns, os_now_ns());
        fsdp_group_release(group);
        return;
    }
    crew_raise(0);
    fsdp_status got = fsdp_recv(group, crew_tensor(data, F32, 4), FSDP_ANY_RANK, 2, NULL);
    EXPECT(got, FSDP_ERR_PEER_LOST, "released the group");
    CHECK(crew_ms_since_event() < SOON_MS, "noticed after %lld ms", (long long)crew_ms_since_event());
    fsdp_group_release(group);
}

Test(death, all_others_release)
{
    crew_run(3, 8000, leave_message);
}

/* The ordinary end of a program: whoever is first through the last call leaves first, by release or by exit.
 */
static void ordinary_end(int rank)
{
    unsigned seed = (unsigned)getpid();
    for (int i = 0; i < (SANITIZED ? 10 : 60); i++) {
        char name[16];
        snprintf(name, sizeof name, "end%d", i);
        fsdp_store *store = crew_store(name, rank, 3, 20000);
        fsdp_group_options options = crew_options(10000, i % 3);
        fsdp_group *group = NULL;
        OK(fsdp_group_create(store, &options, &group));
        fsdp_store_release(store);
        float data[2048];
        int64_t count = i % 2 ? 2048 : 4;
        for (int k = 0; k < 2048; k++) data[k] = (float)rank;
        if (rand_r(&seed) % 2) usleep((useconds_t)(rand_r(&seed) % 2000));
        switch (i % 5) {
        case 0:
            OK(reduce(group, data, count, NULL));
            break;
        case 1:
            OK(fsdp_barrier(group, NULL));
            break;
        case 2:
            OK(fsdp_broadcast(group, crew_tensor(data, F32, count), i % 3, NULL));
            break;
        case 3: {
            float all[3 * 2048];
            OK(fsdp_gather(group, crew_tensor(data, F32, count), crew_tensor(all, F32, 3 * count), i % 3, NULL));
            break;
        }
        default:
            if (rank == 0) OK(fsdp_send(group, crew_tensor(data, F32, count), 1, 0, NULL));
            if (rank == 1) OK(fsdp_recv(group, crew_tensor(data, F32, count), 0, 0, NULL));
        }
        fsdp_group_release(group);
    }
}

Test(death, never_told_at_an_ordinary_end)
{
    crew_run(3, 60000, ordinary_end);
}

/* The same with processes that end without releasing anything, in the middle of what others still finish. */
static void ordinary_exit(int rank)
{
    fsdp_group_options options = crew_options(10000, direct);
    fsdp_group *group = crew_group(rank, 3, &options);
    float *data = crew_floats(size, 1);
    for (int i = 0; i < 3; i++) OK(reduce(group, data, size, NULL));
    OK(fsdp_barrier(group, NULL));
    crew_leaky();
}

Test(death, never_told_when_all_are_through)
{
    for (int i = 0; i < (SANITIZED ? 4 : 30); i++) {
        direct = 1 + i % 2;
        size = i % 3 ? 4 : 50000;
        again();
        crew_run(3, 15000, ordinary_exit);
    }
}

/* ---- Aborting
 * ---------------------------------------------------------------------------------------------------- */

struct aborter {
    fsdp_group *group;
    int flag, count;
};

static void *abort_soon(void *argument)
{
    struct aborter *a = argument;
    crew_await(a->flag, a->count);
    crew_sleep_ms(20);
    atomic_store(&crew->event_ns, os_now_ns());
    OK(fsdp_group_abort(a->group, "the loss is nan"));
    OK(fsdp_group_abort(a->group, "another reason"));
    return NULL;
}

static int how; /* what all ranks but the last block in */

static void abort_blocked(int rank)
{
    fsdp_group *group = mortal_group(rank, 3);
    float *data = crew_floats(1 << 16, 1);
    struct aborter aborter = {group, 0, 2};
    pthread_t thread = 0;
    OK(fsdp_barrier(group, NULL));
    if (rank == 0) CHECK(pthread_create(&thread, NULL, abort_soon, &aborter) == 0, "no thread");
    if (rank < 2) {
        fsdp_status got = FSDP_OK;
        fsdp_work *works[3] = {NULL};
        crew_raise(0);
        switch (how) {
        case 0:
            got = fsdp_barrier(group, NULL);
            break;
        case 1:
            got = reduce(group, data, 1 << 16, NULL);
            break;
        case 2:
            got = fsdp_recv(group, crew_tensor(data, F32, 4), 2, 1, NULL);
            break;
        case 3:
            got = fsdp_send(group, crew_tensor(data, F32, 1 << 16), 2, 1, NULL);
            break;
        default:
            for (int i = 0; i < 3; i++) {
                DLTensor *t = crew_tensor(data + i * 64, F32, 64);
                OK(how == 4 ? reduce(group, data + i * 64, 64, &works[i])
                            : fsdp_recv(group, t, FSDP_ANY_RANK, i, &works[i]));
            }
            for (int i = 2; i >= 0; i--) {
                got = fsdp_work_wait(works[i], i ? 5000 : -1);
                EXPECT(got, FSDP_ERR_ABORTED, "the loss is nan", "rank 0");
                fsdp_work_release(works[i]);
            }
        }
        EXPECT(got, FSDP_ERR_ABORTED, "the loss is nan", "rank 0");
        CHECK(crew_ms_since_event() < SOON_MS, "ended after %lld ms", (long long)crew_ms_since_event());
        crew_raise(1);
    } else {
        crew_await(1, 2);
    }
    if (thread) pthread_join(thread, NULL);
    /* Afterwards, and on the rank that was elsewhere: at once. */
    int64_t begin = crew_now_ms();
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_ABORTED, "the loss is nan", "rank 0");
    EXPECT(fsdp_recv(group, crew_tensor(data, F32, 4), 1, 1, NULL), FSDP_ERR_ABORTED, "the loss is nan");
    fsdp_group *half = NULL;
    EXPECT(fsdp_group_split(group, 0, 0, NULL, &half), FSDP_ERR_ABORTED, "the loss is nan");
    CHECK(crew_now_ms() - begin < 100, "it took %lld ms", (long long)(crew_now_ms() - begin));
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    CHECK(info.status == FSDP_ERR_ABORTED, "failed is %d", info.status);
    OK(fsdp_group_abort(group, NULL));
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_ABORTED, "the loss is nan");
    fsdp_group_release(group);
}

Test(aborts, of_every_kind_of_wait)
{
    for (how = 0; how < 6; how++)
        for (spin = -1; spin < 1; spin++) {
            again();
            crew_run(3, 10000, abort_blocked);
        }
}

static void abort_unused(int rank)
{
    fsdp_group *group = mortal_group(rank, 2);
    if (rank == 0) OK(fsdp_group_abort(group, NULL));
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_ABORTED, "rank 0", "no reason given");
    fsdp_group_release(group);
}

Test(aborts, before_anything)
{
    crew_run(2, 8000, abort_unused);
}

static void abort_alone(int rank)
{
    fsdp_group *group = NULL;
    float data[4] = {0};
    fsdp_work *work = NULL;
    OK(fsdp_group_create(NULL, NULL, &group));
    OK(fsdp_recv(group, crew_tensor(data, F32, 4), 0, 1, &work));
    OK(fsdp_group_abort(group, "enough"));
    EXPECT(fsdp_work_wait(work, 2000), FSDP_ERR_ABORTED, "enough");
    fsdp_work_release(work);
    EXPECT(fsdp_barrier(group, NULL), FSDP_ERR_ABORTED, "enough");
    fsdp_group_release(group);
}

Test(aborts, of_a_group_of_one)
{
    crew_run(1, 8000, abort_alone);
}

/* ---- fork()
 * ------------------------------------------------------------------------------------------------------ */

static void in_child(fsdp_group *group, fsdp_work *work, fsdp_model *model, fsdp_unit *unit,
                     DLManagedTensorVersioned *full)
{
    float data[8] = {0};
    int32_t done;
    DLTensor *t = crew_tensor(data, F32, 4);
    DLTensor *wide = crew_tensor(data, F32, 8);
    fsdp_group *out = NULL;
    fsdp_work *w = NULL;
    fsdp_unit_state state;
    DLManagedTensorVersioned *tensor = NULL;
    const DLTensor *grads[1] = {NULL};
    fsdp_group_info info = {.struct_size = sizeof info};
    fsdp_memory_info memory = {.struct_size = sizeof memory};
    fsdp_error_info error = {.struct_size = sizeof error};
    fsdp_model *other = NULL;
#define REFUSED(call) EXPECT(call, FSDP_ERR_FORKED, "fork")
    REFUSED(fsdp_barrier(group, NULL));
    REFUSED(fsdp_barrier(group, &w));
    REFUSED(fsdp_all_reduce(group, t, t, FSDP_SUM, NULL));
    REFUSED(fsdp_all_gather(group, t, wide, NULL));
    REFUSED(fsdp_send(group, t, 0, 0, NULL));
    REFUSED(fsdp_recv(group, t, 0, 0, &w));
    REFUSED(fsdp_coalesced(group, NULL, 0, NULL));
    REFUSED(fsdp_group_split(group, 0, 0, NULL, &out));
    REFUSED(fsdp_group_abort(group, "from the child"));
    REFUSED(fsdp_group_query(group, &info));
    REFUSED(fsdp_group_retain(group));
    REFUSED(fsdp_work_test(work, &done));
    REFUSED(fsdp_work_wait(work, -1));
    REFUSED(fsdp_work_wait(work, 10));
    REFUSED(fsdp_work_error(work, &error));
    REFUSED(fsdp_model_create(group, NULL, &other));
    REFUSED(fsdp_unit_pre_forward(unit));
    REFUSED(fsdp_unit_post_forward(unit));
    REFUSED(fsdp_unit_pre_backward(unit));
    REFUSED(fsdp_unit_post_backward(unit, grads, 1, NULL));
    REFUSED(fsdp_unit_unshard(unit, NULL));
    REFUSED(fsdp_unit_reshard(unit));
    REFUSED(fsdp_unit_query_state(unit, &state));
    REFUSED(fsdp_unit_shard_changed(unit));
    REFUSED(fsdp_unit_param_shard(unit, 0, &tensor));
    REFUSED(fsdp_unit_param_full(unit, 0, &tensor));
    REFUSED(fsdp_unit_param_grad(unit, 0, &tensor));
    REFUSED(fsdp_model_set_gradient_sync(model, 1));
    REFUSED(fsdp_model_finish_backward(model));
    REFUSED(fsdp_model_zero_grad(model));
    REFUSED(fsdp_model_reset(model));
    REFUSED(fsdp_model_memory(model, &memory));
    CHECK(((float *)full->dl_tensor.data)[0] == 3, "the child reads %g", (double)((float *)full->dl_tensor.data)[0]);
    ((float *)full->dl_tensor.data)[0] = 99; /* its own copy */
    full->deleter(full);
    fsdp_work_release(work);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    fsdp_group_release(group);

    /* It may have groups of its own. */
    fsdp_group *own = NULL;
    OK(fsdp_group_create(NULL, NULL, &own));
    float sum[4] = {0};
    data[2] = 5;
    OK(fsdp_all_reduce(own, t, crew_tensor(sum, F32, 4), FSDP_SUM, NULL));
    CHECK(sum[2] == 5, "sum is %g", (double)sum[2]);
#ifndef __SANITIZE_THREAD__ /* knows no thread that begins in a child of a process with threads */
    OK(fsdp_barrier(own, &w));
    OK(fsdp_work_wait(w, -1));
    fsdp_work_release(w);
#endif
    fsdp_group_release(own);
}

static void with_children(int rank)
{
    fsdp_group_options options = crew_options(10000, direct);
    fsdp_group *group = crew_group(rank, 2, &options);
    fsdp_model_options shape = {
        .struct_size = sizeof shape, .private_unshard = how, .reshard_after_forward = FSDP_RESHARD_NEVER};
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    float values[8] = {3, 3, 3, 3, 3, 3, 3, 3};
    fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = crew_tensor(values, F32, 8)};
    OK(fsdp_model_create(group, &shape, &model));
    OK(fsdp_unit_create(model, "u", &param, 1, NULL, &unit));
    OK(fsdp_unit_pre_forward(unit));
    DLManagedTensorVersioned *full = NULL;
    OK(fsdp_unit_param_full(unit, 0, &full));
    /* A progress thread of each lane, both asleep, and an operation under way. */
    float *data = crew_floats(64, 1), given[4] = {0}, taken[4];
    fsdp_work *work = NULL, *message = NULL;
    OK(fsdp_barrier(group, &work));
    OK(fsdp_work_wait(work, -1));
    fsdp_work_release(work);
    if (rank == 0) {
        OK(reduce(group, data, 64, &work));
        OK(fsdp_recv(group, crew_tensor(taken, F32, 4), 1, 4, &message));
    } else {
        crew_await(0, 1);
        OK(reduce(group, data, 64, &work));
        OK(fsdp_send(group, crew_tensor(given, F32, 4), 0, 4, &message));
    }
    fflush(NULL);
    if (SANITIZED) crew_sleep_ms(100); /* its allocator does not survive a fork while another thread is in it */
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fsdp_work_release(message);
        in_child(group, work, model, unit, full);
        _exit(0);
    }
    int status = -1;
    pid_t got = 0;
    for (int64_t until = crew_now_ms() + 6000; got == 0 && crew_now_ms() < until;) {
        got = waitpid(child, &status, WNOHANG);
        if (!got) crew_sleep_ms(1);
    }
    if (!got) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        CHECK(0, "the child hangs");
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", (unsigned)status);
    crew_raise(0);
    OK(fsdp_work_wait(work, -1));
    OK(fsdp_work_wait(message, -1));
    CHECK(data[63] == 2, "data is %g", (double)data[63]);
    fsdp_work_release(work);
    fsdp_work_release(message);
    for (int i = 0; i < 50; i++) crew_group_works(group, rank, 2);
    CHECK(((float *)full->dl_tensor.data)[0] == 3, "the child wrote");
    OK(fsdp_unit_post_forward(unit));
    OK(fsdp_unit_reshard(unit));
    OK(fsdp_unit_shard_changed(unit));
    OK(fsdp_unit_pre_forward(unit));
    CHECK(((float *)full->dl_tensor.data)[7] == 3, "full is wrong");
    full->deleter(full);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(forks, a_child_is_refused_and_harms_nothing)
{
    for (how = 0; how < 2; how++)
        for (direct = 1; direct <= 2; direct++) {
            again();
            crew_run(2, 20000, with_children);
        }
}

/* Nothing is under way, but the progress threads sleep: a child that drops the group does not wait for them.
 */
static void idle_with_children(int rank)
{
    fsdp_group_options options = crew_options(10000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    fsdp_work *work;
    float data[4] = {0};
    OK(fsdp_barrier(group, &work));
    OK(fsdp_work_wait(work, 5000));
    fsdp_work_release(work);
    DLTensor *t = crew_tensor(data, F32, 4);
    OK(rank ? fsdp_send(group, t, 0, 1, &work) : fsdp_recv(group, t, 1, 1, &work));
    OK(fsdp_work_wait(work, 5000));
    fsdp_work_release(work);
    crew_sleep_ms(50);
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fsdp_group_release(group);
        _exit(0);
    }
    int status = -1;
    pid_t got = 0;
    for (int64_t until = crew_now_ms() + 6000; got == 0 && crew_now_ms() < until; crew_sleep_ms(1))
        got = waitpid(child, &status, WNOHANG);
    if (!got) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    CHECK(got == child && status == 0, "the child ended with %x, or hangs", (unsigned)status);
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(forks, a_child_that_only_releases)
{
    crew_run(2, 15000, idle_with_children);
}

/* ---- What the machine refuses
 * ------------------------------------------------------------------------------------ */

/* From here on, this process's system call `number` fails with `error`. */
static void refuse_syscall(int number, int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ((unsigned)error & SECCOMP_RET_DATA)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "seccomp: %s", strerror(errno));
}

static void no_direct_reads(int rank)
{
    if (rank == 1) refuse_syscall(SYS_process_vm_readv, EPERM);
    fsdp_group_options options = crew_options(5000, 0);
    fsdp_store *store = crew_store("v", rank, 3, 20000);
    fsdp_group *group = NULL;
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_create(store, &options, &group));
    OK(fsdp_group_query(group, &info));
    CHECK(info.direct_read == 0, "direct_read is %d", info.direct_read);
    float *data = crew_floats(100000, (float)(rank + 1));
    OK(reduce(group, data, 100000, NULL));
    for (int i = 0; i < 100000; i++) CHECK(data[i] == 6, "data[%d] is %g", i, (double)data[i]);
    if (rank == 0) OK(fsdp_send(group, crew_tensor(data, F32, 100000), 1, 0, NULL));
    if (rank == 1) {
        float *taken = crew_floats(100000, 0);
        OK(fsdp_recv(group, crew_tensor(taken, F32, 100000), 0, 0, NULL));
        CHECK(taken[99999] == 6, "taken is %g", (double)taken[99999]);
    }
    crew_group_works(group, rank, 3);
    fsdp_group_release(group);

    options.direct_read = 1; /* now it is a must */
    group = NULL;
    int64_t begin = crew_now_ms();
    EXPECT(fsdp_group_create(store, &options, &group), FSDP_ERR_UNSUPPORTED, "direct_read", "rank 1");
    CHECK(!group && crew_now_ms() - begin < 2000, "it took %lld ms", (long long)(crew_now_ms() - begin));
    options.direct_read = 0; /* and the next one is made again */
    OK(fsdp_group_create(store, &options, &group));
    crew_group_works(group, rank, 3);
    fsdp_group_release(group);
    fsdp_store_release(store);
}

Test(limits, process_vm_readv_refused)
{
    crew_run(3, 15000, no_direct_reads);
}

static void no_pidfd(int rank)
{
    refuse_syscall(SYS_pidfd_open, ENOSYS);
    fsdp_group_options options = crew_options(10000, 0);
    fsdp_group *group = crew_group(rank, 3, &options);
    crew_group_works(group, rank, 3);
    if (rank == 1) {
        crew_await(0, 2);
        crew_sleep_ms(20);
        crew_die();
    }
    crew_raise(0);
    expect_lost(fsdp_barrier(group, NULL), 1, "has ended", "barrier");
    fsdp_group_release(group);
}

Test(limits, pidfd_open_refused)
{
    crew_start(3, no_pidfd);
    crew_mortal(1);
    crew_join(10000);
    tell_time("without pidfd_open");
}

/* Every rank gets a clear refusal, soon, whatever it is that one of them lacks. */
static int limit_kind;
static int limited_rank;

static void lower(int resource, rlim_t value)
{
    struct rlimit limit = {value, value};
    CHECK(setrlimit(resource, &limit) == 0, "setrlimit: %s", strerror(errno));
}

static void limited(int rank)
{
    fsdp_store *store = crew_store("limited", rank, 3, 20000);
    crew_leaky(); /* a checker without descriptors can't tell */
    fsdp_group_options options = crew_options(6000, 0);
    fsdp_group *group = NULL;
    fsdp_status wanted = FSDP_ERR_NOMEM;
    const char *word = "bytes";
    char who[24] = "";
    if (limit_kind == 0) { /* descriptors: some are free, not enough */
        wanted = FSDP_ERR_SYSTEM;
        word = "descriptor";
        if (rank == limited_rank) {
            int fd = dup(0);
            close(fd);
            lower(RLIMIT_NOFILE, (rlim_t)fd + 3);
        }
    }
    if (limit_kind == 1) { /* none at all */
        wanted = FSDP_ERR_SYSTEM;
        word = "Too many open files";
        if (rank == limited_rank) lower(RLIMIT_NOFILE, 1);
    }
    if (limit_kind == 2) { /* file size: rank 0 makes the file */
        word = "ulimit -f";
        if (rank == 0) lower(RLIMIT_FSIZE, 100000);
    }
    if (limit_kind == 3) { /* address space */
        options.staging_bytes = 64 << 20;
        if (rank == limited_rank) {
            FILE *file = fopen("/proc/self/statm", "r");
            unsigned long pages = 0;
            CHECK(file && fscanf(file, "%lu", &pages) == 1, "statm");
            fclose(file);
            lower(RLIMIT_AS, pages * 4096 + (32 << 20));
        }
    }
    if (limit_kind == 4) { /* more than there is: files may be sparse, so this must be found by reserving */
        options.staging_bytes = 256 << 20;
        word = "staging_bytes";
    }
    int64_t begin = crew_now_ms();
    fsdp_status got = fsdp_group_create(store, &options, &group);
    int64_t ms = crew_now_ms() - begin;
    if (rank != limited_rank) snprintf(who, sizeof who, "rank %d", limited_rank);
    if (limit_kind == 4 && got == FSDP_OK) { /* it is there */
        crew_group_works(group, rank, 3);
        fsdp_group_release(group);
        fsdp_store_release(store);
        return;
    }
    EXPECT(got, wanted, word, who);
    CHECK(!group && ms < 3000, "it took %lld ms", (long long)ms);
    fsdp_store_release(store);
}

Test(limits, one_rank_lacks_something)
{
    for (limit_kind = 0; limit_kind < 4; limit_kind++) {
        if (SANITIZED && limit_kind == 3) continue; /* sanitizers need the address space */
        for (limited_rank = 0; limited_rank < (limit_kind == 2 ? 1 : 2); limited_rank++) {
            again();
            crew_run(3, 12000, limited);
        }
    }
}

static void lower_space(int64_t more)
{
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    CHECK(file && fscanf(file, "%lu", &pages) == 1, "statm");
    fclose(file);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0, "getrlimit");
    limit.rlim_cur = pages * 4096 + (rlim_t)more; /* soft: it is raised again */
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit: %s", strerror(errno));
}

static void raise_space(void)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0, "getrlimit");
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit: %s", strerror(errno));
}

/* A unit that memory lacks for on one rank: refused on all, and the group and the model go on. Kinds: 0, the shared
 * region of its first unshard can't be reserved; 1, not be mapped; 2, there is none for its shards. */
static void unit_too_large(int rank)
{
    fsdp_group_options options = crew_options(6000, 0);
    fsdp_group *group = crew_group(rank, 2, &options);
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL, *other = NULL;
    OK(fsdp_model_create(group, NULL, &model));
    int64_t count = 16 << 20, poor = limit_kind != 0;
    float *values = mmap(NULL, (size_t)count * 4, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(values != MAP_FAILED, "mmap");
    fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = crew_tensor(values, F32, count)};
    char who[16] = "bytes";
    if (rank != poor) snprintf(who, sizeof who, "rank %d", (int)poor);
    if (limit_kind == 0 && rank == poor) lower(RLIMIT_FSIZE, 40 << 20);
    if (limit_kind == 2 && rank == poor) lower_space(24 << 20);
    if (limit_kind == 2) {
        EXPECT(fsdp_unit_create(model, "big", &param, 1, NULL, &unit), FSDP_ERR_NOMEM, who);
        CHECK(!unit, "an output was written");
        if (rank == poor) raise_space();
    }
    OK(fsdp_unit_create(model, "big", &param, 1, NULL, &unit)); /* its full parameters are addresses only */
    if (limit_kind == 1 && rank == poor) lower_space(48 << 20);
    fsdp_work *work = NULL;
    for (int i = 0; i < 4 && limit_kind < 2; i++) {
        if (i < 2)
            EXPECT(fsdp_unit_pre_forward(unit), FSDP_ERR_NOMEM, who, rank == poor ? who : "'big'");
        else
            EXPECT(fsdp_unit_unshard(unit, &work), FSDP_ERR_NOMEM, who, rank == poor ? who : "'big'");
        fsdp_unit_state state = 9;
        OK(fsdp_unit_query_state(unit, &state));
        fsdp_memory_info memory = {.struct_size = sizeof memory};
        OK(fsdp_model_memory(model, &memory));
        CHECK(state == FSDP_UNIT_SHARDED && !work, "not sharded");
        CHECK(memory.slots == 0 && memory.unsharded == 0 && memory.host_unsharded == 0, "something is left");
    }
    float small[4] = {1, 2, 3, 4};
    param.full = crew_tensor(small, F32, 4);
    param.name = "v";
    OK(fsdp_unit_create(model, "small", &param, 1, NULL, &other));
    OK(fsdp_unit_pre_forward(other));
    if (limit_kind != 0) { /* there is room again, and now the slot of the small one is too small */
        if (rank == poor) raise_space();
        OK(fsdp_unit_pre_forward(unit));
    }
    fsdp_unit_release(other);
    fsdp_unit_release(unit);
    fsdp_model_release(model);
    crew_group_works(group, rank, 2);
    fsdp_group_release(group);
}

Test(limits, a_unit_that_does_not_fit)
{
    for (limit_kind = 0; limit_kind < (SANITIZED ? 1 : 3); limit_kind++) {
        again();
        crew_run(2, 12000, unit_too_large);
    }
}

/* ---- Leaks
 * ------------------------------------------------------------------------------------------------------- */

static int lines_of(const char *path)
{
    FILE *file = fopen(path, "r");
    int n = 0;
    for (int c; file && (c = fgetc(file)) != EOF;) n += c == '\n';
    if (file) fclose(file);
    return n;
}

static void come_and_go(int rank)
{
    fsdp_group_options options = crew_options(10000, 0);
    options.staging_bytes = 64 << 10;
    fsdp_group *parent = crew_group(rank, 2, &options);
    float *data = crew_floats(50000, 1), taken[2] = {0}; /* messages don't queue behind collectives */
    int fds = 0, maps = 0, tasks = 0;
    int rounds = SANITIZED ? 30 : 200;
    for (int i = 0; i < rounds + 20; i++) {
        if (i == 20) { /* whatever is made once is there by now */
            fds = crew_entries("/proc/self/fd");
            maps = lines_of("/proc/self/maps");
            tasks = crew_entries("/proc/self/task");
        }
        fsdp_group *group = NULL;
        fsdp_work *works[2];
        OK(fsdp_group_split(parent, 0, 0, NULL, &group));
        OK(reduce(group, data, 50000, NULL));
        OK(reduce(group, data, 4, &works[0]));
        DLTensor *t = crew_tensor(taken, F32, 2);
        OK(rank ? fsdp_send(group, t, 0, 0, &works[1]) : fsdp_recv(group, t, 1, 0, &works[1]));
        fsdp_group_release(group);
        OK(fsdp_work_wait(works[0], -1)); /* handles outlive the group */
        OK(fsdp_work_wait(works[1], -1));
        fsdp_work_release(works[0]);
        fsdp_work_release(works[1]);
    }
    int now_fds = crew_entries("/proc/self/fd"), now_maps = lines_of("/proc/self/maps");
    int now_tasks = crew_entries("/proc/self/task");
    CHECK(now_fds == fds && now_tasks == tasks, "descriptors %d -> %d, threads %d -> %d", fds, now_fds, tasks,
          now_tasks);
    CHECK(SANITIZED || now_maps <= maps + 6, "mappings %d -> %d", maps, now_maps);
    fsdp_group_release(parent);
}

/* The library's own: other programs come and go. */
static int names_in_shm(void)
{
    int n = 0;
    DIR *folder = opendir("/dev/shm");
    for (struct dirent *entry; folder && (entry = readdir(folder));) n += strncmp(entry->d_name, "fsdp", 4) == 0;
    if (folder) closedir(folder);
    return n;
}

Test(limits, two_hundred_groups_leave_nothing)
{
    int before = names_in_shm();
    crew_run(2, 60000, come_and_go);
    cr_assert(names_in_shm() == before, "left in /dev/shm");
}

/* ---- A peer that scribbles
 * --------------------------------------------------------------------------------------- */

/* Rank 0 overwrites its own area, channels, staging and even the segment's header with noise while the others
 * work. They may fail or compute nonsense; they may not crash, write beside their outputs, or take long. */
static void scribble(int rank)
{
    fsdp_group_options options = crew_options(700, direct);
    fsdp_group *group = crew_group(rank, 3, &options);
    enum { COUNT = 3 * 5000, BESIDE = 4096 };
    float *in = crew_floats(COUNT, 1), *whole = crew_floats(COUNT + 2 * BESIDE, 77), *out = whole + BESIDE;
    OK(fsdp_barrier(group, NULL));
    crew_raise(0);
    if (rank == 0) {
        crew_await(0, 3);
        struct shm *t = (struct shm *)group->transport;
        unsigned seed = (unsigned)how * 7919u + (unsigned)direct + 1;
        char *places[] = {(char *)&t->areas[0], (char *)&t->channels[0], t->staging, (char *)t->segment};
        size_t sizes[] = {sizeof *t->areas, sizeof *t->channels * 3, (size_t)SHM_DEPTH * (256 << 10),
                          sizeof *t->segment};
        int place = how % 4;
        for (int64_t until = crew_now_ms() + 500; crew_now_ms() < until && atomic_load(&crew->flags[1]) < 2;)
            for (int i = 0; i < 2000; i++) {
                size_t at =
                    (size_t)rand_r(&seed) % (i % 4 ? (sizes[place] < 2048 ? sizes[place] : 2048) : sizes[place]);
                places[place][at] = (char)rand_r(&seed);
            }
        crew_await(1, 2);
        kill(getpid(), SIGKILL);
    }
    int64_t begin = crew_now_ms(), limit = begin + 3500;
    fsdp_status got = FSDP_OK;
    for (int i = 0; got == FSDP_OK || got == FSDP_ERR_MISMATCH; i++) {
        int64_t each[3] = {1000, 3000, 11000}, back[3];
        for (int r = 0; r < 3; r++) back[r] = each[rank];
        switch (i % 7) {
        case 0:
            got = fsdp_all_reduce(group, crew_tensor(in, F32, COUNT), crew_tensor(out, F32, COUNT), FSDP_SUM, NULL);
            break;
        case 1:
            got = fsdp_all_gather_v(group, crew_tensor(in, F32, each[rank]), crew_tensor(out, F32, COUNT), each, NULL);
            break;
        case 2:
            got = fsdp_reduce_scatter(group, crew_tensor(in, F32, 30), crew_tensor(out, F32, 10), FSDP_SUM, NULL);
            break;
        case 3:
            got = fsdp_barrier(group, NULL);
            break;
        case 5: /* with the exchange; its last byte is the output's last */
            got = fsdp_all_gather(group, crew_tensor(in, F32, 250), crew_tensor(out + COUNT - 750, F32, 750), NULL);
            break;
        case 4: {
            DLTensor *t = crew_tensor(out, F32, 9000);
            fsdp_work *work = NULL;
            got = fsdp_recv(group, t, 0, 1, &work);
            if (got == FSDP_OK) {
                got = fsdp_send(group, crew_tensor(in, F32, 9000), 0, 2, NULL);
                (void)fsdp_work_wait(work, -1);
            }
            fsdp_work_release(work);
            break;
        }
        default:
            if (back[0] * 3 > COUNT) back[0] = back[1] = back[2] = 1000;
            got = fsdp_all_to_all_v(group, crew_tensor(in, F32, COUNT), crew_tensor(out, F32, back[0] * 3), each, back,
                                    NULL);
        }
        CHECK(crew_now_ms() < limit, "it took %lld ms", (long long)(crew_now_ms() - begin));
    }
    CHECK(crew_now_ms() < limit, "it took %lld ms", (long long)(crew_now_ms() - begin));
    for (int i = 0; i < BESIDE; i++)
        CHECK(whole[i] == 77 && out[COUNT + i] == 77, "written beside the output, at %d", i);
    crew_raise(1);
    fsdp_group_release(group);
}

Test(hostile, a_peer_that_scribbles)
{
    for (how = 0; how < (SANITIZED ? 4 : 8); how++)
        for (direct = 1; direct <= 2; direct++) {
            again();
            crew_start(3, scribble);
            crew_mortal(0);
            crew_join(12000);
        }
}
