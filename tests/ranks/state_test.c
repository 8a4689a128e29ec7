/* A model's state dicts: sharded, local and full, of every layout and however many rows there are; and loading them,
 * whole or in part, by each rank or from rank 0's. Values tell parameter and element, so each is looked at by
 * itself. */
#include "unit_host.h"

#include "base/os.h"

#include <unistd.h>

TestSuite(state, .timeout = RANKS_SECONDS + 30);

static const struct par shapes[] = {
    {.name = "rows", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}, .id = 9},
    {.name = "columns", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}, .dim = 1},
    {.name = "inner", .type = DTYPE_F64, .ndim = 3, .shape = {2, 3, 5}, .dim = 2},
    {.name = "middle", .type = DTYPE_BF16, .ndim = 3, .shape = {2, 3, 4}, .dim = 1},
    {.name = "no rows", .type = DTYPE_F32, .ndim = 2, .shape = {0, 3}},
    {.name = "tied", .type = DTYPE_F32, .ndim = 2, .shape = {5, 3}, .tied = 1, .id = 9},
    {.name = "one", .type = DTYPE_F32, .ndim = 1, .shape = {1}},
    {.name = "frozen", .type = DTYPE_F16, .ndim = 3, .shape = {3, 2, 2}, .dim = 1, .frozen = 1},
    {.name = "two rows", .type = DTYPE_F32, .ndim = 2, .shape = {2, 7}},
};
#define SHAPES 9

static const struct par second[] = {
    {.name = "\xc3\xbc.weight", .type = DTYPE_F32, .ndim = 2, .shape = {7, 2}},
    {.name = "\xc3\xbc.bias", .type = DTYPE_F8E5M2, .ndim = 1, .shape = {6}},
};
#define SECOND 2
#define ALL (SHAPES + SECOND)

/* Two units. Parameter i of the model is of the second one from SHAPES on. */
struct host {
    fsdp_model *model;
    struct kit kits[2];
};

static int host_make(fsdp_group *group, int layout, const fsdp_model_options *options, int seed, struct host *h)
{
    h->model = layout_model(group, (enum layout)layout, options);
    if (!h->model) return 0;
    kit_make(h->model, "shapes", shapes, SHAPES, seed, NULL, &h->kits[0]);
    kit_make(h->model, "second", second, SECOND, seed + 40, NULL, &h->kits[1]);
    return 1;
}

static void host_drop(struct host *h)
{
    kit_drop(&h->kits[0]);
    kit_drop(&h->kits[1]);
    fsdp_model_release(h->model);
}

static const struct par *par_of(int i)
{
    return i < SHAPES ? &shapes[i] : &second[i - SHAPES];
}

static double want_of(int i, int seed, int64_t k)
{
    return i < SHAPES ? kit_value(shapes, i, seed, k) : kit_value(second, i - SHAPES, seed + 40, k);
}

static void set_shards_of(struct host *h, int seed)
{
    kit_set_shards(&h->kits[0], seed);
    kit_set_shards(&h->kits[1], seed + 40);
}

static void expect_shards(const struct host *h, int seed, const char *when)
{
    kit_expect_shards(&h->kits[0], seed, when);
    kit_expect_shards(&h->kits[1], seed + 40, when);
}

static fsdp_entry entry_of(fsdp_state_dict *dict, int64_t i)
{
    fsdp_entry entry = {.struct_size = sizeof entry};
    OK(fsdp_state_dict_entry(dict, i, &entry));
    return entry;
}

static fsdp_state_dict_info info_of(fsdp_state_dict *dict)
{
    fsdp_state_dict_info info = {.struct_size = sizeof info};
    OK(fsdp_state_dict_query(dict, &info));
    return info;
}

static fsdp_state_dict *dict_of(fsdp_model *model, fsdp_state_kind kind, int rank0_only, int copy, const char *prefix)
{
    fsdp_state_dict *dict;
    fsdp_state_dict_options options = {
        .struct_size = sizeof options, .kind = kind, .rank0_only = rank0_only, .copy = copy, .prefix = prefix};
    OK(fsdp_model_state_dict(model, &options, &dict));
    return dict;
}

static void expect_name(const fsdp_entry *entry, const char *prefix, const char *name)
{
    char want[64];
    snprintf(want, sizeof want, "%s%s", prefix, name);
    CHECK(strcmp(entry->name, want) == 0, "'%s', not '%s'", entry->name, want);
}

/* ---- full ones */

