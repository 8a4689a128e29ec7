/* Everything that asks the kernel: time, futexes, fork detection, peers' liveness and memory, shared segments, files,
 * sockets.
 *
 * Functions that can fail record an error and return a status, unless stated otherwise. All file descriptors are
 * close-on-exec. EINTR is handled here. */
#ifndef FSDP_BASE_OS_H
#define FSDP_BASE_OS_H

#include "base/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

/* ---- time and waiting (os.c) */

int64_t os_now_ns(void);     /* monotonic */
int os_cpu_count(void);      /* processors this process may run on */
uint32_t os_processor(void); /* the one this thread runs on just now */

static inline void os_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while *word == expected, at most timeout_ns; spurious returns allowed. Across processes. */
void os_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns);
void os_futex_wake(_Atomic uint32_t *word);

/* A thread that takes none of the host's signals. 0 or an errno. */
int os_thread_start(pthread_t *thread, void *(*body)(void *), void *argument);

/* ---- fork and peers (os.c) */

/* A number that tells this process from those it was forked from: objects note it when they are made, and a child knows
 * by it which are not its own. Costs a load or two. */
uint32_t os_process(void);

/* A descriptor that polls readable once this process has ended; send it to peers. *keep is one that this process must
 * hold open until then (-1: none). */
fsdp_status os_liveness_fd(int *fd, int *keep);
int os_is_dead(int liveness_fd);
/* 1 when the process is known to have ended, whether its parent has noticed or not. */
int os_process_ended(pid_t pid);
uint32_t os_pid_namespace(void); /* pids mean the same to processes with equal numbers */
/* Whether `n` more descriptors can be opened. */
fsdp_status os_descriptors_check(int n, const char *what);

/* Copy from another process's memory. 0 when all bytes were read, else an errno. */
int os_read_peer(pid_t pid, uint64_t address, void *to, size_t bytes);

/* Names this host (kernel instance and network namespace): ranks with equal names can share memory. */
void os_host_name(char *out, size_t size);
void os_random(void *out, size_t bytes);

/* ---- memory (os.c) */

size_t os_page_size(void);
size_t os_page_round(size_t bytes);

/* An unnamed shared segment: a memfd, with `bytes` reserved so that touching it can't raise SIGBUS. */
fsdp_status os_segment_create(const char *name, size_t bytes, int *fd);
fsdp_status os_segment_size(int fd, size_t *bytes);
/* Extend by reserving [offset, offset + bytes), and give such a range back. */
fsdp_status os_segment_reserve(int fd, size_t offset, size_t bytes);
void os_segment_discard(int fd, size_t offset, size_t bytes);

fsdp_status os_map_shared(int fd, size_t offset, size_t bytes, void **out);
/* Copy-on-write view of a segment's range; at `at` (replacing what is mapped there) when it is not NULL. */
fsdp_status os_map_private(int fd, size_t offset, size_t bytes, void *at, void **out);
/* Zeroed private memory with pages of its own; tensors live here. */
fsdp_status os_map_anonymous(size_t bytes, void **out);
/* The same in an unnamed file in `folder`, on its disk: reserved there, so that touching it can't raise SIGBUS. */
fsdp_status os_map_file(const char *folder, size_t bytes, int *fd, void **out);
/* Such memory is not needed for a while: begin to write what is new to the disk, and leave it to the kernel whether it
 * keeps the pages. Does not wait. And it will be needed soon: begin to read what is not in memory. */
void os_file_release(int fd, void *at, size_t bytes);
void os_file_prefetch(void *at, size_t bytes);
void os_unmap(void *at, size_t bytes);
/* Bring pages in for reading, so that no later read faults. Best effort. */
void os_populate_read(void *at, size_t bytes);
int64_t os_page_faults(void); /* of this process so far; -1: not known */
/* Drop this process's copied pages of a private view: it shows the segment again. Costs little when there are none. */
void os_drop_copies(void *at, size_t bytes);
/* Give private memory's pages back: it reads as zeros again. */
void os_discard(void *at, size_t bytes);

