/* Meshes: where ranks stand, their sub-groups, what is refused; and models over some of a mesh's dimensions.
 *
 * The oracle counts coordinates up as an odometer does, last dimension fastest, and knows from them alone who is in a
 * rank's sub-group. */
#include "fsdp_host.h"

#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(mesh, .timeout = RANKS_SECONDS + 30);

#define DIMS FSDP_MESH_MAX_DIMS

static const char *const names[] = {"replicate", "shard", "tp", "a name of thirty-one bytes last"};
static const char *const letters[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};

/* ---- the oracle */

struct grid {
    int32_t ndim;
    int64_t sizes[DIMS];
};

static void coordinates(const struct grid *g, int rank, int64_t *at)
{
    for (int d = 0; d < DIMS; d++) at[d] = 0;
    while (rank-- > 0)
        for (int d = g->ndim - 1; d >= 0 && ++at[d] == g->sizes[d]; d--) at[d] = 0;
}

/* The ranks of `size` that differ from `rank` in the dimensions of `along` only, in their order. */
static int neighbours(const struct grid *g, int size, int rank, unsigned along, int32_t *out)
{
    int64_t own[DIMS], at[DIMS];
    int n = 0;
    coordinates(g, rank, own);
    for (int other = 0; other < size; other++) {
        int same = 1;
        coordinates(g, other, at);
        for (int d = 0; d < g->ndim; d++) same &= (along >> d & 1) || at[d] == own[d];
        if (same) out[n++] = other;
    }
    return n;
}

/* Every way to write `size` as a product of ndim sizes, one after the other; 0: that was the last. */
static int next_grid(struct grid *g, int size)
{
    for (;;) {
        int d = g->ndim - 1;
        while (d >= 0 && ++g->sizes[d] > size) g->sizes[d--] = 1;
        if (d < 0) return 0;
        int64_t product = 1;
        for (int k = 0; k < g->ndim; k++) product *= g->sizes[k];
        if (product == size) return 1;
    }
}

/* ---- groups */

static fsdp_group_info info_of(fsdp_group *group)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    return info;
}

/* The group consists of these ranks (of the whole), in this order. */
static void expect_ranks(fsdp_group *group, int rank, const int32_t *want, int n, const char *what)
{
    int32_t got[RANKS_MAX] = {0};
    int64_t one = 1, all = n;
    fsdp_group_info info = info_of(group);
    CHECK(info.size == n, "%s has %d ranks, not %d", what, info.size, n);
    CHECK(want[info.rank] == rank, "%s: this is its rank %d", what, info.rank);
    DLTensor in = view(&rank, DTYPE_I32, 1, &one), out = view(got, DTYPE_I32, 1, &all);
    OK(fsdp_all_gather(group, &in, &out, NULL));
    for (int i = 0; i < n; i++)
        CHECK(got[i] == want[i], "%s: rank %d is %d of the whole, not %d", what, i, got[i], want[i]);
}

static void check_mesh(struct rank *r, fsdp_group *group, const struct grid *g)
{
    fsdp_mesh *mesh;
    OK(fsdp_mesh_create(group, g->ndim, g->sizes, names, &mesh));
    int64_t at[DIMS];
    coordinates(g, r->rank, at);
    fsdp_mesh_info info = {.struct_size = sizeof info};
    OK(fsdp_mesh_query(mesh, &info));
    CHECK(info.ndim == g->ndim && info.rank == r->rank && info.size == r->size, "%d dimensions, rank %d of %d",
          info.ndim, info.rank, info.size);
    for (int d = 0; d < g->ndim; d++) {
        CHECK(info.sizes[d] == g->sizes[d] && info.coordinates[d] == at[d],
              "dimension %d: at %lld of %lld, not %lld of %lld", d, (long long)info.coordinates[d],
              (long long)info.sizes[d], (long long)at[d], (long long)g->sizes[d]);
        CHECK(strcmp(info.names[d], names[d]) == 0, "dimension %d is '%s'", d, info.names[d]);
        fsdp_group *sub;
        int32_t want[RANKS_MAX];
        OK(fsdp_mesh_group(mesh, names[d], &sub));
        int n = neighbours(g, r->size, r->rank, 1u << d, want);
        CHECK(n == g->sizes[d] && info_of(sub).rank == at[d], "the order is that of coordinates");
        expect_ranks(sub, r->rank, want, n, names[d]);
        fsdp_group_release(sub);
    }
    for (int d = g->ndim; d < DIMS; d++)
        CHECK(!info.sizes[d] && !info.coordinates[d] && !*info.names[d], "dimension %d is not there", d);
    fsdp_group *whole;
    int32_t all[RANKS_MAX];
    OK(fsdp_mesh_group(mesh, NULL, &whole));
    expect_ranks(whole, r->rank, all, neighbours(g, r->size, r->rank, (1u << g->ndim) - 1, all), "the whole");
    fsdp_group_release(whole);
    fsdp_mesh_release(mesh);
}