static void expect_whole(fsdp_state_dict *dict, const char *prefix, int seed, const char *when)
{
    CHECK(info_of(dict).n_entries == ALL, "%s: %lld entries", when, (long long)info_of(dict).n_entries);
    for (int i = 0; i < ALL; i++) {
        const struct par *p = par_of(i);
        fsdp_entry entry = entry_of(dict, i);
        expect_name(&entry, prefix, p->name);
        CHECK(!!entry.tied_to == !!p->tied, "'%s' is tied", p->name);
        if (p->tied) CHECK(strstr(entry.tied_to, "rows"), "to '%s'", entry.tied_to);
        CHECK(entry.ndim == p->ndim && entry.copies == 1 && entry.copy == 0 && entry.rank == -1, "'%s' is whole",
              p->name);
        for (int d = 0; d < p->ndim; d++)
            CHECK(entry.shape[d] == p->shape[d] && entry.length[d] == p->shape[d] && !entry.offset[d], "'%s' is whole",
                  p->name);
        DLManagedTensorVersioned *tensor;
        double got[KIT_ELEMENTS];
        OK(fsdp_state_dict_tensor(dict, i, &tensor));
        CHECK(memcmp(&tensor->dl_tensor.dtype, &(DLDataType){dtype_to_dl(p->type).code, dtype_to_dl(p->type).bits, 1},
                     sizeof(DLDataType)) == 0,
              "'%s' has its own dtype", p->name);
        get_doubles(&tensor->dl_tensor, got);
        for (int64_t k = 0; k < par_count(p); k++)
            CHECK(got[k] == want_of(i, seed, k), "%s: '%s' at %lld is %g, not %g", when, p->name, (long long)k, got[k],
                  want_of(i, seed, k));
        tensor->deleter(tensor);
    }
}

static void check_full(struct rank *r, struct host *h, int seed, const char *when)
{
    fsdp_state_dict *dict = dict_of(h->model, FSDP_STATE_FULL, 0, 0, NULL);
    expect_whole(dict, "", seed, when);
    fsdp_state_dict_release(dict);
    dict = dict_of(h->model, FSDP_STATE_FULL, 1, 0, "model.");
    if (r->rank == 0)
        expect_whole(dict, "model.", seed, when);
    else
        CHECK(info_of(dict).n_entries == 0 && info_of(dict).bytes == 0, "%s: nothing on the other ranks", when);
    fsdp_state_dict_release(dict);
}

static void rank_full(struct rank *r)
{
    const enum way *way = r->argument;
    fsdp_group *group = rank_group(r, *way, 65536);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        struct host h;
        const char *when = layout_names[layout];
        if (!host_make(group, layout, NULL, 11, &h)) continue;
        check_full(r, &h, 11, when);
        set_shards_of(&h, 23);
        check_full(r, &h, 23, when);
        /* In the middle of an iteration, one unit full and written to: still what the shards hold. */
        uint64_t random = 5;
        OK(fsdp_unit_pre_forward(h.kits[0].unit));
        OK(fsdp_unit_post_forward(h.kits[0].unit));
        OK(fsdp_unit_unshard(h.kits[1].unit, NULL));
        if (layout != LAYOUT_NO_SHARD) /* there the full one is the shard */
            for (int i = 0; i < SECOND; i++) {
                double values[KIT_ELEMENTS];
                for (int k = 0; k < KIT_ELEMENTS; k++) values[k] = (double)random_below(&random, 100);
                set_doubles(&h.kits[1].full[i]->dl_tensor, values);
            }
        check_full(r, &h, 23, when);
        fsdp_work *work;
        OK(fsdp_unit_reshard(h.kits[1].unit));
        OK(fsdp_unit_unshard(h.kits[1].unit, &work)); /* under way */
        check_full(r, &h, 23, when);
        OK(fsdp_work_wait(work, -1));
        fsdp_work_release(work);
        OK(fsdp_unit_reshard(h.kits[1].unit));
        OK(fsdp_model_finish_backward(h.model));
        kit_step(h.model, &h.kits[0], r->rank, 0x5f);
        check_full(r, &h, 23, when);
        /* A dict's tensors outlive all. */
        fsdp_state_dict *dict = dict_of(h.model, FSDP_STATE_FULL, 0, 0, NULL);
        host_drop(&h);
        expect_whole(dict, "", 23, when);
        fsdp_state_dict_release(dict);
    }
    fsdp_group_release(group);
}

Test(state, a_full_dict_has_what_the_shards_hold_whatever_the_units_do)
{
    for (int size = 1; size <= 4; size++)
        for (enum way way = ANY_ROUTE; way <= DIRECT; way++)
            if (size > 1 || way == ANY_ROUTE) ranks_run(size, rank_full, &way);
}

static void rank_offloaded(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model_options options = {.offload_dir = "/tmp"};
    for (int layout = 0; layout < LAYOUTS; layout++) {
        struct host h;
        if (!host_make(group, layout, &options, 7, &h)) continue;
        check_full(r, &h, 7, "offloaded");
        fsdp_state_dict *whole = dict_of(h.model, FSDP_STATE_FULL, 0, 0, NULL);
        set_shards_of(&h, 12);
        OK(fsdp_model_load_state_dict(h.model, whole, NULL));
        expect_shards(&h, 7, "offloaded");
        fsdp_state_dict_release(whole);
        host_drop(&h);
    }
    fsdp_group_release(group);
}

