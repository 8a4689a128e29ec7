/* State dicts whose parts lie on ranks in any way: gathered whole, and loaded back; and dicts that do not agree.
 *
 * Every rank knows, from the seed alone, how all tensors are cut: at random, along any dimension again and again, in
 * any order of ranks, in several copies, in memory with gaps and of another dtype. Values tell entry and place. */
#include "fsdp_host.h"

#include "base/hash.h"

TestSuite(state_gather, .timeout = RANKS_SECONDS + 30);

#define ENTRIES 14
#define ELEMENTS 256

struct cut {
    int64_t at[4], size[4];
};

struct whole {
    char name[24];
    enum dtype type, held; /* in files; in memory */
    int ndim, tied;        /* index + 1 of an earlier one; 0: not */
    int of_rank;           /* the ranks that have one of their own, as bits; 0: a tensor */
    int64_t shape[4];
    int copies;
    struct cut parts[RANKS_MAX]; /* of each rank */
    int copy[RANKS_MAX];
};

static double value(const struct whole *w, int seed, int i, int64_t k)
{
    double v = value_of(DTYPE_BF16, seed + 5 * i, k); /* below 256 */
    return w->type == DTYPE_BOOL ? (double)((int)v % 2) : v;
}

static void halve(struct cut *parts, int n, int ndim, uint64_t *random)
{
    if (n < 2) return;
    int left = 1 + random_below(random, n - 1), d = random_below(random, ndim);
    struct cut low = parts[0], high = parts[0];
    low.size[d] = random_below(random, (int)low.size[d] + 1);
    high.at[d] += low.size[d];
    high.size[d] -= low.size[d];
    parts[0] = low;
    parts[left] = high;
    halve(parts, left, ndim, random);
    halve(parts + left, n - left, ndim, random);
}

static void cut_up(struct whole *w, int size, uint64_t *random)
{
    struct cut parts[RANKS_MAX] = {0};
    int order[RANKS_MAX];
    do w->copies = w->ndim ? 1 + random_below(random, size) : size;
    while (size % w->copies);
    for (int d = 0; d < w->ndim; d++) parts[0].size[d] = w->shape[d];
    halve(parts, size / w->copies, w->ndim ? w->ndim : 1, random);
    for (int r = 0; r < size; r++) order[r] = r;
    for (int r = size - 1; r > 0 && random_below(random, 3); r--) { /* in rank order now and then */
        int other = random_below(random, r + 1), was = order[r];
        order[r] = order[other];
        order[other] = was;
    }
    for (int k = 0; k < size; k++) {
        w->parts[order[k]] = parts[k / w->copies];
        w->copy[order[k]] = k % w->copies;
    }
}

static void make_up(struct whole *list, int size, uint64_t *random)
{
    static const enum dtype floats[] = {DTYPE_F32, DTYPE_F64, DTYPE_BF16, DTYPE_F16};
    static const enum dtype others[] = {DTYPE_I64, DTYPE_U8, DTYPE_BOOL, DTYPE_C64, DTYPE_I32};
    for (int i = 0; i < ENTRIES; i++) {
        struct whole *w = &list[i];
        *w = (struct whole){0};
        snprintf(w->name, sizeof w->name, "entry %d", i);
        w->type = w->held = random_below(random, 3) ? floats[random_below(random, 4)] : others[random_below(random, 5)];
        if (dtype_is_float(w->type) && random_below(random, 2)) w->held = floats[random_below(random, 4)];
        w->ndim = random_below(random, 5);
        for (int d = 0; d < w->ndim; d++) w->shape[d] = random_below(random, 12) ? 1 + random_below(random, 4) : 0;
        cut_up(w, size, random);
        int what = random_below(random, 8);
        if (what == 0) w->of_rank = 1 + random_below(random, (1 << size) - 1);
        if (what == 1 && i && !list[i - 1].of_rank && !list[i - 1].tied) w->tied = i;
    }
}

/* Where element j of a part is in the whole. */
static int64_t place_of(const struct whole *w, const struct cut *c, int64_t j)
{
    int64_t index[4], place = 0;
    for (int d = w->ndim - 1; d >= 0; j /= c->size[d], d--) index[d] = j % c->size[d];
    for (int d = 0; d < w->ndim; d++) place = place * w->shape[d] + c->at[d] + index[d];
    return place;
}