static void rank_grids(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 65536);
    for (int ndim = 1; ndim <= 4; ndim++) {
        struct grid g = {.ndim = ndim, .sizes = {1, 1, 1, 1}};
        g.sizes[ndim - 1] = 0;
        while (next_grid(&g, r->size)) check_mesh(r, group, &g);
    }
    fsdp_group_release(group);
}

Test(mesh, every_mesh_of_one_to_four_ranks)
{
    for (int size = 1; size <= 4; size++) ranks_run(size, rank_grids, NULL);
}

static void rank_larger(struct rank *r)
{
    static const struct grid six[] = {{2, {2, 3}}, {3, {3, 1, 2}}}, eight[] = {{3, {2, 2, 2}}, {4, {1, 4, 1, 2}}};
    fsdp_group *group = group_make(r, 0, 65536);
    for (int i = 0; i < 2; i++) check_mesh(r, group, r->size == 6 ? &six[i] : &eight[i]);
    fsdp_group_release(group);
}

Test(mesh, meshes_of_six_and_eight_ranks)
{
    ranks_run(6, rank_larger, NULL);
    ranks_run(8, rank_larger, NULL);
}

/* ---- what is refused */

static void expect_usable(fsdp_group *group)
{
    fsdp_mesh *mesh;
    int64_t sizes[] = {2, 2};
    OK(fsdp_mesh_create(group, 2, sizes, letters, &mesh));
    fsdp_mesh_release(mesh);
}

