/* A store in a file on a local disk: ranks of one host and one user meet by appending to the same log
 * (file_log.c), and each replays it into a table of its own.
 *
 * Records: META (the job: world size, job key), JOIN and LEAVE of a rank, STRIKE (it died while meeting),
 * CONFLICT (why the ranks can't meet, in words, so that all of them say the same), SET. Every decision is
 * taken under the log's write lock with the whole log read, so two processes never decide differently. While
 * a rank uses the file it holds a claim that its death drops: a rank that joined and has no claim is dead,
 * and a file none of whose ranks is alive is left over from an earlier job and is removed by whoever finds
 * it. A file in use by another job is refused; one that is being given up (this rank has left it, others have
 * yet to) is waited for, so that a job can open its store again. The last rank to leave removes it.
 *
 * `lock` guards all below it and is not held while a reader sleeps. The struct owns its descriptor, path and
 * table. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "store/file_log.h"
#include "store/table.h"

#define FILE_VERSION 1
#define LEAVE_MS 1000 /* a release does not wait longer for a stopped rank's lock */

enum { META = 1, JOIN, LEAVE, STRIKE, CONFLICT, SET };
enum member { ABSENT, JOINED, GAVE_UP, LEFT };

struct meta {
    uint32_t version;
    int32_t world_size;
};

struct file_store {
    struct store_backend base;
    struct store_config config;
    char *path;
    pthread_mutex_t lock;
    struct file_log log;
    struct store_table table;

    int32_t world_size; /* of the file; 0: no META yet */
    char job_key[STORE_KEY_MAX + 1];
    uint8_t *members; /* enum member, per rank */
    int32_t n_joined; /* not counting those that left */
    int complete;     /* all ranks have been there at once */
    char conflict[STORE_TEXT_MAX];
};

/* ---- Replay ------------------------------------------------------------------------------------------- */

static fsdp_status apply_meta(struct file_store *self, const void *key, size_t key_bytes, const void *value,
                              size_t value_bytes)
{
    struct meta meta;
    if (value_bytes != sizeof meta || self->world_size != 0) return store_log_damaged(&self->log, "a wrong job record");
    memcpy(&meta, value, sizeof meta);
    if (meta.version != FILE_VERSION)
        return err(FSDP_ERR_RENDEZVOUS,
                   "store file '%s' was made by another version of libfsdp (format %" PRIu32
                   ", this one has %d): use one version in a job, or remove the file",
                   self->path, meta.version, FILE_VERSION);
    if (meta.world_size < 1 || meta.world_size > STORE_WORLD_MAX)
        return store_log_damaged(&self->log, "an impossible world size");
    self->members = mem_alloc((size_t)meta.world_size);
    if (!self->members) return mem_none("the ranks of a store file", (size_t)meta.world_size);
    self->world_size = meta.world_size;
    memcpy(self->job_key, key, key_bytes);
    self->job_key[key_bytes] = 0;
    return FSDP_OK;
}

static fsdp_status apply_member(struct file_store *self, int type, const void *value, size_t value_bytes)
{
    int32_t rank;
    if (value_bytes != sizeof rank) return store_log_damaged(&self->log, "a wrong rank record");
    memcpy(&rank, value, sizeof rank);
    if (rank < 0 || rank >= self->world_size) return store_log_damaged(&self->log, "a rank that does not exist");
    uint8_t *member = &self->members[rank];
    int possible = type == JOIN ? *member == ABSENT || *member == GAVE_UP : *member == JOINED;
    if (!possible) return store_log_damaged(&self->log, "a rank that can't join or leave there");
    if (type == JOIN) {
        *member = JOINED;
        if (++self->n_joined == self->world_size) self->complete = 1;
    } else {
        *member = self->complete ? LEFT : type == LEAVE ? GAVE_UP : ABSENT;
        self->n_joined--;
    }
    return FSDP_OK;
}

static fsdp_status apply(void *ctx, int type, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct file_store *self = ctx;
    if (type == META) return apply_meta(self, key, key_bytes, value, value_bytes);
    if (self->world_size == 0) return store_log_damaged(&self->log, "it does not begin with a job record");
    switch (type) {
    case JOIN:
    case LEAVE:
    case STRIKE:
        return apply_member(self, type, value, value_bytes);
    case SET:
        return store_table_set(&self->table, key, key_bytes, value, value_bytes);
    case CONFLICT:
        if (!self->conflict[0])
            snprintf(self->conflict, sizeof self->conflict, "%.*s", (int)value_bytes, (const char *)value);
        return FSDP_OK;
    default:
        return store_log_damaged(&self->log, "an unknown kind of record");
    }
}