/* filled 0: memory of other values. */
static fsdp_state_dict *parts_dict(const struct whole *list, int n, int rank, int seed, int filled, uint64_t *random)
{
    fsdp_state_dict *dict;
    OK(fsdp_state_dict_create(&dict));
    for (int i = 0; i < n; i++) {
        const struct whole *w = &list[i];
        int form = random_below(random, 3);
        fsdp_entry entry = {.struct_size = sizeof entry, .name = w->name};
        if (w->of_rank) {
            int64_t own[] = {2, rank + 1};
            if (!(w->of_rank >> rank & 1)) continue;
            entry.kind = FSDP_ENTRY_OF_RANK;
            entry.ndim = 2;
            entry.shape = own;
            OK(fsdp_state_dict_add(dict, &entry, host_tensor(w->held, 2, own, form)));
            continue;
        }
        if (w->tied) {
            entry.tied_to = list[w->tied - 1].name;
            OK(fsdp_state_dict_add(dict, &entry, NULL));
            continue;
        }
        const struct cut *c = &w->parts[rank];
        double values[ELEMENTS];
        DLManagedTensorVersioned *tensor = host_tensor(w->held, w->ndim, c->size, form);
        entry.ndim = w->ndim;
        entry.shape = w->shape;
        entry.offset = c->at;
        entry.dtype = dtype_to_dl(w->type);
        entry.copies = w->copies;
        entry.copy = w->copy[rank];
        for (int64_t j = 0; j < elements(&tensor->dl_tensor); j++)
            values[j] = filled ? value(w, seed, i, place_of(w, c, j)) : (double)(j % 2);
        set_doubles(&tensor->dl_tensor, values);
        OK(fsdp_state_dict_add(dict, &entry, tensor));
    }
    return dict;
}

static void expect_entry(fsdp_state_dict *dict, const char *prefix, const struct whole *list, int i, int seed)
{
    char name[64];
    int64_t at;
    const struct whole *w = &list[i], *values = w->tied ? &list[w->tied - 1] : w;
    fsdp_entry entry = {.struct_size = sizeof entry};
    DLManagedTensorVersioned *tensor;
    double got[ELEMENTS];
    snprintf(name, sizeof name, "%s%.40s", prefix, w->name);
    OK(fsdp_state_dict_find(dict, name, &at));
    OK(fsdp_state_dict_entry(dict, at, &entry));
    OK(fsdp_state_dict_tensor(dict, at, &tensor));
    CHECK(!entry.tied_to == !w->tied && entry.copies == 1, "'%s' is tied: %d", name, w->tied);
    DLDataType type = dtype_to_dl(values->type);
    CHECK(memcmp(&tensor->dl_tensor.dtype, &type, sizeof type) == 0 && memcmp(&entry.dtype, &type, sizeof type) == 0,
          "'%s': the dtype is that of files", name);
    CHECK(entry.ndim == values->ndim && tensor->dl_tensor.ndim == values->ndim, "'%s': dimensions", name);
    for (int d = 0; d < values->ndim; d++)
        CHECK(tensor->dl_tensor.shape[d] == values->shape[d] && entry.shape[d] == values->shape[d] && !entry.offset[d],
              "'%s' is whole", name);
    get_doubles(&tensor->dl_tensor, got);
    int number = w->tied ? w->tied - 1 : i;
    for (int64_t k = 0; k < elements(&tensor->dl_tensor); k++)
        CHECK(got[k] == value(values, seed, number, k), "'%s' (%s, in %d copies) at %lld is %g, not %g", name,
              dtype_name(values->type), values->copies, (long long)k, got[k], value(values, seed, number, k));
    tensor->deleter(tensor);
}

static fsdp_state_dict_info info_of(fsdp_state_dict *dict)
{
    fsdp_state_dict_info info = {.struct_size = sizeof info};
    OK(fsdp_state_dict_query(dict, &info));
    return info;
}

static void expect_gathered(fsdp_state_dict *dict, const char *prefix, const struct whole *list, int rank, int seed)
{
    int n = 0;
    const char *name, *text;
    char want[64];
    for (int i = 0; i < ENTRIES; i++) {
        if (list[i].of_rank) continue;
        fsdp_entry entry = {.struct_size = sizeof entry};
        OK(fsdp_state_dict_entry(dict, n++, &entry));
        CHECK(strcmp(entry.name + strlen(prefix), list[i].name) == 0, "'%s' comes in its turn", list[i].name);
        expect_entry(dict, prefix, list, i, seed);
    }
    CHECK(info_of(dict).n_entries == n && info_of(dict).n_json == 1, "%lld entries",
          (long long)info_of(dict).n_entries);
    OK(fsdp_state_dict_json(dict, 0, &name, &text));
    snprintf(want, sizeof want, "{\"rank\":%d}", rank);
    CHECK(strcmp(text, want) == 0 && strcmp(name + strlen(prefix), "group") == 0, "'%s' is %s", name, text);
}

static fsdp_state_dict *gathered(fsdp_group *group, fsdp_state_dict *dict, int rank0_only, const char *prefix)
{
    fsdp_state_dict *full;
    fsdp_state_dict_options options = {
        .struct_size = sizeof options, .kind = FSDP_STATE_FULL, .rank0_only = rank0_only, .prefix = prefix};
    OK(fsdp_state_dict_gather(dict, group, &options, &full));
    return full;
}

