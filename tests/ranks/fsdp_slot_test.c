/* Slots: which memory a unit's full parameters get, how much of it there is, and that nothing is made or mapped in the
 * steady state. Expected numbers are written out by hand; fsdp_test.c has random calls against an oracle. */
#include "fsdp_host.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

TestSuite(fsdp_slot, .timeout = RANKS_SECONDS + 30);

/* ---- mappings that the library makes: its calls of mmap come here (malloc's own don't) */

static atomic_llong mappings;

#if !SANITIZED
void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    atomic_fetch_add(&mappings, 1);
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset); // NOLINT(performance-no-int-to-ptr)
}
#endif

/* ---- units of so many pages */

enum { MOST = 8 };

struct paged {
    struct rank *r;
    fsdp_group *group;
    fsdp_model *model;
    int n, private;
    struct spec specs[MOST];
    char names[MOST][16];
    struct host_unit units[MOST];
    int seed[MOST], shown[MOST]; /* of the shards' values, and of the full ones; -1: sharded */
    uint64_t others;             /* operations but for publications and for making slots */
    uint64_t begun;
};

static void paged_make(struct paged *p, struct rank *r, fsdp_group *group, const fsdp_model_options *options,
                       const int *pages)
{
    int64_t floats = sysconf(_SC_PAGESIZE) / 4;
    *p = (struct paged){.r = r, .group = group, .private = options->private_unshard};
    p->model = model_make(group, options);
    for (; p->n < MOST && pages[p->n]; p->n++) {
        int i = p->n;
        snprintf(p->names[i], sizeof p->names[i], "w%d", i);
        p->specs[i] = (struct spec){.name = p->names[i], .type = DTYPE_F32, .ndim = 1};
        p->specs[i].shape[0] = pages[i] * floats - 3; /* almost */
        p->seed[i] = 100 * i;
        p->shown[i] = -1;
        host_unit_make(r, p->model, NULL, &p->specs[i], 1, p->seed[i], &p->units[i]);
    }
    p->begun = operations_of(group);
}

static void paged_drop(struct paged *p)
{
    for (int i = 0; i < p->n; i++) host_unit_drop(&p->units[i]);
    fsdp_model_release(p->model);
}

/* f: pre_forward, F: post_forward, b: pre_backward, B: post_backward, u: unshard, U: reshard of unit i; e:
 * finish_backward and an optimizer's step; r: reset. */
static void paged_call(struct paged *p, char call, int i)
{
    fsdp_unit *unit = p->units[i].unit;
    switch (call) {
    case 'f':
        OK(fsdp_unit_pre_forward(unit));
        p->shown[i] = p->seed[i];
        break;
    case 'b':
        OK(fsdp_unit_pre_backward(unit));
        p->shown[i] = p->seed[i];
        break;
    case 'u':
        OK(fsdp_unit_unshard(unit, NULL));
        p->shown[i] = p->seed[i];
        break;
    case 'F':
        OK(fsdp_unit_post_forward(unit));
        p->shown[i] = -1;
        break;
    case 'U':
        OK(fsdp_unit_reshard(unit));
        p->shown[i] = -1;
        break;
    case 'B':
        OK(backward_nothing(&p->units[i]));
        p->shown[i] = -1;
        p->others++;
        break;
    default:
        OK(call == 'r' ? fsdp_model_reset(p->model) : fsdp_model_finish_backward(p->model));
        p->others += call == 'r';
        for (int k = 0; k < p->n; k++) {
            p->shown[k] = -1;
            set_shards(&p->units[k], ++p->seed[k]);
        }
        break;
    }
}