static void rank_refused(struct rank *r)
{
    static const char *const twice[] = {"x", "y", "x"}, *const empty[] = {"x", ""}, *const none[] = {"x", NULL},
                             *const longer[] = {"x", "this one has thirty-two bytes..."};
    fsdp_group *group = group_make(r, 0, 65536);
    fsdp_mesh *mesh = NULL;
    int64_t ones[9] = {4, 1, 1, 1, 1, 1, 1, 1, 1}, small[] = {1, 3}, large[] = {2, 3}, right[] = {2, 2},
            huge[] = {(int64_t)1 << 32, (int64_t)1 << 32, 4}, zero[] = {4, 0}, negative[] = {-2, -2}, odd[] = {1, 4, 1};
    uint64_t before = info_of(group).operations;
    REFUSED(fsdp_mesh_create(group, 0, right, letters, &mesh), FSDP_ERR_INVALID, "1 to 8");
    REFUSED(fsdp_mesh_create(group, 9, ones, letters, &mesh), FSDP_ERR_INVALID, "1 to 8");
    REFUSED(fsdp_mesh_create(group, -1, ones, letters, &mesh), FSDP_ERR_INVALID, "ndim");
    REFUSED(fsdp_mesh_create(group, 2, NULL, letters, &mesh), FSDP_ERR_INVALID, "sizes is NULL");
    REFUSED(fsdp_mesh_create(group, 2, right, NULL, &mesh), FSDP_ERR_INVALID, "names is NULL");
    REFUSED(fsdp_mesh_create(group, 2, right, letters, NULL), FSDP_ERR_INVALID, "mesh is NULL");
    REFUSED(fsdp_mesh_create(NULL, 2, right, letters, &mesh), FSDP_ERR_INVALID, "group is NULL");
    REFUSED(fsdp_mesh_create(group, 2, small, letters, &mesh), FSDP_ERR_INVALID, "ranks 0 to 2");
    REFUSED(fsdp_mesh_create(group, 2, large, letters, &mesh), FSDP_ERR_INVALID, "6 places");
    REFUSED(fsdp_mesh_create(group, 3, huge, letters, &mesh), FSDP_ERR_INVALID, "places");
    REFUSED(fsdp_mesh_create(group, 2, zero, letters, &mesh), FSDP_ERR_INVALID, "sizes[1] is 0");
    REFUSED(fsdp_mesh_create(group, 2, negative, letters, &mesh), FSDP_ERR_INVALID, "sizes[0] is -2");
    REFUSED(fsdp_mesh_create(group, 3, odd, twice, &mesh), FSDP_ERR_INVALID, "names[0] and names[2] are both 'x'");
    REFUSED(fsdp_mesh_create(group, 2, right, empty, &mesh), FSDP_ERR_INVALID, "names[1]");
    REFUSED(fsdp_mesh_create(group, 2, right, none, &mesh), FSDP_ERR_INVALID, "names[1]");
    REFUSED(fsdp_mesh_create(group, 2, right, longer, &mesh), FSDP_ERR_INVALID, "thirty-two");
    CHECK(!mesh && info_of(group).operations == before, "refused calls have no effect");

    /* Eight dimensions are allowed; what a mesh does not have is told with what it has. */
    fsdp_group *sub = NULL;
    OK(fsdp_mesh_create(group, 8, ones, letters, &mesh));
    REFUSED(fsdp_mesh_group(mesh, "i", &sub), FSDP_ERR_INVALID, "'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'");
    REFUSED(fsdp_mesh_group(mesh, "", &sub), FSDP_ERR_INVALID, "no dimension");
    REFUSED(fsdp_mesh_group(mesh, "a", NULL), FSDP_ERR_INVALID, "group is NULL");
    REFUSED(fsdp_mesh_query(mesh, NULL), FSDP_ERR_INVALID, "info");
    fsdp_mesh_info info = {.struct_size = 4};
    REFUSED(fsdp_mesh_query(mesh, &info), FSDP_ERR_STRUCT_SIZE, "struct_size");
    CHECK(!sub, "nothing is written on failure");
    fsdp_mesh_release(mesh);
    fsdp_mesh_release(NULL);
    REFUSED(fsdp_mesh_retain(NULL), FSDP_ERR_INVALID, "mesh is NULL");
    REFUSED(fsdp_mesh_query(NULL, &info), FSDP_ERR_INVALID, "mesh is NULL");
    REFUSED(fsdp_mesh_group(NULL, NULL, &sub), FSDP_ERR_INVALID, "mesh is NULL");
    REFUSED(fsdp_mesh_query((fsdp_mesh *)(void *)group, &info), FSDP_ERR_INVALID, "not a live mesh");

    /* Ranks that differ: sizes, names, number of dimensions, another call. All are told, and can go on. */
    int64_t four[] = {4, 1}, two[] = {2, 2}, one[] = {4};
    const char *const swapped[] = {"b", "a"};
    int odd_one = r->rank == 2;
    mesh = NULL;
    REFUSED(fsdp_mesh_create(group, 2, odd_one ? four : two, letters, &mesh), FSDP_ERR_MISMATCH, "rank 2");
    expect_usable(group);
    REFUSED(fsdp_mesh_create(group, 2, two, odd_one ? swapped : letters, &mesh), FSDP_ERR_MISMATCH, "rank 2");
    REFUSED(fsdp_mesh_create(group, odd_one ? 1 : 2, odd_one ? one : four, letters, &mesh), FSDP_ERR_MISMATCH,
            "rank 2");
    REFUSED(odd_one ? fsdp_barrier(group, NULL) : fsdp_mesh_create(group, 2, two, letters, &mesh), FSDP_ERR_MISMATCH,
            "create_mesh");
    CHECK(!mesh, "no mesh was made");
    expect_usable(group);
    fsdp_group_release(group);
}