Test(state, shards_in_files_are_as_good)
{
    ranks_run(4, rank_offloaded, NULL);
}

/* A model over one dimension of a mesh: ranks 0 1 and 2 3 are models of their own. */
static void rank_on_a_dimension(struct rank *r)
{
    static const char *const names[] = {"outer", "inner"};
    static const int64_t sizes[] = {2, 2};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_mesh *mesh;
    OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
    for (int dim = 0; dim < 2; dim++) {
        fsdp_model_options options = {.struct_size = sizeof options, .shard_dim = names[dim]};
        struct host h;
        int seed = 3 + (dim ? r->rank / 2 : r->rank % 2); /* another in each */
        OK(fsdp_model_create_on_mesh(mesh, &options, &h.model));
        kit_make(h.model, "shapes", shapes, SHAPES, seed, NULL, &h.kits[0]);
        kit_make(h.model, "second", second, SECOND, seed + 40, NULL, &h.kits[1]);
        CHECK(h.kits[0].size == 2, "sharded over two");
        fsdp_state_dict *dict = dict_of(h.model, FSDP_STATE_FULL, 0, 0, NULL), *first;
        expect_whole(dict, "", seed, "a dimension");
        first = dict_of(h.model, FSDP_STATE_FULL, 1, 0, NULL);
        int root = h.kits[0].rank == 0;
        if (root) expect_whole(first, "", seed, "a dimension");
        set_shards_of(&h, 70);
        fsdp_load_options load = {.struct_size = sizeof load, .from_rank0 = 1};
        OK(fsdp_model_load_state_dict(h.model, root ? first : NULL, &load));
        expect_shards(&h, seed, "a dimension");
        fsdp_state_dict_release(first);
        fsdp_state_dict_release(dict);
        host_drop(&h);
    }
    fsdp_mesh_release(mesh);
    fsdp_group_release(group);
}

Test(state, models_on_one_dimension_of_a_mesh_have_dicts_of_their_own)
{
    ranks_run(4, rank_on_a_dimension, NULL);
}

/* ---- parts */

static void expect_parts(const struct host *h, int layout, fsdp_state_dict *dict, fsdp_state_kind kind, int copy,
                         int seed)
{
    int replicas = layout == LAYOUT_NO_SHARD ? kit_query(&h->kits[0]).replicate_size : layout >= LAYOUT_HYBRID ? 2 : 1;
    int64_t bytes = 0;
    for (int i = 0; i < ALL; i++) {
        const struct par *p = par_of(i);
        const struct kit *kit = &h->kits[i >= SHAPES];
        fsdp_entry entry = entry_of(dict, i), of_unit = {.struct_size = sizeof of_unit};
        DLManagedTensorVersioned *tensor, *shard = kit->shard[i >= SHAPES ? i - SHAPES : i];
        OK(fsdp_state_dict_tensor(dict, i, &tensor));
        OK(fsdp_unit_param_entry(kit->unit, i >= SHAPES ? i - SHAPES : i, &of_unit));
        expect_name(&entry, "p.", p->name);
        CHECK(strcmp(of_unit.name, p->name) == 0 && of_unit.kind == FSDP_ENTRY_TENSOR && !of_unit.tied_to,
              "the unit's");
        int64_t places[KIT_ELEMENTS], n = par_places(p, kit->rank, kit->size, places);
        CHECK(elements(&tensor->dl_tensor) == n, "'%s' has %lld elements, not %lld", p->name,
              (long long)elements(&tensor->dl_tensor), (long long)n);
        double got[KIT_ELEMENTS];
        get_doubles(&tensor->dl_tensor, got);
        for (int64_t j = 0; j < n; j++)
            CHECK(got[j] == want_of(i, seed, places[j]), "'%s' at %lld is %g, not %g", p->name, (long long)j, got[j],
                  want_of(i, seed, places[j]));
        if (n) CHECK((tensor->dl_tensor.data == shard->dl_tensor.data) == !copy, "'%s' is a copy: %d", p->name, copy);
        if (n && !copy) {
            int64_t first = places[0]; /* in the whole */
            for (int d = p->ndim - 1; d >= 0; first /= p->shape[d], d--)
                CHECK(of_unit.offset[d] == first % p->shape[d], "'%s' begins at %lld in dimension %d", p->name,
                      (long long)of_unit.offset[d], d);
        }
        for (int d = 0; d < p->ndim; d++) {
            CHECK(of_unit.shape[d] == p->shape[d] && of_unit.length[d] == shard->dl_tensor.shape[d], "of the unit");
            CHECK(entry.length[d] == shard->dl_tensor.shape[d], "'%s' has the shard's extents", p->name);
            CHECK(entry.shape[d] == (kind == FSDP_STATE_LOCAL ? entry.length[d] : p->shape[d]), "'%s': the whole",
                  p->name);
            CHECK(entry.offset[d] == (kind == FSDP_STATE_LOCAL ? 0 : of_unit.offset[d]), "'%s': the offset", p->name);
        }
        CHECK(of_unit.copies == replicas && of_unit.copy == kit_query(kit).replicate_rank, "copy %d of %d",
              of_unit.copy, of_unit.copies);
        CHECK(entry.copies == (kind == FSDP_STATE_LOCAL ? 1 : replicas), "'%s' is in %d copies", p->name, entry.copies);
        if (!p->tied) bytes += (int64_t)tensor_bytes(&tensor->dl_tensor);
        tensor->deleter(tensor);
    }
    CHECK(info_of(dict).bytes == bytes, "%lld bytes, not %lld: tied ones once", (long long)info_of(dict).bytes,
          (long long)bytes);
}

