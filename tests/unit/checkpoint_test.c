/* Checkpoints in one process: reading any part of a tensor, foreign files, and files that are damaged in every way that
 * comes to mind. Whatever was damaged, the error names the file and, where there is one, the tensor; values that a read
 * hands out are those that were saved.
 *
 * Values are float32 or int16 numbers made from the place of their element. */
#include <criterion/criterion.h>
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fsdp.h"

static char folder[64], path[128];

static void begin(void)
{
    strcpy(folder, "/tmp/fsdp-unit-checkpoint-XXXXXX");
    cr_assert(mkdtemp(folder), "%s", strerror(errno));
    snprintf(path, sizeof path, "%s/c", folder);
}

static int remove_one(const char *name, const struct stat *st, int type, struct FTW *walk)
{
    return remove(name);
}

static void end(void)
{
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

TestSuite(checkpoint, .init = begin, .fini = end, .timeout = 240);

#define OK(call) cr_assert_eq(call, FSDP_OK, "%s: %s", #call, fsdp_last_error())
#define REFUSED(call, status, word)                                                                                    \
    do {                                                                                                               \
        fsdp_status got_ = (call);                                                                                     \
        cr_expect_eq(got_, status, "%s: %s: %s", #call, fsdp_status_name(got_), fsdp_last_error());                    \
        cr_expect(strstr(fsdp_last_error(), word), "no '%s' in '%s'", word, fsdp_last_error());                        \
    } while (0)

/* ---- a dict */

#define ROWS 700
#define COLUMNS 1000 /* 2.8 MB: three blocks */
#define F32 ((DLDataType){kDLFloat, 32, 1})
#define F64 ((DLDataType){kDLFloat, 64, 1})
#define F16 ((DLDataType){kDLFloat, 16, 1})
#define I16 ((DLDataType){kDLInt, 16, 1})

static float big[ROWS * COLUMNS];
static int16_t small[5] = {3, -1, 4, -15, 9};
static float scalar = 2.5f;
static double vector[6] = {1.5, -2.5, 3.25, 1e300, -0.0, 7};

static void keep(DLManagedTensorVersioned *self)
{
    free(self->dl_tensor.shape);
    free(self);
}

static DLManagedTensorVersioned *managed(void *data, DLDataType dtype, int ndim, int64_t a, int64_t b)
{
    DLManagedTensorVersioned *t = calloc(1, sizeof *t);
    int64_t *shape = malloc(2 * sizeof *shape);
    shape[0] = a;
    shape[1] = b;
    t->version.major = DLPACK_MAJOR_VERSION;
    t->deleter = keep;
    t->dl_tensor = (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = ndim, .dtype = dtype, .shape = shape};
    return t;
}

static void add(fsdp_state_dict *dict, const char *name, void *data, DLDataType dtype, int ndim, int64_t a, int64_t b)
{
    int64_t shape[] = {a, b};
    fsdp_entry entry = {.struct_size = sizeof entry, .name = name, .ndim = ndim, .shape = shape};
    OK(fsdp_state_dict_add(dict, &entry, managed(data, dtype, ndim, a, b)));
}

static float big_value(int64_t i)
{
    return (float)(i % 16777213) * (i % 2 ? -1 : 1);
}

static fsdp_state_dict *dict_make(void)
{
    fsdp_state_dict *dict;
    for (int64_t i = 0; i < ROWS * COLUMNS; i++) big[i] = big_value(i);
    OK(fsdp_state_dict_create(&dict));
    add(dict, "big", big, F32, 2, ROWS, COLUMNS);
    add(dict, "small", small, I16, 1, 5, 0);
    fsdp_entry tied = {.struct_size = sizeof tied, .name = "again", .tied_to = "small"};
    OK(fsdp_state_dict_add(dict, &tied, NULL));
    add(dict, "scalar", &scalar, F32, 0, 0, 0);
    add(dict, "vector", vector, F64, 1, 6, 0);
    add(dict, "none", NULL, F32, 2, 0, 3);
    OK(fsdp_state_dict_set_json(dict, "j", "{\"a\":[1,null,\"\\u00e9\\n\"]}"));
    return dict;
}

static void save_as(fsdp_checkpoint_format format, const char *where, int64_t most)
{
    fsdp_state_dict *dict = dict_make();
    fsdp_save_options options = {.struct_size = sizeof options, .format = format, .no_sync = 1, .max_file_bytes = most};
    OK(fsdp_checkpoint_save(NULL, dict, where, &options, NULL));
    fsdp_state_dict_release(dict);
}

/* ---- files */

static void only_file(const char *in, const char *ends, char out[512])
{
    DIR *list = opendir(in);
    out[0] = 0;
    for (struct dirent *e; list && (e = readdir(list));)
        if (strlen(e->d_name) > strlen(ends) && strcmp(e->d_name + strlen(e->d_name) - strlen(ends), ends) == 0)
            snprintf(out, 512, "%s/%s", in, e->d_name);
    closedir(list);
    cr_assert(out[0], "no *%s in %s", ends, in);
}

static char *read_all(const char *name, size_t *bytes)
{
    FILE *f = fopen(name, "rb");
    cr_assert(f, "%s", name);
    fseek(f, 0, SEEK_END);
    *bytes = (size_t)ftell(f);
    rewind(f);
    char *text = malloc(*bytes + 1);
    cr_assert_eq(fread(text, 1, *bytes, f), *bytes);
    text[*bytes] = 0;
    fclose(f);
    return text;
}

static void write_all(const char *name, const void *text, size_t bytes)
{
    FILE *f = fopen(name, "wb");
    cr_assert(f && fwrite(text, 1, bytes, f) == bytes);
    fclose(f);
}

/* A safetensors file of this header and so many bytes of data that count up. */
static void write_foreign(const char *name, const char *header, size_t data)
{
    size_t n = strlen(header);
    char *text = calloc(1, 8 + n + data);
    for (int i = 0; i < 8; i++) text[i] = (char)(n >> (8 * i));
    memcpy(text + 8, header, n);
    for (size_t i = 0; i < data; i++) text[8 + n + i] = (char)i;
    write_all(name, text, 8 + n + data);
    free(text);
}

static DLTensor view(void *data, DLDataType dtype, int ndim, int64_t *shape, int64_t *strides)
{
    return (DLTensor){
        .data = data, .device = {kDLCPU, 0}, .ndim = ndim, .dtype = dtype, .shape = shape, .strides = strides};
}

/* ---- reading */

static void read_boxes(const char *where)
{
    fsdp_checkpoint *c;
    int64_t index;
    OK(fsdp_checkpoint_open(where, &c));
    OK(fsdp_checkpoint_find(c, "big", -1, &index));
    /* Corners, rows, columns, one element; across blocks (262144 elements) and not. */
    static const int64_t boxes[][4] = {{0, 0, ROWS, COLUMNS}, {0, 0, 1, 1},           {ROWS - 1, COLUMNS - 1, 1, 1},
                                       {262, 140, 1, 9},      {100, 0, 400, COLUMNS}, {0, 333, ROWS, 1},
                                       {17, 5, 650, 990},     {262, 143, 1, 2},       {5, 7, 0, 3},
                                       {300, 999, 400, 1},    {262, 0, 262, COLUMNS}};
    static float out[ROWS * COLUMNS * 2 + 1];
    for (size_t b = 0; b < sizeof boxes / sizeof *boxes; b++)
        for (int way = 0; way < 3; way++) { /* in rows, in columns, with gaps */
            int64_t shape[] = {boxes[b][2], boxes[b][3]};
            int64_t strides[] = {way == 1   ? 1
                                 : way == 0 ? shape[1]
                                            : 2 * shape[1],
                                 way == 1   ? shape[0]
                                 : way == 0 ? 1
                                            : 2};
            int64_t count = shape[0] * shape[1];
            for (int64_t i = 0; i < 2 * count + 1; i++) out[i] = -0.5f;
            DLTensor t = view(out, F32, 2, shape, strides);
            OK(fsdp_checkpoint_read(c, index, boxes[b], &t));
            int64_t wrong = 0, written = 0;
            for (int64_t y = 0; y < shape[0]; y++)
                for (int64_t x = 0; x < shape[1]; x++)
                    wrong += out[y * strides[0] + x * strides[1]] !=
                             big_value((boxes[b][0] + y) * COLUMNS + boxes[b][1] + x);
            for (int64_t i = 0; i < 2 * count + 1; i++) written += out[i] != -0.5f;
            cr_expect_eq(wrong, 0, "box %zu, way %d", b, way);
            cr_expect_eq(written, count, "box %zu, way %d: other elements were written", b, way);
        }
    /* Floats are cast. */
    int64_t shape[] = {3}, from[] = {1};
    double wide[3];
    DLTensor t = view(wide, F64, 1, shape, NULL);
    float narrow[3];
    DLTensor n = view(narrow, F32, 1, shape, NULL);
    OK(fsdp_checkpoint_find(c, "vector", -1, &index));
    OK(fsdp_checkpoint_read(c, index, from, &t));
    cr_expect(wide[0] == -2.5 && wide[1] == 3.25 && wide[2] == 1e300);
    OK(fsdp_checkpoint_read(c, index, from, &n));
    cr_expect(narrow[0] == -2.5f && narrow[1] == 3.25f && isinf(narrow[2]));
    uint16_t half[2];
    int64_t two[] = {2};
    DLTensor h = view(half, F16, 1, two, NULL);
    OK(fsdp_checkpoint_read(c, index, NULL, &h));
    cr_expect(half[0] == 0x3e00 && half[1] == 0xc100, "%x %x", half[0], half[1]);
    /* What does not fit is refused. */
    int64_t off[] = {4};
    REFUSED(fsdp_checkpoint_read(c, index, off, &t), FSDP_ERR_INVALID, "'vector'");
    off[0] = -1;
    REFUSED(fsdp_checkpoint_read(c, index, off, &t), FSDP_ERR_INVALID, "'vector'");
    off[0] = INT64_MAX;
    REFUSED(fsdp_checkpoint_read(c, index, off, &t), FSDP_ERR_INVALID, "'vector'");
    OK(fsdp_checkpoint_find(c, "again", -1, &index));
    REFUSED(fsdp_checkpoint_read(c, index, NULL, &t), FSDP_ERR_INVALID, "only floats are cast");
    int16_t numbers[5];
    int64_t five[] = {5};
    DLTensor s = view(numbers, I16, 1, five, NULL);
    OK(fsdp_checkpoint_read(c, index, NULL, &s));
    cr_expect_arr_eq(numbers, small, sizeof small);
    REFUSED(fsdp_checkpoint_read(c, 99, NULL, &s), FSDP_ERR_INVALID, "99");
    REFUSED(fsdp_checkpoint_read(c, -1, NULL, &s), FSDP_ERR_INVALID, "-1");
    REFUSED(fsdp_checkpoint_find(c, "bigger", -1, &index), FSDP_ERR_NOT_FOUND, "bigger");
    REFUSED(fsdp_checkpoint_find(c, "big", 0, &index), FSDP_ERR_NOT_FOUND, "of rank 0");
    fsdp_checkpoint_release(c);
}

Test(checkpoint, any_box_of_a_tensor_can_be_read)
{
    char one[192];
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    read_boxes(path);
    snprintf(one, sizeof one, "%s/one.safetensors", folder);
    save_as(FSDP_CHECKPOINT_FULL, one, 0);
    read_boxes(one);
    snprintf(one, sizeof one, "%s/several", folder);
    save_as(FSDP_CHECKPOINT_FULL, one, 100);
    read_boxes(one);
}

static int32_t count_calls(int64_t done, int64_t total, void *user)
{
    int64_t *calls = user;
    cr_expect(done > calls[1] && done <= total);
    calls[1] = done;
    calls[2] = total;
    return ++calls[0] == calls[3];
}

Test(checkpoint, verifying_tells_how_far_it_is_and_can_be_ended)
{
    fsdp_checkpoint *c;
    int64_t calls[4] = {0, 0, 0, -1};
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    OK(fsdp_checkpoint_open(path, &c));
    OK(fsdp_checkpoint_verify(c, count_calls, calls));
    cr_expect(calls[0] >= 6 && calls[1] == calls[2] && calls[2] == (int64_t)(sizeof big + 10 + 4 + 48));
    int64_t ended[4] = {0, 0, 0, 2};
    REFUSED(fsdp_checkpoint_verify(c, count_calls, ended), FSDP_ERR_CALLBACK, "on_progress");
    cr_expect_eq(ended[0], 2);
    fsdp_checkpoint_release(c);
}

Test(checkpoint, an_open_one_stays_readable_when_another_takes_its_place)
{
    fsdp_checkpoint *c;
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    OK(fsdp_checkpoint_open(path, &c));
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    OK(fsdp_checkpoint_verify(c, NULL, NULL));
    fsdp_checkpoint_release(c);
}

Test(checkpoint, parts_and_json_are_told)
{
    fsdp_checkpoint *c;
    fsdp_checkpoint_info info = {.struct_size = sizeof info};
    fsdp_checkpoint_part part = {.struct_size = sizeof part};
    int64_t n;
    const char *name, *text;
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    OK(fsdp_checkpoint_open(path, &c));
    OK(fsdp_checkpoint_query(c, &info));
    cr_expect(info.n_entries == 6 && info.n_files == 1 && info.n_json == 1 && info.ranks == 1 && info.checksums == 1);
    cr_expect_eq(strlen(info.save_id), 16);
    OK(fsdp_checkpoint_n_parts(c, 0, &n));
    cr_expect_eq(n, 1);
    OK(fsdp_checkpoint_part_of(c, 0, 0, &part));
    cr_expect(part.ndim == 2 && part.length[0] == ROWS && part.offset[0] == 0 && part.bytes == (int64_t)sizeof big);
    cr_expect(strstr(part.file, info.save_id) != NULL, "%s", part.file);
    REFUSED(fsdp_checkpoint_part_of(c, 0, 1, &part), FSDP_ERR_INVALID, "'big' has 1");
    OK(fsdp_checkpoint_json(c, 0, &name, &text));
    cr_expect_str_eq(name, "j");
    cr_expect_str_eq(text, "{\"a\":[1,null,\"\xc3\xa9\\n\"]}");
    REFUSED(fsdp_checkpoint_json(c, 1, &name, &text), FSDP_ERR_INVALID, "index is 1");
    fsdp_checkpoint_release(c);
}

/* ---- what is not there, or not ours */

Test(checkpoint, where_there_is_none_it_says_what_was_looked_for)
{
    fsdp_checkpoint *c;
    char name[256];
    REFUSED(fsdp_checkpoint_open(path, &c), FSDP_ERR_NOT_FOUND, path);
    REFUSED(fsdp_checkpoint_open(folder, &c), FSDP_ERR_NOT_FOUND, "manifest.json");
    REFUSED(fsdp_checkpoint_open("", &c), FSDP_ERR_INVALID, "path");
    REFUSED(fsdp_checkpoint_open("/dev/null", &c), FSDP_ERR_SYSTEM, "neither a file nor a folder");
    mkdir(path, 0777);
    snprintf(name, sizeof name, "%s/manifest.json", path);
    mkdir(name, 0777);
    REFUSED(fsdp_checkpoint_open(path, &c), FSDP_ERR_SYSTEM, "not a regular file");
    rmdir(name);
    mkfifo(name, 0666); /* nobody writes: opening it must not wait */
    REFUSED(fsdp_checkpoint_open(path, &c), FSDP_ERR_SYSTEM, "not a regular file");
}

Test(checkpoint, paths_are_taken_alike_by_all_and_what_is_wrong_with_one_is_said)
{
    fsdp_checkpoint *c;
    fsdp_save_options options = {.struct_size = sizeof options, .no_sync = 1};
    char name[256], target[256], long_path[4000];
    fsdp_state_dict *dict = dict_make();
    for (int full = 0; full < 2; full++) { /* a slash, or several, at the end */
        snprintf(name, sizeof name, "%s/%s//", folder, full ? "x.safetensors" : "sharded");
        options.format = full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED;
        OK(fsdp_checkpoint_save(NULL, dict, name, &options, NULL));
        OK(fsdp_checkpoint_open(name, &c));
        fsdp_checkpoint_release(c);
        name[strlen(name) - 2] = 0;
        OK(fsdp_checkpoint_open(name, &c));
        fsdp_checkpoint_release(c);
    }
    options.format = FSDP_CHECKPOINT_SHARDED;
    snprintf(name, sizeof name, "%s/link", folder);
    snprintf(target, sizeof target, "%s/target", folder);
    cr_assert_eq(symlink(target, name), 0);
    REFUSED(fsdp_checkpoint_save(NULL, dict, name, &options, NULL), FSDP_ERR_SYSTEM, "/link' is a symbolic link to");
    mkdir(target, 0777); /* then it is a folder like any other */
    OK(fsdp_checkpoint_save(NULL, dict, name, &options, NULL));
    OK(fsdp_checkpoint_open(target, &c));
    fsdp_checkpoint_release(c);
    memset(long_path, 'a', sizeof long_path);
    long_path[0] = '/';
    for (int length = 3072; length <= 3073; length++) { /* the name is then the kernel's to refuse */
        fsdp_status status = length > 3072 ? FSDP_ERR_INVALID : FSDP_ERR_SYSTEM;
        long_path[length] = 0;
        for (options.background = 0; options.background < 2; options.background++) {
            fsdp_save *saving = NULL;
            fsdp_status got = fsdp_checkpoint_save(NULL, dict, long_path, &options, &saving);
            if (got == FSDP_OK) got = fsdp_save_wait(saving, -1);
            cr_expect_eq(got, status, "%s", fsdp_last_error());
            fsdp_save_release(saving);
        }
        REFUSED(fsdp_checkpoint_open(long_path, &c), status, length > 3072 ? "3073 bytes" : "File name too long");
        long_path[length] = 'a';
    }
    /* Relative to a folder that leaves no room for it. */
    char here[4096];
    cr_assert(getcwd(here, sizeof here) && chdir(folder) == 0);
    options.background = 1;
    fsdp_save *saving = NULL;
    long_path[0] = 'a';
    long_path[3072] = 0;
    REFUSED(fsdp_checkpoint_save(NULL, dict, long_path, &options, &saving), FSDP_ERR_INVALID, "relative");
    cr_assert_eq(chdir(here), 0);
    fsdp_state_dict_release(dict);
}

#define TWO                                                                                                            \
    "{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]},"                                                  \
    "\"a\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[0,4]}}"

Test(checkpoint, foreign_files_are_full_checkpoints_without_checksums)
{
    char name[256];
    fsdp_checkpoint *c;
    fsdp_checkpoint_info info = {.struct_size = sizeof info};
    fsdp_entry entry = {.struct_size = sizeof entry};
    mkdir(path, 0777);
    static const char *const names[] = {"any.safetensors", "model.safetensors"};
    for (int i = 0; i < 2; i++) { /* the second one is taken where both are */
        snprintf(name, sizeof name, "%s/%s", path, names[i]);
        write_foreign(name, i ? "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}" : TWO, i ? 1 : 6);
        for (int whole = 0; whole < 2; whole++) {
            OK(fsdp_checkpoint_open(whole ? path : name, &c));
            OK(fsdp_checkpoint_query(c, &info));
            cr_expect(info.format == FSDP_CHECKPOINT_FULL && !info.checksums && !info.ranks && !info.save_id[0]);
            cr_expect_eq(info.n_entries, i ? 1 : 2);
            OK(fsdp_checkpoint_entry(c, 0, &entry));
            cr_expect_str_eq(entry.name, i ? "x" : "a");
            OK(fsdp_checkpoint_verify(c, NULL, NULL));
            fsdp_checkpoint_release(c);
        }
    }
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    unlink(name);
    snprintf(name, sizeof name, "%s/second.safetensors", path);
    write_foreign(name, TWO, 6);
    REFUSED(fsdp_checkpoint_open(path, &c), FSDP_ERR_NOT_FOUND, "more than one");
}

static void index_is(const char *text, fsdp_status status, const char *word)
{
    char name[256];
    fsdp_checkpoint *c;
    snprintf(name, sizeof name, "%s/model.safetensors.index.json", path);
    write_all(name, text, strlen(text));
    REFUSED(fsdp_checkpoint_open(path, &c), status, word);
}

Test(checkpoint, an_index_of_hugging_face_names_its_files)
{
    char name[256];
    fsdp_checkpoint *c;
    int64_t at;
    mkdir(path, 0777);
    snprintf(name, sizeof name, "%s/part-1.safetensors", path);
    write_foreign(name, TWO, 6);
    snprintf(name, sizeof name, "%s/part-2.safetensors", path);
    write_foreign(name, "{\"c\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3);
    snprintf(name, sizeof name, "%s/model.safetensors.index.json", path);
    const char *good = "{\"metadata\":{\"total_size\":9},\"weight_map\":{\"c\":\"part-2.safetensors\","
                       "\"a\":\"part-1.safetensors\",\"b\":\"part-1.safetensors\"}}";
    write_all(name, good, strlen(good));
    OK(fsdp_checkpoint_open(path, &c));
    OK(fsdp_checkpoint_find(c, "c", -1, &at));
    cr_expect_eq(at, 2);
    uint8_t bytes[3];
    int64_t shape[] = {3};
    DLTensor t = view(bytes, (DLDataType){kDLUInt, 8, 1}, 1, shape, NULL);
    OK(fsdp_checkpoint_read(c, at, NULL, &t));
    cr_expect(bytes[0] == 0 && bytes[2] == 2);
    fsdp_checkpoint_release(c);

    index_is("{\"weight_map\":{\"a\":\"../c/part-1.safetensors\"}}", FSDP_ERR_CORRUPT, "'a' is not in a file of this");
    index_is("{\"weight_map\":{\"a\":\"/etc/passwd\"}}", FSDP_ERR_CORRUPT, "'a' is not in a file of this");
    index_is("{\"weight_map\":{\"a\":\"..\"}}", FSDP_ERR_CORRUPT, "'a' is not in a file of this");
    index_is("{\"weight_map\":{\"a\":\"\"}}", FSDP_ERR_CORRUPT, "'a' is not in a file of this");
    index_is("{\"weight_map\":{\"a\":7}}", FSDP_ERR_CORRUPT, "'a' is not in a file of this");
    index_is("{\"weight_map\":{\"a\":\"part-3.safetensors\"}}", FSDP_ERR_CORRUPT, "part-3.safetensors");
    index_is("{\"weight_map\":{\"a\":\"part-2.safetensors\"}}", FSDP_ERR_CORRUPT, "lacks tensor 'a'");
    index_is("{\"weight_map\":[]}", FSDP_ERR_CORRUPT, "no weight_map");
    index_is("{\"metadata\":{\"fsdp\":1},\"weight_map\":{}}", FSDP_ERR_CORRUPT, "metadata.fsdp");
    index_is("{", FSDP_ERR_CORRUPT, "index.json");
}

/* ---- damage */

/* Whatever a damaged checkpoint gives is what was saved, or it is CORRUPT (UNSUPPORTED, where the damage made another
 * version or dtype of it). *name: that the error must have, or NULL. */
static int damaged(const char *where, const char *name)
{
    fsdp_checkpoint *c = NULL;
    static float out[ROWS * COLUMNS];
    fsdp_status status = fsdp_checkpoint_open(where, &c);
    if (status == FSDP_OK) {
        status = fsdp_checkpoint_verify(c, NULL, NULL);
        int64_t index, shape[] = {ROWS, COLUMNS};
        DLTensor t = view(out, F32, 2, shape, NULL);
        memset(out, 0, sizeof out);
        fsdp_status read = fsdp_checkpoint_find(c, "big", -1, &index);
        if (read == FSDP_OK) read = fsdp_checkpoint_read(c, index, NULL, &t);
        if (read == FSDP_OK) cr_expect_arr_eq(out, big, sizeof big, "damage was read");
        if (status == FSDP_OK) status = read;
    }
    fsdp_checkpoint_release(c);
    cr_expect(status == FSDP_OK || status == FSDP_ERR_CORRUPT || status == FSDP_ERR_UNSUPPORTED, "%s: %s",
              fsdp_status_name(status), fsdp_last_error());
    if (status != FSDP_OK && name)
        cr_expect(strstr(fsdp_last_error(), name), "no '%s' in '%s'", name, fsdp_last_error());
    return status != FSDP_OK;
}

/* Flip bits of a file, one at a time: `every`-th byte of the first `dense` and some of the rest. Returns how many went
 * unseen. */
static int flips(const char *where, const char *file, size_t dense, int every)
{
    size_t bytes;
    char *text = read_all(file, &bytes);
    int unseen = 0;
    int fd = open(file, O_WRONLY);
    for (size_t i = 0; i < bytes; i += i < dense ? (size_t)every : 99991) {
        char flipped = (char)(text[i] ^ (1 << (i * 5 % 8)));
        cr_assert_eq(pwrite(fd, &flipped, 1, (off_t)i), 1);
        unseen += !damaged(where, file);
        cr_assert_eq(pwrite(fd, text + i, 1, (off_t)i), 1);
    }
    close(fd);
    free(text);
    cr_expect(!damaged(where, NULL), "%s", fsdp_last_error());
    return unseen;
}

static size_t header_bytes(const char *file)
{
    size_t bytes;
    char *text = read_all(file, &bytes);
    uint64_t n;
    memcpy(&n, text, 8);
    free(text);
    return (size_t)n + 8;
}

Test(checkpoint, every_flipped_bit_of_a_sharded_one_is_found)
{
    char file[512];
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    only_file(path, ".safetensors", file);
    cr_expect_eq(flips(path, file, header_bytes(file), 3), 0);
    snprintf(file, sizeof file, "%s/manifest.json", path);
    cr_expect_eq(flips(path, file, 100000, 1), 0);
}

Test(checkpoint, every_flipped_bit_of_a_full_one_that_matters_is_found)
{
    char file[512];
    snprintf(file, sizeof file, "%s/one.safetensors", folder);
    save_as(FSDP_CHECKPOINT_FULL, file, 0);
    /* Not: those of "format":"pt", and of the key "fsdp", without which it is a foreign file. damaged() sees that
     * values are right all the same. */
    int unseen = flips(file, file, header_bytes(file), 1);
    cr_expect(unseen <= (int)strlen("\"format\":\"pt\"fsdp"), "%d", unseen);
    save_as(FSDP_CHECKPOINT_FULL, path, 100);
    snprintf(file, sizeof file, "%s/model.safetensors.index.json", path);
    unseen = flips(path, file, 100000, 1);
    cr_expect(unseen <= (int)strlen("metadata total_size 2800000 fsdp"), "%d", unseen);
}

Test(checkpoint, a_file_cut_short_or_made_longer_is_found)
{
    char file[512];
    size_t bytes;
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    only_file(path, ".safetensors", file);
    char *text = read_all(file, &bytes);
    const size_t cuts[] = {0, 7, 8, 9, 100, header_bytes(file), bytes / 2, bytes - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        write_all(file, text, cuts[i]);
        cr_expect(damaged(path, file), "cut to %zu of %zu", cuts[i], bytes);
    }
    text[bytes] = 0;
    write_all(file, text, bytes + 1);
    cr_expect(damaged(path, file));
    unlink(file);
    cr_expect(damaged(path, strrchr(file, '/') + 1), "a missing file");
    write_all(file, text, bytes);
    cr_expect(!damaged(path, NULL));
    free(text);
}

Test(checkpoint, a_file_that_is_cut_short_after_opening_is_an_error_and_no_signal)
{
    char file[512];
    fsdp_checkpoint *c;
    static float out[ROWS * COLUMNS];
    int64_t shape[] = {ROWS, COLUMNS};
    DLTensor t = view(out, F32, 2, shape, NULL);
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    only_file(path, ".safetensors", file);
    OK(fsdp_checkpoint_open(path, &c));
    cr_assert_eq(truncate(file, 5000), 0);
    REFUSED(fsdp_checkpoint_read(c, 0, NULL, &t), FSDP_ERR_CORRUPT, "'big'");
    REFUSED(fsdp_checkpoint_read(c, 0, NULL, &t), FSDP_ERR_CORRUPT, file);
    REFUSED(fsdp_checkpoint_verify(c, NULL, NULL), FSDP_ERR_CORRUPT, "cut short");
    fsdp_checkpoint_release(c);
}

Test(checkpoint, damaged_values_are_named_and_the_rest_can_be_read)
{
    char file[512];
    size_t bytes;
    fsdp_checkpoint *c;
    static float out[ROWS * COLUMNS];
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    only_file(path, ".safetensors", file);
    char *text = read_all(file, &bytes);
    float wanted = big_value(300 * COLUMNS + 5); /* in the second block */
    char *at = memmem(text + header_bytes(file), bytes - header_bytes(file), &wanted, sizeof wanted);
    cr_assert(at);
    at[1] ^= 4;
    write_all(file, text, bytes);
    free(text);
    OK(fsdp_checkpoint_open(path, &c));
    REFUSED(fsdp_checkpoint_verify(c, NULL, NULL), FSDP_ERR_CORRUPT, "tensor 'big' is damaged");
    int64_t shape[] = {262, COLUMNS}, rest[] = {100, COLUMNS}, from[] = {600, 0}, one[] = {1, 1}, mid[] = {290, 3};
    DLTensor t = view(out, F32, 2, shape, NULL);
    OK(fsdp_checkpoint_read(c, 0, NULL, &t));
    t.shape = rest;
    OK(fsdp_checkpoint_read(c, 0, from, &t));
    t.shape = one;
    REFUSED(fsdp_checkpoint_read(c, 0, mid, &t), FSDP_ERR_CORRUPT, file);
    fsdp_checkpoint_release(c);
}

/* Texts with the sums that belong to them: what a hostile writer can make. */
#include "state/files.h"

static void manifest_is(const char *body, fsdp_status status, const char *word)
{
    char name[256], *text;
    fsdp_checkpoint *c;
    snprintf(name, sizeof name, "%s/manifest.json", path);
    cr_assert(asprintf(&text, "%s,\"sum\":\"%016llx\"}", body, (unsigned long long)block_sum(body, strlen(body))) > 0);
    write_all(name, text, strlen(text));
    free(text);
    REFUSED(fsdp_checkpoint_open(path, &c), status, word);
    cr_expect(strstr(fsdp_last_error(), path), "%s", fsdp_last_error());
}

Test(checkpoint, a_manifest_of_nonsense_is_refused)
{
    char file[512], body[1024];
    save_as(FSDP_CHECKPOINT_SHARDED, path, 0);
    only_file(path, ".safetensors", file);
    const char *base = strrchr(file, '/') + 1;
#define HEAD "{\"libfsdp\":\"checkpoint\",\"version\":1,\"save\":\"0123456789abcdef\",\"ranks\":1"
    manifest_is("{\"libfsdp\":\"checkpoint\",\"version\":2,\"save\":7", FSDP_ERR_UNSUPPORTED, "version 2");
    manifest_is("{\"libfsdp\":\"checkpoint\",\"version\":\"1\"", FSDP_ERR_CORRUPT, "no version");
    manifest_is("{\"libfsdp\":\"something\",\"version\":1,\"save\":\"0123456789abcdef\",\"ranks\":1", FSDP_ERR_CORRUPT,
                "not the manifest");
    manifest_is("{\"libfsdp\":\"checkpoint\",\"version\":1,\"save\":\"0123456789ABCDEF\",\"ranks\":1", FSDP_ERR_CORRUPT,
                "save");
    manifest_is("{\"libfsdp\":\"checkpoint\",\"version\":1,\"save\":\"0123456789abcdef\",\"ranks\":0", FSDP_ERR_CORRUPT,
                "ranks");
    manifest_is(HEAD ",\"files\":7", FSDP_ERR_CORRUPT, "files");
    manifest_is(HEAD ",\"files\":[]", FSDP_ERR_CORRUPT, "0 files of 1 ranks");
    manifest_is(HEAD ",\"files\":[{}]", FSDP_ERR_CORRUPT, "file 0");
    manifest_is(HEAD ",\"files\":[{\"name\":\"../x.safetensors\"}]", FSDP_ERR_CORRUPT, "file 0");
    manifest_is(HEAD ",\"files\":[{\"name\":\"/etc/passwd\"}]", FSDP_ERR_CORRUPT, "file 0");
    manifest_is(HEAD ",\"files\":[{\"name\":\"x.safetensors\",\"bytes\":-1,\"header\":\"0123456789abcdef\"}]",
                FSDP_ERR_CORRUPT, "x.safetensors");
    manifest_is(HEAD ",\"files\":[{\"name\":\"x.safetensors\",\"bytes\":1,\"header\":\"0123456789abcdef\"}]",
                FSDP_ERR_CORRUPT, "x.safetensors");
    manifest_is(HEAD ",\"files\":[{\"name\":\".\",\"bytes\":1,\"header\":\"0123456789abcdef\"}]", FSDP_ERR_CORRUPT,
                "file 0");
    snprintf(body, sizeof body, HEAD ",\"files\":[{\"name\":\"%s\",\"bytes\":1,\"header\":\"0123456789abcdef\"}]",
             base);
    manifest_is(body, FSDP_ERR_CORRUPT, base);
    struct stat st;
    stat(file, &st);
    snprintf(body, sizeof body, HEAD ",\"files\":[{\"name\":\"%s\",\"bytes\":%lld,\"header\":\"0123456789abcdef\"}]",
             base, (long long)st.st_size);
    manifest_is(body, FSDP_ERR_CORRUPT, "header is not what was written");
    size_t bytes;
    char *text = read_all(file, &bytes);
    snprintf(body, sizeof body, HEAD ",\"files\":[{\"name\":\"%s\",\"bytes\":%lld,\"header\":\"%016llx\"}]", base,
             (long long)bytes, (unsigned long long)block_sum(text, header_bytes(file)));
    manifest_is(body, FSDP_ERR_CORRUPT, "another save");
    free(text);
}

/* A file of one rank with one tensor, of this metadata, and the manifest to it. */
static void rank_file_is(const char *meta, const char *tensor, fsdp_status status, const char *word)
{
    char name[256], body[4096], head[8192], manifest[1024];
    size_t bytes;
    fsdp_checkpoint *c;
    snprintf(body, sizeof body,
             "{\"version\":1,\"save\":\"0123456789abcdef\",\"rank\":0,\"ranks\":1,\"checksum\":\"xxh3-64\",\"block\":"
             "1048576,"
             "\"tensors\":{%s}",
             meta);
    struct text t = {0};
    text_add(&t, body);
    manifest_end(&t);
    struct text escaped = {0};
    text_string(&escaped, t.at, t.used);
    snprintf(head, sizeof head, "{\"__metadata__\":{\"fsdp\":%s},%s}", escaped.at, tensor);
    text_free(&t);
    text_free(&escaped);
    snprintf(name, sizeof name, "%s/rank-00000-of-00001.0123456789abcdef.safetensors", path);
    write_foreign(name, head, 8);
    char *all = read_all(name, &bytes);
    snprintf(manifest, sizeof manifest, HEAD ",\"files\":[{\"name\":\"%s\",\"bytes\":%zu,\"header\":\"%016llx\"}]",
             strrchr(name, '/') + 1, bytes, (unsigned long long)block_sum(all, bytes - 8));
    free(all);
    if (status != FSDP_OK) {
        text_add(&t, manifest);
        manifest_end(&t);
        snprintf(name, sizeof name, "%s/manifest.json", path);
        write_all(name, t.at, t.used);
        text_free(&t);
        REFUSED(fsdp_checkpoint_open(path, &c), status, word);
        cr_expect(strstr(fsdp_last_error(), "'t'") || strstr(word, "tensor 0"), "no tensor in '%s'", fsdp_last_error());
    }
}

Test(checkpoint, metadata_of_nonsense_is_refused)
{
    mkdir(path, 0777);
#define U8 "\"t\":{\"dtype\":\"U8\",\"shape\":[2,4],\"data_offsets\":[0,8]}"
#define M(index, dtype, shape, offset, sums)                                                                           \
    "\"t\":{\"index\":" index ",\"dtype\":\"" dtype "\",\"shape\":" shape ",\"offset\":" offset ",\"sums\":\"" sums    \
    "\"}"
#define SUM "0123456789abcdef"
    rank_file_is(M("0", "I8", "[2,4]", "[0,0]", SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4]", "[0,1]", SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4]", "[0]", SUM), U8, FSDP_ERR_CORRUPT, "no sense");
    rank_file_is(M("0", "U8", "[2,4]", "[-1,0]", SUM), U8, FSDP_ERR_CORRUPT, "no sense");
    rank_file_is(M("0", "U8", "[2,4]", "[9223372036854775807,0]", SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4,1]", "[0,0,0]", SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[3,4]", "[1,0]", SUM), U8, FSDP_ERR_CORRUPT, "not whole");
    rank_file_is(M("0", "U8", "[9223372036854775807,4]", "[1,0]", SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4]", "[0,0]", SUM SUM), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4]", "[0,0]", ""), U8, FSDP_ERR_CORRUPT, "don't fit together");
    rank_file_is(M("0", "U8", "[2,4]", "[0,0]", "0123456789abcde"), U8, FSDP_ERR_CORRUPT, "no sense");
    rank_file_is(M("0", "U8", "[2,4]", "[0,0]", "0123456789abcdeX"), U8, FSDP_ERR_CORRUPT, "not a number");
    rank_file_is(M("-1", "U8", "[2,4]", "[0,0]", SUM), U8, FSDP_ERR_CORRUPT, "no sense");
    rank_file_is(M("1", "U8", "[2,4]", "[0,0]", SUM), U8, FSDP_ERR_CORRUPT, "tensor 0");
}