Test(mesh, bad_and_differing_arguments_are_refused)
{
    ranks_run(4, rank_refused, NULL);
}

/* ---- lives */

/* Group, mesh, its sub-group, a model over the mesh and a unit of it are released in each order; what is left works. */
static void rank_lives(struct rank *r)
{
    static const struct spec specs[] = {{"w", DTYPE_F32, 1, {5}, 0}};
    int64_t sizes[] = {2, r->size / 2}, one = 1;
    for (int first = 0; first < 5; first++)
        for (int step = 1; step < 5; step += 2) {
            fsdp_group *group = group_make(r, 0, 65536), *sub;
            fsdp_mesh *mesh;
            fsdp_model *model;
            struct host_unit u;
            fsdp_model_options options = {.struct_size = sizeof options, .strategy = FSDP_HYBRID_SHARD};
            OK(fsdp_mesh_create(group, 2, sizes, names, &mesh));
            OK(fsdp_mesh_retain(mesh));
            fsdp_mesh_release(mesh);
            OK(fsdp_mesh_group(mesh, "shard", &sub));
            OK(fsdp_model_create_on_mesh(mesh, &options, &model));
            host_unit_make(r, model, "u", specs, 1, 3, &u);
            for (int k = 0, which = first; k < 5; k++, which = (which + step) % 5) {
                if (which == 0) fsdp_group_release(group);
                if (which == 1) fsdp_mesh_release(mesh);
                if (which == 2) {
                    float in = (float)r->rank, out;
                    DLTensor from = view(&in, DTYPE_F32, 1, &one), to = view(&out, DTYPE_F32, 1, &one);
                    OK(fsdp_all_reduce(sub, &from, &to, FSDP_SUM, NULL));
                    CHECK(out == (float)(r->size == 4 ? r->rank / 2 * 4 + 1 : r->rank), "sub-group: %g", out);
                    fsdp_group_release(sub);
                }
                if (which == 3) fsdp_model_release(model);
                if (which == 4) {
                    OK(fsdp_unit_unshard(u.unit, NULL));
                    expect_full(&u, 3, "after others went");
                    host_unit_drop(&u);
                }
            }
        }
}

Test(mesh, objects_are_released_in_any_order)
{
    ranks_run(2, rank_lives, NULL);
    ranks_run(4, rank_lives, NULL);
}

/* A child made by fork() is told so by each function, may release, and disturbs nobody. */
static void rank_forks(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 65536);
    fsdp_mesh *mesh;
    int64_t sizes[] = {1, 2};
    OK(fsdp_mesh_create(group, 2, sizes, letters, &mesh));
    pid_t child = fork();
    CHECK(child >= 0, "fork: %s", strerror(errno));
    if (child == 0) {
        fsdp_mesh_info info = {.struct_size = sizeof info};
        fsdp_group *sub;
        fsdp_model *model;
        fsdp_mesh *other;
        int good = fsdp_mesh_query(mesh, &info) == FSDP_ERR_FORKED && fsdp_mesh_retain(mesh) == FSDP_ERR_FORKED &&
                   fsdp_mesh_group(mesh, "b", &sub) == FSDP_ERR_FORKED &&
                   fsdp_model_create_on_mesh(mesh, NULL, &model) == FSDP_ERR_FORKED &&
                   fsdp_mesh_create(group, 2, sizes, letters, &other) == FSDP_ERR_FORKED;
        fsdp_mesh_release(mesh);
        fsdp_group_release(group);
        _exit(good ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %d",
          status);
    int32_t want[] = {0, 1};
    fsdp_group *sub;
    OK(fsdp_mesh_group(mesh, "b", &sub));
    expect_ranks(sub, r->rank, want, 2, "after fork");
    fsdp_group_release(sub);
    fsdp_mesh_release(mesh);
    fsdp_group_release(group);
}