static void rank_parts(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int kind = FSDP_STATE_SHARDED; kind <= FSDP_STATE_LOCAL; kind += FSDP_STATE_LOCAL)
            for (int copy = 0; copy < 2; copy++) {
                struct host h;
                if (!host_make(group, layout, NULL, 11, &h)) continue;
                fsdp_state_dict *dict = dict_of(h.model, kind, 0, copy, "p."), *other;
                expect_parts(&h, layout, dict, kind, copy, 11);
                set_shards_of(&h, 31);
                expect_parts(&h, layout, dict, kind, copy, copy ? 11 : 31);
                /* Into one that shares the shards: into the model. */
                other = dict_of(h.model, kind, 0, 0, "p.");
                OK(fsdp_state_dict_load(other, dict, NULL));
                expect_shards(&h, copy ? 11 : 31, "loaded by parts");
                set_shards_of(&h, 31);
                fsdp_load_options load = {.struct_size = sizeof load, .prefix = "p."};
                OK(fsdp_model_load_state_dict(h.model, dict, &load));
                expect_shards(&h, copy ? 11 : 31, "loaded by parts");
                fsdp_state_dict_release(other);
                /* It keeps the shards. */
                DLManagedTensorVersioned *kept;
                OK(fsdp_state_dict_tensor(dict, 0, &kept));
                host_drop(&h);
                fsdp_state_dict_release(dict);
                double got[KIT_ELEMENTS];
                get_doubles(&kept->dl_tensor, got);
                kept->deleter(kept);
            }
    fsdp_group_release(group);
}

Test(state, a_sharded_dict_shares_or_copies_the_shards_and_says_where_they_lie)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_parts, NULL);
}

/* A LOCAL dict has no shapes that would tell, but knows which parts it has. */
static void rank_local(struct rank *r)
{
    static const struct par one[] = {{.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {4, 4}, .id = 9}};
    static const struct par other[] = {{.name = "w", .type = DTYPE_F32, .ndim = 2, .shape = {4, 4}, .dim = 1, .id = 9}};
    fsdp_group *group = group_make(r, 0, 0), *turned;
    OK(fsdp_group_split(group, 0, r->size - r->rank, NULL, &turned));
    for (int which = 0; which < 3; which++) { /* the same; rank 0's where the last one's are; cut otherwise */
        fsdp_model *a = layout_model(group, LAYOUT_SHARED, NULL),
                   *b = layout_model(which == 1 ? turned : group, LAYOUT_SHARED, NULL);
        struct kit from, into;
        kit_make(a, "a", one, 1, 11, NULL, &from);
        kit_make(b, "b", which == 2 ? other : one, 1, 22, NULL, &into);
        fsdp_state_dict *dict = dict_of(a, FSDP_STATE_LOCAL, 0, 0, NULL),
                        *local = dict_of(b, FSDP_STATE_LOCAL, 0, 0, NULL);
        fsdp_load_options root = {.struct_size = sizeof root, .from_rank0 = 1};
        if (which == 0 || r->size == 1) {
            OK(fsdp_model_load_state_dict(b, dict, NULL));
            kit_expect_shards(&into, 11, "the same parts");
            OK(fsdp_state_dict_load(local, dict, NULL));
        } else {
            REFUSED(fsdp_model_load_state_dict(b, dict, NULL), FSDP_ERR_INVALID, "'w' is there in part");
            REFUSED(fsdp_state_dict_load(local, dict, NULL), FSDP_ERR_INVALID, which == 1 ? "another part" : "'w'");
            int first = which == 1 ? r->size - 1 : 0; /* rank 0 of b's group */
            REFUSED(fsdp_model_load_state_dict(b, r->rank == first ? dict : NULL, &root), FSDP_ERR_INVALID,
                    "'w' is there in part");
            kit_expect_shards(&into, 22, "other parts");
        }
        fsdp_state_dict_release(local);
        fsdp_state_dict_release(dict);
        /* The same values as a host's tensor. */
        fsdp_entry entry = {
            .struct_size = sizeof entry, .name = "w", .ndim = 2, .shape = from.shard[0]->dl_tensor.shape};
        DLManagedTensorVersioned *tensor = host_tensor(DTYPE_F32, 2, entry.shape, 0);
        OK(fsdp_state_dict_create(&dict));
        OK(fsdp_state_dict_add(dict, &entry, tensor));
        if (r->size > 1 && which == 0)
            REFUSED(fsdp_model_load_state_dict(b, dict, NULL), FSDP_ERR_INVALID, "FSDP_STATE_LOCAL");
        fsdp_state_dict_release(dict);
        kit_drop(&from);
        kit_drop(&into);
        fsdp_model_release(a);
        fsdp_model_release(b);
    }
    fsdp_group_release(turned);
    fsdp_group_release(group);
}

