/* See checkpoint_host.h. */
#include "checkpoint_host.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#define F(bits) ((DLDataType){kDLFloat, bits, 1})
#define I(bits) ((DLDataType){kDLInt, bits, 1})
#define U(bits) ((DLDataType){kDLUInt, bits, 1})

/* Every dtype that files have, every cut, no elements, one, and more than a checksum's block. */
const struct spec host_specs[] = {
    {"embed.weight", F(32), 2, {13, 6}, ROWS},
    {"head.weight", {0, 0, 0}, 0, {0}, TIED},
    {"half", F(16), 2, {3, 5}, COLUMNS},
    {"brain", {kDLBfloat, 16, 1}, 3, {4, 3, 2}, ROWS},
    {"double", F(64), 1, {11}, UNEVEN},
    {"e4m3", {kDLFloat8_e4m3fn, 8, 1}, 2, {2, 9}, ROWS},
    {"e5m2", {kDLFloat8_e5m2, 8, 1}, 2, {7, 2}, GRID},
    {"large", F(32), 2, {900, 701}, ROWS}, /* 2.4 MiB */
    {"large.columns", F(32), 2, {600, 1203}, COLUMNS},
    {"large.copied", I(64), 2, {300, 1001}, COPIED},
    {"i8", I(8), 1, {5}, ROWS},
    {"i16", I(16), 1, {5}, UNEVEN},
    {"i32", I(32), 2, {6, 4}, GRID},
    {"i64", I(64), 1, {1}, ROWS},
    {"u8", U(8), 2, {5, 3}, PAIRED},
    {"u16", U(16), 1, {9}, PAIRED},
    {"u32", U(32), 1, {4}, COPIED},
    {"u64", U(64), 2, {1, 3}, COPIED},
    {"bool", {kDLBool, 8, 1}, 1, {17}, ROWS},
    {"complex", {kDLComplex, 64, 1}, 2, {3, 3}, ROWS},
    {"scalar", F(32), 0, {0}, COPIED},
    {"scalar.last", I(64), 0, {0}, ONE_RANK},
    {"nothing", F(32), 1, {0}, ROWS},
    {"nothing.wide", F(32), 2, {3, 0}, ROWS},
    {"rng", U(8), 1, {0}, OF_RANK},
    {"six", F(32), 1, {6}, ROWS}, /* of 4 ranks: 2, 2, 2 and none */
    {"deep", F(32), 4, {3, 2, 4, 5}, GRID},
    {"name with \"quotes\", \\ and \xc3\xa9\xe2\x82\xac", F(32), 1, {3}, ROWS},
};
const int host_n_specs = sizeof host_specs / sizeof *host_specs;

static int64_t size_of(const struct spec *spec)
{
    return spec->dtype.bits / 8;
}

void host_value(const struct spec *spec, int index, uint64_t seed, int64_t place, char *out)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15u + (uint64_t)index * 0xbf58476d1ce4e5b9u + (uint64_t)place;
    x = (x ^ x >> 31) * 0x94d049bb133111ebu;
    x ^= x >> 29;
    if (spec->dtype.code == kDLBool) x &= 1;
    for (int64_t i = 0; i < size_of(spec); i++) out[i] = (char)(x >> (8 * i));
}

static void chunk(int64_t n, int rank, int size, int64_t *at, int64_t *length)
{
    int64_t each = (n + size - 1) / size, begin = each * rank < n ? each * rank : n;
    *at = begin;
    *length = begin + each < n ? each : n - begin;
}