Test(mesh, a_forked_child_may_only_release)
{
    ranks_run(2, rank_forks, NULL);
}

/* ---- models on a mesh */

static const struct spec model_specs[] = {
    {"w", DTYPE_F32, 2, {5, 3}, 0}, {"b", DTYPE_F64, 1, {1}, 0}, {"h", DTYPE_BF16, 1, {9}, 0}};

/* Which dimensions the model is expected to shard and replicate over (bits), and what is asked for. */
struct want {
    struct grid grid;
    fsdp_strategy strategy;
    const char *shard, *replicate;
    unsigned sharded, replicated;
};

static double mesh_gradient(int rank, int64_t k)
{
    return (double)((rank * 5 + k * 3) % 11) - 4;
}

static void check_model(struct rank *r, fsdp_group *group, const struct want *w)
{
    fsdp_mesh *mesh;
    fsdp_model *model;
    OK(fsdp_mesh_create(group, w->grid.ndim, w->grid.sizes, letters, &mesh));
    fsdp_model_options options = {
        .struct_size = sizeof options, .strategy = w->strategy, .shard_dim = w->shard, .replicate_dim = w->replicate};
    OK(fsdp_model_create_on_mesh(mesh, &options, &model));
    int32_t all[RANKS_MAX], sharded[RANKS_MAX], replicas[RANKS_MAX], rank = 0, replica = 0;
    int n = neighbours(&w->grid, r->size, r->rank, w->sharded | w->replicated, all),
        n_sharded = neighbours(&w->grid, r->size, r->rank, w->sharded, sharded),
        n_replicas = neighbours(&w->grid, r->size, r->rank, w->replicated, replicas);
    while (sharded[rank] != r->rank) rank++;
    while (replicas[replica] != r->rank) replica++;

    /* Values differ between the models of other ranks: what is gathered is from this model's only. */
    int seed = all[0] * 100;
    struct host_unit u;
    struct rank among = {.rank = rank, .size = n_sharded};
    host_unit_make(&among, model, "u", model_specs, 3, seed, &u);
    fsdp_unit_info info = {.struct_size = sizeof info};
    OK(fsdp_unit_query(u.unit, &info));
    CHECK(info.strategy == w->strategy && info.shard_rank == rank && info.shard_size == n_sharded &&
              info.replicate_rank == replica && info.replicate_size == n_replicas,
          "strategy %d, shard %d of %d, replica %d of %d; not %d, %d of %d, %d of %d", info.strategy, info.shard_rank,
          info.shard_size, info.replicate_rank, info.replicate_size, w->strategy, rank, n_sharded, replica, n_replicas);
    OK(fsdp_unit_pre_forward(u.unit));
    expect_full(&u, seed, "on a mesh");
    OK(fsdp_unit_post_forward(u.unit));
    OK(fsdp_unit_pre_backward(u.unit));
    char memory[3][128];
    DLTensor tensors[3];
    const DLTensor *grads[3];
    for (int i = 0; i < 3; i++) {
        double values[16];
        for (int k = 0; k < 16; k++) values[k] = mesh_gradient(r->rank + i, k);
        tensors[i] = view(memory[i], model_specs[i].type, model_specs[i].ndim, model_specs[i].shape);
        set_doubles(&tensors[i], values);
        grads[i] = &tensors[i];
    }
    OK(fsdp_unit_post_backward(u.unit, grads, 3, NULL));
    OK(fsdp_model_finish_backward(model));
    for (int i = 0; i < 3; i++) {
        double got[16];
        int64_t begin, count;
        spec_part(&model_specs[i], rank, n_sharded, &begin, &count);
        get_doubles(&u.grad[i]->dl_tensor, got);
        for (int64_t k = 0; k < count; k++) {
            double sum = 0;
            for (int m = 0; m < n; m++) sum += mesh_gradient(all[m] + i, begin + k);
            CHECK(got[k] == sum / n, "gradient of '%s' at %lld is %g, not %g", model_specs[i].name,
                  (long long)(begin + k), got[k], sum / n);
        }
    }
    host_unit_drop(&u);
    fsdp_model_release(model);
    fsdp_mesh_release(mesh);
}

