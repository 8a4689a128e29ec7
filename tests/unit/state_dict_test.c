/* State dicts by themselves: what may be added and how it is told, JSON values, and loading one from another. The
 * public functions, with tensors whose deleters are counted. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp.h"

#include "base/mem.h"
#include "base/os.h"
#include "state/state.h"

static void refused(fsdp_status got, fsdp_status want, const char *word, int line)
{
    cr_expect_eq(got, want, "line %d: %s: %s", line, fsdp_status_name(got), fsdp_last_error());
    cr_expect(strstr(fsdp_last_error(), word) != NULL, "line %d: no \"%s\" in \"%s\"", line, word, fsdp_last_error());
}
#define REFUSED(call, status, word) refused(call, status, word, __LINE__)
#define OK(call) cr_assert_eq(call, FSDP_OK, "%s: %s", #call, fsdp_last_error())

/* ---- tensors of a host */

static int deleted, alive;

static void delete_tensor(DLManagedTensorVersioned *self)
{
    deleted++;
    alive--;
    free(self->manager_ctx);
    free(self);
}

/* Values seed, seed + 1, ... in rows. */
static DLManagedTensorVersioned *tensor_of(enum dtype type, int ndim, const int64_t *shape, double seed)
{
    DLManagedTensorVersioned *m = calloc(1, sizeof *m);
    int64_t count = 1, *dims = calloc(1, 64 * sizeof *dims);
    for (int d = 0; d < ndim; d++) count *= dims[d] = shape[d];
    char *block = calloc(1, 64 * sizeof *dims + (size_t)count * 16 + 16);
    memcpy(block, dims, 64 * sizeof *dims);
    free(dims);
    double *values = malloc((size_t)count * sizeof *values + 8);
    for (int64_t k = 0; k < count; k++) values[k] = seed + (double)k;
    m->version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    m->deleter = delete_tensor;
    m->manager_ctx = block;
    m->dl_tensor = (DLTensor){.data = block + 64 * sizeof *dims,
                              .device = {kDLCPU, 0},
                              .ndim = ndim,
                              .dtype = dtype_to_dl(type),
                              .shape = (int64_t *)(void *)block};
    DLTensor from = m->dl_tensor;
    from.dtype = dtype_to_dl(DTYPE_F64);
    from.data = values;
    if (count) OK(fsdp_copy(&from, &m->dl_tensor));
    free(values);
    alive++;
    return m;
}

static fsdp_state_dict *empty(void)
{
    fsdp_state_dict *dict;
    OK(fsdp_state_dict_create(&dict));
    return dict;
}

static fsdp_entry named(const char *name, int ndim, const int64_t *shape)
{
    return (fsdp_entry){.struct_size = sizeof(fsdp_entry), .name = name, .ndim = ndim, .shape = shape};
}

static void add(fsdp_state_dict *dict, const char *name, enum dtype type, int64_t rows, double seed)
{
    fsdp_entry entry = named(name, 1, &rows);
    OK(fsdp_state_dict_add(dict, &entry, tensor_of(type, 1, &rows, seed)));
}

static void tie(fsdp_state_dict *dict, const char *name, const char *to)
{
    fsdp_entry entry = named(name, 0, NULL);
    entry.tied_to = to;
    OK(fsdp_state_dict_add(dict, &entry, NULL));
}

static fsdp_entry entry_at(fsdp_state_dict *dict, int64_t index)
{
    fsdp_entry entry = {.struct_size = sizeof entry};
    OK(fsdp_state_dict_entry(dict, index, &entry));
    return entry;
}

/* The first `n` elements of an entry are seed, seed + 1, ... */
static void expect(fsdp_state_dict *dict, const char *name, int n, double seed)
{
    int64_t index;
    DLManagedTensorVersioned *tensor;
    double got[64];
    OK(fsdp_state_dict_find(dict, name, &index));
    OK(fsdp_state_dict_tensor(dict, index, &tensor));
    DLTensor to = tensor->dl_tensor;
    to.strides = NULL;
    to.data = got;
    to.dtype = dtype_to_dl(DTYPE_F64);
    OK(fsdp_copy(&tensor->dl_tensor, &to));
    tensor->deleter(tensor);
    for (int k = 0; k < n; k++) cr_expect_eq(got[k], seed + k, "'%s' at %d is %g, not %g", name, k, got[k], seed + k);
}

static fsdp_state_dict_info info_of(fsdp_state_dict *dict)
{
    fsdp_state_dict_info info = {.struct_size = sizeof info};
    OK(fsdp_state_dict_query(dict, &info));
    return info;
}

static void all_gone(void)
{
    cr_expect_eq(alive, 0, "%d tensors are left", alive);
}

TestSuite(state_dict, .fini = all_gone);

/* ---- entries */