static void cut_make(const struct spec *spec, int rank, int size, struct host_part *part)
{
    int last = spec->ndim - 1;
    enum cut cut = spec->cut;
    *part = (struct host_part){.copies = 1};
    for (int d = 0; d < spec->ndim; d++) part->size[d] = spec->shape[d];
    if (cut == OF_RANK) part->size[0] = 3 + rank;
    if ((cut == GRID || cut == PAIRED) && size != 4) cut = ROWS;
    if (cut == COPIED) {
        part->copies = size;
        part->copy = rank;
    } else if (cut == ROWS) {
        chunk(spec->shape[0], rank, size, &part->at[0], &part->size[0]);
    } else if (cut == UNEVEN && size > 1) {
        int64_t before = (spec->shape[0] - 1) / size * rank / 2;
        part->at[0] = before;
        part->size[0] = (rank == size - 1 ? spec->shape[0] : (spec->shape[0] - 1) / size * (rank + 1) / 2) - before;
    } else if (cut == COLUMNS) {
        chunk(spec->shape[last], rank, size, &part->at[last], &part->size[last]);
    } else if (cut == GRID) {
        chunk(spec->shape[0], rank / 2, 2, &part->at[0], &part->size[0]);
        chunk(spec->shape[1], rank % 2, 2, &part->at[1], &part->size[1]);
    } else if (cut == PAIRED) {
        chunk(spec->shape[0], rank / 2, 2, &part->at[0], &part->size[0]);
        part->copies = 2;
        part->copy = rank % 2;
    } else if (cut == ONE_RANK && rank != size - 1) {
        part->count = -1; /* of none of a 0-dim tensor there is no box: the entry is not this rank's */
    }
}

/* The next index of a walk in row-major order; 0: that was the last. */
static int step(int ndim, const int64_t *size, int64_t *at)
{
    for (int d = ndim - 1; d >= 0; d--) {
        if (++at[d] < size[d]) return 1;
        at[d] = 0;
    }
    return 0;
}

static int64_t place_of(const struct spec *spec, const struct host_part *part, const int64_t *at)
{
    int64_t place = 0;
    for (int d = 0; d < spec->ndim; d++)
        place = place * (spec->cut == OF_RANK ? part->size[d] : spec->shape[d]) + part->at[d] + at[d];
    return place;
}

static int64_t offset_of(const struct spec *spec, const struct host_part *part, const int64_t *at)
{
    int64_t offset = 0;
    for (int d = 0; d < spec->ndim; d++) offset += at[d] * part->strides[d];
    return offset;
}

static uint64_t seed_of(const struct spec *spec, uint64_t seed, int rank)
{
    return spec->cut == OF_RANK ? seed + 1000 + (uint64_t)rank : seed;
}

static void managed_free(DLManagedTensorVersioned *self)
{
    free(self->dl_tensor.shape);
    free(self);
}

static DLManagedTensorVersioned *managed_make(const struct spec *spec, struct host_part *part)
{
    DLManagedTensorVersioned *t = calloc(1, sizeof *t);
    int64_t *dims = malloc(8 * sizeof *dims);
    for (int d = 0; d < spec->ndim; d++) {
        dims[d] = part->size[d];
        dims[4 + d] = part->strides[d];
    }
    t->version.major = DLPACK_MAJOR_VERSION;
    t->version.minor = DLPACK_MINOR_VERSION;
    t->deleter = managed_free;
    t->dl_tensor = (DLTensor){.data = part->data,
                              .device = {kDLCPU, 0},
                              .ndim = spec->ndim,
                              .dtype = spec->dtype,
                              .shape = dims,
                              .strides = dims + 4};
    return t;
}

static void memory_make(const struct spec *spec, struct host_part *part, int strided)
{
    int64_t stride = strided == 2 ? 2 : 1;
    part->count = 1;
    for (int i = 0; i < spec->ndim; i++) {
        int d = strided == 1 ? i : spec->ndim - 1 - i;
        part->strides[d] = stride;
        stride *= part->size[d] ? part->size[d] : 1;
        if (strided == 2) stride += 1;
        part->count *= part->size[d];
    }
    size_t bytes = (size_t)((stride + 1) * size_of(spec));
    part->data = malloc(bytes);
    memset(part->data, 0xee, bytes);
}

static void fill(const struct spec *spec, int index, struct host_part *part, uint64_t seed)
{
    int64_t at[4] = {0};
    if (!part->count) return;
    do host_value(spec, index, seed, place_of(spec, part, at), part->data + offset_of(spec, part, at) * size_of(spec));
    while (step(spec->ndim, part->size, at));
}