/* What is full holds its own values, where it always was. */
static void paged_check(const struct paged *p, const char *when)
{
    for (int i = 0; i < p->n; i++) {
        DLManagedTensorVersioned *now;
        OK(fsdp_unit_param_full(p->units[i].unit, 0, &now));
        CHECK(now->dl_tensor.data == p->units[i].full[0]->dl_tensor.data, "%s: unit %d has moved", when, i);
        now->deleter(now);
        CHECK((state_of(&p->units[i]) == FSDP_UNIT_UNSHARDED) >= (p->shown[i] >= 0), "%s: unit %d is not full", when,
              i);
        if (p->shown[i] >= 0) expect_full(&p->units[i], p->shown[i], when);
    }
}

static int64_t publications_of(const struct paged *p)
{
    int64_t n = 0;
    for (int i = 0; i < p->n; i++) {
        fsdp_unit_info info = {.struct_size = sizeof info};
        OK(fsdp_unit_query(p->units[i].unit, &info));
        n += info.publications;
    }
    return n;
}

/* ---- the rules, one by one */

/* Each step may say how many slots there are then, of how many pages in all, and how often anything has been published
 * and a slot made so far. */
static const struct script {
    const char *what;
    int pages[MOST];
    const char *steps;
} scripts[] = {
    {"units that are full in turn share a slot; backward finds the last one's values in it",
     {2, 2, 2},
     "f0=1,2,1,1 F0 f1=1,2,2,1 F1 f2=1,2,3,1 F2 b2=1,2,3,1 B2 b1=1,2,4,1 B1 b0=1,2,5,1 B0 e=1,2,5,1 f0=1,2,6,1 F0"},
    {"nested units take as many as are full at once; backward finds all",
     {2, 2, 2},
     "f0=1,2,1,1 f1=2,4,2,2 f2=3,6,3,3 F2 F1 F0 b0=3,6,3,3 b1=3,6,3,3 b2=3,6,3,3 B2 B1 B0 e=3,6,3,3 f1=3,6,4,3 F1 e"},
    {"a larger unit's slot takes the place of one that is too small",
     {1, 3, 2, 4},
     "f0=1,1,1,1 F0 f1=1,3,2,2 F1 f2=1,3,3,2 F2 f3=1,4,4,3 F3 f0=1,4,5,3 F0 e=1,4,5,3"},
    {"of those that are too small, the largest",
     {1, 2, 3, 1},
     "f0=1,1,1,1 f1=2,3,2,2 F0 F1 f2=2,4,3,3 f3=2,4,4,3 F2 F3 e"},
    {"of those that will do, the smallest",
     {4, 2, 1},
     "f0=1,4,1,1 f1=2,6,2,2 F0 F1 f2=2,6,3,2 f0=2,6,4,2 f1=3,8,5,3 F2 F0 F1 e=3,8,5,3"},
    {"one that is held is nobody else's",
     {2, 1, 1},
     "f0=1,2,1,1 f1=2,3,2,2 F1 f2=2,3,3,2 F2 f1=2,3,4,2 F1 F0 f1=2,3,5,2 F1 e"},
    {"its last one before all others, which keep what they hold",
     {1, 1},
     "f0=1,1,1,1 f1=2,2,2,2 F1 F0 f1=2,2,3,2 F1 b0=2,2,3,2 B0 e"},
    {"what another unit has taken is published anew, in another slot if need be",
     {1, 1},
     "f0=1,1,1,1 F0 f1=1,1,2,1 F1 b1=1,1,2,1 b0=2,2,3,2 B0 B1 e f0=2,2,4,2 F0 f1=2,2,5,2 F1 b1=2,2,5,2 b0=2,2,5,2"},
    {"by hand as by hooks; before a forward it is published always",
     {1, 2},
     "u0=1,1,1,1 U0 u1=1,2,2,2 U1 u1=1,2,3,2 U1 f1=1,2,4,2 F1 b1=1,2,4,2 U1 b1=1,2,4,2 B1 e"},
    {"a reset gives them up, since ranks may have come to hold different ones",
     {1, 1},
     "f0=1,1,1,1 f1=2,2,2,2 r=0,0,2,2 b1=1,1,3,3 b0=2,2,4,4 B0 B1 e f1=2,2,5,4 F1"},
    {"units that stay full until the end of backward",
     {1, 1},
     "f0 f1=2,2,2,2 e=2,2,2,2 f1=2,2,3,2 f0=2,2,4,2 e=2,2,4,2"},
};