/* A checkpoint of two ranks with 4 bytes each: what each file says, and the manifest. */
struct two {
    int ranks[2];         /* that they say they are of */
    const char *names[2]; /* of the tensor in each: rows 0 and 1 of a (2, 4) one */
    const char *more;     /* of the manifest */
    int index;            /* of the tensor */
    int longer;           /* bytes that the manifest claims above the truth of file 1 */
};

static fsdp_status two_open(struct two two)
{
    char manifest[2048], name[512];
    size_t used = (size_t)snprintf(
        manifest, sizeof manifest,
        "{\"libfsdp\":\"checkpoint\",\"version\":1,\"save\":\"0123456789abcdef\",\"ranks\":2,\"files\":[");
    for (int r = 0; r < 2; r++) {
        char body[1024], head[4096], value[] = {0, 1, 2, 3};
        struct text t = {0}, escaped = {0};
        snprintf(
            body, sizeof body,
            "{\"version\":1,\"save\":\"0123456789abcdef\",\"rank\":%d,\"ranks\":2,\"checksum\":\"xxh3-64\","
            "\"block\":1048576,\"tensors\":{\"%s\":{\"index\":%d,\"dtype\":\"U8\",\"shape\":[2,4],\"offset\":[%d,0],"
            "\"sums\":\"%016llx\"}}",
            two.ranks[r], two.names[r], two.index, r, (unsigned long long)block_sum(value, 4));
        text_add(&t, body);
        manifest_end(&t);
        text_string(&escaped, t.at, t.used);
        snprintf(head, sizeof head,
                 "{\"__metadata__\":{\"fsdp\":%s},\"%s\":{\"dtype\":\"U8\",\"shape\":[1,4],\"data_offsets\":[0,4]}}",
                 escaped.at, two.names[r]);
        text_free(&t);
        text_free(&escaped);
        snprintf(name, sizeof name, "%s/%d.safetensors", path, r);
        write_foreign(name, head, 4);
        size_t bytes;
        char *all = read_all(name, &bytes);
        used +=
            (size_t)snprintf(manifest + used, sizeof manifest - used,
                             "%s{\"name\":\"%d.safetensors\",\"bytes\":%zu,\"header\":\"%016llx\"}", r ? "," : "", r,
                             bytes + (size_t)(r ? two.longer : 0), (unsigned long long)block_sum(all, bytes - 4));
        free(all);
    }
    snprintf(manifest + used, sizeof manifest - used, "]%s", two.more ? two.more : "");
    struct text t = {0};
    text_add(&t, manifest);
    manifest_end(&t);
    snprintf(name, sizeof name, "%s/manifest.json", path);
    write_all(name, t.at, t.used);
    text_free(&t);
    fsdp_checkpoint *c;
    fsdp_status status = fsdp_checkpoint_open(path, &c);
    if (status == FSDP_OK) status = fsdp_checkpoint_verify(c, NULL, NULL);
    if (status == FSDP_OK) fsdp_checkpoint_release(c);
    return status;
}

