/* Loading: what is wanted against what is there, name by name, then the values. See state.h.
 *
 * All that can be wrong is found before anything is written, so a load that is refused has changed nothing. A tensor
 * with several names (tied ones) is wanted once, and read by the first of its names that is there.
 */
#include "state/state.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- a dict as a source */

static const struct state_entry *dict_entry(const struct source *source, int64_t index)
{
    const fsdp_state_dict *dict = source->of;
    return dict->entries[index];
}

static int64_t dict_find(const struct source *source, const char *name)
{
    const fsdp_state_dict *dict = source->of;
    int64_t index = state_dict_find(dict, name);
    return index >= 0 && dict->entries[index]->kind == FSDP_ENTRY_TENSOR ? index : -1;
}

static int dict_holds(const struct source *source, int64_t index, const struct box *want)
{
    return box_contains(&dict_entry(source, index)->part, want);
}

static void dict_view(const struct source *source, int64_t index, const struct box *want, struct tensor *out)
{
    const struct state_entry *values = state_dict_values(source->of, index);
    *out = values->data;
    if (box_count(want))
        box_narrow(out, &values->part, want);
    else /* it may lie anywhere */
        tensor_make(out, NULL, values->data.type, want->ndim, want->size);
}

static fsdp_status dict_read(const struct source *source, int64_t index, const struct box *want,
                             const struct tensor *out)
{
    struct tensor view;
    if (!box_count(want)) return FSDP_OK;
    dict_view(source, index, want, &view);
    if (!tensor_same_place(&view, out)) tensor_copy(out, &view);
    return FSDP_OK;
}

static void dict_json(const struct source *source, int64_t index, const char **name, const char **text)
{
    const fsdp_state_dict *dict = source->of;
    *name = dict->json[index].name;
    *text = dict->json[index].text;
}

void state_dict_source(const fsdp_state_dict *dict, struct source *out)
{
    *out = (struct source){.what = "the state dict",
                           .n = dict->n_entries,
                           .entry = dict_entry,
                           .find = dict_find,
                           .holds = dict_holds,
                           .view = dict_view,
                           .read = dict_read,
                           .n_json = dict->n_json,
                           .json = dict_json,
                           .of = dict};
}

/* ---- names */

#define NAMES_SHOWN 5

/* Missing or unexpected ones: told to the host, and the first few kept for the message. */
struct names {
    const fsdp_load_options *options;
    int64_t n[2];
    char text[2][360]; /* 'a', 'b' */
};

static void names_add(struct names *names, fsdp_name_kind kind, const char *name)
{
    char *text = names->text[kind];
    size_t used = strlen(text), room = sizeof names->text[kind] - used;
    if (names->n[kind]++ < NAMES_SHOWN) snprintf(text + used, room, "%s'%.60s'", used ? ", " : "", name);
    if (names->options->on_name) names->options->on_name(kind, name, names->options->user);
}

static fsdp_status names_verdict(const struct names *names, const struct source *from)
{
    int64_t missing = names->n[FSDP_NAME_MISSING], unexpected = names->n[FSDP_NAME_UNEXPECTED];
    if (names->options->partial || (!missing && !unexpected)) return FSDP_OK;
    char lacks[420] = "", has[420] = "";
    if (missing)
        snprintf(lacks, sizeof lacks, "lacks %lld wanted names: %s%s", (long long)missing,
                 names->text[FSDP_NAME_MISSING], missing > NAMES_SHOWN ? ", .." : "");
    if (unexpected)
        snprintf(has, sizeof has, "has %lld names that are not wanted: %s%s", (long long)unexpected,
                 names->text[FSDP_NAME_UNEXPECTED], unexpected > NAMES_SHOWN ? ", .." : "");
    return err(FSDP_ERR_INVALID, "%s %s%s%s; options.partial 1 loads what there is", from->what, lacks,
               missing && unexpected ? ", and " : "", has);
}

static int is_tensor(const struct state_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR;
}

