/* Log lines: see log.h. The sink is replaced as a whole under a lock and copied out before it is called, so a host may
 * change it at any time. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fsdp_log_fn sink;
static void *sink_user;
static atomic_int threshold; /* 0: not read from the environment yet */

static const char *const level_names[] = {"", "error", "warn", "info", "debug"};

static int threshold_from_environment(void)
{
    const char *text = getenv("FSDP_LOG");
    for (int i = FSDP_LOG_ERROR; text && i <= FSDP_LOG_DEBUG; i++)
        if (strcmp(text, level_names[i]) == 0) return i;
    if (text && *text)
        fprintf(stderr, "libfsdp: the environment's FSDP_LOG is '%s': error, warn, info or debug\n", text);
    return FSDP_LOG_WARN;
}

int log_wanted(fsdp_log_level level)
{
    int now = atomic_load_explicit(&threshold, memory_order_relaxed);
    if (now == 0) {
        now = threshold_from_environment();
        atomic_store_explicit(&threshold, now, memory_order_relaxed);
    }
    return level <= now;
}

void log_line(fsdp_log_level level, const char *fmt, ...)
{
    char text[1280];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);

    pthread_mutex_lock(&lock);
    fsdp_log_fn fn = sink;
    void *user = sink_user;
    pthread_mutex_unlock(&lock);
    if (fn)
        fn(level, text, user);
    else
        fprintf(stderr, "libfsdp[%d] %s: %s\n", (int)getpid(), level_names[level], text);
}

void log_set(fsdp_log_fn fn, void *user, fsdp_log_level level)
{
    pthread_mutex_lock(&lock);
    sink = fn;
    sink_user = user;
    pthread_mutex_unlock(&lock);
    atomic_store_explicit(&threshold, level ? level : threshold_from_environment(), memory_order_relaxed);
}
