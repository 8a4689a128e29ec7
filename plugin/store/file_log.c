/* The log of a file:// store: records at the end of one file, and byte-range locks on bytes far behind any
 * record.
 *
 * A record is a header (magic, type, lengths, checksum), a key and a value, each length bounded. Processes
 * append under a write lock and read under a read lock, so a record is never seen half written; one that is
 * half written belongs to a process that was killed in the act, and the file counts as damaged.
 *
 * The locks are "open file description" locks: they belong to this struct's descriptor rather than to the
 * process, so several stores in one process exclude each other, and the kernel drops them when the last copy
 * of the descriptor is closed, however the process ends. That is what tells a file of a running job from one
 * that a crash left behind. All waiting for a lock is polling with a deadline, since its holder may be
 * stopped.
 *
 * One struct is used by one thread at a time (file.c's lock). */
#include "store/file_log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/mem.h"

#define RECORD_MAGIC 0x324c5346u /* "FSL2" */
#define LOCK_BYTE (INT64_C(1) << 61)
#define CLAIM_BYTE (LOCK_BYTE + 1) /* + rank */

struct record {
    uint32_t magic;
    uint8_t type, key_bytes;
    uint16_t zero;
    uint32_t value_bytes;
    uint32_t sum; /* of all else, header included */
};

static uint32_t checksum(struct record head, const void *key, const void *value)
{
    uint64_t hash = hash_bytes(HASH_START, &head, offsetof(struct record, sum));
    hash = hash_bytes(hash, key, head.key_bytes);
    return (uint32_t)hash_bytes(hash, value, head.value_bytes);
}

fsdp_status store_log_damaged(const struct file_log *log, const char *what)
{
    return err(FSDP_ERR_RENDEZVOUS,
               "store file '%s' is damaged at byte %" PRId64 " (%s): remove it and start the job again", log->path,
               (int64_t)log->at, what);
}

/* ---- The file ----------------------------------------------------------------------------------------- */

static fsdp_status check_file(int fd, const char *path)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return err_sys(FSDP_ERR_SYSTEM, errno, "store file '%s' can't be examined", path);
    if (!S_ISREG(st.st_mode))
        return err(FSDP_ERR_RENDEZVOUS, "'%s' is not a regular file: give a path of its own to each job", path);
    if (st.st_uid != geteuid())
        return err(FSDP_ERR_RENDEZVOUS,
                   "store file '%s' belongs to user %u, this process runs as user %u: all ranks of a job run "
                   "as one user; choose another path",
                   path, (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_mode & 022)
        return err(FSDP_ERR_RENDEZVOUS, "store file '%s' can be written by other users (mode %o): remove it", path,
                   (unsigned)st.st_mode & 07777);
    return FSDP_OK;
}

fsdp_status store_log_open(struct file_log *log, const char *path)
{
    log->path = path;
    log->at = 0;
    atomic_store(&log->fd, -1);
    int fd;
    do fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0600);
    while (fd < 0 && errno == EINTR);
    if (fd < 0 && errno == ELOOP)
        return err(FSDP_ERR_RENDEZVOUS, "store file '%s' is a symbolic link, which is not followed: give the real path",
                   path);
    if (fd < 0) return err_sys(FSDP_ERR_SYSTEM, errno, "store file '%s' can't be opened", path);
    fsdp_status status = check_file(fd, path);
    if (status != FSDP_OK) {
        close(fd);
        return status;
    }
    atomic_store(&log->fd, fd);
    return FSDP_OK;
}

void store_log_close(struct file_log *log)
{
    int fd = atomic_exchange(&log->fd, -1);
    if (fd >= 0) close(fd);
}

int store_log_is_removed(const struct file_log *log)
{
    struct stat st;
    return fstat(atomic_load(&log->fd), &st) == 0 && st.st_nlink == 0;
}

int store_log_has_more(const struct file_log *log)
{
    struct stat st;
    return fstat(atomic_load(&log->fd), &st) == 0 && st.st_size != log->at;
}

void store_log_remove(struct file_log *log)
{
    struct stat here, there;
    if (fstat(atomic_load(&log->fd), &here) != 0 || lstat(log->path, &there) != 0) return;
    if (here.st_dev == there.st_dev && here.st_ino == there.st_ino) unlink(log->path);
}

/* ---- Locks -------------------------------------------------------------------------------------------- */

static int range(const struct file_log *log, int command, short type, int64_t byte, struct flock *out)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int rc;
    do rc = fcntl(atomic_load(&log->fd), command, &lock);
    while (rc != 0 && errno == EINTR);
    if (out) *out = lock;
    return rc;
}

