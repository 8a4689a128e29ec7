/* JSON as text: written by hand, so that lengths are known beforehand and sums can be filled in; read with jansson. */
#include "state/files.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- written */

void text_bytes(struct text *t, const char *bytes, size_t n)
{
    if (t->failed) return;
    if (t->room - t->used <= n) {
        size_t room = t->room * 2 > t->used + n + 1 ? t->room * 2 : t->used + n + 4096;
        char *at = mem_alloc(room);
        if (!at) {
            t->failed = 1;
            return;
        }
        if (t->used) memcpy(at, t->at, t->used);
        mem_free(t->at);
        t->at = at;
        t->room = room;
    }
    if (n) memcpy(t->at + t->used, bytes, n);
    t->used += n;
    t->at[t->used] = 0;
}

void text_add(struct text *t, const char *words)
{
    text_bytes(t, words, strlen(words));
}

void text_number(struct text *t, int64_t number)
{
    char digits[24];
    text_bytes(t, digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)number));
}

void text_numbers(struct text *t, const int64_t *numbers, int32_t n)
{
    text_add(t, "[");
    for (int32_t i = 0; i < n; i++) {
        if (i) text_add(t, ",");
        text_number(t, numbers[i]);
    }
    text_add(t, "]");
}

void text_hex(struct text *t, uint64_t number)
{
    char digits[16];
    for (int i = 0; i < 16; i++) digits[i] = "0123456789abcdef"[number >> (60 - 4 * i) & 15];
    text_bytes(t, digits, sizeof digits);
}

void text_string(struct text *t, const char *string, size_t n)
{
    text_add(t, "\"");
    size_t plain = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)string[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        char escape[8];
        int length = snprintf(escape, sizeof escape, c < 0x20 ? "\\u%04x" : "\\%c", c);
        text_bytes(t, string + plain, i - plain);
        text_bytes(t, escape, (size_t)length);
        plain = i + 1;
    }
    text_bytes(t, string + plain, n - plain);
    text_add(t, "\"");
}

fsdp_status text_end(const struct text *t)
{
    return t->failed ? mem_none("the text of a checkpoint's header", t->used) : FSDP_OK;
}

void text_free(struct text *t)
{
    mem_free(t->at);
    *t = (struct text){0};
}

/* ---- read */

fsdp_status json_read(const char *path, const char *what, const char *text, size_t bytes, json_t **out)
{
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root && json_error_code(&error) == json_error_out_of_memory) return mem_none("reading JSON", bytes);
    if (!root)
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s is not sound JSON: %.150s (byte %d)", path, what, error.text,
                   error.position);
    if (!json_is_object(root)) {
        json_decref(root);
        return err(FSDP_ERR_CORRUPT, "'%.400s': %s is not a JSON object", path, what);
    }
    *out = root;
    return FSDP_OK;
}

int json_number_in(const json_t *value, int64_t least, int64_t most, int64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < least || json_integer_value(value) > most) return 0;
    *out = json_integer_value(value);
    return 1;
}

int hex_read(const char *digits, uint64_t *out)
{
    uint64_t number = 0;
    for (int i = 0; i < 16; i++) {
        char c = digits[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) return 0;
        number = number << 4 | (unsigned)digit;
    }
    *out = number;
    return 1;
}

int json_hex(const json_t *value, uint64_t *out)
{
    return json_is_string(value) && json_string_length(value) == 16 && hex_read(json_string_value(value), out);
}

char *json_text(const json_t *value)
{
    size_t flags = JSON_COMPACT | JSON_ENCODE_ANY;
    size_t bytes = json_dumpb(value, NULL, 0, flags);
    char *text = bytes ? mem_alloc(bytes + 1) : NULL;
    if (text && json_dumpb(value, text, bytes, flags) != bytes) {
        mem_free(text);
        return NULL;
    }
    return text;
}