Test(state, a_local_dict_loads_where_the_same_parts_are)
{
    ranks_run(1, rank_local, NULL);
    ranks_run(2, rank_local, NULL);
    ranks_run(4, rank_local, NULL);
}

/* ---- loading wholes */

struct wanted {
    enum dtype type; /* of all; DTYPE_COUNT: their own */
    int strided;
    const char *prefix;
};

/* All of the model's, but for those in `without`. */
static fsdp_state_dict *wholes(const struct wanted *w, int seed, unsigned without)
{
    fsdp_state_dict *dict;
    OK(fsdp_state_dict_create(&dict));
    for (int i = ALL - 1; i >= 0; i--) { /* the order is not the model's */
        const struct par *p = par_of(i);
        char name[64];
        double values[KIT_ELEMENTS];
        if (p->tied || without >> i & 1) continue;
        snprintf(name, sizeof name, "%s%s", w->prefix ? w->prefix : "", p->name);
        fsdp_entry entry = {.struct_size = sizeof entry, .name = name, .ndim = p->ndim, .shape = p->shape};
        DLManagedTensorVersioned *tensor =
            host_tensor(w->type == DTYPE_COUNT ? p->type : w->type, p->ndim, p->shape, w->strided);
        for (int64_t k = 0; k < par_count(p); k++) values[k] = want_of(i, seed, k);
        set_doubles(&tensor->dl_tensor, values);
        OK(fsdp_state_dict_add(dict, &entry, tensor));
    }
    return dict;
}

static void rank_load(struct rank *r)
{
    static const struct wanted forms[] = {
        {.type = DTYPE_COUNT}, {.type = DTYPE_F64, .strided = 1}, {.type = DTYPE_F32, .prefix = "a.b."}};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int form = 0; form < 3; form++)
            for (int from_rank0 = 0; from_rank0 < 2; from_rank0++) {
                struct host h;
                const char *when = layout_names[layout];
                if (!host_make(group, layout, NULL, 11, &h)) continue;
                int seed = 20 + form;
                fsdp_state_dict *dict = NULL;
                fsdp_load_options load = {
                    .struct_size = sizeof load, .from_rank0 = from_rank0, .prefix = forms[form].prefix};
                if (!from_rank0 || r->rank == 0) dict = wholes(&forms[form], seed, 0);
                uint64_t before = operations_of(group);
                OK(fsdp_model_load_state_dict(h.model, dict, &load));
                if (from_rank0 && layout <= LAYOUT_NO_SHARD) /* one for each tensor, also where all have all */
                    CHECK(operations_of(group) - before <= ALL + 4, "%s: %llu operations", when,
                          (unsigned long long)(operations_of(group) - before));
                expect_shards(&h, seed, when);
                OK(fsdp_unit_pre_forward(h.kits[0].unit));
                kit_expect_full(&h.kits[0], seed, when);
                OK(fsdp_unit_post_forward(h.kits[0].unit));
                OK(fsdp_unit_pre_forward(h.kits[1].unit));
                if (layout == LAYOUT_NO_SHARD)
                    OK(fsdp_model_load_state_dict(h.model, dict, &load));
                else
                    REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_STATE, "'second'");
                OK(fsdp_unit_post_forward(h.kits[1].unit));
                /* Between forward and backward: what is loaded is what backward sees. */
                fsdp_state_dict_release(dict);
                dict = NULL;
                if (!from_rank0 || r->rank == 0) dict = wholes(&forms[form], seed + 10, 0);
                OK(fsdp_model_load_state_dict(h.model, dict, &load));
                for (int u = 1; u >= 0; u--) {
                    OK(fsdp_unit_pre_backward(h.kits[u].unit));
                    kit_expect_full(&h.kits[u], u ? seed + 50 : seed + 10, when);
                    OK(kit_give(&h.kits[u], r->rank, u ? 3 : 0x5f, NULL));
                }
                OK(fsdp_model_finish_backward(h.model));
                fsdp_state_dict_release(dict);
                host_drop(&h);
            }
    fsdp_group_release(group);
}

Test(state, whole_tensors_load_into_any_sharding_and_are_seen_at_once)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_load, NULL);
}

/* ---- names that do not agree, and what goes wrong */

struct heard {
    int n[2];
    char text[2][256];
    int64_t calls, done, total, end_at; /* progress: answer 1 at call end_at */
};