Test(state_dict, names_are_utf8_of_1_to_4095_bytes)
{
    static const char *const good[] = {"a",
                                       " ",
                                       "layers.0.weight",
                                       "\xc3\xa9",
                                       "\xe4\xb8\xad\xe6\x96\x87",
                                       "\xf0\x9f\x98\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xf4\x8f\xbf\xbf",
                                       "\xe0\xa0\x80",
                                       "\xf0\x90\x80\x80",
                                       "\xc2\x80",
                                       "__metadata__",
                                       "\x01"};
    static const char *const bad[] = {"",
                                      "\x80",
                                      "\xc3",
                                      "\xc3(",
                                      "\xc0\x80",
                                      "\xc1\xbf",
                                      "\xe0\x9f\xbf",
                                      "\xed\xa0\x80",
                                      "\xed\xbf\xbf",
                                      "\xf0\x8f\xbf\xbf",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xff",
                                      "a\xe4\xb8",
                                      "\xe4\xb8z",
                                      "\xf0\x9f\x98",
                                      "abc\xf8\x88\x80\x80\x80"};
    fsdp_state_dict *dict = empty();
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) add(dict, good[i], DTYPE_F32, 1, (double)i);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t one = 1;
        fsdp_entry entry = named(bad[i], 1, &one);
        DLManagedTensorVersioned *tensor = tensor_of(DTYPE_F32, 1, &one, 0);
        REFUSED(fsdp_state_dict_add(dict, &entry, tensor), FSDP_ERR_INVALID, "entry.name");
        if (*bad[i]) cr_expect(strstr(fsdp_last_error(), "UTF-8"), "%s", fsdp_last_error());
        REFUSED(fsdp_state_dict_set_json(dict, bad[i], "1"), FSDP_ERR_INVALID, "name");
        tensor->deleter(tensor);
    }
    char longest[4097];
    memset(longest, 'x', sizeof longest);
    longest[4096] = 0;
    int64_t one = 1;
    fsdp_entry entry = named(longest, 1, &one);
    DLManagedTensorVersioned *tensor = tensor_of(DTYPE_F32, 1, &one, 3);
    REFUSED(fsdp_state_dict_add(dict, &entry, tensor), FSDP_ERR_INVALID, "longer");
    longest[4095] = 0;
    OK(fsdp_state_dict_add(dict, &entry, tensor));
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) expect(dict, good[i], 1, (double)i);
    expect(dict, longest, 1, 3);
    REFUSED(fsdp_state_dict_find(dict, "b", &one), FSDP_ERR_NOT_FOUND, "'b'");
    fsdp_state_dict_release(dict);
}

Test(state_dict, what_is_told_stays_while_more_is_added)
{
    enum { N = 5000 };
    fsdp_state_dict *dict = empty();
    fsdp_entry first = {0}, last = {0};
    for (int i = 0; i < N; i++) {
        char name[24];
        snprintf(name, sizeof name, "entry %d", i);
        add(dict, name, DTYPE_I64, 1 + i % 3, i);
        if (i == 0) first = entry_at(dict, 0);
    }
    last = entry_at(dict, N - 1);
    cr_expect(strcmp(first.name, "entry 0") == 0 && first.shape[0] == 1 && first.offset[0] == 0 &&
              first.length[0] == 1);
    cr_expect(strcmp(last.name, "entry 4999") == 0 && last.shape[0] == 1 + (N - 1) % 3);
    cr_expect(entry_at(dict, 0).name == first.name && entry_at(dict, 0).shape == first.shape);
    for (int i = 0; i < N; i += 37) {
        char name[24];
        int64_t index;
        snprintf(name, sizeof name, "entry %d", i);
        OK(fsdp_state_dict_find(dict, name, &index));
        cr_expect_eq(index, i);
        expect(dict, name, 1, i);
    }
    cr_expect_eq(info_of(dict).n_entries, N);
    fsdp_state_dict_release(dict);
    cr_expect_eq(deleted, N);
}

Test(state_dict, a_tensor_is_taken_or_left)
{
    static const int64_t shape[] = {4, 3}, part[] = {2, 3}, offset[] = {1, 0}, far[] = {3, 0}, less[] = {4},
                         minus[] = {-1, 3}, other[] = {2, 2}, huge[] = {INT64_MAX / 16 + 1, 1},
                         thin[] = {0, INT64_MAX, INT64_MAX};
    fsdp_state_dict *dict = empty();
    add(dict, "there", DTYPE_F32, 4, 0);
    DLManagedTensorVersioned *t = tensor_of(DTYPE_F32, 2, part, 0);
    struct {
        fsdp_entry entry;
        const char *word;
    } bad[] = {
        {named(NULL, 2, shape), "entry.name"},      {named("there", 2, shape), "'there'"},
        {named("new", 2, NULL), "entry.shape"},     {named("new", 1, less), "dimensions"},
        {named("new", 33, shape), "entry.ndim"},    {named("new", -1, shape), "entry.ndim"},
        {named("new", 2, minus), "entry.shape[0]"}, {named("new", 2, other), "part"},
        {named("new", 2, huge), "overflows"},       {named("new", 3, thin), "overflows"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int before = deleted;
        REFUSED(fsdp_state_dict_add(dict, &bad[i].entry, t), FSDP_ERR_INVALID, bad[i].word);
        cr_expect(deleted == before && info_of(dict).n_entries == 1, "case %zu", i);
    }
    fsdp_entry entry = named("new", 2, shape);
    entry.kind = 2;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "entry.kind");
    entry.kind = FSDP_ENTRY_OF_RANK;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "of this rank alone");
    entry = named("new", 2, shape);
    entry.offset = far;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "(4, 3)");
    entry.offset = offset;
    entry.length = other;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "entry.length[1]");
    entry.length = part;
    entry.copies = 2, entry.copy = 2;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "copies");
    entry.copies = -1, entry.copy = 0;
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "copies");
    entry.copies = 3, entry.copy = 1;
    entry.dtype = dtype_to_dl(DTYPE_I32);
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "entry.dtype");
    entry.dtype = (DLDataType){kDLFloat, 32, 4};
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_UNSUPPORTED, "entry.dtype");
    entry.dtype = dtype_to_dl(DTYPE_BF16);
    entry.tied_to = "there";
    REFUSED(fsdp_state_dict_add(dict, &entry, t), FSDP_ERR_INVALID, "tied_to");
    entry.tied_to = NULL;
    REFUSED(fsdp_state_dict_add(dict, &entry, NULL), FSDP_ERR_INVALID, "tensor is NULL");
    cr_expect(deleted == 0 && info_of(dict).n_entries == 1);

    OK(fsdp_state_dict_add(dict, &entry, t));
    fsdp_entry told = entry_at(dict, 1);
    DLDataType bf16 = dtype_to_dl(DTYPE_BF16);
    cr_expect(told.kind == FSDP_ENTRY_TENSOR && told.ndim == 2 && told.shape[0] == 4 && told.offset[0] == 1 &&
              told.length[0] == 2 && told.length[1] == 3 && told.copies == 3 && told.copy == 1 && told.rank == -1 &&
              !told.tied_to && memcmp(&told.dtype, &bf16, sizeof bf16) == 0);
    cr_expect_eq(info_of(dict).bytes, 4 * 4 + 6 * 2, "as they are in files");
    cr_expect_eq(info_of(dict).whole_bytes, 4 * 4 + 12 * 2);

    DLManagedTensorVersioned *newer = calloc(1, sizeof *newer);
    newer->version.major = DLPACK_MAJOR_VERSION + 1;
    newer->deleter = delete_tensor;
    alive++;
    entry.name = "newer";
    REFUSED(fsdp_state_dict_add(dict, &entry, newer), FSDP_ERR_VERSION, "tensor");
    cr_expect_eq(deleted, 1, "one of an unknown version is deleted");
    fsdp_state_dict_release(dict);
    cr_expect_eq(deleted, 3);
}

