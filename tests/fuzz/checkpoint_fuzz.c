/* A whole checkpoint made by libFuzzer, opened and read. An input has four parts, split by lines of "--":
 *
 *   S, F or I   a sharded one, one file, or an index of ours; A: an index of anybody's
 *   top         the manifest, or `fsdp` in the index, without the sum and what follows it
 *   fsdp        of the file's metadata, as well without; empty: a foreign file
 *   tensors     the header's: "name":{"dtype":..}, ..; or, of A, the weight_map's entries
 *
 * Sums, the file's length and the sum of its header (@ and # in `top`) are put in here, since no fuzzer finds those.
 * The file has 64 bytes of data. */
#include "state/files.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DATA 64

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[] = "/dev/shm/fsdp-fuzz-XXXXXX";

static void clean(void)
{
    static const char *const names[] = {"f.safetensors", MANIFEST_NAME, INDEX_NAME};
    for (int i = 0; i < 3; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
}

static void clean_all(void)
{
    clean();
    rmdir(folder);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    if (!mkdtemp(folder)) abort();
    return atexit(clean_all);
}

static void write_file(const char *name, const char *text, size_t bytes)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, text, bytes) != (ssize_t)bytes) abort();
    close(fd);
}

struct slice {
    const char *at;
    size_t n;
};

static struct slice next(struct slice *rest)
{
    struct slice part = *rest;
    const char *end = rest->n ? memmem(rest->at, rest->n, "\n--\n", 4) : NULL;
    if (end) part.n = (size_t)(end - rest->at);
    size_t used = end ? part.n + 4 : part.n;
    rest->at += used;
    rest->n -= used;
    return part;
}

/* The file; its length and the sum of its header. */
static void make_file(struct slice fsdp, struct slice tensors, size_t *bytes, uint64_t *sum)
{
    struct text meta = {0}, file = {0};
    text_bytes(&file, "\0\0\0\0\0\0\0\0{", 9);
    if (fsdp.n) {
        text_bytes(&meta, fsdp.at, fsdp.n);
        manifest_end(&meta);
        text_add(&file, "\"__metadata__\":{\"fsdp\":");
        text_string(&file, meta.at, meta.used);
        text_add(&file, tensors.n ? "}," : "}");
    }
    text_bytes(&file, tensors.at, tensors.n);
    text_add(&file, "}");
    for (int i = 0; i < 8; i++) file.at[i] = (char)((file.used - 8) >> (8 * i));
    *sum = block_sum(file.at, file.used);
    for (int i = 0; i < DATA; i++) text_bytes(&file, &(char){(char)i}, 1);
    write_file("f.safetensors", file.at, file.used);
    *bytes = file.used;
    text_free(&file);
    text_free(&meta);
}

static void make_top(char kind, struct slice top, struct slice tensors, size_t bytes, uint64_t sum)
{
    struct text t = {0}, index = {0};
    for (size_t i = 0; i < top.n; i++)
        if (top.at[i] == '@')
            text_number(&t, (int64_t)bytes);
        else if (top.at[i] == '#')
            text_hex(&t, sum);
        else
            text_bytes(&t, top.at + i, 1);
    manifest_end(&t);
    if (kind == 'S') {
        write_file(MANIFEST_NAME, t.at, t.used);
    } else {
        text_add(&index, "{\"metadata\":{\"total_size\":64");
        if (kind == 'I') text_add(&index, ",\"fsdp\":");
        if (kind == 'I') text_string(&index, t.at, t.used);
        text_add(&index, "},\"weight_map\":{");
        if (kind == 'I')
            text_add(&index, "\"t\":\"f.safetensors\"");
        else
            text_bytes(&index, tensors.at, tensors.n);
        text_add(&index, "}}");
        write_file(INDEX_NAME, index.at, index.used);
    }
    text_free(&t);
    text_free(&index);
}

static void read_all(const fsdp_checkpoint *c)
{
    fsdp_checkpoint_info info;
    static _Alignas(16) char out[4 * DATA];
    checkpoint_query(c, &info);
    if (info.bytes > 2 * DATA) abort(); /* a file may be named twice */
    (void)checkpoint_verify(c, NULL, NULL);
    for (int64_t i = 0; i < info.n_entries; i++) {
        fsdp_entry entry;
        int64_t parts, found;
        if (checkpoint_entry(c, i, &entry) != FSDP_OK) abort();
        if (checkpoint_find(c, entry.name, entry.rank, &found) != FSDP_OK || found != i) abort();
        if (checkpoint_n_parts(c, i, &parts) != FSDP_OK) abort();
        enum dtype type;
        struct tensor t;
        struct box box;
        if (dtype_from_dl(entry.dtype, "entry", &type) != FSDP_OK) abort();
        box_make(&box, entry.ndim, NULL, entry.shape);
        if (box_count(&box) * (int64_t)dtype_size(type) > 2 * DATA) abort();
        tensor_make(&t, out, type, entry.ndim, entry.shape);
        (void)checkpoint_read(c, i, &box, &t);
        /* A corner of it, too. */
        for (int32_t d = 0; d < box.ndim; d++) {
            box.at[d] = box.size[d] / 3;
            box.size[d] -= box.at[d];
        }
        tensor_make(&t, out, type, box.ndim, box.size);
        (void)checkpoint_read(c, i, &box, &t);
    }
    for (int64_t i = 0; i < info.n_json; i++) {
        const char *name, *text;
        if (checkpoint_json(c, i, &name, &text) != FSDP_OK || !name || !text) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct slice rest = {(const char *)data, size}, kind = next(&rest), top = next(&rest), fsdp = next(&rest);
    size_t bytes;
    uint64_t sum;
    if (kind.n != 1 || !memchr("SFIA", kind.at[0], 4)) return -1;
    clean();
    if (kind.at[0] == 'A') {
        static const char plain[] = "\"t\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64]}";
        make_file(fsdp, (struct slice){plain, sizeof plain - 1}, &bytes, &sum);
    } else {
        make_file(fsdp, rest, &bytes, &sum);
    }
    if (kind.at[0] != 'F') make_top(kind.at[0], top, rest, bytes, sum);
    fsdp_checkpoint *c;
    if (checkpoint_open(folder, &c) != FSDP_OK) return 0;
    read_all(c);
    checkpoint_release(c);
    return 0;
}