static void hear_name(fsdp_name_kind kind, const char *name, void *user)
{
    struct heard *heard = user;
    heard->n[kind]++;
    strcat(strcat(heard->text[kind], name), ";");
}

static int32_t hear_progress(int64_t done, int64_t total, void *user)
{
    struct heard *heard = user;
    if (heard->calls++) CHECK(done > heard->done, "it grows: %lld after %lld", (long long)done, (long long)heard->done);
    heard->done = done;
    heard->total = total;
    return heard->calls == heard->end_at ? 77 : 0;
}

/* A dict of rank 0, or of every rank, that lacks 'columns' and 'one' and has two of its own. */
static fsdp_state_dict *odd(int seed)
{
    static const struct wanted own = {.type = DTYPE_COUNT, .prefix = "m."};
    static const int64_t three = 3;
    fsdp_state_dict *dict = wholes(&own, seed, 1u << 1 | 1u << 6);
    static const char *const names[] = {"m.more", "m.again", "elsewhere"};
    for (int i = 0; i < 3; i++) {
        fsdp_entry entry = {.struct_size = sizeof entry, .name = names[i], .ndim = 1, .shape = &three};
        OK(fsdp_state_dict_add(dict, &entry, host_tensor(DTYPE_I32, 1, &three, 0)));
    }
    return dict;
}

static void rank_names(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int from_rank0 = 0; from_rank0 < 2; from_rank0++) {
            struct host h;
            if (!host_make(group, layout, NULL, 11, &h)) continue;
            int mine = !from_rank0 || r->rank == 0;
            fsdp_state_dict *dict = mine ? odd(50) : NULL;
            struct heard heard = {0};
            fsdp_load_options load = {.struct_size = sizeof load,
                                      .from_rank0 = from_rank0,
                                      .prefix = "m.",
                                      .on_name = hear_name,
                                      .on_progress = hear_progress,
                                      .user = &heard};
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_INVALID, "'m.columns', 'm.one'");
            CHECK(strstr(fsdp_last_error(), "'m.again', 'm.more'") || strstr(fsdp_last_error(), "'m.more', 'm.again'"),
                  "%s", fsdp_last_error());
            CHECK(!strstr(fsdp_last_error(), "elsewhere"), "without the prefix: %s", fsdp_last_error());
            CHECK(heard.n[0] == 2 * mine && heard.n[1] == 2 * mine && !heard.calls, "%d and %d are told", heard.n[0],
                  heard.n[1]);
            if (mine) CHECK(strcmp(heard.text[0], "m.columns;m.one;") == 0, "%s", heard.text[0]);
            expect_shards(&h, 11, "nothing was written");

            /* In part: what is there, and no more. */
            load.partial = 1;
            heard = (struct heard){0};
            OK(fsdp_model_load_state_dict(h.model, dict, &load));
            for (int i = 0; i < ALL; i++) {
                const struct kit *kit = &h.kits[i >= SHAPES];
                const struct par *p = par_of(i);
                int64_t places[KIT_ELEMENTS], n = par_places(p, kit->rank, kit->size, places);
                double got[KIT_ELEMENTS];
                int seed = i == 1 || i == 6 ? 11 : 50;
                get_doubles(&kit->shard[i >= SHAPES ? i - SHAPES : i]->dl_tensor, got);
                for (int64_t j = 0; j < n; j++)
                    CHECK(got[j] == want_of(i, seed, places[j]), "'%s' at %lld is %g", p->name, (long long)j, got[j]);
            }
            if (mine)
                CHECK(heard.done == heard.total && heard.calls > 1 && heard.n[0] == 2, "%lld of %lld bytes",
                      (long long)heard.done, (long long)heard.total);

            /* The host ends it: with the same words on all ranks. */
            heard = (struct heard){.end_at = mine ? 2 : 0};
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_CALLBACK, "77");
            heard = (struct heard){.end_at = mine ? 1 : 0};
            set_shards_of(&h, 60);
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_CALLBACK, "on_progress");
            expect_shards(&h, 60, "ended before it began");
            heard = (struct heard){0};
            OK(fsdp_model_load_state_dict(h.model, dict, &load));
            heard = (struct heard){.end_at = heard.calls}; /* the last one */
            if (mine) CHECK(heard.end_at > 1, "%lld calls", (long long)heard.end_at);
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_CALLBACK, "77");
            fsdp_state_dict_release(dict);
            host_drop(&h);
        }
    fsdp_group_release(group);
}

Test(state, names_must_agree_or_are_told_and_left_alone)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_names, NULL);
}