void host_dict_make(struct host_dict *host, const struct specs *specs, int rank, int size, int filled)
{
    memset(host, 0, sizeof *host);
    host->specs = specs;
    OK(fsdp_state_dict_create(&host->dict));
    for (int i = 0; i < specs->n; i++) {
        const struct spec *spec = &specs->list[i];
        struct host_part *part = &host->parts[i];
        fsdp_entry entry = {.struct_size = sizeof entry, .name = spec->name};
        if (spec->cut == TIED) {
            entry.tied_to = specs->list[i - 1].name;
            OK(fsdp_state_dict_add(host->dict, &entry, NULL));
            continue;
        }
        cut_make(spec, rank, size, part);
        if (part->count < 0) {
            /* As a copy that writes nothing: rank `size - 1` is the first one. */
            part->count = 0;
        }
        memory_make(spec, part, specs->strided);
        if (spec->cut == ONE_RANK) {
            part->copies = size;
            part->copy = (rank + 1) % size;
        }
        if (filled) fill(spec, i, part, seed_of(spec, specs->seed, rank));
        entry.kind = spec->cut == OF_RANK ? FSDP_ENTRY_OF_RANK : FSDP_ENTRY_TENSOR;
        entry.ndim = spec->ndim;
        entry.shape = spec->cut == OF_RANK ? part->size : spec->shape;
        entry.offset = part->at;
        entry.length = part->size;
        entry.copies = part->copies;
        entry.copy = part->copy;
        OK(fsdp_state_dict_add(host->dict, &entry, managed_make(spec, part)));
    }
}

void host_dict_free(struct host_dict *host)
{
    fsdp_state_dict_release(host->dict);
    for (int i = 0; i < host->specs->n; i++) free(host->parts[i].data);
}

static int part_matches(const struct spec *spec, int index, const struct host_part *part, uint64_t seed, int64_t *where)
{
    int64_t at[4] = {0};
    char want[16];
    if (!part->count) return 1;
    do {
        *where = place_of(spec, part, at);
        host_value(spec, index, seed, *where, want);
        if (memcmp(want, part->data + offset_of(spec, part, at) * size_of(spec), (size_t)size_of(spec)) != 0) return 0;
    } while (step(spec->ndim, part->size, at));
    return 1;
}

void host_dict_check(const struct host_dict *host, uint64_t seed, int rank)
{
    for (int i = 0; i < host->specs->n; i++) {
        const struct spec *spec = &host->specs->list[i];
        int64_t where;
        if (spec->cut == TIED || spec->cut == OF_RANK) continue;
        CHECK(part_matches(spec, i, &host->parts[i], seed, &where), "rank %d: '%s' differs at element %lld", rank,
              spec->name, (long long)where);
    }
}

/* ---- one process, all of it */

static int entry_matches(fsdp_checkpoint *c, int64_t index, const struct spec *spec, int i, uint64_t seed, char *why,
                         size_t size)
{
    fsdp_entry entry = {.struct_size = sizeof entry};
    struct host_part part = {.copies = 1};
    int64_t where = -1;
    if (fsdp_checkpoint_entry(c, index, &entry) != FSDP_OK || entry.ndim != spec->ndim) {
        snprintf(why, size, "'%s': entry: %s", spec->name, fsdp_last_error());
        return 0;
    }
    for (int d = 0; d < spec->ndim; d++) {
        part.size[d] = entry.shape[d];
        if (spec->cut != OF_RANK && entry.shape[d] != spec->shape[d]) {
            snprintf(why, size, "'%s' has another shape", spec->name);
            return 0;
        }
    }
    memory_make(spec, &part, 0);
    DLManagedTensorVersioned *t = managed_make(spec, &part);
    int good = 1;
    if (fsdp_checkpoint_read(c, index, NULL, &t->dl_tensor) != FSDP_OK) {
        snprintf(why, size, "%s", fsdp_last_error());
        good = 0;
    } else if (!part_matches(spec, i, &part, seed, &where)) {
        snprintf(why, size, "'%s' differs at element %lld", spec->name, (long long)where);
        good = 0;
    }
    t->deleter(t);
    free(part.data);
    return good;
}

