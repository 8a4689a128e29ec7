/* See disk_fault.h. */
#include "disk_fault.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static enum disk_fault fault;
static atomic_int left;
void (*disk_fault_on_hit)(const char *call);
char disk_fault_calls[256];

void disk_fault_set(enum disk_fault what, int at)
{
    fault = what;
    atomic_store(&left, at);
}

/* Whether this call is the one. */
static int now(const char *name)
{
    if (fault == DISK_SOUND || fault >= DISK_SLOW || atomic_fetch_sub(&left, 1) != 1) return 0;
    if (disk_fault_on_hit) disk_fault_on_hit(name);
    return 1;
}

static void called(char letter)
{
    size_t n = strlen(disk_fault_calls);
    if (n < sizeof disk_fault_calls - 1 && !(letter == 'w' && n && disk_fault_calls[n - 1] == 'w'))
        disk_fault_calls[n] = letter;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int fail(const char *name, int error)
{
    if (!now(name)) return 0;
    if (fault != DISK_FAILS) die();
    errno = error;
    return 1;
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at)
{
    called('w');
    if (fault == DISK_SLOW)
        usleep(150000);
    else if (now("pwrite")) {
        if (fault == DISK_TEARS && syscall(SYS_pwrite64, fd, from, bytes / 2, at) < 0) die();
        if (fault != DISK_FAILS) die();
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, from, bytes, at);
}

int fallocate(int fd, int mode, off_t at, off_t bytes)
{
    if (fail("fallocate", ENOSPC)) return -1;
    return (int)syscall(SYS_fallocate, fd, mode, at, bytes);
}

int fsync(int fd)
{
    called('s');
    if (fault == DISK_STALLS) usleep(700000);
    return fail("fsync", EIO) ? -1 : 0;
}

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    called('r');
    if (fail("renameat", EIO)) return -1;
    return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, 0);
}

int unlinkat(int folder, const char *name, int flags)
{
    called('u');
    if (fail("unlinkat", EIO)) return -1;
    return (int)syscall(SYS_unlinkat, folder, name, flags);
}

int mkdir(const char *path, mode_t mode)
{
    if (fail("mkdir", ENOSPC)) return -1;
    int made = (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (fault == DISK_STALLS && made == 0) usleep(700000);
    return made;
}

int openat(int folder, const char *name, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (flags & O_CREAT && fail("openat", ENOSPC)) return -1;
    return (int)syscall(SYS_openat, folder, name, flags, mode);
}