static void forget(struct file_store *self)
{
    mem_free(self->members);
    self->members = NULL;
    store_table_free(&self->table);
    self->world_size = self->n_joined = 0;
    self->complete = 0;
    self->conflict[0] = 0;
}

/* The log's lock, with everything read. */
static fsdp_status lock_and_read(struct file_store *self, enum file_lock kind, int64_t deadline)
{
    TRY(store_log_lock(&self->log, kind, deadline));
    fsdp_status status = store_log_read(&self->log, apply, self);
    if (status != FSDP_OK) store_log_unlock(&self->log);
    return status;
}

static fsdp_status append(struct file_store *self, int type, const char *key, const void *value, size_t bytes)
{
    TRY(store_log_append(&self->log, type, key, strlen(key), value, bytes));
    return store_log_read(&self->log, apply, self);
}

static fsdp_status append_rank(struct file_store *self, int type, int32_t rank)
{
    return append(self, type, "", &rank, sizeof rank);
}

/* ---- Joining ------------------------------------------------------------------------------------------ */

/* Tell everybody, then fail with the same words. */
static fsdp_status conflict(struct file_store *self, const char *text)
{
    append(self, CONFLICT, "", text, strlen(text)); /* if it can't be written, the others run into their timeout */
    return err(FSDP_ERR_RENDEZVOUS, "%s", text);
}

/* Ranks whose process lives. Before the meeting is complete, the dead ones are struck off. */
static int32_t count_alive(struct file_store *self)
{
    int32_t alive = 0;
    for (int32_t rank = 0; rank < self->world_size; rank++) {
        if (store_log_is_claimed(&self->log, rank))
            alive++;
        else if (self->members[rank] == JOINED && !self->complete)
            append_rank(self, STRIKE, rank);
    }
    return alive;
}

/* May this rank join a file that others use? Under the write lock. *again: not yet. */
static fsdp_status admit(struct file_store *self, int *again)
{
    const struct store_config *me = &self->config;
    char text[sizeof self->conflict];
    if (strcmp(self->job_key, me->job_key) != 0)
        return err(FSDP_ERR_RENDEZVOUS,
                   "store file '%s' is in use by a job with another job key: give this job a path of its "
                   "own, or the same job key to all of its ranks",
                   self->path);
    if (self->world_size != me->world_size) {
        snprintf(text, sizeof text,
                 "ranks disagree on world_size at store file '%.200s': rank %" PRId32 " says %" PRId32
                 ", a rank before it says %" PRId32 ": start all ranks with the same",
                 self->path, me->rank, me->world_size, self->world_size);
        if (!self->complete) return conflict(self, text);
        return err(FSDP_ERR_RENDEZVOUS, "%s; or choose another path, as another job may be using this one", text);
    }
    if (self->conflict[0]) return err(FSDP_ERR_RENDEZVOUS, "%s", self->conflict);
    if (self->members[me->rank] == LEFT) *again = 1;
    if (self->members[me->rank] != JOINED) return FSDP_OK;

    if (self->complete && !store_log_is_claimed(&self->log, me->rank))
        return err(FSDP_ERR_RENDEZVOUS,
                   "store file '%s' exists from an earlier job whose rank %" PRId32
                   " has ended while others still run: end them, or choose another path",
                   self->path, me->rank);
    snprintf(text, sizeof text,
             "two processes say they are rank %" PRId32
             " at store file '%.200s': give each process its own rank, and each job its own path",
             me->rank, self->path);
    if (!self->complete) return conflict(self, text);
    return err(FSDP_ERR_RENDEZVOUS, "%s", text);
}

/* Under the write lock. Ranks still on their way hold no claim; they find the file gone and make a new one.
 */
static void remove_if_alone(struct file_store *self)
{
    for (int32_t rank = 0; rank < self->world_size; rank++)
        if (rank != self->config.rank && store_log_is_claimed(&self->log, rank)) return;
    store_log_remove(&self->log);
}

static fsdp_status write_meta(struct file_store *self)
{
    struct meta meta = {.version = FILE_VERSION, .world_size = self->config.world_size};
    return append(self, META, self->config.job_key, &meta, sizeof meta);
}