Test(state_dict, tensors_handed_out_outlive_it)
{
    static const int64_t shape[] = {2, 2}, strides[] = {1, 2};
    fsdp_state_dict *dict = empty();
    fsdp_entry entry = named("turned", 2, shape);
    DLManagedTensorVersioned *t = tensor_of(DTYPE_F32, 2, shape, 5), *a, *b;
    void *memory = t->dl_tensor.data;
    t->dl_tensor.strides = (int64_t *)(uintptr_t)strides;
    t->flags = DLPACK_FLAG_BITMASK_READ_ONLY;
    OK(fsdp_state_dict_add(dict, &entry, t));
    OK(fsdp_state_dict_tensor(dict, 0, &a));
    OK(fsdp_state_dict_retain(dict));
    fsdp_state_dict_release(dict);
    cr_expect_eq(deleted, 0);
    OK(fsdp_tensor_share(a, &b));
    a->deleter(a);
    fsdp_state_dict_release(dict);
    cr_expect_eq(deleted, 0, "one handle is left");
    cr_expect(b->dl_tensor.data == memory && b->dl_tensor.strides[0] == 1 && b->dl_tensor.strides[1] == 2 &&
              (b->flags & DLPACK_FLAG_BITMASK_READ_ONLY));
    b->deleter(b);
    cr_expect_eq(deleted, 1);
}

Test(state_dict, tied_entries_are_one_tensor)
{
    static const int64_t three = 3, four = 4;
    fsdp_state_dict *dict = empty();
    add(dict, "first", DTYPE_F32, 3, 1);
    tie(dict, "second", "first");
    tie(dict, "third", "second");
    fsdp_entry entry = named("more", 1, &four);
    entry.tied_to = "first";
    REFUSED(fsdp_state_dict_add(dict, &entry, NULL), FSDP_ERR_INVALID, "another shape");
    entry.shape = &three;
    OK(fsdp_state_dict_add(dict, &entry, NULL));
    entry.name = "none", entry.tied_to = "later";
    REFUSED(fsdp_state_dict_add(dict, &entry, NULL), FSDP_ERR_INVALID, "'later'");
    entry.tied_to = "first", entry.kind = FSDP_ENTRY_OF_RANK;
    REFUSED(fsdp_state_dict_add(dict, &entry, NULL), FSDP_ERR_INVALID, "of a rank");
    cr_expect(strcmp(entry_at(dict, 2).tied_to, "first") == 0 && entry_at(dict, 2).shape[0] == 3);
    expect(dict, "third", 3, 1);
    cr_expect_eq(info_of(dict).bytes, 12);
    fsdp_state_dict_release(dict);
}

/* ---- JSON */

static const char *json_of(fsdp_state_dict *dict, int64_t index)
{
    const char *name, *text;
    OK(fsdp_state_dict_json(dict, index, &name, &text));
    return text;
}