static void one_case(struct rank *r, fsdp_group *group, uint64_t seed)
{
    struct whole list[ENTRIES], again[ENTRIES];
    uint64_t random = seed, own = seed * 17 + (uint64_t)r->rank;
    char json[64];
    make_up(list, r->size, &random);
    fsdp_state_dict *parts = parts_dict(list, ENTRIES, r->rank, 3, 1, &own);
    snprintf(json, sizeof json, "{\"rank\": %d}", r->rank);
    OK(fsdp_state_dict_set_json(parts, "group", json));
    fsdp_state_dict *full = gathered(group, parts, 0, NULL), *first = gathered(group, parts, 1, "all.");
    expect_gathered(full, "", list, r->rank, 3);
    if (r->rank == 0)
        expect_gathered(first, "all.", list, r->rank, 3);
    else
        CHECK(!info_of(first).n_entries && !info_of(first).n_json, "nothing on the other ranks");
    fsdp_state_dict_release(first);
    fsdp_state_dict_release(parts);

    /* The whole into parts that are cut otherwise, and those gathered. */
    memcpy(again, list, sizeof list);
    for (int i = 0; i < ENTRIES; i++) cut_up(&again[i], r->size, &random);
    parts = parts_dict(again, ENTRIES, r->rank, 0, 0, &own);
    OK(fsdp_state_dict_load(parts, full, NULL));
    fsdp_state_dict_release(full);
    full = gathered(group, parts, 0, "b.");
    expect_gathered(full, "b.", list, r->rank, 3);
    fsdp_state_dict_release(full);
    fsdp_state_dict_release(parts);
}

static void rank_random(struct rank *r)
{
    const uint64_t *seed = r->argument;
    for (enum way way = ANY_ROUTE; way <= DIRECT; way++) {
        if (r->size == 1 && way) continue;
        fsdp_group *group = rank_group(r, way, 65536);
        for (int i = 0; i < (SANITIZED ? 4 : 20); i++) one_case(r, group, *seed + (uint64_t)i);
        fsdp_group_release(group);
    }
}

Test(state_gather, parts_cut_in_any_way_come_whole_and_go_back)
{
    uint64_t seed = random_seed();
    fprintf(stderr, "STATE FSDP_TEST_SEED=%llu\n", (unsigned long long)seed);
    for (int size = 1; size <= 6; size++) ranks_run(size, rank_random, &seed);
}

/* ---- parts that do not make up a tensor */

