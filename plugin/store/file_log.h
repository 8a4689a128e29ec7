/* An append-only log in a file that several processes share, with locks that die with their holders. What the
 * records mean is file.c's affair. */
#ifndef FSDP_STORE_FILE_LOG_H
#define FSDP_STORE_FILE_LOG_H

#include <stdatomic.h>
#include <sys/types.h>

#include "store/store_backend.h"

struct file_log {
    atomic_int fd; /* -1: closed */
    const char *path;
    off_t at; /* records before this have been read */
};

enum file_lock { FILE_READ, FILE_WRITE };

/* Opens or makes the file; refuses what another user could have planted. Errors: SYSTEM, RENDEZVOUS. */
fsdp_status store_log_open(struct file_log *log, const char *path);
/* Closes and, with that, drops every lock this log holds. */
void store_log_close(struct file_log *log);

/* Who may read or append. Waits for other holders until `deadline`. Errors: TIMEOUT, SYSTEM. */
fsdp_status store_log_lock(struct file_log *log, enum file_lock kind, int64_t deadline);
void store_log_unlock(struct file_log *log);

/* A rank is alive while it holds its claim. `claim` gives 1, or 0 when another process has it. */
int store_log_claim(struct file_log *log, int32_t rank);
void store_log_disclaim(struct file_log *log, int32_t rank);
int store_log_is_claimed(const struct file_log *log, int32_t rank); /* by another than this log */

int store_log_is_removed(const struct file_log *log); /* no name leads to the file any more */
int store_log_has_more(const struct file_log *log);   /* needs no lock */
void store_log_remove(struct file_log *log);          /* if the path still leads to it; under the write lock */

typedef fsdp_status (*log_apply_fn)(void *ctx, int type, const void *key, size_t key_bytes, const void *value,
                                    size_t value_bytes);
/* Hand every record after `at` to `apply`, under a lock. Errors: RENDEZVOUS (damaged, or not a log), SYSTEM,
 * NOMEM, and apply's. */
fsdp_status store_log_read(struct file_log *log, log_apply_fn apply, void *ctx);
/* Under the write lock, with all records read. A record is there whole or not at all. */
fsdp_status store_log_append(struct file_log *log, int type, const void *key, size_t key_bytes, const void *value,
                             size_t value_bytes);
fsdp_status store_log_damaged(const struct file_log *log, const char *what);

#endif
