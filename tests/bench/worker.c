#include "worker.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

int64_t worker_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void *worker_memory(size_t bytes)
{
    void *block = NULL;
    if (posix_memalign(&block, 64, bytes) != 0) {
        fprintf(stderr, "no %zu bytes of memory\n", bytes);
        exit(1);
    }
    memset(block, 0, bytes);
    return block;
}

float worker_input(int rank, size_t i)
{
    return (float)((size_t)(rank + 1) * (i % 13 + 1));
}

float worker_sum(int size, size_t i)
{
    return (float)((size_t)(size * (size + 1) / 2) * (i % 13 + 1));
}

static int connect_driver(void)
{
    const char *path = getenv("BENCH_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || strlen(path) >= sizeof address.sun_path) {
        fprintf(stderr, "BENCH_SOCKET is not set: this program is started by ci/bench\n");
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror(path);
        return -1;
    }
    return fd;
}

/* One line, without its end. 0 when the driver has hung up. */
static int read_line(int fd, char *line, size_t capacity)
{
    size_t used = 0;
    for (;;) {
        ssize_t got = read(fd, line + used, 1);
        if (got <= 0) return 0;
        if (line[used] == '\n') break;
        if (used + 1 < capacity) used++;
    }
    line[used] = 0;
    return 1;
}

static int say(int fd, const char *line)
{
    size_t length = strlen(line);
    return write(fd, line, length) == (ssize_t)length;
}

static const char *pin(int cpu)
{
    static cpu_set_t anywhere;
    static int known;
    if (!known && sched_getaffinity(0, sizeof anywhere, &anywhere) != 0) return "can't read the processor mask";
    known = 1;
    cpu_set_t one;
    CPU_ZERO(&one);
    if (cpu >= 0) CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, cpu >= 0 ? &one : &anywhere) == 0 ? NULL : "can't pin to that processor";
}

int worker_serve(int rank, const struct worker_tasks *tasks)
{
    char line[256], answer[512], task[64];
    size_t bytes;
    long repetitions;
    int cpu, fd = connect_driver();
    if (fd < 0) return 1;
    snprintf(answer, sizeof answer, "hello %d\n", rank);
    if (!say(fd, answer)) return 1;
    while (read_line(fd, line, sizeof line)) {
        struct worker_time time = {0};
        const char *wrong = NULL;
        snprintf(answer, sizeof answer, "ok\n");
        if (sscanf(line, "check %63s %zu", task, &bytes) == 2) {
            wrong = tasks->check(task, bytes);
        } else if (sscanf(line, "turn %63s %zu %ld", task, &bytes, &repetitions) == 3) {
            wrong = tasks->turn(task, bytes, repetitions, &time);
            if (time.took)
                snprintf(answer, sizeof answer, "took %lld\n", (long long)time.took);
            else
                snprintf(answer, sizeof answer, "span %lld %lld\n", (long long)time.begin, (long long)time.end);
        } else if (sscanf(line, "pin %d", &cpu) == 1) {
            wrong = pin(cpu);
        } else {
            wrong = "not understood";
        }
        if (wrong) snprintf(answer, sizeof answer, "bad %.400s\n", wrong);
        if (!say(fd, answer)) return 1;
    }
    return 0;
}