static void rank_parts(struct rank *r)
{
    static const int64_t shape[] = {6, 2}, none = 0;
    fsdp_group *group = group_make(r, 0, 0);
    static const struct {
        int64_t at[3], rows[3];
        int32_t copies[3], copy[3];
        const char *words;
    } cases[] = {
        {{0, 2, 4}, {2, 2, 2}, {0}, {0}, NULL},
        {{0, 2, 4}, {2, 1, 2}, {0}, {0}, "gaps"},
        {{0, 2, 5}, {2, 2, 1}, {1, 1, 1}, {0}, "gaps"},
        {{0, 1, 4}, {2, 3, 2}, {0}, {0}, "ranks 0 and 1"},
        {{0, 2, 3}, {2, 2, 3}, {0}, {0}, "ranks 1 and 2"},
        {{0, 0, 0}, {6, 6, 6}, {0}, {0}, "overlap"},
        {{0, 0, 0}, {6, 6, 6}, {3, 3, 3}, {0, 1, 2}, NULL},
        {{0, 0, 0}, {6, 6, 6}, {3, 3, 3}, {2, 0, 1}, NULL},
        {{0, 0, 0}, {6, 6, 6}, {3, 3, 3}, {0, 1, 1}, "copies"},
        {{0, 0, 0}, {6, 6, 6}, {3, 3, 4}, {0, 1, 2}, "copies"},
        {{0, 0, 0}, {6, 6, 6}, {2, 2, 2}, {0, 1, 1}, "copies"},
        {{0, 0, 3}, {3, 3, 3}, {2, 2, 1}, {0, 1, 0}, NULL},
        {{0, 0, 3}, {6, 3, 3}, {1, 2, 2}, {0, 1, 1}, "copies"},
        {{0, 0, 3}, {3, 3, 3}, {2, 2, 2}, {0, 1, 0}, "copies"},
        {{6, 6, 0}, {0, 0, 6}, {0}, {0}, NULL},
        {{6, 6, 0}, {0, 0, 6}, {2, 2, 0}, {0, 1, 0}, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_state_dict *dict, *full = NULL;
        OK(fsdp_state_dict_create(&dict));
        OK(fsdp_state_dict_add(
            dict, &(fsdp_entry){.struct_size = sizeof(fsdp_entry), .name = "none", .ndim = 1, .shape = &none},
            host_tensor(DTYPE_F32, 1, &none, 0)));
        int64_t at[] = {cases[i].at[r->rank], 0}, size[] = {cases[i].rows[r->rank], 2};
        fsdp_entry entry = {.struct_size = sizeof entry,
                            .name = "weight",
                            .ndim = 2,
                            .shape = shape,
                            .offset = at,
                            .copies = cases[i].copies[r->rank],
                            .copy = cases[i].copy[r->rank]};
        OK(fsdp_state_dict_add(dict, &entry, host_tensor(DTYPE_F32, 2, size, 0)));
        if (!cases[i].words) {
            OK(fsdp_state_dict_gather(dict, group, NULL, &full));
        } else {
            REFUSED(fsdp_state_dict_gather(dict, group, NULL, &full), FSDP_ERR_INVALID, cases[i].words);
            CHECK(strstr(fsdp_last_error(), "'weight'") && !full, "case %zu names it: %s", i, fsdp_last_error());
        }
        fsdp_state_dict_release(full);
        fsdp_state_dict_release(dict);
    }
    fsdp_group_release(group);
}

Test(state_gather, parts_that_overlap_or_leave_gaps_are_refused_on_all_ranks)
{
    ranks_run(3, rank_parts, NULL);
}

/* ---- dicts that differ */

enum difference { A_NAME, A_DTYPE, A_SHAPE, A_TIE, ONE_LESS, AN_ORDER, DIFFERENCES };

static fsdp_state_dict *many(int n, int odd_at, enum difference difference)
{
    static const int64_t shape[] = {1, 1}, other[] = {1, 2};
    fsdp_state_dict *dict;
    OK(fsdp_state_dict_create(&dict));
    for (int i = 0; i < n; i++) {
        char name[24];
        int odd = i == odd_at, next = odd_at >= 0 && i == odd_at + 1;
        int number = difference == AN_ORDER && odd ? i + 1 : difference == AN_ORDER && next ? i - 1 : i;
        if (odd && difference == ONE_LESS) continue;
        snprintf(name, sizeof name, odd && difference == A_NAME ? "other %d" : "name %d", number);
        fsdp_entry entry = {.struct_size = sizeof entry, .name = name, .ndim = 2, .copies = 3};
        entry.shape = odd && difference == A_SHAPE ? other : shape;
        if (odd && difference == A_TIE) entry.tied_to = "name 0";
        DLManagedTensorVersioned *tensor =
            entry.tied_to ? NULL : host_tensor(odd && difference == A_DTYPE ? DTYPE_F64 : DTYPE_F32, 2, entry.shape, 0);
        OK(fsdp_state_dict_add(dict, &entry, tensor));
    }
    return dict;
}

static void rank_differ(struct rank *r)
{
    static const int sizes[] = {3, 380, 2000};
    uint64_t said = HASH_START;
    fsdp_group *group = group_make(r, 0, 0);
    for (int s = 0; s < 3; s++)
        for (int difference = 0; difference < DIFFERENCES; difference++)
            for (int who = 0; who < 3; who++) {
                int n = sizes[s], at = 1 + (n - 2) * difference / DIFFERENCES;
                if (difference == ONE_LESS && who == 1) at = n - 1;
                fsdp_state_dict *dict = many(n, r->rank == who ? at : -1, (enum difference)difference), *full = NULL;
                char name[24];
                snprintf(name, sizeof name, "'name %d'", at);
                REFUSED(fsdp_state_dict_gather(dict, group, NULL, &full), FSDP_ERR_MISMATCH, name);
                snprintf(name, sizeof name, "rank %d", who ? who : 1);
                CHECK(strstr(fsdp_last_error(), "rank 0") && strstr(fsdp_last_error(), name), "rank %d is odd: %s", who,
                      fsdp_last_error());
                fsdp_error_info info = {.struct_size = sizeof info};
                OK(fsdp_last_error_info(&info));
                CHECK(info.operation == FSDP_OP_GATHER_STATE && info.rank_a == 0 && info.rank_b == (who ? who : 1),
                      "%d, %d", info.rank_a, info.rank_b);
                const char *told = strstr(info.message, "entry "); /* the group's name may differ */
                CHECK(told, "%s", info.message);
                said = hash_bytes(said, told, strlen(told));
                fsdp_state_dict_release(dict);
                CHECK(!full, "nothing was made");
            }
    memcpy(r->shared + 8 * r->rank, &said, sizeof said);
    fsdp_group_release(group);
}

Test(state_gather, dicts_that_differ_are_refused_with_the_first_entry_that_does)
{
    const char *said = ranks_run(3, rank_differ, NULL);
    for (int r = 1; r < 3; r++) cr_assert_eq(memcmp(said, said + 8 * r, 8), 0, "rank %d says what rank 0 does", r);
}