static void expect_slots(struct paged *p, const int64_t *want, const char *when)
{
    fsdp_memory_info info = memory_of(p->model);
    int64_t page = sysconf(_SC_PAGESIZE);
    CHECK(info.slots == want[0], "%lld slots, %s", (long long)info.slots, when);
    CHECK(info.unsharded == want[1] * page, "%lld bytes, %s", (long long)info.unsharded, when);
    CHECK(info.host_unsharded == info.unsharded * (p->private ? p->r->size : 1), "%lld bytes on the host, %s",
          (long long)info.host_unsharded, when);
    CHECK(publications_of(p) == want[2], "%lld publications, %s", (long long)publications_of(p), when);
    uint64_t operations = (uint64_t)(want[2] + want[3] * (p->private ? 1 : 2)) + p->others;
    CHECK(operations_of(p->group) - p->begun == operations, "%llu operations, not %llu, %s",
          (unsigned long long)(operations_of(p->group) - p->begun), (unsigned long long)operations, when);
}

static void run_script(struct rank *r, fsdp_group *group, const struct script *s, int private)
{
    struct paged p;
    char when[512];
    paged_make(&p, r, group, &(fsdp_model_options){.private_unshard = private}, s->pages);
    for (const char *at = s->steps; *at;) {
        char call = *at++, *end;
        int i = *at >= '0' && *at <= '9' ? *at++ - '0' : 0;
        paged_call(&p, call, i);
        snprintf(when, sizeof when, "%s (%s): after %.*s", s->what, private ? "private" : "shared",
                 (int)(at - s->steps), s->steps);
        paged_check(&p, when);
        if (*at == '=') {
            int64_t want[4];
            for (int k = 0; k < 4; k++, at = end) want[k] = strtoll(at + 1, &end, 10);
            expect_slots(&p, want, when);
        }
        while (*at == ' ') at++;
    }
    paged_drop(&p);
}

static void rank_scripts(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int private = 0; private < 2; private ++)
        for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) run_script(r, group, &scripts[i], private);
    fsdp_group_release(group);
}

Test(fsdp_slot, units_take_slots_by_the_rules)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_scripts, NULL);
}

/* ---- a transformer: a root that is full throughout, layers in turn */

static const struct shape {
    int root, layers[MOST];
} shapes[] = {{3, {4, 4, 4, 4}}, {3, {2, 5, 4, 7}}, {6, {1, 2, 3, 4, 5}}, {2, {9, 1, 8, 1, 7, 1}}};

static const struct mode {
    int root, forward;
    fsdp_backward_prefetch backward;
    int slots;     /* in the steady state */
    int published; /* in each iteration, of equal layers: twice all, less what backward finds */
} modes[] = {
    {0, 0, FSDP_BACKWARD_NONE, 1, 7}, {0, 1, FSDP_BACKWARD_NONE, 2, 6}, {0, 1, FSDP_BACKWARD_PRE, 2, 6},
    {0, 0, FSDP_BACKWARD_PRE, 2, 6},  {0, 1, FSDP_BACKWARD_POST, 2, 6}, {0, 0, FSDP_BACKWARD_POST, 1, 7},
    {1, 0, FSDP_BACKWARD_NONE, 2, 8}, {1, 1, FSDP_BACKWARD_PRE, 3, 7},  {1, 2, FSDP_BACKWARD_PRE, 4, 6},
};

static int lines_in_maps(void)
{
    FILE *f = fopen("/proc/self/maps", "r");
    int n = 0;
    for (int c; f && (c = fgetc(f)) != EOF;) n += c == '\n';
    if (f) fclose(f);
    return n;
}

