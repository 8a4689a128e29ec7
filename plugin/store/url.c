/* URLs of stores: "env://", "tcp://host:port?rank=R&world_size=N", "file:///path?rank=R&world_size=N".
 *
 * Read by hand, strictly: an unknown scheme, parameter or escape is refused with what was expected. IPv6
 * addresses are in brackets; paths may use %XX. Works on a copy; nothing is allocated. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "store/address.h"

#define FORMS "expected env://, tcp://host:port or file:///path"

int store_parse_int(const char *text, int64_t low, int64_t high, int64_t *out)
{
    if (!(text[0] >= '0' && text[0] <= '9') && !(text[0] == '-' && text[1] >= '0' && text[1] <= '9')) return 0;
    char *end;
    errno = 0;
    int64_t value = strtoll(text, &end, 10);
    if (errno || *end || value < low || value > high) return 0;
    *out = value;
    return 1;
}

static fsdp_status parse_query(char *query, const char *url, struct store_address *out)
{
    int64_t rank = -1, world_size = -1;
    for (char *save = NULL, *part = strtok_r(query, "&", &save); part; part = strtok_r(NULL, "&", &save)) {
        char *equals = strchr(part, '=');
        CHECK_ARG(equals, "url '%s': parameter '%s' has no value: expected rank=R&world_size=N", url, part);
        *equals = 0;
        int is_rank = strcmp(part, "rank") == 0;
        CHECK_ARG(is_rank || strcmp(part, "world_size") == 0,
                  "url '%s': unknown parameter '%s': expected rank and world_size", url, part);
        int64_t *value = is_rank ? &rank : &world_size;
        CHECK_ARG(*value < 0, "url '%s': parameter '%s' is given twice", url, part);
        CHECK_ARG(store_parse_int(equals + 1, is_rank ? 0 : 1, STORE_WORLD_MAX, value),
                  "url '%s': %s is '%s': expected a number, %d to %d", url, part, equals + 1, is_rank ? 0 : 1,
                  STORE_WORLD_MAX);
    }
    if (rank < 0 && world_size < 0) return FSDP_OK;
    CHECK_ARG(world_size >= 0, "url '%s' has rank but not world_size: give both, or neither", url);
    CHECK_ARG(rank >= 0, "url '%s' has world_size but not rank: give both, or neither", url);
    CHECK_ARG(rank < world_size,
              "url '%s': rank %" PRId64 " is out of range: world_size %" PRId64 " has ranks 0 to %" PRId64, url, rank,
              world_size, world_size - 1);
    out->rank = (int32_t)rank;
    out->world_size = (int32_t)world_size;
    return FSDP_OK;
}

static fsdp_status parse_tcp(char *rest, const char *url, struct store_address *out)
{
    size_t length = strlen(rest);
    if (length && rest[length - 1] == '/') rest[length - 1] = 0;
    char *host = rest, *colon;
    if (rest[0] == '[') {
        char *close = strchr(rest, ']');
        CHECK_ARG(close, "url '%s': the IPv6 address has no closing ']'", url);
        host = rest + 1;
        *close = 0;
        colon = close + 1;
        CHECK_ARG(*colon == ':', "url '%s' has no port: expected tcp://[address]:port", url);
    } else {
        colon = strchr(rest, ':');
        CHECK_ARG(colon, "url '%s' has no port: expected tcp://host:port", url);
        CHECK_ARG(!strchr(colon + 1, ':'), "url '%s': put an IPv6 address in brackets, tcp://[::1]:29500", url);
    }
    *colon = 0;
    CHECK_ARG(*host, "url '%s' has no host: rank 0 listens at host, for one machine use localhost", url);
    CHECK_ARG(strlen(host) < sizeof out->endpoint.host, "url '%s': the host name has %zu bytes, at most %zu fit", url,
              strlen(host), sizeof out->endpoint.host - 1);
    CHECK_ARG(!strpbrk(host, "/@%\\ \t\n"), "url '%s': '%s' is not a host name", url, host);
    int64_t port;
    CHECK_ARG(store_parse_int(colon + 1, 0, 65535, &port), "url '%s': port '%s' is not a number from 1 to 65535", url,
              colon + 1);
    CHECK_ARG(port != 0, "url '%s': port 0 can't be met at, since all ranks must know it: choose one from 1 to 65535",
              url);
    strcpy(out->endpoint.host, host);
    out->endpoint.port = (uint16_t)port;
    return FSDP_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static fsdp_status parse_file(const char *rest, const char *url, struct store_address *out)
{
    CHECK_ARG(rest[0] == '/' && rest[1], "url '%s' has no absolute path: expected file:///path", url);
    size_t used = 0;
    for (const char *at = rest; *at; at++) {
        char c = *at;
        if (c == '%') {
            int high = hex_digit(at[1]), low = high < 0 ? -1 : hex_digit(at[2]);
            CHECK_ARG(low >= 0 && high * 16 + low != 0, "url '%s': '%.3s' is not an escape: write %% as %%25", url, at);
            c = (char)(high * 16 + low);
            at += 2;
        }
        out->path[used++] = c; /* shorter than the URL, whose length store_url_parse has checked */
    }
    out->path[used] = 0;
    return FSDP_OK;
}

fsdp_status store_url_parse(const char *url, struct store_address *out)
{
    memset(out, 0, sizeof *out);
    CHECK_ARG(*url, "url is empty: " FORMS);
    char copy[STORE_PATH_MAX];
    size_t length = strlen(url);
    CHECK_ARG(length < sizeof copy, "url has %zu bytes, at most %zu fit", length, sizeof copy - 1);
    memcpy(copy, url, length + 1);

    char *query = strchr(copy, '?');
    if (query) {
        *query++ = 0;
        TRY(parse_query(query, url, out));
    }
    if (strncmp(copy, "tcp://", 6) == 0) {
        out->scheme = STORE_TCP;
        return parse_tcp(copy + 6, url, out);
    }
    if (strncmp(copy, "file://", 7) == 0) {
        out->scheme = STORE_FILE;
        return parse_file(copy + 7, url, out);
    }
    CHECK_ARG(strcmp(copy, "env://") == 0, "url '%s' is not understood: " FORMS, url);
    out->scheme = STORE_ENV;
    return FSDP_OK;
}