Test(checkpoint, files_that_do_not_belong_together_are_refused)
{
    mkdir(path, 0777);
    struct two good = {.ranks = {0, 1}, .names = {"t", "t"}}, two = good;
    OK(two_open(good));
    two.ranks[0] = 1; /* one rank's twice: what is a rank's own would be another's */
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "/0.safetensors' is of another save, or another rank's");
    two = good;
    two.names[1] = "u";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "don't agree about tensor 't'");
    two = good;
    two.longer = 1;
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "was written with");
    two = good;
    two.more = ",\"tied\":[{\"index\":1,\"name\":\"a\",\"to\":\"t\"},{\"index\":2,\"name\":\"b\",\"to\":\"t\"}]";
    OK(two_open(two));
    two.more = ",\"tied\":[{\"index\":1,\"name\":\"a\",\"to\":\"b\"},{\"index\":2,\"name\":\"b\",\"to\":\"t\"}]";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "'a' is tied to 'b'");
    two.more = ",\"tied\":[{\"index\":1,\"name\":\"a\",\"to\":\"a\"}]";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "'a' is tied to 'a'");
    two.more = ",\"tied\":[{\"index\":1,\"name\":\"a\",\"to\":\"x\"}]";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "'a' is tied to 'x'");
    two.more = ",\"tied\":[{\"index\":1,\"name\":\"t\",\"to\":\"t\"}]";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "'t' is there twice");
    two.index = 1;
    two.more = ",\"tied\":[{\"index\":0,\"name\":\"a\",\"to\":\"t\"}]";
    REFUSED(two_open(two), FSDP_ERR_CORRUPT, "no earlier tensor");
}