/* Whether memory is within its bound: the shards, and so many of the largest unit. */
static void bounded(const struct paged *p, const struct mode *m, int64_t largest, const char *when)
{
    fsdp_memory_info info = memory_of(p->model);
    CHECK(info.slots <= m->slots, "%lld slots, %s", (long long)info.slots, when);
    CHECK(info.unsharded_peak <= m->slots * largest, "%lld bytes of slots at once, not %d of %lld, %s",
          (long long)info.unsharded_peak, m->slots, (long long)largest, when);
    CHECK(info.host_unsharded_peak == info.unsharded_peak * (p->private ? p->r->size : 1), "on the host, %s", when);
    paged_check(p, when);
}

static void transformer(struct rank *r, fsdp_group *group, const struct shape *shape, const struct mode *m, int private)
{
    fsdp_model_options options = {
        .private_unshard = private, .forward_prefetch = m->forward, .backward_prefetch = m->backward};
    int pages[MOST] = {0}, n = 0;
    int64_t largest = 0, published = 0;
    uint64_t operations = 0;
    struct paged p;
    char when[160];
    if (m->root) pages[n++] = shape->root;
    for (int l = 0; shape->layers[l]; l++) pages[n++] = shape->layers[l];
    for (int i = 0; i < n; i++)
        if (pages[i] * sysconf(_SC_PAGESIZE) > largest) largest = pages[i] * sysconf(_SC_PAGESIZE);
    paged_make(&p, r, group, &options, pages);
    for (int iteration = 0; iteration < 6; iteration++) {
        uint64_t began = operations_of(group);
        int64_t before = publications_of(&p), mapped = mappings;
        int maps = lines_in_maps();
        snprintf(when, sizeof when, "iteration %d of %d layers from %d pages, root %d, prefetch %d/%d, %s", iteration,
                 n - m->root, shape->layers[0], m->root, m->forward, m->backward, private ? "private" : "shared");
        if (m->root) paged_call(&p, 'f', 0);
        for (int i = m->root; i < n; i++) {
            paged_call(&p, 'f', i);
            bounded(&p, m, largest, when);
            paged_call(&p, 'F', i);
        }
        if (m->root) paged_call(&p, 'F', 0);
        if (m->root) paged_call(&p, 'b', 0);
        for (int i = n - 1; i >= m->root; i--) {
            paged_call(&p, 'b', i);
            bounded(&p, m, largest, when);
            paged_call(&p, 'B', i);
        }
        if (m->root) paged_call(&p, 'B', 0);
        paged_call(&p, 'e', 0);
        bounded(&p, m, largest, when);
        if (iteration > 3) { /* one to learn the order, some for slots to become large enough */
            CHECK(mappings == mapped, "%lld mappings, %s", (long long)(mappings - mapped), when);
            CHECK(SANITIZED || lines_in_maps() == maps, "%d mappings more, %s", lines_in_maps() - maps, when);
            CHECK(memory_of(p.model).slots == m->slots, "%lld slots, %s", (long long)memory_of(p.model).slots, when);
            CHECK(publications_of(&p) - before == published, "publications changed, %s", when);
            CHECK(operations_of(group) - began == operations, "operations changed, %s", when);
            CHECK(operations == (uint64_t)(published + n), "%llu operations for %lld publications and %d units, %s",
                  (unsigned long long)operations, (long long)published, n, when);
            CHECK(shape != &shapes[0] || published == m->published, "%lld publications, %s", (long long)published,
                  when);
        }
        published = publications_of(&p) - before;
        operations = operations_of(group) - began;
    }
    paged_drop(&p);
}

static void rank_transformers(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int private = 0; private < 2; private ++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
                transformer(r, group, &shapes[s], &modes[m], private);
    fsdp_group_release(group);
}

Test(fsdp_slot, memory_is_the_shards_and_as_many_units_as_are_in_flight)
{
    for (int n = 1; n <= 3; n++) ranks_run(n, rank_transformers, NULL);
}