static fsdp_status find_wanted(const struct source *from, const fsdp_state_dict *into, const char *prefix,
                               struct names *names, struct state_plan *plan)
{
    size_t prefix_bytes = strlen(prefix);
    char *name = mem_alloc(prefix_bytes + STATE_NAME_MOST + 1);
    if (!name) return mem_none("a name", prefix_bytes + STATE_NAME_MOST + 1);
    memcpy(name, prefix, prefix_bytes);
    for (int64_t i = 0; i < into->n_entries; i++) {
        const struct state_entry *entry = into->entries[i];
        int64_t first = entry->tied_to < 0 ? i : entry->tied_to;
        if (entry->tied_to < 0) plan->from[i] = -1;
        if (!is_tensor(entry) || plan->from[first] >= 0) continue;
        strcpy(name + prefix_bytes, entry->name);
        plan->from[first] = from->find(from, name);
    }
    for (int64_t i = 0; i < into->n_entries; i++) {
        const struct state_entry *entry = into->entries[i];
        if (entry->tied_to >= 0) plan->from[i] = -1;
        if (!is_tensor(entry) || entry->tied_to >= 0 || plan->from[i] >= 0) continue;
        strcpy(name + prefix_bytes, entry->name);
        names_add(names, FSDP_NAME_MISSING, name);
    }
    mem_free(name);
    return FSDP_OK;
}

static void find_unexpected(const struct source *from, const fsdp_state_dict *into, const char *prefix,
                            struct names *names)
{
    size_t prefix_bytes = strlen(prefix);
    for (int64_t i = 0; i < from->n; i++) {
        const struct state_entry *entry = from->entry(from, i);
        if (!is_tensor(entry) || strncmp(entry->name, prefix, prefix_bytes) != 0) continue;
        int64_t at = state_dict_find(into, entry->name + prefix_bytes);
        if (at < 0 || !is_tensor(into->entries[at])) names_add(names, FSDP_NAME_UNEXPECTED, entry->name);
    }
}

/* ---- values */

static const char *whole_text(const struct state_entry *entry, char text[TENSOR_TEXT])
{
    struct tensor whole;
    tensor_make(&whole, NULL, entry->type, entry->whole.ndim, entry->whole.size);
    return tensor_text(&whole, text);
}

static fsdp_status check_values(const struct source *from, int64_t index, const struct state_entry *wanted,
                                const struct box *want)
{
    char a[TENSOR_TEXT], b[TENSOR_TEXT];
    const struct state_entry *there = from->entry(from, index);
    int like_part = there->whole.ndim == want->ndim &&
                    memcmp(there->whole.size, want->size, (size_t)want->ndim * sizeof *want->size) == 0;
    CHECK_ARG(box_same(&there->whole, &wanted->whole), "'%.200s' is %s in %s, but %s is wanted: shapes must be equal%s",
              there->name, whole_text(there, a), from->what, whole_text(wanted, b),
              like_part ? " (it has that of this rank's part: say so with entry.shape and offset when it is added, or "
                          "load it into a dict of the model of kind FSDP_STATE_LOCAL)"
                        : "");
    CHECK_ARG(
        !there->home || !wanted->home ||
            (box_same(&there->home->whole, &wanted->home->whole) && box_same(&there->home->part, &wanted->home->part)),
        "'%.200s' is another part of its parameter in %s than the one that is wanted: a dict of kind "
        "FSDP_STATE_LOCAL is of use where each rank has the same part",
        there->name, from->what);
    CHECK_ARG(there->type == wanted->type || (dtype_is_float(there->type) && dtype_is_float(wanted->type)),
              "'%.200s' is %s in %s, but %s is wanted: only floats are converted", there->name, whole_text(there, a),
              from->what, whole_text(wanted, b));
    CHECK_ARG(!from->holds || from->holds(from, index, want),
              "'%.200s' is there in part only in %s, and not the part that is wanted: gather it, or load on ranks that "
              "have the same parts",
              there->name, from->what);
    return FSDP_OK;
}

static fsdp_status check_writable(const struct state_entry *wanted)
{
    char name[240];
    struct tensor out;
    snprintf(name, sizeof name, "the tensor of '%.200s'", wanted->name);
    CHECK_ARG(!(wanted->tensor->flags & DLPACK_FLAG_BITMASK_READ_ONLY),
              "%s is read-only: nothing can be loaded into it", name);
    return tensor_import_output(&wanted->tensor->dl_tensor, name, &out);
}

void state_plan_free(struct state_plan *plan)
{
    mem_free(plan->from);
    plan->from = NULL;
}