Test(checkpoint, headers_of_any_claimed_length_are_refused)
{
    char name[192];
    fsdp_checkpoint *c;
    static const unsigned char lengths[][8] = {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
                                               {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
                                               {0, 0, 0, 0, 0, 0, 0, 0x80},
                                               {0, 0xe1, 0xf5, 5, 0, 0, 0, 0},
                                               {3, 0, 0, 0, 0, 0, 0, 0},
                                               {0}};
    snprintf(name, sizeof name, "%s/x.safetensors", folder);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char text[10] = {0};
        memcpy(text, lengths[i], 8);
        memcpy(text + 8, "{}", 2);
        write_all(name, text, 10);
        REFUSED(fsdp_checkpoint_open(name, &c), FSDP_ERR_CORRUPT, name);
    }
}

/* ---- saving */

Test(checkpoint, what_files_cannot_hold_is_refused_by_name)
{
    fsdp_state_dict *dict;
    double z[4] = {0};
    OK(fsdp_state_dict_create(&dict));
    add(dict, "z", z, (DLDataType){kDLComplex, 128, 1}, 1, 2, 0);
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, NULL, NULL), FSDP_ERR_UNSUPPORTED, "'z' is complex128");
    fsdp_state_dict_release(dict);
    OK(fsdp_state_dict_create(&dict));
    add(dict, "__metadata__", z, F64, 1, 4, 0);
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, NULL, NULL), FSDP_ERR_INVALID, "__metadata__");
    fsdp_state_dict_release(dict);
    cr_expect(access(path, F_OK) != 0);
}