fsdp_status store_log_lock(struct file_log *log, enum file_lock kind, int64_t deadline)
{
    for (int tries = 0;; tries++) {
        if (range(log, F_OFD_SETLK, kind == FILE_WRITE ? F_WRLCK : F_RDLCK, LOCK_BYTE, NULL) == 0) return FSDP_OK;
        if (errno != EAGAIN && errno != EACCES)
            return err_sys(FSDP_ERR_SYSTEM, errno, "store file '%s' can't be locked (is it on a local disk?)",
                           log->path);
        if (store_now_ms() >= deadline)
            return err(FSDP_ERR_TIMEOUT,
                       "store file '%s' stayed locked by another process until the time was up: a rank may "
                       "be stopped",
                       log->path);
        store_sleep_ms(tries < 20 ? 1 : 5);
    }
}

void store_log_unlock(struct file_log *log)
{
    range(log, F_OFD_SETLK, F_UNLCK, LOCK_BYTE, NULL);
}

int store_log_claim(struct file_log *log, int32_t rank)
{
    return range(log, F_OFD_SETLK, F_WRLCK, CLAIM_BYTE + rank, NULL) == 0;
}

void store_log_disclaim(struct file_log *log, int32_t rank)
{
    range(log, F_OFD_SETLK, F_UNLCK, CLAIM_BYTE + rank, NULL);
}

int store_log_is_claimed(const struct file_log *log, int32_t rank)
{
    struct flock lock;
    return range(log, F_OFD_GETLK, F_WRLCK, CLAIM_BYTE + rank, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* ---- Records ------------------------------------------------------------------------------------------ */

/* 1: all of it; 0: the file ends before; -1: errno says. */
static int read_exactly(int fd, void *buffer, size_t bytes, off_t at)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (char *)buffer + done, bytes - done, at + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return (int)n;
        done += (size_t)n;
    }
    return 1;
}

static fsdp_status read_failed(const struct file_log *log, int rc)
{
    if (rc == 0) return store_log_damaged(log, "the last record is incomplete");
    return err_sys(FSDP_ERR_SYSTEM, errno, "store file '%s' can't be read", log->path);
}

fsdp_status store_log_read(struct file_log *log, log_apply_fn apply, void *ctx)
{
    int fd = atomic_load(&log->fd);
    struct stat st;
    if (fstat(fd, &st) != 0) return err_sys(FSDP_ERR_SYSTEM, errno, "store file '%s' can't be examined", log->path);
    if (st.st_size < log->at) return store_log_damaged(log, "it has become shorter");
    if (st.st_size == log->at) return FSDP_OK;

    char *body = mem_alloc(STORE_KEY_MAX + STORE_VALUE_MAX);
    if (!body) return mem_none("reading a store file", STORE_KEY_MAX + STORE_VALUE_MAX);
    fsdp_status status = FSDP_OK;
    while (status == FSDP_OK && log->at < st.st_size) {
        struct record head;
        int rc = read_exactly(fd, &head, sizeof head, log->at);
        if (rc <= 0) {
            status = log->at == 0 && rc == 0 ? store_log_damaged(log, "it is not a store file of libfsdp")
                                             : read_failed(log, rc);
            break;
        }
        if (head.magic != RECORD_MAGIC || head.zero != 0 || head.value_bytes > STORE_VALUE_MAX) {
            status = log->at == 0
                         ? err(FSDP_ERR_RENDEZVOUS,
                               "'%s' exists and is not a store file of libfsdp: choose another path, or remove it",
                               log->path)
                         : store_log_damaged(log, "no record begins there");
            break;
        }
        rc = read_exactly(fd, body, head.key_bytes + head.value_bytes, log->at + (off_t)sizeof head);
        if (rc <= 0) {
            status = read_failed(log, rc);
            break;
        }
        if (checksum(head, body, body + head.key_bytes) != head.sum) {
            status = store_log_damaged(log, "the checksum differs");
            break;
        }
        status = apply(ctx, head.type, body, head.key_bytes, body + head.key_bytes, head.value_bytes);
        if (status == FSDP_OK) log->at += (off_t)(sizeof head + head.key_bytes + head.value_bytes);
    }
    mem_free(body);
    return status;
}

fsdp_status store_log_append(struct file_log *log, int type, const void *key, size_t key_bytes, const void *value,
                             size_t value_bytes)
{
    struct record head = {.magic = RECORD_MAGIC,
                          .type = (uint8_t)type,
                          .key_bytes = (uint8_t)key_bytes,
                          .value_bytes = (uint32_t)value_bytes};
    head.sum = checksum(head, key, value);
    struct iovec parts[] = {
        {&head, sizeof head}, {(void *)(uintptr_t)key, key_bytes}, {(void *)(uintptr_t)value, value_bytes}};
    int fd = atomic_load(&log->fd);
    ssize_t whole = (ssize_t)(sizeof head + key_bytes + value_bytes), n;
    do n = pwritev(fd, parts, 3, log->at);
    while (n < 0 && errno == EINTR);
    if (n == whole) return FSDP_OK;

    int why = n < 0 ? errno : ENOSPC;
    if (n > 0 && ftruncate(fd, log->at) != 0) why = errno;
    return err_sys(FSDP_ERR_SYSTEM, why, "store file '%s' can't be written", log->path);
}