fsdp_status state_plan_make(const struct source *from, const fsdp_state_dict *into, const fsdp_load_options *options,
                            int whole, struct state_plan *plan)
{
    struct names names = {.options = options};
    const char *prefix = options->prefix ? options->prefix : "";
    *plan = (struct state_plan){.from = mem_array((size_t)into->n_entries, sizeof *plan->from)};
    if (!plan->from) return mem_none("a load", (size_t)into->n_entries * sizeof *plan->from);
    fsdp_status status = find_wanted(from, into, prefix, &names, plan);
    if (status == FSDP_OK) find_unexpected(from, into, prefix, &names);
    if (status == FSDP_OK) status = names_verdict(&names, from);
    for (int64_t i = 0; i < into->n_entries && status == FSDP_OK; i++) {
        const struct state_entry *entry = into->entries[i];
        if (plan->from[i] < 0) continue;
        const struct box *want = whole ? &entry->whole : &entry->part;
        status = check_values(from, plan->from[i], entry, want);
        if (status == FSDP_OK && !whole) status = check_writable(entry);
        plan->bytes += box_count(want) * (int64_t)dtype_size(entry->type);
    }
    if (status == FSDP_OK) status = state_check_memory(from, into, plan, whole);
    if (status != FSDP_OK) state_plan_free(plan);
    return status;
}

/* ---- JSON: copied before anything is written, set after */

struct json_copies {
    struct state_json *values;
    int64_t n;
};

static void json_free(struct json_copies *copies)
{
    for (int64_t i = 0; i < copies->n; i++) {
        mem_free(copies->values[i].name);
        mem_free(copies->values[i].text);
    }
    mem_free(copies->values);
}

static fsdp_status json_take(const struct source *from, fsdp_state_dict *into, const char *prefix,
                             struct json_copies *copies)
{
    size_t prefix_bytes = strlen(prefix);
    copies->values = mem_array((size_t)from->n_json, sizeof *copies->values);
    if (!copies->values) return mem_none("JSON values", (size_t)from->n_json * sizeof *copies->values);
    for (int64_t i = 0; i < from->n_json; i++) {
        const char *name, *text;
        from->json(from, i, &name, &text);
        if (strncmp(name, prefix, prefix_bytes) != 0 || !name[prefix_bytes]) continue;
        struct state_json *copy = &copies->values[copies->n++];
        copy->name = mem_strdup(name + prefix_bytes);
        copy->text = mem_strdup(text);
        if (!copy->name || !copy->text) return mem_none("a JSON value", strlen(text) + 1);
    }
    return state_json_room(into, copies->n);
}

/* ---- loading */

fsdp_status state_progress(const fsdp_load_options *options, int64_t done, int64_t total)
{
    int32_t answer = options->on_progress ? options->on_progress(done, total, options->user) : 0;
    return answer ? err(FSDP_ERR_CALLBACK, "on_progress ended the load with %d, %lld of %lld bytes are written", answer,
                        (long long)done, (long long)total)
                  : FSDP_OK;
}

static fsdp_status read_all(const struct source *from, const fsdp_state_dict *into, const fsdp_load_options *options,
                            const struct state_plan *plan)
{
    int64_t done = 0;
    TRY(state_progress(options, 0, plan->bytes));
    for (int64_t i = 0; i < into->n_entries; i++) {
        const struct state_entry *entry = into->entries[i];
        if (plan->from[i] < 0) continue;
        TRY(from->read(from, plan->from[i], &entry->part, &entry->data));
        done += box_count(&entry->part) * (int64_t)dtype_size(entry->type);
        if (box_count(&entry->part)) TRY(state_progress(options, done, plan->bytes));
    }
    return FSDP_OK;
}

fsdp_status state_load(const struct source *from, fsdp_state_dict *into, const fsdp_load_options *options)
{
    struct state_plan plan;
    struct json_copies json = {0};
    TRY(state_plan_make(from, into, options, 0, &plan));
    fsdp_status status = json_take(from, into, options->prefix ? options->prefix : "", &json);
    if (status == FSDP_OK) status = read_all(from, into, options, &plan);
    for (int64_t i = 0; i < json.n && status == FSDP_OK; i++) state_json_put(into, &json.values[i]);
    json_free(&json);
    state_plan_free(&plan);
    return status;
}