Test(checkpoint, options_are_checked)
{
    fsdp_state_dict *dict = dict_make();
    fsdp_save *save;
    fsdp_save_options o = {.struct_size = sizeof o, .format = 2};
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, &o, NULL), FSDP_ERR_INVALID, "format");
    o = (fsdp_save_options){.struct_size = sizeof o, .background = 1};
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, &o, NULL), FSDP_ERR_INVALID, "background");
    o.background = 2;
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, &o, &save), FSDP_ERR_INVALID, "background");
    o = (fsdp_save_options){.struct_size = sizeof o, .max_file_bytes = 5};
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, &o, NULL), FSDP_ERR_INVALID, "max_file_bytes");
    o.format = FSDP_CHECKPOINT_FULL;
    REFUSED(fsdp_checkpoint_save(NULL, dict, "a.safetensors", &o, NULL), FSDP_ERR_INVALID, "max_file_bytes");
    o.max_file_bytes = -1;
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, &o, NULL), FSDP_ERR_INVALID, "max_file_bytes");
    REFUSED(fsdp_checkpoint_save(NULL, dict, "", NULL, NULL), FSDP_ERR_INVALID, "path");
    REFUSED(fsdp_checkpoint_save(NULL, dict, NULL, NULL, NULL), FSDP_ERR_INVALID, "path");
    fsdp_state_dict_release(dict);
}

