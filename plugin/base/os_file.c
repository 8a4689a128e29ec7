/* Files and folders: see os.h. Nothing here keeps state. Files are read and written at given places, so that several
 * threads may use one descriptor. Names are those in a folder that is held open: it may be renamed meanwhile. */
#include "base/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define ONCE_MOST ((size_t)1 << 30) /* the kernel moves no more than 2 GiB in one call */

/* ---- folders */

/* `path` behind what is in `out` already, of `before` bytes. */
static fsdp_status path_take(const char *path, size_t before, char out[OS_PATH_MOST + 1])
{
    size_t length = strlen(path);
    CHECK_ARG(length > 0 && before + length <= OS_PATH_MOST, "path has %zu bytes%s: 1 to %d", before + length,
              before ? " with the folder that it is relative to" : "", OS_PATH_MOST);
    memcpy(out + before, path, length + 1);
    return FSDP_OK;
}

fsdp_status os_path_kind(const char *path, enum os_kind *kind)
{
    struct stat st;
    if (stat(path, &st) == 0) {
        *kind = S_ISREG(st.st_mode) ? OS_FILE : S_ISDIR(st.st_mode) ? OS_FOLDER : OS_OTHER;
        return FSDP_OK;
    }
    if (errno != ENOENT && errno != ENOTDIR) return err_sys(FSDP_ERR_SYSTEM, errno, "looking for '%.400s'", path);
    *kind = OS_NOTHING;
    return FSDP_OK;
}

fsdp_status os_path_absolute(const char *path, char out[OS_PATH_MOST + 1])
{
    size_t before = 0;
    if (path[0] != '/') {
        if (!getcwd(out, OS_PATH_MOST))
            return err_sys(FSDP_ERR_SYSTEM, errno, "the folder that '%.400s' is relative to", path);
        before = strlen(out);
        out[before++] = '/';
    }
    return path_take(path, before, out);
}

fsdp_status os_folder_make(const char *path)
{
    char part[OS_PATH_MOST + 1];
    TRY(path_take(path, 0, part));
    size_t length = strlen(part);
    for (size_t i = 1; i <= length; i++) {
        if (part[i] != '/' && part[i] != 0) continue;
        part[i] = 0;
        struct stat st;
        if (mkdir(part, 0777) != 0) {
            /* Folders that are there may be on a file system that is read-only, or not ours to write. */
            int failed = errno;
            if (stat(part, &st) != 0 && lstat(part, &st) == 0 && S_ISLNK(st.st_mode))
                return err(FSDP_ERR_SYSTEM,
                           "'%.400s' is a symbolic link to what is not there: make that, or remove the link", part);
            if (stat(part, &st) != 0) return err_sys(FSDP_ERR_SYSTEM, failed, "making the folder '%.400s'", part);
            if (!S_ISDIR(st.st_mode)) return err(FSDP_ERR_SYSTEM, "'%.400s' is not a folder", part);
        }
        if (i < length) part[i] = '/';
    }
    return FSDP_OK;
}

fsdp_status os_folder_open(const char *path, struct os_folder *out)
{
    TRY(path_take(path, 0, out->path));
    size_t length = strlen(path);
    while (length > 1 && out->path[length - 1] == '/') out->path[--length] = 0;
    out->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (out->fd >= 0) return FSDP_OK;
    return err_sys(errno == ENOENT || errno == ENOTDIR ? FSDP_ERR_NOT_FOUND : FSDP_ERR_SYSTEM, errno,
                   "opening the folder '%.400s'", path);
}

void os_folder_close(struct os_folder *folder)
{
    os_close(&folder->fd);
}

fsdp_status os_folder_lock(const struct os_folder *folder, int *locked)
{
    int failed;
    do failed = flock(folder->fd, LOCK_EX | LOCK_NB) ? errno : 0;
    while (failed == EINTR);
    *locked = failed == 0;
    if (failed == 0 || failed == EWOULDBLOCK) return FSDP_OK;
    *locked = -1;
    if (failed == ENOLCK || failed == EOPNOTSUPP || failed == ENOSYS || failed == EINVAL || failed == EBADF)
        return FSDP_OK;
    return err_sys(FSDP_ERR_SYSTEM, failed, "locking the folder '%.400s'", folder->path);
}

void os_folder_unlock(const struct os_folder *folder)
{
    /* Closing would not do: a forked child has the descriptor, too, and with it the lock. */
    (void)flock(folder->fd, LOCK_UN);
}

fsdp_status os_folder_sync(const struct os_folder *folder)
{
    int failed;
    do failed = fsync(folder->fd) ? errno : 0;
    while (failed == EINTR);
    if (failed == 0 || failed == EINVAL || failed == EROFS) return FSDP_OK; /* there is nothing to sync there */
    return err_sys(FSDP_ERR_SYSTEM, failed, "syncing the folder '%.400s'", folder->path);
}