Test(state_dict, json_values_are_kept_as_they_mean)
{
    static const struct {
        const char *in, *out;
    } good[] = {
        {" { \"lr\" : 0.001,\n \"betas\": [0.9, 0.999] } ", "{\"lr\":0.001,\"betas\":[0.9,0.999]}"},
        {"{\"z\":1,\"a\":2,\"m\":3}", "{\"z\":1,\"a\":2,\"m\":3}"},
        {"9223372036854775807", "9223372036854775807"},
        {"-9223372036854775808", "-9223372036854775808"},
        {"[9007199254740993, 1e300, -0.0, 5e-324]", "[9007199254740993,1e300,-0.0,5e-324]"},
        {"0.1", "0.1"},
        {"null", "null"},
        {"\"a\\nb \xc3\xa9 \\u00e9\"", "\"a\\nb \xc3\xa9 \xc3\xa9\""},
        {"true", "true"},
    };
    fsdp_state_dict *dict = empty();
    add(dict, "value", DTYPE_F32, 1, 0); /* the name of an entry, too */
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        OK(fsdp_state_dict_set_json(dict, "value", good[i].in));
        double want, got;
        const char *text = json_of(dict, 0);
        cr_expect(!strchr(text, '\n'), "on one line: %s", text);
        if (sscanf(good[i].out, "%lf", &want) == 1 && sscanf(text, "%lf", &got) == 1 && strchr(good[i].out, '.'))
            cr_expect_eq(got, want, "%s", text);
        else if (!strchr(good[i].out, 'e') || *good[i].out == '"')
            if (!strchr(good[i].out, '.')) cr_expect_str_eq(text, good[i].out);
        cr_expect_eq(info_of(dict).n_json, 1, "it is replaced");
    }
    OK(fsdp_state_dict_set_json(dict, "another", "{}"));
    OK(fsdp_state_dict_set_json(dict, "value", "7"));
    cr_expect(info_of(dict).n_json == 2 && strcmp(json_of(dict, 0), "7") == 0 && strcmp(json_of(dict, 1), "{}") == 0);
    fsdp_state_dict_release(dict);
}

Test(state_dict, what_is_no_json_value_is_refused_with_its_place)
{
    static const struct {
        const char *in, *word;
    } bad[] = {
        {"", "text"},
        {"{", "line 1"},
        {"1 2", "text"},
        {"{\"a\":1,\"a\":2}", "duplicate"},
        {"{\"a\":1,}", "text"},
        {"NaN", "text"},
        {"[1,\n2,\n x]", "line 3"},
        {"9223372036854775808", "big"},
        {"1e400", "overflow"},
        {"'a'", "text"},
        {"\"\\u0000\"", "text"},
        {"\"\xff\"", "0xff"},
        {"\"\\ud800\"", "text"},
        {"01", "text"},
    };
    fsdp_state_dict *dict = empty();
    OK(fsdp_state_dict_set_json(dict, "kept", "1"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED(fsdp_state_dict_set_json(dict, "kept", bad[i].in), FSDP_ERR_INVALID, bad[i].word);
        cr_expect(strstr(fsdp_last_error(), "'kept'"), "%s", fsdp_last_error());
    }
    char deep[4003];
    for (int depth = 1000; depth <= 2000; depth += depth == 1000 ? 1 : 999) {
        memset(deep, '[', (size_t)depth);
        memset(deep + depth, ']', (size_t)depth);
        deep[2 * depth] = 0;
        if (depth == 1000)
            OK(fsdp_state_dict_set_json(dict, "deep", deep));
        else
            REFUSED(fsdp_state_dict_set_json(dict, "kept", deep), FSDP_ERR_INVALID, "deep");
    }
    size_t bytes = (64u << 20) + 2;
    char *large = malloc(bytes);
    memset(large, ' ', bytes);
    large[0] = '1';
    large[bytes - 1] = 0;
    REFUSED(fsdp_state_dict_set_json(dict, "kept", large), FSDP_ERR_INVALID, "64 MiB");
    free(large);
    cr_expect_str_eq(json_of(dict, 0), "1");
    const char *name, *text;
    REFUSED(fsdp_state_dict_json(dict, 2, &name, &text), FSDP_ERR_INVALID, "index");
    fsdp_state_dict_release(dict);
}

/* ---- loading */

static fsdp_load_options loading(void)
{
    return (fsdp_load_options){.struct_size = sizeof(fsdp_load_options)};
}

Test(state_dict, floats_are_cast_once_and_others_must_be_equal)
{
    fsdp_state_dict *from = empty(), *into = empty();
    int64_t three = 3;
    fsdp_entry kept = named("buffer", 1, &three);
    kept.dtype = dtype_to_dl(DTYPE_F32);
    add(from, "buffer", DTYPE_F64, 3, 1.00390625); /* halfway between two of bfloat16's */
    OK(fsdp_state_dict_add(into, &kept, tensor_of(DTYPE_BF16, 1, &three, 0)));
    add(from, "count", DTYPE_I64, 2, 77);
    add(into, "count", DTYPE_I64, 2, 0);
    OK(fsdp_state_dict_set_json(from, "groups", "[1]"));
    OK(fsdp_state_dict_set_json(into, "groups", "[2]"));
    OK(fsdp_state_dict_set_json(into, "own", "[3]"));
    OK(fsdp_state_dict_load(into, from, NULL));
    expect(into, "buffer", 3, 1);
    expect(into, "count", 2, 77);
    cr_expect(strcmp(json_of(into, 0), "[1]") == 0 && strcmp(json_of(into, 1), "[3]") == 0 &&
              info_of(into).n_json == 2);
    add(from, "mask", DTYPE_U8, 2, 0);
    add(into, "mask", DTYPE_BOOL, 2, 0);
    OK(fsdp_state_dict_set_json(from, "groups", "[9]"));
    add(from, "count2", DTYPE_I32, 2, 5);
    add(into, "count2", DTYPE_I32, 2, 4);
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'mask'");
    expect(into, "count2", 2, 4);
    cr_expect_str_eq(json_of(into, 0), "[1]");
    fsdp_load_options options = loading();
    options.from_rank0 = 1;
    REFUSED(fsdp_state_dict_load(into, from, &options), FSDP_ERR_INVALID, "from_rank0");
    fsdp_state_dict_release(from);
    fsdp_state_dict_release(into);
}

Test(state_dict, each_takes_its_part_from_a_part_that_has_it)
{
    static const int64_t whole[] = {6, 4}, held[] = {4, 4}, held_at[] = {1, 0}, part[] = {2, 2}, part_at[] = {2, 1},
                         out_at[] = {4, 1}, none[] = {0, 4}, none_at[] = {6, 0};
    fsdp_state_dict *from = empty(), *into = empty();
    fsdp_entry entry = named("w", 2, whole);
    entry.offset = held_at;
    OK(fsdp_state_dict_add(from, &entry, tensor_of(DTYPE_F32, 2, held, 4))); /* element k of the whole is k */
    entry.offset = part_at;
    OK(fsdp_state_dict_add(into, &entry, tensor_of(DTYPE_F32, 2, part, 0)));
    OK(fsdp_state_dict_load(into, from, NULL));
    int64_t index;
    DLManagedTensorVersioned *t;
    OK(fsdp_state_dict_find(into, "w", &index));
    OK(fsdp_state_dict_tensor(into, index, &t));
    const float *got = t->dl_tensor.data;
    cr_expect(got[0] == 9 && got[1] == 10 && got[2] == 13 && got[3] == 14, "%g %g %g %g", (double)got[0],
              (double)got[1], (double)got[2], (double)got[3]);
    t->deleter(t);
    fsdp_state_dict_release(into);

    into = empty();
    entry.offset = out_at;
    OK(fsdp_state_dict_add(into, &entry, tensor_of(DTYPE_F32, 2, part, 0)));
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'w' is there in part");
    fsdp_state_dict_release(into);
    into = empty(); /* an empty part needs nothing */
    entry.offset = none_at;
    OK(fsdp_state_dict_add(into, &entry, tensor_of(DTYPE_F32, 2, none, 0)));
    OK(fsdp_state_dict_load(into, from, NULL));
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);
}