Test(checkpoint, a_file_above_the_limit_is_an_error_and_no_signal)
{
    fsdp_state_dict *dict = dict_make();
    struct rlimit limit = {.rlim_cur = 100000, .rlim_max = RLIM_INFINITY};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    REFUSED(fsdp_checkpoint_save(NULL, dict, path, NULL, NULL), FSDP_ERR_SYSTEM, "ulimit -f");
    fsdp_state_dict_release(dict);
}

Test(checkpoint, a_background_save_goes_where_its_path_was_at_the_call)
{
    fsdp_state_dict *dict = dict_make();
    fsdp_save_options o = {.struct_size = sizeof o, .background = 1, .no_sync = 1};
    fsdp_save *save;
    cr_assert_eq(chdir(folder), 0);
    OK(fsdp_checkpoint_save(NULL, dict, "c", &o, &save));
    cr_assert_eq(chdir("/"), 0);
    OK(fsdp_save_wait(save, -1));
    fsdp_save_release(save);
    fsdp_checkpoint *c;
    OK(fsdp_checkpoint_open(path, &c));
    fsdp_checkpoint_release(c);
    fsdp_state_dict_release(dict);
}

Test(checkpoint, a_background_save_without_a_handle_goes_on)
{
    fsdp_state_dict *dict = dict_make();
    fsdp_save_options o = {.struct_size = sizeof o, .background = 1, .no_sync = 1};
    fsdp_save_info info = {.struct_size = sizeof info};
    fsdp_save *save;
    OK(fsdp_checkpoint_save(NULL, dict, path, &o, &save));
    OK(fsdp_save_retain(save));
    fsdp_save_release(save);
    OK(fsdp_save_query(save, &info));
    cr_expect_gt(info.total_bytes, (int64_t)sizeof big);
    fsdp_save_release(save);
    fsdp_checkpoint *c = NULL;
    for (int i = 0; i < 2000 && fsdp_checkpoint_open(path, &c) != FSDP_OK; i++) usleep(5000);
    cr_assert(c, "%s", fsdp_last_error());
    OK(fsdp_checkpoint_verify(c, NULL, NULL));
    fsdp_checkpoint_release(c);
    fsdp_state_dict_release(dict);
}