/* Take this rank's place in the file, under the write lock. *again: not yet, or not in this file. */
static fsdp_status join_locked(struct file_store *self, int *again)
{
    if (store_log_is_removed(&self->log)) {
        *again = 1;
        return FSDP_OK;
    }
    if (self->world_size == 0) {
        fsdp_status status = write_meta(self);
        if (status != FSDP_OK) {
            remove_if_alone(self);
            return status;
        }
    } else if (count_alive(self) == 0) {
        LOG(FSDP_LOG_INFO, "store file '%s' was left by an earlier job: starting afresh", self->path);
        store_log_remove(&self->log);
        *again = store_log_is_removed(&self->log);
        if (*again) return FSDP_OK;
        return err(FSDP_ERR_RENDEZVOUS, "store file '%s' exists from an earlier job and can't be removed: remove it",
                   self->path);
    } else {
        TRY(admit(self, again));
        if (*again) return FSDP_OK;
    }
    if (!store_log_claim(&self->log, self->config.rank))
        return err(FSDP_ERR_RENDEZVOUS,
                   "store file '%s': rank %" PRId32
                   " can't lock its place: is the file on a local disk, and has nobody written to it?",
                   self->path, self->config.rank);
    fsdp_status status = append_rank(self, JOIN, self->config.rank);
    if (status != FSDP_OK) remove_if_alone(self);
    return status;
}

static fsdp_status join(struct file_store *self, int64_t deadline)
{
    for (int64_t pause = 1;; pause = pause < 20 ? pause * 2 : 20) {
        int again = 0;
        TRY(store_log_open(&self->log, self->path));
        fsdp_status status = lock_and_read(self, FILE_WRITE, deadline);
        if (status == FSDP_OK) {
            status = join_locked(self, &again);
            store_log_unlock(&self->log);
        }
        if (status == FSDP_OK && !again) return FSDP_OK;
        store_log_close(&self->log);
        forget(self);
        if (status != FSDP_OK) return status;
        if (store_now_ms() >= deadline)
            return err(FSDP_ERR_TIMEOUT,
                       "store file '%s' is still in use by ranks that met there before: they have not "
                       "released their stores; release them all, or choose another path",
                       self->path);
        store_sleep_ms(pause);
    }
}

/* ---- Meeting and leaving ------------------------------------------------------------------------------ */

static int is_missing(const void *ctx, int32_t rank)
{
    const struct file_store *self = ctx;
    if (rank == self->config.rank) return 0;
    return self->members[rank] == ABSENT || (self->members[rank] == JOINED && !store_log_is_claimed(&self->log, rank));
}

/* Give this rank's place up, under the write lock; the last one out removes the file. */
static void part_locked(struct file_store *self)
{
    if (self->members[self->config.rank] == JOINED) append_rank(self, LEAVE, self->config.rank);
    remove_if_alone(self);
    store_log_disclaim(&self->log, self->config.rank);
    store_log_unlock(&self->log);
}

/* The same from outside. What can't be written is inferred by the others from the dropped claim. Keeps this
 * thread's error record: the caller may be on its way out with one. */
static void part(struct file_store *self)
{
    fsdp_error_info info;
    err_save(&info);
    if (lock_and_read(self, FILE_WRITE, store_deadline(LEAVE_MS)) == FSDP_OK) part_locked(self);
    store_log_disclaim(&self->log, self->config.rank);
    store_log_close(&self->log);
    err_restore(&info);
}

static fsdp_status err_missing(const struct file_store *self)
{
    char ranks[256];
    int32_t first = 0;
    while (first < self->world_size - 1 && !is_missing(self, first)) first++;
    store_list_ranks(ranks, sizeof ranks, self->world_size, is_missing, self);
    err(FSDP_ERR_TIMEOUT,
        "not all of %" PRId32 " ranks came to store file '%s' within %" PRId64
        " ms: missing %s; see their output, or raise timeout_ms",
        self->world_size, self->path, self->config.timeout_ms, ranks);
    err_operation(FSDP_OP_NONE, 0, first, -1);
    return FSDP_ERR_TIMEOUT;
}

/* Wait for the others. To give up is decided under the write lock too, so that nobody counts on a rank that
 * has. */
static fsdp_status meet(struct file_store *self, int64_t deadline)
{
    for (int64_t pause = 1;; pause = pause < 10 ? pause + 1 : 10) {
        if (store_log_has_more(&self->log)) {
            TRY(lock_and_read(self, FILE_READ, deadline + LEAVE_MS));
            store_log_unlock(&self->log);
        }
        if (self->conflict[0]) return err(FSDP_ERR_RENDEZVOUS, "%s", self->conflict);
        if (self->complete) return FSDP_OK;
        if (store_now_ms() >= deadline) break;
        store_sleep_ms(pause);
    }
    TRY(lock_and_read(self, FILE_WRITE, store_deadline(LEAVE_MS)));
    if (self->complete) {
        store_log_unlock(&self->log);
        return FSDP_OK;
    }
    fsdp_error_info info;
    err_missing(self);
    err_save(&info);
    part_locked(self);
    return err_restore(&info);
}

static void file_abandon(struct store_backend *base, int torn)
{
    struct file_store *self = (struct file_store *)base;
    store_log_close(&self->log); /* the parent's copy of the descriptor keeps the locks */
    if (torn) return;
    forget(self);
    mem_free(self->path);
    mem_free(self);
}