static char heard[2][200];

static void hear(fsdp_name_kind kind, const char *name, void *user)
{
    cr_expect_eq(user, (void *)heard);
    strcat(strcat(heard[kind], name), ";");
}

Test(state_dict, names_must_agree_unless_partial)
{
    fsdp_state_dict *from = empty(), *into = empty();
    add(from, "m.a", DTYPE_F32, 2, 10);
    add(from, "m.x", DTYPE_F32, 2, 20);
    add(from, "a", DTYPE_F32, 2, 30);
    add(into, "a", DTYPE_F32, 2, 0);
    add(into, "b", DTYPE_F32, 2, 50);
    add(into, "m.a", DTYPE_F32, 2, 60);
    int64_t one = 1;
    fsdp_entry own = named("rng", 1, &one);
    own.kind = FSDP_ENTRY_OF_RANK;
    OK(fsdp_state_dict_add(into, &own, tensor_of(DTYPE_U8, 1, &one, 9)));
    OK(fsdp_state_dict_add(from, &own, tensor_of(DTYPE_U8, 1, &one, 8)));
    OK(fsdp_state_dict_set_json(from, "m.j", "1"));
    OK(fsdp_state_dict_set_json(from, "j", "2"));
    fsdp_load_options options = loading();
    options.prefix = "m.";
    options.on_name = hear;
    options.user = heard;
    REFUSED(fsdp_state_dict_load(into, from, &options), FSDP_ERR_INVALID, "'m.b', 'm.m.a'");
    cr_expect(strstr(fsdp_last_error(), "'m.x'") && strstr(fsdp_last_error(), "partial"), "%s", fsdp_last_error());
    cr_expect(strcmp(heard[0], "m.b;m.m.a;") == 0 && strcmp(heard[1], "m.x;") == 0, "%s %s", heard[0], heard[1]);
    expect(into, "a", 2, 0);
    options.partial = 1;
    options.on_name = NULL;
    OK(fsdp_state_dict_load(into, from, &options));
    expect(into, "a", 2, 10);
    expect(into, "b", 2, 50);
    expect(into, "m.a", 2, 60);
    expect(into, "rng", 1, 9);
    cr_expect(info_of(into).n_json == 1 && strcmp(json_of(into, 0), "1") == 0);
    fsdp_state_dict_release(from);
    fsdp_state_dict_release(into);

    from = empty(), into = empty(); /* many: the first few are named */
    for (int i = 0; i < 40; i++) {
        char name[16];
        snprintf(name, sizeof name, "name %d", i);
        add(into, name, DTYPE_F32, 1, 0);
    }
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID,
            "lacks 40 wanted names: 'name 0', 'name 1', 'name 2'");
    cr_expect(!strstr(fsdp_last_error(), "'name 9'") && strstr(fsdp_last_error(), ".."), "%s", fsdp_last_error());
    REFUSED(fsdp_state_dict_load(from, into, NULL), FSDP_ERR_INVALID, "has 40 names that are not wanted: 'name 0'");
    fsdp_state_dict_release(from);
    fsdp_state_dict_release(into);
}

Test(state_dict, a_tied_tensor_is_read_by_the_first_name_that_is_there)
{
    for (int form = 0; form < 4; form++) {
        fsdp_state_dict *from = empty(), *into = empty();
        add(into, "embed", DTYPE_F32, 2, 0);
        tie(into, "head", "embed");
        if (form != 1) add(from, "embed", DTYPE_F32, 2, 10);
        if (form == 1 || form == 2) add(from, "head", DTYPE_F32, 2, 20);
        if (form == 3) tie(from, "head", "embed");
        OK(fsdp_state_dict_load(into, from, NULL));
        expect(into, "embed", 2, form == 1 ? 20 : 10);
        expect(into, "head", 2, form == 1 ? 20 : 10);
        fsdp_state_dict_release(from);
        fsdp_state_dict_release(into);
    }
    /* From tied ones into two. */
    fsdp_state_dict *from = empty(), *into = empty();
    add(from, "embed", DTYPE_F32, 2, 10);
    tie(from, "head", "embed");
    add(into, "embed", DTYPE_F32, 2, 0);
    add(into, "head", DTYPE_F32, 2, 0);
    OK(fsdp_state_dict_load(into, from, NULL));
    expect(into, "head", 2, 10);
    fsdp_state_dict_release(from);
    fsdp_state_dict_release(into);
}

