/* Log lines for the host. Off the fast paths; a line is built only when its level is wanted. The callback may run on
 * any thread and is called without a lock held. Without a callback, lines go to standard error. The level comes from
 * the environment variable FSDP_LOG (error, warn, info, debug) until fsdp_set_log sets it; the default is warn. */
#ifndef FSDP_BASE_LOG_H
#define FSDP_BASE_LOG_H

#include "base/error.h"

int log_wanted(fsdp_log_level level);
void log_line(fsdp_log_level level, const char *fmt, ...) FSDP_PRINTF(2, 3);
void log_set(fsdp_log_fn fn, void *user, fsdp_log_level level);

#define LOG(level, ...)                                                                                                \
    do {                                                                                                               \
        if (log_wanted(level)) log_line(level, __VA_ARGS__);                                                           \
    } while (0)

#endif