fsdp_status os_folder_list(const struct os_folder *folder, fsdp_status (*each)(const char *name, void *user),
                           void *user)
{
    /* A descriptor of its own: the place in the list belongs to the open folder. */
    int fd = openat(folder->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    if (!list) {
        int failed = errno;
        if (fd >= 0) close(fd);
        return err_sys(FSDP_ERR_SYSTEM, failed, "listing the folder '%.400s'", folder->path);
    }
    fsdp_status status = FSDP_OK;
    struct dirent *entry;
    for (errno = 0; status == FSDP_OK && (entry = readdir(list)); errno = 0)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) status = each(entry->d_name, user);
    if (status == FSDP_OK && errno)
        status = err_sys(FSDP_ERR_SYSTEM, errno, "listing the folder '%.400s'", folder->path);
    closedir(list);
    return status;
}

/* ---- files */

fsdp_status os_file_open(const struct os_folder *folder, const char *name, int *out, int64_t *bytes)
{
    /* Not to wait for the other end of what turns out to be a pipe. */
    int fd = openat(folder->fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return err_sys(errno == ENOENT ? FSDP_ERR_NOT_FOUND : FSDP_ERR_SYSTEM, errno, "opening '%.400s/%.255s'%s",
                       folder->path, name, errno == EMFILE ? " (raise `ulimit -n`)" : "");
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return err(FSDP_ERR_SYSTEM, "'%.400s/%.255s' is not a regular file", folder->path, name);
    }
    *out = fd;
    *bytes = (int64_t)st.st_size;
    return FSDP_OK;
}

fsdp_status os_file_create(const struct os_folder *folder, const char *name, int *out)
{
    int fd = openat(folder->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return err_sys(errno == EEXIST ? FSDP_ERR_STATE : FSDP_ERR_SYSTEM, errno, "making '%.400s/%.255s'",
                       folder->path, name);
    *out = fd;
    return FSDP_OK;
}

fsdp_status os_file_reserve(int fd, const char *name, int64_t bytes)
{
    /* Writing past RLIMIT_FSIZE would raise a signal in the host: refuse first. */
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && (uint64_t)bytes > limit.rlim_cur)
        return err(FSDP_ERR_SYSTEM,
                   "'%.400s': a file of %lld bytes is above the file size limit of %llu: raise `ulimit -f`", name,
                   (long long)bytes, (unsigned long long)limit.rlim_cur);
    if (!bytes) return FSDP_OK;
    int failed;
    do failed = fallocate(fd, 0, 0, (off_t)bytes) ? errno : 0;
    while (failed == EINTR);
    /* A file system that can't reserve says so at the write instead. */
    if (failed != ENOSPC && failed != EFBIG && failed != EDQUOT && failed != EIO) return FSDP_OK;
    return err_sys(FSDP_ERR_SYSTEM, failed, "making room for the %lld bytes of '%.400s'", (long long)bytes, name);
}

fsdp_status os_file_read(int fd, const char *name, void *to, size_t bytes, int64_t at)
{
    char *p = to;
    while (bytes > 0) {
        ssize_t n = pread(fd, p, bytes < ONCE_MOST ? bytes : ONCE_MOST, (off_t)at);
        if (n < 0) {
            if (errno == EINTR) continue;
            return err_sys(FSDP_ERR_SYSTEM, errno, "reading '%.400s' at byte %lld", name, (long long)at);
        }
        if (n == 0)
            return err(FSDP_ERR_CORRUPT, "'%.400s' ends at byte %lld, before what it should hold: it was cut short",
                       name, (long long)at);
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return FSDP_OK;
}

fsdp_status os_file_write(int fd, const char *name, const void *from, size_t bytes, int64_t at)
{
    const char *p = from;
    while (bytes > 0) {
        ssize_t n = pwrite(fd, p, bytes < ONCE_MOST ? bytes : ONCE_MOST, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return err_sys(FSDP_ERR_SYSTEM, n < 0 ? errno : EIO, "writing '%.400s' at byte %lld", name, (long long)at);
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return FSDP_OK;
}

void os_file_expect(int fd, int64_t at, int64_t bytes)
{
    (void)posix_fadvise(fd, (off_t)at, (off_t)bytes, POSIX_FADV_WILLNEED);
}

void os_file_begin_sync(int fd, int64_t at, int64_t bytes)
{
    (void)sync_file_range(fd, (off_t)at, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
}

fsdp_status os_file_sync(int fd, const char *name)
{
    int failed;
    do failed = fsync(fd) ? errno : 0;
    while (failed == EINTR);
    return failed ? err_sys(FSDP_ERR_SYSTEM, failed, "syncing '%.400s'", name) : FSDP_OK;
}

fsdp_status os_file_close(int *fd, const char *name)
{
    int failed = close(*fd) ? errno : 0;
    *fd = -1;
    return failed && failed != EINTR ? err_sys(FSDP_ERR_SYSTEM, failed, "closing '%.400s'", name) : FSDP_OK;
}

fsdp_status os_file_rename(const struct os_folder *folder, const char *from, const char *to)
{
    if (renameat(folder->fd, from, folder->fd, to) == 0) return FSDP_OK;
    return err_sys(FSDP_ERR_SYSTEM, errno, "renaming '%.255s' to '%.255s' in '%.300s'", from, to, folder->path);
}

fsdp_status os_file_remove(const struct os_folder *folder, const char *name)
{
    if (unlinkat(folder->fd, name, 0) == 0 || errno == ENOENT) return FSDP_OK;
    return err_sys(FSDP_ERR_SYSTEM, errno, "removing '%.300s/%.255s'", folder->path, name);
}
