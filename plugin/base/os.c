/* Kernel services without sockets: see os.h. Nothing here keeps state but the process's number, on a page that the
 * kernel wipes in a child (MADV_WIPEONFORK), so a fork by any route is seen; the child then takes the next number. */
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* ---- time and waiting */

int64_t os_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int os_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

uint32_t os_processor(void)
{
    int now = sched_getcpu();
    return now < 0 ? UINT32_MAX - 1 : (uint32_t)now;
}

void os_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns)
{
    if (timeout_ns <= 0) return;
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0);
}

void os_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int os_thread_start(pthread_t *thread, void *(*body)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

/* ---- fork and peers */

static pthread_once_t process_once = PTHREAD_ONCE_INIT;
static _Atomic uint32_t *process_mark; /* this process's number, 0 in a new child; NULL: the kernel can't wipe pages */
static _Atomic uint32_t process_last;  /* the number of the process that this one was forked from, or its own */

static void process_mark_make(void)
{
    void *page = mmap(NULL, os_page_size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, os_page_size(), MADV_WIPEONFORK) != 0) {
        munmap(page, os_page_size());
        return;
    }
    process_mark = page;
}

uint32_t os_process(void)
{
    pthread_once(&process_once, process_mark_make);
    if (!process_mark) return (uint32_t)getpid();
    uint32_t now = atomic_load_explicit(process_mark, memory_order_relaxed);
    if (now) return now;
    uint32_t mine = atomic_fetch_add(&process_last, 1) + 1;
    return atomic_compare_exchange_strong(process_mark, &now, mine) ? mine : now;
}

fsdp_status os_liveness_fd(int *fd, int *keep)
{
    *keep = -1;
#ifdef SYS_pidfd_open
    *fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (*fd >= 0) return FSDP_OK;
#endif
    /* Older kernels: a pipe whose write end closes with the process (or, late, with the last of its forked
     * children). */
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return err_sys(FSDP_ERR_SYSTEM, errno, "pipe for telling peers of this process's end");
    *fd = ends[0];
    *keep = ends[1];
    return FSDP_OK;
}

int os_is_dead(int liveness_fd)
{
    struct pollfd p = {.fd = liveness_fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && p.revents != 0;
}

int os_process_ended(pid_t pid)
{
#ifdef SYS_pidfd_open
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd >= 0) {
        int dead = os_is_dead(fd);
        close(fd);
        return dead;
    }
#endif
    return kill(pid, 0) != 0 && errno == ESRCH;
}

uint32_t os_pid_namespace(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint32_t)st.st_ino : 0;
}

fsdp_status os_descriptors_check(int n, const char *what)
{
    int fds[1024], got = 0, failed = 0;
    if (n > 1024) n = 1024;
    while (got < n && !failed) {
        int fd = open("/", O_PATH | O_CLOEXEC);
        if (fd >= 0)
            fds[got++] = fd;
        else
            failed = errno;
    }
    for (int i = 0; i < got; i++) close(fds[i]);
    if (!failed) return FSDP_OK;
    return err_sys(FSDP_ERR_SYSTEM, failed, "%s needs %d file descriptors, but there is room for %d: raise `ulimit -n`",
                   what, n, got);
}

int os_read_peer(pid_t pid, uint64_t address, void *to, size_t bytes)
{
    char *at = to;
    while (bytes > 0) {
        struct iovec local = {.iov_base = at, .iov_len = bytes};
        struct iovec remote = {.iov_base = (void *)(uintptr_t)address, .iov_len = bytes};
        ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (n < 0) return errno;
        if (n == 0) return EFAULT;
        at += n;
        address += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return 0;
}

void os_host_name(char *out, size_t size)
{
    char boot[64] = "unknown";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, boot, sizeof boot - 1);
        if (n > 0) boot[strcspn((boot[n] = 0, boot), "\n")] = 0;
        close(fd);
    }
    struct stat net = {0};
    if (stat("/proc/self/ns/net", &net) != 0) net.st_ino = 0;
    char node[64] = "";
    gethostname(node, sizeof node - 1);
    snprintf(out, size, "%s/%s/%llu", node, boot, (unsigned long long)net.st_ino);
}

void os_random(void *out, size_t bytes)
{
    char *at = out;
    while (bytes > 0) {
        ssize_t n = getrandom(at, bytes, 0);
        if (n < 0) {
            if (errno == EINTR) continue;
            /* No getrandom: time and pid still make clashes unlikely; nothing secret hangs on it. */
            uint64_t seed = (uint64_t)os_now_ns() ^ ((uint64_t)getpid() << 32);
            for (size_t i = 0; i < bytes; i++)
                at[i] = (char)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
            return;
        }
        at += n;
        bytes -= (size_t)n;
    }
}