static void file_close(struct store_backend *base)
{
    struct file_store *self = (struct file_store *)base;
    part(self);
    pthread_mutex_destroy(&self->lock);
    file_abandon(base, 0);
}

/* ---- Keys --------------------------------------------------------------------------------------------- */

static fsdp_status file_set(struct store_backend *base, const char *key, const void *value, size_t bytes)
{
    struct file_store *self = (struct file_store *)base;
    pthread_mutex_lock(&self->lock);
    fsdp_status status = lock_and_read(self, FILE_WRITE, store_deadline(self->config.timeout_ms));
    if (status == FSDP_OK) {
        status = append(self, SET, key, value, bytes);
        store_log_unlock(&self->log);
    }
    pthread_mutex_unlock(&self->lock);
    return status;
}

static fsdp_status file_add(struct store_backend *base, const char *key, int64_t amount, int64_t *result)
{
    struct file_store *self = (struct file_store *)base;
    int64_t sum = 0;
    pthread_mutex_lock(&self->lock);
    fsdp_status status = lock_and_read(self, FILE_WRITE, store_deadline(self->config.timeout_ms));
    if (status == FSDP_OK) {
        status = store_table_sum(&self->table, key, strlen(key), amount, &sum);
        if (status == FSDP_OK) {
            char text[32];
            int length = snprintf(text, sizeof text, "%" PRId64, sum);
            status = append(self, SET, key, text, (size_t)length);
        }
        store_log_unlock(&self->log);
    }
    pthread_mutex_unlock(&self->lock);
    if (status == FSDP_OK) *result = sum;
    return status;
}

/* One look: *found, or not yet. With no buffer it only looks. */
static fsdp_status look(struct file_store *self, const char *key, int64_t deadline, void *buffer, size_t capacity,
                        size_t *bytes, int *found)
{
    if (store_log_has_more(&self->log)) {
        TRY(lock_and_read(self, FILE_READ, deadline));
        store_log_unlock(&self->log);
    }
    const void *value;
    size_t have;
    *found = store_table_get(&self->table, key, strlen(key), &value, &have);
    if (!*found || !bytes) return FSDP_OK;
    *bytes = have;
    if (have > capacity) return store_err_too_large(key, have, capacity);
    if (have) memcpy(buffer, value, have);
    return FSDP_OK;
}

static fsdp_status read_key(struct file_store *self, const char *key, void *buffer, size_t capacity, size_t *bytes,
                            int64_t timeout_ms)
{
    int64_t deadline = store_deadline(timeout_ms);
    for (int64_t pause = 1;; pause = pause < 10 ? pause + 1 : 10) {
        int found = 0;
        pthread_mutex_lock(&self->lock);
        fsdp_status status = look(self, key, deadline, buffer, capacity, bytes, &found);
        pthread_mutex_unlock(&self->lock);
        if (status != FSDP_OK || found) return status;
        if (store_now_ms() >= deadline) return store_err_key_timeout(key, timeout_ms);
        store_sleep_ms(pause);
    }
}

static fsdp_status file_get(struct store_backend *base, const char *key, void *buffer, size_t capacity, size_t *bytes,
                            int64_t timeout_ms)
{
    return read_key((struct file_store *)base, key, buffer, capacity, bytes, timeout_ms);
}

static fsdp_status file_wait(struct store_backend *base, const char *key)
{
    struct file_store *self = (struct file_store *)base;
    return read_key(self, key, NULL, 0, NULL, self->config.timeout_ms);
}

static const struct store_backend_ops file_ops = {
    .name = "file",
    .set = file_set,
    .get = file_get,
    .add = file_add,
    .wait = file_wait,
    .close = file_close,
    .abandon = file_abandon,
};

fsdp_status store_file_open(const char *path, const struct store_config *config, struct store_backend **out)
{
    struct file_store *self = mem_alloc(sizeof *self);
    if (!self) return mem_none("a store", sizeof *self);
    self->base.ops = &file_ops;
    self->config = *config;
    atomic_init(&self->log.fd, -1);
    self->path = mem_strdup(path);
    if (!self->path) {
        mem_free(self);
        return mem_none("a store's path", strlen(path) + 1);
    }
    pthread_mutex_init(&self->lock, NULL);

    int64_t deadline = store_deadline(config->timeout_ms);
    fsdp_status status = join(self, deadline);
    if (status == FSDP_OK) {
        status = meet(self, deadline);
        if (status != FSDP_OK) part(self);
    }
    if (status != FSDP_OK) {
        pthread_mutex_destroy(&self->lock);
        file_abandon(&self->base, 0);
        return status;
    }
    *out = &self->base;
    return FSDP_OK;
}