/* ---- files (os_file.c): what a failing call was about is in its message, errors are SYSTEM unless stated otherwise */

#define OS_PATH_MOST 3072 /* bytes of a path that is taken */

struct os_folder {
    int fd; /* -1: not open */
    char path[OS_PATH_MOST + 1];
};

enum os_kind { OS_NOTHING, OS_FILE, OS_FOLDER, OS_OTHER };
fsdp_status os_path_kind(const char *path, enum os_kind *kind);
/* The same place, whatever folder the process is in later. */
fsdp_status os_path_absolute(const char *path, char out[OS_PATH_MOST + 1]);
fsdp_status os_folder_make(const char *path); /* with its parents; it may be there already */
fsdp_status os_folder_open(const char *path, struct os_folder *out);
void os_folder_close(struct os_folder *folder);
/* For one holder at a time, until os_folder_unlock or the holder's end. *locked: 1; 0: another has it; -1: this file
 * system has no such locks. */
fsdp_status os_folder_lock(const struct os_folder *folder, int *locked);
void os_folder_unlock(const struct os_folder *folder);
fsdp_status os_folder_sync(const struct os_folder *folder);
/* each(name, user) for what is in it, in no order, until it fails. */
fsdp_status os_folder_list(const struct os_folder *folder, fsdp_status (*each)(const char *name, void *user),
                           void *user);

/* A regular file for reading; *bytes is its size. NOT_FOUND. */
fsdp_status os_file_open(const struct os_folder *folder, const char *name, int *fd, int64_t *bytes);
/* A new one for writing. STATE where there is one of the name. */
fsdp_status os_file_create(const struct os_folder *folder, const char *name, int *fd);
/* Find out whether there is room for `bytes`, as far as that is to be had without writing them. */
fsdp_status os_file_reserve(int fd, const char *name, int64_t bytes);
/* All of the bytes; a file that ends before them is CORRUPT. */
fsdp_status os_file_read(int fd, const char *name, void *to, size_t bytes, int64_t at);
fsdp_status os_file_write(int fd, const char *name, const void *from, size_t bytes, int64_t at);
void os_file_expect(int fd, int64_t at, int64_t bytes);     /* these will be read soon */
void os_file_begin_sync(int fd, int64_t at, int64_t bytes); /* begin to bring them to the disk; does not wait */
fsdp_status os_file_sync(int fd, const char *name);
fsdp_status os_file_close(int *fd, const char *name); /* of one that was written: a late failure is told; sets -1 */
fsdp_status os_file_rename(const struct os_folder *folder, const char *from, const char *to);
fsdp_status os_file_remove(const struct os_folder *folder, const char *name); /* none of the name: fine */

/* ---- sockets (os_socket.c) */

/* Abstract unix sockets; `name` without the leading zero byte. `deadline` is an os_now_ns() time. */
fsdp_status os_listen(const char *name, int backlog, int *fd);
fsdp_status os_accept(int listener, int64_t deadline, int *fd);
fsdp_status os_connect(const char *name, int64_t deadline, int *fd);
/* The process at the other end: its pid as seen from here (0: in no namespace of ours) and its user. */
fsdp_status os_peer_credentials(int fd, pid_t *pid, uid_t *uid);
/* One message of exactly `bytes` with n_fds descriptors. Receiving wants exactly that, else RENDEZVOUS; where `got` is
 * not NULL, a shorter message without any descriptor is taken too, and *got says how many there were. A peer that has
 * gone: PEER_LOST. */
fsdp_status os_send_fds(int fd, const void *data, size_t bytes, const int *fds, int n_fds);
fsdp_status os_recv_fds(int fd, void *data, size_t bytes, int *fds, int n_fds, int *got, int64_t deadline);
void os_close(int *fd); /* closes unless -1; sets -1 */

#endif