/* ---- memory */

size_t os_page_size(void)
{
    static atomic_size_t size;
    size_t now = atomic_load_explicit(&size, memory_order_relaxed);
    if (now == 0) {
        now = (size_t)sysconf(_SC_PAGESIZE);
        atomic_store_explicit(&size, now, memory_order_relaxed);
    }
    return now;
}

size_t os_page_round(size_t bytes)
{
    size_t page = os_page_size();
    return bytes > SIZE_MAX - page ? SIZE_MAX & ~(page - 1) : (bytes + page - 1) & ~(page - 1);
}

fsdp_status os_segment_create(const char *name, size_t bytes, int *out)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) return err_sys(FSDP_ERR_SYSTEM, errno, "memfd_create for a shared segment");
    fsdp_status status = bytes ? os_segment_reserve(fd, 0, bytes) : FSDP_OK;
    if (status != FSDP_OK) {
        close(fd);
        return status;
    }
    *out = fd;
    return FSDP_OK;
}

fsdp_status os_segment_size(int fd, size_t *bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return err_sys(FSDP_ERR_SYSTEM, errno, "fstat of a shared segment");
    *bytes = (size_t)st.st_size;
    return FSDP_OK;
}

fsdp_status os_segment_reserve(int fd, size_t offset, size_t bytes)
{
    /* Growing a file past RLIMIT_FSIZE would raise a signal in the host: refuse first. */
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && offset + bytes > limit.rlim_cur)
        return err(FSDP_ERR_NOMEM,
                   "a shared segment of %zu bytes is above the file size limit of %llu: raise `ulimit -f`",
                   offset + bytes, (unsigned long long)limit.rlim_cur);
    int failed;
    do failed = fallocate(fd, 0, (off_t)offset, (off_t)bytes) ? errno : 0;
    while (failed == EINTR);
    if (failed == 0) return FSDP_OK;
    return err_sys(
        FSDP_ERR_NOMEM, failed,
        "can't reserve %zu bytes of shared memory: free memory, raise the container's memory limit, or use less "
        "(staging_bytes, private_unshard)",
        bytes);
}

void os_segment_discard(int fd, size_t offset, size_t bytes)
{
    (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

static fsdp_status map_result(void *at, size_t bytes, const char *what, void **out)
{
    if (at == MAP_FAILED) return err_sys(FSDP_ERR_NOMEM, errno, "can't map %zu bytes of %s", bytes, what);
    *out = at;
    return FSDP_OK;
}

fsdp_status os_map_shared(int fd, size_t offset, size_t bytes, void **out)
{
    return map_result(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset), bytes, "shared memory",
                      out);
}

fsdp_status os_map_private(int fd, size_t offset, size_t bytes, void *at, void **out)
{
    int flags = MAP_PRIVATE | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    return map_result(mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset), bytes, "a private view", out);
}

fsdp_status os_map_anonymous(size_t bytes, void **out)
{
    return map_result(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), bytes, "memory",
                      out);
}

static int open_unnamed(const char *folder, int *failed)
{
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    *failed = fd < 0 ? errno : 0;
    if (fd >= 0 || (*failed != EOPNOTSUPP && *failed != EISDIR)) return fd;
    char path[4096]; /* a file system without such files */
    if ((size_t)snprintf(path, sizeof path, "%s/fsdp-XXXXXX", folder) >= sizeof path) {
        *failed = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    *failed = fd < 0 ? errno : 0;
    if (fd >= 0) unlink(path);
    return fd;
}

fsdp_status os_map_file(const char *folder, size_t bytes, int *out_fd, void **out)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
        return err(FSDP_ERR_NOMEM, "a file of %zu bytes is above the file size limit of %llu: raise `ulimit -f`", bytes,
                   (unsigned long long)limit.rlim_cur);
    int failed, fd = open_unnamed(folder, &failed);
    if (fd < 0)
        return err_sys(FSDP_ERR_SYSTEM, failed, "making a file in offload_dir '%.200s': give a folder on a local disk",
                       folder);
    do failed = posix_fallocate(fd, 0, (off_t)bytes);
    while (failed == EINTR);
    fsdp_status status = FSDP_OK;
    if (failed)
        status = err_sys(FSDP_ERR_NOMEM, failed, "can't reserve %zu bytes in offload_dir '%.200s'", bytes, folder);
    else
        status = map_result(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), bytes, "a file", out);
    if (status == FSDP_OK)
        *out_fd = fd;
    else
        close(fd);
    return status;
}

