/* See fsdp_host.h. */
#include "fsdp_host.h"

#include <time.h>
#include <unistd.h>

/* ---- numbers */

uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int random_below(uint64_t *state, int n)
{
    return (int)(random_next(state) % (uint64_t)n);
}

double random_real(uint64_t *state)
{
    return (double)(random_next(state) >> 11) / (double)(1ull << 52) - 1;
}

uint64_t random_seed(void)
{
    const char *given = getenv("FSDP_TEST_SEED");
    if (given && *given) return strtoull(given, NULL, 0);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return ((uint64_t)t.tv_sec * 1000003u + (uint64_t)t.tv_nsec / 1000) % 1000000000u;
}

/* ---- tensors */

DLTensor view(void *data, enum dtype type, int ndim, const int64_t *shape)
{
    return (DLTensor){.data = data,
                      .device = {kDLCPU, 0},
                      .ndim = ndim,
                      .dtype = dtype_to_dl(type),
                      .shape = (int64_t *)(uintptr_t)shape};
}

int64_t elements(const DLTensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

size_t tensor_bytes(const DLTensor *t)
{
    return (size_t)elements(t) * t->dtype.bits / 8;
}

void get_doubles(const DLTensor *t, double *out)
{
    DLTensor to = view(out, DTYPE_F64, t->ndim, t->shape);
    if (elements(t)) OK(fsdp_copy(t, &to));
}

void set_doubles(const DLTensor *t, const double *values)
{
    DLTensor from = view((double *)(uintptr_t)values, DTYPE_F64, t->ndim, t->shape);
    if (elements(t)) OK(fsdp_copy(&from, t));
}

double rounded(enum dtype type, double v)
{
    char held[8];
    DLTensor t = view(held, type, 0, NULL);
    set_doubles(&t, &v);
    get_doubles(&t, &v);
    return v;
}

double value_of(enum dtype type, int seed, int64_t element)
{
    static const int spans[] = {
        [DTYPE_F64] = 1 << 20, [DTYPE_F32] = 1 << 20, [DTYPE_F16] = 2048,
        [DTYPE_BF16] = 256,    [DTYPE_F8E4M3FN] = 17, [DTYPE_F8E5M2] = 9,
    };
    return (double)(((int64_t)seed * 31 + element * 7 + 1) % spans[type]);
}

static void delete_host_tensor(DLManagedTensorVersioned *self)
{
    free(self->manager_ctx);
    free(self);
}

DLManagedTensorVersioned *host_tensor(enum dtype type, int ndim, const int64_t *shape, int form)
{
    DLManagedTensorVersioned *m = calloc(1, sizeof *m);
    int64_t step = form == 2 ? 3 : 1, count = step, head = 2 * ndim + 2; /* shape, strides, room for an offset */
    for (int d = 0; d < ndim; d++) count *= shape[d];
    int64_t *dims = calloc((size_t)(head + 2 * count + 2), sizeof *dims);
    CHECK(m && dims, "no memory");
    m->version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    m->deleter = delete_host_tensor;
    m->manager_ctx = dims;
    m->dl_tensor = view(dims + head, type, ndim, dims);
    m->dl_tensor.byte_offset = form == 2 ? 16 : 0;
    for (int d = 0; d < ndim; d++) dims[d] = shape[d];
    for (int d = 0; d < ndim; d++) {
        int at = form == 1 ? d : ndim - 1 - d;
        dims[ndim + at] = step;
        step *= shape[at] ? shape[at] : 1;
    }
    m->dl_tensor.strides = dims + ndim;
    return m;
}

/* ---- slots */

static struct host_slot *slot_at(struct host_slots *s, int number)
{
    for (int i = 0; i < s->n && number; i++)
        if (s->at[i].number == number) return &s->at[i];
    return NULL;
}

static struct host_slot *slot_add(struct host_slots *s, int64_t bytes, struct host_slot *instead)
{
    if (instead) {
        s->bytes -= instead->bytes;
        *instead = s->at[--s->n];
    }
    CHECK(s->n < HOST_SLOTS, "too many slots for the oracle");
    s->at[s->n] = (struct host_slot){.number = ++s->made, .bytes = bytes};
    s->bytes += bytes;
    if (s->bytes > s->bytes_peak) s->bytes_peak = s->bytes;
    s->operations += s->private ? 1 : 2;
    return &s->at[s->n++];
}

/* Its last one when that is free, else the smallest free one that will do (the oldest of equal ones), else a new one in
 * place of the largest free one (the newest of equal ones). */
static struct host_slot *slot_choose(struct host_slots *s, const struct host_content *u)
{
    struct host_slot *last = slot_at(s, u->slot), *best = NULL, *largest = NULL;
    if (last && (!last->holder || last->holder == u->unit)) return last;
    for (int i = 0; i < s->n; i++) {
        struct host_slot *slot = &s->at[i];
        if (slot->holder) continue;
        if (slot->bytes >= u->bytes &&
            (!best || slot->bytes < best->bytes || (slot->bytes == best->bytes && slot->number < best->number)))
            best = slot;
        if (slot->bytes < u->bytes && (!largest || slot->bytes > largest->bytes ||
                                       (slot->bytes == largest->bytes && slot->number > largest->number)))
            largest = slot;
    }
    return best ? best : slot_add(s, u->bytes, largest);
}

void slots_publish(struct host_slots *s, struct host_content *u)
{
    struct host_slot *slot = slot_choose(s, u);
    slot->holder = u->unit;
    slot->content = u->publication = ++s->publications;
    u->slot = slot->number;
    s->operations++;
}

int slots_reuse(struct host_slots *s, struct host_content *u)
{
    struct host_slot *slot = slot_at(s, u->slot);
    if (!slot || !u->publication || slot->content != u->publication) return 0;
    if (slot->holder && slot->holder != u->unit) return 0;
    slot->holder = u->unit;
    return 1;
}

void slots_leave(struct host_slots *s, const struct host_content *u)
{
    struct host_slot *slot = slot_at(s, u->slot);
    if (slot && slot->holder == u->unit) slot->holder = 0;
}

void slots_end(struct host_slots *s)
{
    for (int i = 0; i < s->n; i++) s->at[i].holder = 0, s->at[i].content = 0;
}

void slots_reset(struct host_slots *s)
{
    s->n = 0;
    s->bytes = 0;
}

void slots_expect(const struct host_slots *s, fsdp_model *model, const char *when)
{
    fsdp_memory_info info = memory_of(model);
    CHECK(info.slots == s->n, "%lld slots, not %d, %s", (long long)info.slots, s->n, when);
    CHECK(info.unsharded == s->bytes, "slots of %lld bytes, not %lld, %s", (long long)info.unsharded,
          (long long)s->bytes, when);
    CHECK(info.unsharded_peak == s->bytes_peak, "slots of at most %lld bytes, not %lld, %s",
          (long long)info.unsharded_peak, (long long)s->bytes_peak, when);
}

/* ---- units */

fsdp_group *group_make(struct rank *r, int direct_read, int64_t staging_bytes)
{
    fsdp_group_options options;
    fsdp_group *group;
    OK(fsdp_group_options_init(&options, sizeof options));
    options.direct_read = direct_read;
    options.staging_bytes = staging_bytes;
    options.timeout_ms = RANKS_SECONDS * 1000;
    OK(fsdp_group_create(r->store, &options, &group));
    return group;
}

fsdp_model *model_make(fsdp_group *group, const fsdp_model_options *options)
{
    fsdp_model_options known;
    fsdp_model *model;
    OK(fsdp_model_options_init(&known, sizeof known));
    if (options) {
        known = *options;
        known.struct_size = sizeof known;
    }
    OK(fsdp_model_create(group, &known, &model));
    return model;
}

int64_t spec_count(const struct spec *spec)
{
    int64_t n = 1;
    for (int d = 0; d < spec->ndim; d++) n *= spec->shape[d];
    return n;
}

int64_t spec_bytes(const struct spec *spec)
{
    return spec_count(spec) * (int64_t)dtype_size(spec->type);
}

int64_t specs_slot_bytes(const struct spec *specs, int n)
{
    int64_t bytes = 0, page = sysconf(_SC_PAGESIZE);
    for (int i = 0; i < n; i++) bytes += (spec_bytes(&specs[i]) + 63) / 64 * 64;
    return (bytes + page - 1) / page * page;
}

void spec_part(const struct spec *spec, int rank, int size, int64_t *begin, int64_t *count)
{
    int64_t row = 1, chunk = (spec->shape[0] + size - 1) / size, start = chunk * rank;
    for (int d = 1; d < spec->ndim; d++) row *= spec->shape[d];
    if (start > spec->shape[0]) start = spec->shape[0];
    int64_t rows = spec->shape[0] - start < chunk ? spec->shape[0] - start : chunk;
    *begin = start * row;
    *count = rows * row;
}

fsdp_status unit_try(fsdp_model *model, const char *name, const struct spec *specs, int n, int seed, fsdp_unit **out)
{
    fsdp_param params[HOST_PARAMS] = {0};
    DLTensor tensors[HOST_PARAMS];
    for (int i = 0; i < n; i++) {
        int64_t count = spec_count(&specs[i]);
        double *values = malloc((size_t)(count + 1) * sizeof *values);
        for (int64_t k = 0; k < count; k++)
            values[k] = dtype_is_float(specs[i].type) ? value_of(specs[i].type, seed + i, k) : 0;
        tensors[i] = view(malloc((size_t)(count + 1) * 8), specs[i].type, specs[i].ndim, specs[i].shape);
        set_doubles(&tensors[i], values);
        free(values);
        params[i] = (fsdp_param){
            .struct_size = sizeof *params, .name = specs[i].name, .full = &tensors[i], .frozen = specs[i].frozen};
    }
    fsdp_status status = fsdp_unit_create(model, name, params, n, NULL, out);
    for (int i = 0; i < n; i++) free(tensors[i].data);
    return status;
}

void host_unit_make(struct rank *r, fsdp_model *model, const char *name, const struct spec *specs, int n, int seed,
                    struct host_unit *u)
{
    *u = (struct host_unit){.n = n, .rank = r->rank, .size = r->size, .specs = specs};
    OK(unit_try(model, name, specs, n, seed, &u->unit));
    for (int i = 0; i < n; i++) {
        OK(fsdp_unit_param_full(u->unit, i, &u->full[i]));
        OK(fsdp_unit_param_shard(u->unit, i, &u->shard[i]));
        if (!specs[i].frozen) OK(fsdp_unit_param_grad(u->unit, i, &u->grad[i]));
    }
}

void host_unit_drop(struct host_unit *u)
{
    for (int i = 0; i < u->n; i++) {
        u->full[i]->deleter(u->full[i]);
        u->shard[i]->deleter(u->shard[i]);
        if (u->grad[i]) u->grad[i]->deleter(u->grad[i]);
    }
    fsdp_unit_release(u->unit);
}

/* The first element that is not as it should be, or -1. */
static int64_t first_wrong(const DLTensor *t, enum dtype type, int seed, int64_t begin, double *got)
{
    int64_t count = elements(t), wrong = -1;
    double *values = malloc((size_t)(count + 1) * sizeof *values);
    get_doubles(t, values);
    for (int64_t k = 0; k < count && wrong < 0; k++)
        if (values[k] != value_of(type, seed, begin + k)) {
            wrong = k;
            *got = values[k];
        }
    free(values);
    return wrong;
}

void expect_full(const struct host_unit *u, int seed, const char *when)
{
    for (int i = 0; i < u->n; i++) {
        double got = 0;
        int64_t k = first_wrong(&u->full[i]->dl_tensor, u->specs[i].type, seed + i, 0, &got);
        CHECK(k < 0, "%s: element %lld of '%s' is %g, not %g", when, (long long)k, u->specs[i].name, got,
              value_of(u->specs[i].type, seed + i, k));
    }
}

int full_is(const struct host_unit *u, int seed)
{
    for (int i = 0; i < u->n; i++) {
        double got;
        if (first_wrong(&u->full[i]->dl_tensor, u->specs[i].type, seed + i, 0, &got) >= 0) return 0;
    }
    return 1;
}

void set_shards(const struct host_unit *u, int seed)
{
    for (int i = 0; i < u->n; i++) {
        int64_t begin, count;
        spec_part(&u->specs[i], u->rank, u->size, &begin, &count);
        double *values = malloc((size_t)(count + 1) * sizeof *values);
        for (int64_t k = 0; k < count; k++) values[k] = value_of(u->specs[i].type, seed + i, begin + k);
        set_doubles(&u->shard[i]->dl_tensor, values);
        free(values);
    }
}

void scribble(const struct host_unit *u, uint64_t *random)
{
    for (int i = 0; i < u->n; i++) {
        const DLTensor *t = &u->full[i]->dl_tensor;
        size_t bytes = tensor_bytes(t);
        if (!bytes) continue;
        switch (random_below(random, 4)) {
        case 0:
            memset(t->data, 0x55, bytes);
            break;
        case 1:
            ((char *)t->data)[bytes - 1] = 0x55;
            break;
        case 2:
            ((char *)t->data)[random_next(random) % bytes] = 0x55;
            break;
        default:
            break;
        }
    }
}

fsdp_unit_state state_of(const struct host_unit *u)
{
    fsdp_unit_state state;
    OK(fsdp_unit_query_state(u->unit, &state));
    return state;
}

fsdp_memory_info memory_of(fsdp_model *model)
{
    fsdp_memory_info info = {.struct_size = sizeof info};
    OK(fsdp_model_memory(model, &info));
    return info;
}

uint64_t operations_of(fsdp_group *group)
{
    fsdp_group_info info = {.struct_size = sizeof info};
    OK(fsdp_group_query(group, &info));
    return info.operations;
}

fsdp_status backward_nothing(const struct host_unit *u)
{
    const DLTensor *none[HOST_PARAMS] = {0};
    return fsdp_unit_post_backward(u->unit, none, u->n, NULL);
}

void nap(int64_t us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}