/* Each rank has, or hears of, the failure; then all can go on. */
static void rank_trouble(struct rank *r)
{
    static const struct wanted own = {.type = DTYPE_COUNT};
    static const int64_t turned[] = {3, 5}, rows[] = {5, 3};
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        struct host h;
        if (!host_make(group, layout, NULL, 11, &h)) continue;
        int root = r->rank == 0;
        fsdp_load_options load = {.struct_size = sizeof load, .from_rank0 = 1};
        for (int trouble = 0; trouble < 5; trouble++) {
            int shards_are_whole = r->size == 1 || layout == LAYOUT_NO_SHARD;
            if (trouble == 4 && !shards_are_whole) continue;
            fsdp_state_dict *dict = root ? wholes(&own, 30, 1) : NULL;
            fsdp_entry entry = {.struct_size = sizeof entry, .name = "rows", .ndim = 2, .shape = rows};
            DLManagedTensorVersioned *tensor = NULL;
            if (trouble == 0) { /* a shape */
                entry.shape = turned;
                tensor = host_tensor(DTYPE_F32, 2, turned, 0);
            } else if (trouble == 1) { /* a dtype */
                tensor = host_tensor(DTYPE_I64, 2, rows, 0);
            } else if (trouble == 2) { /* half of it */
                static const int64_t half[] = {2, 3};
                tensor = host_tensor(DTYPE_F32, 2, half, 0);
            } else if (trouble == 3) { /* nothing wrong but on the last rank */
                tensor = host_tensor(DTYPE_F32, 2, rows, 0);
            } else { /* another's shard, which will be written */
                int64_t columns;
                fsdp_state_dict *shards = dict_of(h.model, FSDP_STATE_SHARDED, 0, 0, NULL);
                OK(fsdp_state_dict_find(shards, "columns", &columns));
                OK(fsdp_state_dict_tensor(shards, columns, &tensor));
                fsdp_state_dict_release(shards);
            }
            if (root) OK(fsdp_state_dict_add(dict, &entry, tensor));
            if (!root) tensor->deleter(tensor);
            if (trouble != 3) {
                REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_INVALID, "'rows'");
            } else {
                int last = r->rank == r->size - 1 && r->size > 1;
                fsdp_state_dict *more = last ? wholes(&own, 30, 0) : dict;
                if (r->size > 1)
                    REFUSED(fsdp_model_load_state_dict(h.model, more, &load), FSDP_ERR_INVALID, "from is given");
                REFUSED(fsdp_model_load_state_dict(h.model, NULL, &load), FSDP_ERR_INVALID, "from is NULL");
                if (last) fsdp_state_dict_release(more);
            }
            expect_shards(&h, 11, "nothing was written");
            fsdp_state_dict_release(dict);
        }
        if (r->size > 1 && layout != LAYOUT_NO_SHARD) { /* a unit that is full: on all ranks alike, as units are */
            fsdp_state_dict *dict = root ? wholes(&own, 30, 0) : NULL;
            OK(fsdp_unit_unshard(h.kits[1].unit, NULL));
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_STATE, "fsdp_unit_reshard");
            OK(fsdp_unit_reshard(h.kits[1].unit));
            load.partial = r->rank == 1; /* other options */
            REFUSED(fsdp_model_load_state_dict(h.model, dict, &load), FSDP_ERR_MISMATCH, "options");
            load.partial = 0;
            OK(fsdp_model_load_state_dict(h.model, dict, &load));
            expect_shards(&h, 30, "after all that");
            fsdp_state_dict_release(dict);
        }
        /* Another call on one rank. */
        if (r->size > 1) {
            fsdp_state_dict *dict = NULL;
            fsdp_state_dict_options full = {.struct_size = sizeof full, .kind = FSDP_STATE_FULL};
            REFUSED(r->rank ? fsdp_model_state_dict(h.model, &full, &dict) : fsdp_barrier(group, NULL),
                    FSDP_ERR_MISMATCH, "gather_state");
            full.rank0_only = r->rank == 1;
            REFUSED(fsdp_model_state_dict(h.model, &full, &dict), FSDP_ERR_MISMATCH, "options");
            CHECK(!dict, "no dict");
        }
        check_full(r, &h, r->size > 1 && layout != LAYOUT_NO_SHARD ? 30 : 11, "in the end");
        host_drop(&h);
    }
    fsdp_group_release(group);
}

Test(state, what_is_wrong_on_one_rank_is_said_on_all_and_nothing_is_written)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_trouble, NULL);
}

/* Memory that one rank lacks, at every place: nothing is written, or all. */
static _Thread_local int armed, refused;

static void *alloc_armed(size_t bytes, void *user)
{
    if (armed && --armed == 0) {
        refused = 1;
        return NULL;
    }
    return malloc(bytes);
}

static void free_armed(void *p, void *user)
{
    free(p);
}