Test(state_dict, what_can_not_be_written_is_found_before_anything_is)
{
    static const int64_t four = 4, two = 2, zero = 0;
    for (int trouble = 0; trouble < 4; trouble++) {
        fsdp_state_dict *from = empty(), *into = empty();
        add(from, "first", DTYPE_F32, 4, 10);
        add(into, "first", DTYPE_F32, 4, 20);
        fsdp_entry entry = named("second", 1, &four);
        DLManagedTensorVersioned *theirs = tensor_of(DTYPE_F32, 1, &four, 30),
                                 *ours = tensor_of(DTYPE_F32, 1, &four, 40);
        const char *word = "read-only";
        if (trouble == 0) ours->flags = DLPACK_FLAG_BITMASK_READ_ONLY;
        if (trouble == 1) {
            word = "share memory";
            ours->dl_tensor.strides = (int64_t *)(uintptr_t)&zero;
        }
        float *memory = theirs->dl_tensor.data;
        OK(fsdp_state_dict_add(from, &entry, theirs));
        if (trouble == 2) {
            word = "overlaps";
            ours->dl_tensor.data = memory + 1;
        }
        if (trouble == 3) {
            word = "(2,) float32";
            entry.shape = &two;
            ours->dl_tensor.shape[0] = 2;
        }
        OK(fsdp_state_dict_add(into, &entry, ours)); /* it can be saved all the same */
        REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, word);
        cr_expect(strstr(fsdp_last_error(), "'second'"), "%s", fsdp_last_error());
        expect(into, "first", 4, 20);
        fsdp_state_dict_release(into);
        fsdp_state_dict_release(from);
    }
    fsdp_state_dict *same = empty();
    add(same, "first", DTYPE_F32, 4, 10);
    OK(fsdp_state_dict_load(same, same, NULL)); /* the very same memory is as it should be */
    expect(same, "first", 4, 10);
    fsdp_state_dict_release(same);
}

/* An entry that is a view of `memory`. */
static void add_view(fsdp_state_dict *dict, const char *name, float *memory, int ndim, const int64_t *shape,
                     int64_t *strides)
{
    fsdp_entry entry = named(name, ndim, shape);
    DLManagedTensorVersioned *view = tensor_of(DTYPE_F32, ndim, shape, 0);
    view->dl_tensor.data = memory;
    view->dl_tensor.strides = strides;
    OK(fsdp_state_dict_add(dict, &entry, view));
}

static void count_up(float *memory, int n, float from)
{
    for (int k = 0; k < n; k++) memory[k] = from + (float)k;
}

Test(state_dict, memory_that_two_names_would_write_is_refused)
{
    static const int64_t six[] = {6}, left[] = {5, 4}, right[] = {5, 6}, wide[] = {5, 5};
    int64_t rows_of_10[] = {10, 1}, twos[] = {2};
    float memory[50];
    fsdp_load_options options = loading();

    fsdp_state_dict *from = empty(), *into = empty();
    count_up(memory, 50, 100);
    add(from, "b", DTYPE_F32, 6, 10);
    add(from, "a", DTYPE_F32, 6, 20);
    add(from, "c", DTYPE_F32, 6, 30);
    add_view(into, "c", memory + 20, 1, six, NULL);
    add_view(into, "b", memory, 1, six, NULL);
    add_view(into, "a", memory, 1, six, NULL); /* the same, but not said to be */
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'b' and 'a'");
    cr_expect(strstr(fsdp_last_error(), "tied_to"), "%s", fsdp_last_error());
    for (int k = 0; k < 50; k++) cr_expect_eq(memory[k], (float)(100 + k));
    fsdp_state_dict_release(into);

    into = empty(); /* one byte past the end of the other */
    add_view(into, "a", memory, 1, six, NULL);
    add_view(into, "b", memory + 6, 1, six, NULL);
    add_view(into, "c", (float *)((char *)(memory + 12) - 1), 1, six, NULL);
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'b' and 'c'");
    fsdp_state_dict_release(into);

    into = empty(); /* side by side, and between each other */
    add_view(into, "b", memory, 1, six, NULL);
    add_view(into, "c", memory + 6, 1, six, twos);
    add_view(into, "a", memory + 7, 1, six, twos);
    OK(fsdp_state_dict_load(into, from, NULL));
    for (int k = 0; k < 6; k++)
        cr_expect(memory[k] == (float)(10 + k) && memory[6 + 2 * k] == (float)(30 + k) &&
                  memory[7 + 2 * k] == (float)(20 + k));
    fsdp_state_dict_release(into);
    into = empty(); /* one that is not written is not in the way */
    add_view(into, "b", memory, 1, six, NULL);
    add_view(into, "only here", memory, 1, six, NULL);
    options.partial = 1;
    OK(fsdp_state_dict_load(into, from, &options));
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);

    float parts[2][30];
    count_up(parts[0], 30, 10);
    count_up(parts[1], 30, 60);
    from = empty(), into = empty(); /* columns of one matrix */
    add_view(from, "right", parts[1], 2, right, NULL);
    add_view(from, "left", parts[0], 2, left, NULL);
    add_view(into, "right", memory + 4, 2, right, rows_of_10);
    add_view(into, "left", memory, 2, left, rows_of_10);
    OK(fsdp_state_dict_load(into, from, NULL));
    for (int k = 0; k < 50; k++)
        cr_expect_eq(memory[k], k % 10 < 4 ? parts[0][k / 10 * 4 + k % 10] : parts[1][k / 10 * 6 + k % 10 - 4]);
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);
    from = empty(), into = empty(); /* one column more than there is room for */
    add_view(from, "right", parts[1], 2, right, NULL);
    add_view(from, "left", parts[0], 2, wide, NULL);
    add_view(into, "right", memory + 4, 2, right, rows_of_10);
    add_view(into, "left", memory, 2, wide, rows_of_10);
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'right' and 'left'");
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);
}

