/* Errors: one way to report them.
 *
 * A function that fails calls err() (or one of its forms) exactly once, at the place that knows what was wrong, and
 * returns the status it gave. Callers above pass the status on and say nothing. The record is thread-local; an
 * operation that fails on another thread carries its own copy (err_save / err_restore) to the thread that waits.
 *
 * A message says what was wrong, with the values, and what to do about it. It begins with a lower-case letter, names
 * arguments as the header does, and ends without a full stop.
 */
#ifndef FSDP_BASE_ERROR_H
#define FSDP_BASE_ERROR_H

#include "fsdp.h"

#define FSDP_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

/* Record a failure for this thread and return `status`. */
fsdp_status err(fsdp_status status, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* The same for a failed system call: appends ": <strerror(errnum)>". */
fsdp_status err_sys(fsdp_status status, int errnum, const char *fmt, ...) FSDP_PRINTF(3, 4);

/* Put words before the message of the failure just recorded ("creating group 'g': ..."); returns `status`. */
fsdp_status err_prefix(fsdp_status status, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* Add the operation and the ranks (-1: none) to the failure just recorded. */
void err_operation(fsdp_op_kind kind, uint64_t sequence, int32_t rank_a, int32_t rank_b);

void err_save(fsdp_error_info *out);                  /* copy this thread's record out */
fsdp_status err_restore(const fsdp_error_info *from); /* make it this thread's record; returns its status */
const char *err_message(void);
const char *err_status_name(fsdp_status status);

/* Argument checks of public functions read as one line each. */
#define CHECK_ARG(cond, ...)                                                                                           \
    do {                                                                                                               \
        if (!(cond)) return err(FSDP_ERR_INVALID, __VA_ARGS__);                                                        \
    } while (0)

/* Pass a failure of an inner call on. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        fsdp_status try_status_ = (call);                                                                              \
        if (try_status_ != FSDP_OK) return try_status_;                                                                \
    } while (0)

#endif