static void rank_models(struct rank *r)
{
    static const struct want wants[] = {
        {{2, {2, 2}}, FSDP_FULL_SHARD, NULL, NULL, 3, 0},
        {{2, {2, 2}}, FSDP_FULL_SHARD, "a", NULL, 1, 0},
        {{2, {2, 2}}, FSDP_SHARD_GRAD_OP, "b", NULL, 2, 0},
        {{2, {2, 2}}, FSDP_NO_SHARD, NULL, NULL, 0, 3},
        {{2, {2, 2}}, FSDP_NO_SHARD, NULL, "a", 0, 1},
        {{2, {2, 2}}, FSDP_HYBRID_SHARD, NULL, NULL, 2, 1},
        {{2, {2, 2}}, FSDP_HYBRID_SHARD, "a", "b", 1, 2},
        {{2, {2, 2}}, FSDP_HYBRID_SHARD, "a", NULL, 1, 2},
        {{2, {2, 2}}, FSDP_HYBRID_SHARD_GRAD_OP, NULL, "b", 1, 2},
        {{3, {2, 1, 2}}, FSDP_FULL_SHARD, NULL, NULL, 7, 0},
        {{3, {2, 1, 2}}, FSDP_FULL_SHARD, "a", NULL, 1, 0},
        {{3, {2, 1, 2}}, FSDP_FULL_SHARD, "b", NULL, 2, 0},
        {{3, {2, 1, 2}}, FSDP_NO_SHARD, NULL, "c", 0, 4},
        {{3, {2, 1, 2}}, FSDP_HYBRID_SHARD, NULL, NULL, 4, 2},
        {{3, {2, 1, 2}}, FSDP_HYBRID_SHARD, "c", "a", 4, 1},
        {{3, {2, 1, 2}}, FSDP_HYBRID_SHARD_GRAD_OP, "a", "c", 1, 4},
        {{3, {2, 1, 2}}, FSDP_HYBRID_SHARD, NULL, "a", 4, 1},
        {{1, {4}}, FSDP_FULL_SHARD, "a", NULL, 1, 0},
        {{1, {4}}, FSDP_NO_SHARD, NULL, "a", 0, 1},
    };
    fsdp_group *group = group_make(r, 0, 65536);
    for (size_t i = 0; i < sizeof wants / sizeof *wants; i++) check_model(r, group, &wants[i]);
    fsdp_group_release(group);
}

Test(mesh, models_shard_and_replicate_over_the_dimensions_named)
{
    ranks_run(4, rank_models, NULL);
}

static fsdp_status model_try(fsdp_mesh *mesh, fsdp_strategy strategy, const char *shard, const char *replicate,
                             int32_t reshard)
{
    fsdp_model_options options = {.struct_size = sizeof options,
                                  .strategy = strategy,
                                  .shard_dim = shard,
                                  .replicate_dim = replicate,
                                  .reshard_after_forward = reshard};
    fsdp_model *model;
    fsdp_status status = fsdp_model_create_on_mesh(mesh, &options, &model);
    if (status == FSDP_OK) fsdp_model_release(model);
    return status;
}