Test(state_dict, memory_that_is_still_to_be_read_is_not_written)
{
    static const int64_t four[] = {4}, two[] = {2, 4};
    int64_t again[] = {0, 1};
    float memory[8], other[4];
    fsdp_state_dict *from = empty(), *into = empty();
    count_up(memory, 8, 10);
    count_up(other, 4, 70);
    add_view(from, "a", memory + 4, 1, four, NULL); /* the two in each other's places */
    add_view(from, "b", memory, 1, four, NULL);
    add_view(into, "a", memory, 1, four, NULL);
    add_view(into, "b", memory + 4, 1, four, NULL);
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'a', which will be written");
    cr_expect(strstr(fsdp_last_error(), "'b'"), "%s", fsdp_last_error());
    for (int k = 0; k < 8; k++) cr_expect_eq(memory[k], (float)(10 + k));
    fsdp_state_dict_release(into);
    into = empty(); /* where they are */
    add_view(into, "a", memory + 4, 1, four, NULL);
    add_view(into, "b", memory, 1, four, NULL);
    OK(fsdp_state_dict_load(into, from, NULL));
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);

    from = empty(), into = empty(); /* one that is where it should be, under another's end */
    add_view(from, "a", memory + 2, 1, four, NULL);
    add_view(from, "b", other, 1, four, NULL);
    add_view(into, "a", memory + 2, 1, four, NULL);
    add_view(into, "b", memory, 1, four, NULL);
    REFUSED(fsdp_state_dict_load(into, from, NULL), FSDP_ERR_INVALID, "'b'");
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);

    from = empty(), into = empty(); /* what is read may lie anywhere, also several times in one place */
    add_view(from, "a", other, 1, four, NULL);
    add_view(from, "b", other, 1, four, NULL);
    add_view(from, "c", other, 2, two, again);
    float wide[8];
    add_view(into, "a", memory + 4, 1, four, NULL);
    add_view(into, "b", memory, 1, four, NULL);
    add_view(into, "c", wide, 2, two, NULL);
    OK(fsdp_state_dict_load(into, from, NULL));
    for (int k = 0; k < 8; k++) cr_expect(memory[k] == (float)(70 + k % 4) && wide[k] == (float)(70 + k % 4));
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);
}

/* Views of 64 bytes with any strides, against all their bytes. */
Test(state_dict, whether_two_tensors_meet_is_exact)
{
    static char memory[4096];
    unsigned random = 12345;
    int met = 0, apart = 0;
    for (int i = 0; i < 30000; i++) {
        struct tensor t[2];
        uint64_t bytes[2] = {0};
        for (int k = 0; k < 2; k++) {
            static const enum dtype types[] = {DTYPE_U8, DTYPE_I16, DTYPE_F32};
            int64_t shape[3], low = 0, high = 0;
            random = random * 1664525 + 1013904223;
            enum dtype type = types[(random >> 10) % 3];
            int64_t size = (int64_t)dtype_size(type);
            int32_t ndim = (int32_t)((random >> 12) % 4);
            for (int d = 0; d < ndim; d++) shape[d] = 1 + (random >> (14 + 3 * d)) % 4;
            tensor_make(&t[k], memory + 2048, type, ndim, shape);
            for (int d = 0; d < ndim; d++) {
                random = random * 1664525 + 1013904223;
                if (shape[d] < 2) continue;
                t[k].strides[d] = (int64_t)((random >> 12) % 15) - 4;
                int64_t reach = (shape[d] - 1) * t[k].strides[d] * size;
                *(reach < 0 ? &low : &high) += reach;
                t[k].contiguous = 0;
            }
            if (high - low + size > 64) {
                k--; /* another */
                continue;
            }
            random = random * 1664525 + 1013904223;
            int64_t at = (random >> 12) % (64 - (high - low + size) + 1) - low;
            t[k].data = memory + 2048 + at;
            for (int64_t e = 0; e < t[k].count; e++) {
                int64_t place = at, left = e;
                for (int d = ndim - 1; d >= 0; d--) {
                    place += left % shape[d] * t[k].strides[d] * size;
                    left /= shape[d];
                }
                bytes[k] |= ((UINT64_C(1) << size) - 1) << place;
            }
        }
        int want = (bytes[0] & bytes[1]) != 0;
        want ? met++ : apart++;
        cr_assert_eq(tensor_meet(&t[0], &t[1]), want, "case %d: %llx and %llx", i, (unsigned long long)bytes[0],
                     (unsigned long long)bytes[1]);
    }
    cr_expect(met > 2000 && apart > 2000, "%d, %d", met, apart);
}