/* NULL in *why: all is well. */
static int matches(fsdp_checkpoint *c, const struct specs *specs, uint64_t seed, int ranks, int full, char *why,
                   size_t size)
{
    for (int i = 0; i < specs->n; i++) {
        const struct spec *spec = &specs->list[i];
        int64_t index;
        int n = spec->cut == OF_RANK ? ranks : 1;
        for (int r = 0; r < n; r++) {
            fsdp_status found = fsdp_checkpoint_find(c, spec->name, spec->cut == OF_RANK ? r : -1, &index);
            if (full && spec->cut == OF_RANK) continue;
            if (found != FSDP_OK) {
                snprintf(why, size, "%s", fsdp_last_error());
                return 0;
            }
            const struct spec *values = spec->cut == TIED ? spec - 1 : spec;
            if (!entry_matches(c, index, values, (int)(values - specs->list), seed_of(values, seed, r), why, size))
                return 0;
        }
    }
    return 1;
}

void host_checkpoint_check(const char *path, const struct specs *specs, uint64_t seed, int ranks, int full)
{
    fsdp_checkpoint *c;
    fsdp_checkpoint_info info = {.struct_size = sizeof info};
    char why[1100];
    cr_assert_eq(fsdp_checkpoint_open(path, &c), FSDP_OK, "%s", fsdp_last_error());
    cr_assert_eq(fsdp_checkpoint_query(c, &info), FSDP_OK);
    cr_expect_eq(info.ranks, ranks);
    cr_expect_eq(info.format, full ? FSDP_CHECKPOINT_FULL : FSDP_CHECKPOINT_SHARDED);
    cr_expect(info.checksums);
    cr_expect(matches(c, specs, seed, ranks, full, why, sizeof why), "%s", why);
    cr_expect_eq(fsdp_checkpoint_verify(c, NULL, NULL), FSDP_OK, "%s", fsdp_last_error());
    /* Tensors are in the order of the dict. */
    int64_t at = 0;
    for (int i = 0; i < specs->n; i++) {
        fsdp_entry entry = {.struct_size = sizeof entry};
        if (specs->list[i].cut == OF_RANK) continue;
        cr_assert_eq(fsdp_checkpoint_entry(c, at++, &entry), FSDP_OK, "%s", fsdp_last_error());
        cr_expect_str_eq(entry.name, specs->list[i].name);
        cr_expect((entry.tied_to != NULL) == (specs->list[i].cut == TIED));
    }
    fsdp_checkpoint_release(c);
}

int host_checkpoint_seed(const char *path, const struct specs *specs, const uint64_t *seeds, int n, char *why,
                         size_t size)
{
    fsdp_checkpoint *c;
    fsdp_checkpoint_info info = {.struct_size = sizeof info};
    int found = -1;
    if (fsdp_checkpoint_open(path, &c) != FSDP_OK) {
        snprintf(why, size, "%s", fsdp_last_error());
        return -1;
    }
    fsdp_checkpoint_query(c, &info);
    for (int i = 0; i < n && found < 0; i++)
        if (matches(c, specs, seeds[i], info.ranks, info.format == FSDP_CHECKPOINT_FULL, why, size)) found = i;
    fsdp_checkpoint_release(c);
    return found;
}

/* ---- folders */

void host_folder_make(char out[64])
{
    strcpy(out, "/tmp/fsdp-checkpoint-XXXXXX");
    cr_assert(mkdtemp(out), "%s", strerror(errno));
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *walk)
{
    return remove(path);
}

void host_folder_remove(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

int host_files(const char *path, char names[][256], int most)
{
    DIR *list = opendir(path);
    int n = 0;
    for (struct dirent *e; list && (e = readdir(list));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && n < most)
            snprintf(names[n++], 256, "%s", e->d_name);
    if (list) closedir(list);
    qsort(names, (size_t)n, 256, by_text);
    return n;
}