void os_file_release(int fd, void *at, size_t bytes)
{
    if (fd < 0 || !at) return;
    (void)sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
    madvise(at, bytes, MADV_DONTNEED); /* of a shared mapping: the file keeps what was written */
}

void os_file_prefetch(void *at, size_t bytes)
{
    if (at) madvise(at, bytes, MADV_WILLNEED);
}

void os_unmap(void *at, size_t bytes)
{
    if (at) munmap(at, bytes);
}

void os_populate_read(void *at, size_t bytes)
{
    if (madvise(at, bytes, MADV_POPULATE_READ) == 0) return;
    volatile const char *p = at;
    for (size_t i = 0; i < bytes; i += os_page_size()) (void)p[i];
}

void os_discard(void *at, size_t bytes)
{
    madvise(at, bytes, MADV_DONTNEED);
}

/* Finding copied pages. Dropping a whole view would cost a fault for every page on the next use, so only ranges that
 * hold anonymous pages are dropped. /proc/self/pagemap tells them: by an ioctl (Linux 6.7) that returns just such
 * ranges, or by a 64-bit entry for each page. Without either, everything is dropped. */

struct scan_range {
    uint64_t start, end, categories;
};

struct scan_request { /* struct pm_scan_arg, which older kernel headers lack */
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define SCAN_REQUEST _IOWR('f', 16, struct scan_request)
#define SCAN_FILE (1u << 2)
#define SCAN_PRESENT (1u << 3)
#define SCAN_SWAPPED (1u << 4)

#define ENTRY_PRESENT ((uint64_t)1 << 63)
#define ENTRY_SWAPPED ((uint64_t)1 << 62)
#define ENTRY_FILE ((uint64_t)1 << 61)

static int drop_by_scan(int fd, char *at, size_t bytes)
{
    struct scan_range ranges[64] = {0}; /* valgrind does not know that the call fills it */
    uint64_t start = (uintptr_t)at, end = start + bytes;
    while (start < end) {
        struct scan_request request = {.size = sizeof request,
                                       .start = start,
                                       .end = end,
                                       .vec = (uintptr_t)ranges,
                                       .vec_len = sizeof ranges / sizeof *ranges,
                                       .category_inverted = SCAN_FILE,
                                       .category_mask = SCAN_FILE,
                                       .category_anyof_mask = SCAN_PRESENT | SCAN_SWAPPED,
                                       .return_mask = SCAN_PRESENT | SCAN_SWAPPED};
        int n = ioctl(fd, SCAN_REQUEST, &request);
        if (n < 0) return 0;
        for (int i = 0; i < n; i++) {
            size_t from = (size_t)(ranges[i].start - (uintptr_t)at);
            madvise(at + from, (size_t)(ranges[i].end - ranges[i].start), MADV_DONTNEED);
        }
        if (request.walk_end <= start) return 0;
        start = request.walk_end;
    }
    return 1;
}

static int drop_by_entries(int fd, char *at, size_t bytes)
{
    uint64_t entries[512];
    size_t page = os_page_size(), first = (uintptr_t)at / page, n = bytes / page;
    for (size_t done = 0; done < n;) {
        size_t want = n - done < 512 ? n - done : 512;
        ssize_t got = pread(fd, entries, want * sizeof *entries, (off_t)((first + done) * sizeof *entries));
        if (got < (ssize_t)sizeof *entries) return 0;
        size_t now = (size_t)got / sizeof *entries;
        for (size_t i = 0; i < now; i++) {
            int held = (entries[i] & (ENTRY_PRESENT | ENTRY_SWAPPED)) != 0;
            if (held && !(entries[i] & ENTRY_FILE)) madvise(at + (done + i) * page, page, MADV_DONTNEED);
        }
        done += now;
    }
    return 1;
}

int64_t os_page_faults(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (int64_t)usage.ru_minflt + usage.ru_majflt : -1;
}

void os_drop_copies(void *at, size_t bytes)
{
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    int found = fd >= 0 && (drop_by_scan(fd, at, bytes) || drop_by_entries(fd, at, bytes));
    if (fd >= 0) close(fd);
    if (!found) madvise(at, bytes, MADV_DONTNEED);
}