Test(state_dict, memory_of_many_entries_is_compared_quickly)
{
    enum { MANY = 5000, COLUMNS = 300 };
    static float memory[MANY * 4], values[MANY * 4], matrix[COLUMNS * COLUMNS];
    static const int64_t four[] = {4}, column[] = {COLUMNS};
    int64_t step[] = {COLUMNS};
    fsdp_state_dict *from = empty(), *into = empty();
    for (int i = 0; i < MANY; i++) {
        char name[16];
        snprintf(name, sizeof name, "name %d", i);
        add_view(from, name, values, 1, four, NULL); /* all read one and the same */
        add_view(into, name, memory + 4 * (i * 2749 % MANY), 1, four, NULL);
    }
    for (int i = 0; i < COLUMNS; i++) {
        char name[16];
        snprintf(name, sizeof name, "column %d", i);
        add_view(from, name, values, 1, column, NULL);
        add_view(into, name, matrix + i, 1, column, step);
    }
    int64_t begin = os_now_ns();
    OK(fsdp_state_dict_load(into, from, NULL));
    int64_t ms = (os_now_ns() - begin) / 1000000;
    cr_expect_lt(ms, 3000, "%lld ms", (long long)ms);
    fsdp_state_dict_release(into);
    fsdp_state_dict_release(from);
}

static int32_t count_calls(int64_t done, int64_t total, void *user)
{
    int *left = user;
    cr_expect(done >= 0 && done <= total && total == 3 * 16, "%lld of %lld", (long long)done, (long long)total);
    return (*left)-- == 0 ? -5 : 0;
}

Test(state_dict, progress_is_told_and_may_end_it)
{
    fsdp_state_dict *from = empty(), *into = empty();
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        add(from, names[i], DTYPE_F32, 4, 10 * i);
        add(into, names[i], DTYPE_F32, 4, 70);
    }
    fsdp_load_options options = loading();
    options.on_progress = count_calls;
    int left = 2;
    options.user = &left;
    REFUSED(fsdp_state_dict_load(into, from, &options), FSDP_ERR_CALLBACK, "32 of 48 bytes");
    expect(into, "b", 4, 10);
    expect(into, "c", 4, 70);
    left = 100;
    OK(fsdp_state_dict_load(into, from, &options));
    cr_expect_eq(left, 96, "at the beginning, and after each");
    expect(into, "c", 4, 20);
    fsdp_state_dict_release(from);
    fsdp_state_dict_release(into);
}

/* ---- no memory */

static atomic_int armed, blocks;

static void *counted(size_t bytes, void *user)
{
    if (atomic_load(&armed) && atomic_fetch_sub(&armed, 1) == 1) return NULL;
    void *p = malloc(bytes);
    if (p) memset(p, 0xa5, bytes);
    atomic_fetch_add(&blocks, 1);
    return p;
}

static void uncounted(void *p, void *user)
{
    atomic_fetch_sub(&blocks, 1);
    free(p);
}

Test(state_dict, every_allocation_may_fail)
{
    static const int64_t rows = 3;
    OK(fsdp_set_allocator(counted, uncounted, NULL));
    int n = 1, done = 0;
    for (; !done && n < 300; n++) {
        fsdp_state_dict *from = NULL, *into = NULL;
        DLManagedTensorVersioned *a = tensor_of(DTYPE_F32, 1, &rows, 1), *b = tensor_of(DTYPE_F32, 1, &rows, 9),
                                 *out = NULL;
        fsdp_entry entry = named("a", 1, &rows), tied = named("b", 0, NULL);
        tied.tied_to = "a";
        fsdp_status got = FSDP_OK;
        atomic_store(&armed, n);
#define NEXT(call)                                                                                                     \
    if (got == FSDP_OK) got = (call)
        NEXT(fsdp_state_dict_create(&from));
        NEXT(fsdp_state_dict_create(&into));
        NEXT(fsdp_state_dict_add(from, &entry, a));
        if (got == FSDP_OK) a = NULL;
        NEXT(fsdp_state_dict_add(from, &tied, NULL));
        NEXT(fsdp_state_dict_set_json(from, "j", "{\"k\":[1,2]}"));
        NEXT(fsdp_state_dict_set_json(from, "l", "2"));
        NEXT(fsdp_state_dict_add(into, &entry, b));
        if (got == FSDP_OK) b = NULL;
        NEXT(fsdp_state_dict_add(into, &tied, NULL));
        fsdp_status loaded = got;
        NEXT(fsdp_state_dict_load(into, from, NULL));
        atomic_store(&armed, atomic_load(&armed) > 0 && got == FSDP_OK ? atomic_load(&armed) : 0);
        NEXT(fsdp_state_dict_tensor(into, 1, &out));
        done = atomic_load(&armed) > 0;
        atomic_store(&armed, 0);
        cr_assert(got == (done ? FSDP_OK : FSDP_ERR_NOMEM), "allocation %d: %s: %s", n, fsdp_status_name(got),
                  fsdp_last_error());
        if (loaded == FSDP_OK) {
            int whole = info_of(into).n_json == 2;
            expect(into, "a", 3, whole ? 1 : 9);
        }
        if (out) out->deleter(out);
        fsdp_state_dict_release(from);
        fsdp_state_dict_release(into);
        if (a) a->deleter(a);
        if (b) b->deleter(b);
        cr_assert_eq(atomic_load(&blocks), 0, "allocation %d: %d blocks are left", n, atomic_load(&blocks));
        all_gone();
    }
    cr_expect(n > 20, "%d allocations", n);
    OK(fsdp_set_allocator(NULL, NULL, NULL));
}
