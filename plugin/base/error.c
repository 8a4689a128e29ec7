/* Thread-local error records. See error.h for the convention. Nothing here allocates, so an out-of-memory failure can
 * be reported like any other. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local fsdp_error_info record = {.struct_size = sizeof(fsdp_error_info), .rank_a = -1, .rank_b = -1};

static void record_set(fsdp_status status, const char *fmt, va_list args)
{
    record.status = status;
    record.operation = FSDP_OP_NONE;
    record.sequence = 0;
    record.rank_a = record.rank_b = -1;
    vsnprintf(record.message, sizeof record.message, fmt, args);
}

fsdp_status err(fsdp_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    record_set(status, fmt, args);
    va_end(args);
    return status;
}

fsdp_status err_sys(fsdp_status status, int errnum, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    record_set(status, fmt, args);
    va_end(args);
    size_t used = strlen(record.message);
    char text[128];
    /* GNU strerror_r returns the text, which may or may not be in `text`. */
    snprintf(record.message + used, sizeof record.message - used, ": %s", strerror_r(errnum, text, sizeof text));
    return status;
}

fsdp_status err_prefix(fsdp_status status, const char *fmt, ...)
{
    char tail[sizeof record.message];
    memcpy(tail, record.message, sizeof tail);
    va_list args;
    va_start(args, fmt);
    vsnprintf(record.message, sizeof record.message, fmt, args);
    va_end(args);
    size_t used = strlen(record.message);
    snprintf(record.message + used, sizeof record.message - used, "%s", tail);
    return status;
}

void err_operation(fsdp_op_kind kind, uint64_t sequence, int32_t rank_a, int32_t rank_b)
{
    record.operation = kind;
    record.sequence = sequence;
    record.rank_a = rank_a;
    record.rank_b = rank_b;
}

void err_save(fsdp_error_info *out)
{
    *out = record;
}

fsdp_status err_restore(const fsdp_error_info *from)
{
    record = *from;
    return record.status;
}

const char *err_message(void)
{
    return record.message;
}

const char *err_status_name(fsdp_status status)
{
    switch (status) {
    case FSDP_OK:
        return "OK";
    case FSDP_ERR_INVALID:
        return "INVALID";
    case FSDP_ERR_STRUCT_SIZE:
        return "STRUCT_SIZE";
    case FSDP_ERR_VERSION:
        return "VERSION";
    case FSDP_ERR_UNSUPPORTED:
        return "UNSUPPORTED";
    case FSDP_ERR_NOMEM:
        return "NOMEM";
    case FSDP_ERR_SYSTEM:
        return "SYSTEM";
    case FSDP_ERR_TIMEOUT:
        return "TIMEOUT";
    case FSDP_ERR_PENDING:
        return "PENDING";
    case FSDP_ERR_MISMATCH:
        return "MISMATCH";
    case FSDP_ERR_PEER_LOST:
        return "PEER_LOST";
    case FSDP_ERR_ABORTED:
        return "ABORTED";
    case FSDP_ERR_FORKED:
        return "FORKED";
    case FSDP_ERR_STATE:
        return "STATE";
    case FSDP_ERR_RENDEZVOUS:
        return "RENDEZVOUS";
    case FSDP_ERR_CALLBACK:
        return "CALLBACK";
    case FSDP_ERR_INTERNAL:
        return "INTERNAL";
    case FSDP_ERR_CORRUPT:
        return "CORRUPT";
    case FSDP_ERR_NOT_FOUND:
        return "NOT_FOUND";
    default:
        return "UNKNOWN";
    }
}