static void rank_no_memory(struct rank *r)
{
    static const struct wanted own = {.type = DTYPE_COUNT};
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_load_options load = {.struct_size = sizeof load, .from_rank0 = 1};
    for (int faulty = 0; faulty < r->size; faulty++) {
        int met = 1, k = 0, refusals = 0;
        struct host h;
        CHECK(host_make(group, r->size == 4 ? LAYOUT_HYBRID : LAYOUT_SHARED, NULL, 11, &h), "a model");
        fsdp_state_dict *dict = r->rank ? NULL : wholes(&own, 30, 0);
        while (met) {
            uint64_t before = operations_of(group);
            fsdp_status status;
            do { /* without the very first of it the call is not made, and the others wait for the next */
                refused = 0;
                armed = r->rank == faulty ? ++k : 0;
                status = fsdp_model_load_state_dict(h.model, dict, &load);
                armed = 0;
            } while (r->rank == faulty && status == FSDP_ERR_NOMEM && operations_of(group) == before);
            CHECK(status == FSDP_OK || status == FSDP_ERR_NOMEM, "%s", fsdp_last_error());
            met = status != FSDP_OK;
            refusals += met;
            expect_shards(&h, met ? 11 : 30, "for want of memory");
            if (r->rank == faulty) CHECK(met == refused, "allocation %d", k);
            OK(fsdp_barrier(group, NULL));
        }
        CHECK(refusals > 10, "%d refusals", refusals);
        fsdp_state_dict_release(dict);
        host_drop(&h);
    }
    fsdp_group_release(group);
}

Test(state, for_want_of_memory_nothing_is_written_on_any_rank)
{
    cr_assert_eq(fsdp_set_allocator(alloc_armed, free_armed, NULL), FSDP_OK);
    ranks_run(2, rank_no_memory, NULL);
    ranks_run(4, rank_no_memory, NULL);
}

/* ---- memory */

#define LARGE (1 << 20) /* elements */
#define LARGES 6

static int64_t status_bytes(const char *what)
{
    char line[256];
    long long kb = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, what, strlen(what)) == 0) sscanf(line + strlen(what), ": %lld", &kb);
    if (file) fclose(file);
    return kb * 1024;
}

static void rank_memory(struct rank *r)
{
    static const int64_t shape[] = {1024, LARGE / 1024};
    fsdp_group *group = group_make(r, 0, 65536);
    for (int form = 0; form < 3; form++) { /* rows, columns, and all on every rank */
        int dim = form == 1;
        fsdp_model_options options = {.struct_size = sizeof options, .strategy = form == 2 ? FSDP_NO_SHARD : 0};
        fsdp_model *model = model_make(group, &options);
        fsdp_param params[LARGES] = {0};
        char names[LARGES][8];
        DLTensor tensor = view(NULL, DTYPE_F32, 2, shape);
        fsdp_unit *unit;
        for (int i = 0; i < LARGES; i++) {
            snprintf(names[i], sizeof names[i], "p%d", i);
            params[i] = (fsdp_param){.struct_size = sizeof *params,
                                     .name = names[i],
                                     .full = &tensor,
                                     .shard_dim = dim,
                                     .meta = 1,
                                     .id = (uint64_t)i + 1};
        }
        OK(fsdp_unit_create(model, "large", params, LARGES, NULL, &unit));
        for (int i = 0; i < LARGES; i++) { /* so that the shards have pages */
            DLManagedTensorVersioned *shard;
            OK(fsdp_unit_param_shard(unit, i, &shard));
            float *data = shard->dl_tensor.data;
            for (int64_t k = 0; k < elements(&shard->dl_tensor); k++) data[k] = (float)(i + 1);
            shard->deleter(shard);
        }
        for (int rank0_only = 0; rank0_only < 2; rank0_only++) {
            int64_t each = (int64_t)LARGE * 4, results = rank0_only && r->rank ? 0 : LARGES * each;
            int64_t most = results + (dim && results ? each : 0) + (1 << 20); /* rows go straight to their place */
            FILE *reset = fopen("/proc/self/clear_refs", "w");
            if (!reset) return;
            fputs("5", reset);
            fclose(reset);
            int64_t before = status_bytes("VmRSS");
            fsdp_state_dict *dict = dict_of(model, FSDP_STATE_FULL, rank0_only, 0, NULL);
            int64_t took = status_bytes("VmHWM") - before;
            CHECK(SANITIZED || took <= most, "form %d: a full dict of %lld bytes took %lld", form, (long long)results,
                  (long long)took);
            fprintf(stderr, "STATE form %d rank %d: results %lld KiB, one tensor %lld KiB, peak %lld KiB\n", form,
                    r->rank, (long long)results / 1024, (long long)each / 1024, (long long)took / 1024);
            for (int64_t i = 0; i < info_of(dict).n_entries; i++) {
                DLManagedTensorVersioned *whole;
                OK(fsdp_state_dict_tensor(dict, i, &whole));
                const float *data = whole->dl_tensor.data;
                for (int64_t k = 0; k < LARGE; k += 997) CHECK(data[k] == (float)(i + 1), "p%lld", (long long)i);
                whole->deleter(whole);
            }
            fsdp_state_dict_release(dict);
        }
        fsdp_unit_release(unit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(state, a_full_dict_takes_no_more_than_one_tensor_above_itself)
{
    ranks_run(3, rank_memory, NULL);
}