static void rank_contradictions(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 65536);
    fsdp_mesh *square, *line;
    int64_t sizes[] = {2, 2}, length[] = {4};
    OK(fsdp_mesh_create(group, 2, sizes, letters, &square));
    OK(fsdp_mesh_create(group, 1, length, letters, &line));
    uint64_t before = info_of(group).operations;
    REFUSED(model_try(square, FSDP_FULL_SHARD, "z", NULL, 0), FSDP_ERR_INVALID, "no dimension 'z': it has 'a', 'b'");
    REFUSED(model_try(square, FSDP_HYBRID_SHARD, "a", "z", 0), FSDP_ERR_INVALID, "'z'");
    REFUSED(model_try(square, FSDP_FULL_SHARD, "a", "b", 0), FSDP_ERR_INVALID, "replicate_dim");
    REFUSED(model_try(square, 0, NULL, "b", 0), FSDP_ERR_INVALID, "replicate_dim");
    REFUSED(model_try(square, FSDP_NO_SHARD, "a", NULL, 0), FSDP_ERR_INVALID, "shard_dim");
    REFUSED(model_try(square, FSDP_HYBRID_SHARD, "a", "a", 0), FSDP_ERR_INVALID, "both 'a'");
    REFUSED(model_try(line, FSDP_HYBRID_SHARD, NULL, NULL, 0), FSDP_ERR_INVALID, "two dimensions");
    REFUSED(model_try(square, 6, NULL, NULL, 0), FSDP_ERR_INVALID, "strategy is 6");
    REFUSED(model_try(square, FSDP_HYBRID_SHARD_GRAD_OP, NULL, NULL, FSDP_RESHARD_ALWAYS), FSDP_ERR_INVALID,
            "reshard_after_forward");
    REFUSED(model_try(square, FSDP_HYBRID_SHARD, NULL, NULL, 3), FSDP_ERR_INVALID, "does not divide the 2 ranks");
    REFUSED(model_try(square, FSDP_NO_SHARD, NULL, NULL, 2), FSDP_ERR_INVALID, "nothing is sharded");
    fsdp_model *model;
    fsdp_model_options hybrid = {.struct_size = sizeof hybrid, .strategy = FSDP_HYBRID_SHARD};
    fsdp_model_options named = {.struct_size = sizeof named, .shard_dim = "a"};
    REFUSED(fsdp_model_create(group, &hybrid, &model), FSDP_ERR_INVALID, "mesh");
    REFUSED(fsdp_model_create(group, &named, &model), FSDP_ERR_INVALID, "options.shard_dim");
    CHECK(info_of(group).operations == before, "refused without asking the others");

    /* A unit can't be hybrid in a model that is not. The model goes on. */
    fsdp_unit_options unit_options = {.struct_size = sizeof unit_options, .strategy = FSDP_HYBRID_SHARD};
    float value = 1;
    DLTensor full = view(&value, DTYPE_F32, 1, &model_specs[1].shape[0]);
    fsdp_param param = {.struct_size = sizeof param, .name = "w", .full = &full};
    fsdp_unit *unit;
    OK(fsdp_model_create_on_mesh(square, NULL, &model));
    REFUSED(fsdp_unit_create(model, "u", &param, 1, &unit_options, &unit), FSDP_ERR_INVALID, "unit 'u'");
    OK(fsdp_unit_create(model, "u", &param, 1, NULL, &unit));
    fsdp_unit_release(unit);
    fsdp_model_release(model);

    /* Ranks whose models differ in their dimensions are told, all of them. */
    int odd_one = r->rank == 3;
    REFUSED(model_try(square, FSDP_HYBRID_SHARD, odd_one ? "a" : "b", NULL, 0), FSDP_ERR_MISMATCH, "rank 3");
    REFUSED(model_try(square, 0, odd_one ? "a" : "b", NULL, 0), FSDP_ERR_MISMATCH, "rank 3");
    REFUSED(model_try(square, 0, odd_one ? NULL : "b", NULL, 0), FSDP_ERR_MISMATCH, "rank 3");
    REFUSED(model_try(square, odd_one ? FSDP_NO_SHARD : FSDP_HYBRID_SHARD, NULL, NULL, 0), FSDP_ERR_MISMATCH, "rank 3");
    OK(model_try(square, FSDP_HYBRID_SHARD, NULL, NULL, 0));
    fsdp_mesh_release(square);
    fsdp_mesh_release(line);
    fsdp_group_release(group);
}

Test(mesh, options_that_contradict_the_mesh_are_refused)
{
    ranks_run(4, rank_contradictions, NULL);
}
