/* Exported functions of state dicts: check arguments, call the module, return. */
#include "api.h"

#include <string.h>

/* ---- dicts */

fsdp_status fsdp_state_dict_create(fsdp_state_dict **dict)
{
    CHECK_OUT(dict);
    return state_dict_create(dict);
}

fsdp_status fsdp_state_dict_retain(fsdp_state_dict *dict)
{
    CHECK_STATE_DICT(dict);
    ref_get(&dict->ref);
    return FSDP_OK;
}

void fsdp_state_dict_release(fsdp_state_dict *dict)
{
    if (state_dict_is(dict)) state_dict_release(dict);
}

fsdp_status fsdp_state_dict_add(fsdp_state_dict *dict, const fsdp_entry *entry, DLManagedTensorVersioned *tensor)
{
    CHECK_STATE_DICT(dict);
    CHECK_ARG(entry, "entry is NULL: it says the tensor's name and shape");
    if (tensor) TRY(managed_accept(tensor, "tensor"));
    fsdp_entry known;
    TRY(ABI_READ(fsdp_entry, entry, &known));
    return state_dict_add(dict, &known, tensor);
}

fsdp_status fsdp_state_dict_set_json(fsdp_state_dict *dict, const char *name, const char *text)
{
    CHECK_STATE_DICT(dict);
    CHECK_ARG(name, "name is NULL");
    CHECK_ARG(text, "text is NULL: one JSON value");
    return state_dict_set_json(dict, name, text);
}

fsdp_status fsdp_state_dict_query(fsdp_state_dict *dict, fsdp_state_dict_info *info)
{
    CHECK_STATE_DICT(dict);
    TRY(ABI_WRITE_CHECK(fsdp_state_dict_info, info));
    fsdp_state_dict_info now;
    state_dict_query(dict, &now);
    return ABI_WRITE(fsdp_state_dict_info, info, &now);
}

static fsdp_status check_index(int64_t index, int64_t n, const char *what)
{
    CHECK_ARG(index >= 0 && index < n, "index is %lld: the state dict has %lld %s", (long long)index, (long long)n,
              what);
    return FSDP_OK;
}

fsdp_status fsdp_state_dict_entry(fsdp_state_dict *dict, int64_t index, fsdp_entry *entry)
{
    CHECK_STATE_DICT(dict);
    CHECK_OUT(entry);
    TRY(ABI_WRITE_CHECK(fsdp_entry, entry));
    TRY(check_index(index, dict->n_entries, "entries"));
    fsdp_entry now;
    const struct state_entry *found = dict->entries[index];
    state_entry_tell(found, found->tied_to < 0 ? NULL : dict->entries[found->tied_to]->name, &now);
    return ABI_WRITE(fsdp_entry, entry, &now);
}

fsdp_status fsdp_state_dict_find(fsdp_state_dict *dict, const char *name, int64_t *index)
{
    CHECK_STATE_DICT(dict);
    CHECK_ARG(name, "name is NULL");
    CHECK_OUT(index);
    int64_t found = state_dict_find(dict, name);
    if (found < 0) return err(FSDP_ERR_NOT_FOUND, "name '%.200s' is not in the state dict", name);
    *index = found;
    return FSDP_OK;
}

fsdp_status fsdp_state_dict_tensor(fsdp_state_dict *dict, int64_t index, DLManagedTensorVersioned **tensor)
{
    CHECK_STATE_DICT(dict);
    CHECK_OUT(tensor);
    TRY(check_index(index, dict->n_entries, "entries"));
    return state_dict_tensor(dict, index, tensor);
}

fsdp_status fsdp_state_dict_json(fsdp_state_dict *dict, int64_t index, const char **name, const char **text)
{
    CHECK_STATE_DICT(dict);
    CHECK_OUT(name);
    CHECK_OUT(text);
    TRY(check_index(index, dict->n_json, "JSON values"));
    *name = dict->json[index].name;
    *text = dict->json[index].text;
    return FSDP_OK;
}

/* ---- made from a model, or from the ranks' parts */

fsdp_status fsdp_state_dict_options_init(fsdp_state_dict_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_state_dict_options, options, struct_size);
}

static fsdp_status read_options(const fsdp_state_dict_options *options, fsdp_state_dict_options *known)
{
    TRY(ABI_READ(fsdp_state_dict_options, options, known));
    CHECK_ARG(known->kind >= FSDP_STATE_SHARDED && known->kind <= FSDP_STATE_LOCAL,
              "options.kind is %d: FSDP_STATE_SHARDED (0), FSDP_STATE_FULL (1) or FSDP_STATE_LOCAL (2)", known->kind);
    CHECK_ARG((known->rank0_only | 1) == 1, "options.rank0_only is %d: 0 or 1", known->rank0_only);
    CHECK_ARG((known->copy | 1) == 1, "options.copy is %d: 0 or 1", known->copy);
    CHECK_ARG(known->reserved == 0, "options.reserved is %d: it must be 0", known->reserved);
    return FSDP_OK;
}

fsdp_status fsdp_model_state_dict(fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **dict)
{
    CHECK_MODEL(model);
    CHECK_OUT(dict);
    fsdp_state_dict_options known;
    TRY(read_options(options, &known));
    CHECK_ARG(!known.rank0_only || known.kind == FSDP_STATE_FULL,
              "options.rank0_only is 1, but kind is not FSDP_STATE_FULL: every rank has its own parts");
    return model_state_dict(model, &known, dict);
}

fsdp_status fsdp_unit_param_entry(fsdp_unit *unit, int32_t index, fsdp_entry *entry)
{
    CHECK_UNIT(unit);
    CHECK_OUT(entry);
    TRY(ABI_WRITE_CHECK(fsdp_entry, entry));
    fsdp_entry now;
    TRY(unit_param_entry(unit, index, &now));
    return ABI_WRITE(fsdp_entry, entry, &now);
}

fsdp_status fsdp_state_dict_gather(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options,
                                   fsdp_state_dict **full)
{
    CHECK_STATE_DICT(dict);
    CHECK_GROUP(group);
    CHECK_OUT(full);
    fsdp_state_dict_options known;
    TRY(read_options(options, &known));
    CHECK_ARG(known.kind != FSDP_STATE_LOCAL,
              "options.kind is FSDP_STATE_LOCAL: a gather makes whole tensors, so it is "
              "FSDP_STATE_FULL, or 0");
    return state_dict_gather(dict, group, &known, full);
}

/* ---- loading */

fsdp_status fsdp_load_options_init(fsdp_load_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_load_options, options, struct_size);
}

static fsdp_status read_load_options(const fsdp_load_options *options, fsdp_load_options *known)
{
    TRY(ABI_READ(fsdp_load_options, options, known));
    CHECK_ARG((known->partial | 1) == 1, "options.partial is %d: 0 or 1", known->partial);
    CHECK_ARG((known->from_rank0 | 1) == 1, "options.from_rank0 is %d: 0 or 1", known->from_rank0);
    return FSDP_OK;
}

fsdp_status fsdp_state_dict_load(fsdp_state_dict *into, fsdp_state_dict *from, const fsdp_load_options *options)
{
    CHECK_STATE_DICT(into);
    CHECK_STATE_DICT(from);
    fsdp_load_options known;
    TRY(read_load_options(options, &known));
    CHECK_ARG(!known.from_rank0, "options.from_rank0 is 1, but a state dict knows no other ranks: use "
                                 "fsdp_model_load_state_dict");
    struct source source;
    state_dict_source(from, &source);
    return state_load(&source, into, &known);
}

static fsdp_status check_from(const fsdp_model *model, fsdp_state_dict *from, int32_t from_rank0)
{
    if (from_rank0 && model->group->rank != 0) {
        CHECK_ARG(!from,
                  "from is given, but with options.from_rank0 it is rank 0's that counts: give NULL on the others");
        return FSDP_OK;
    }
    CHECK_STATE_DICT(from);
    return FSDP_OK;
}

fsdp_status fsdp_model_load_state_dict(fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options)
{
    CHECK_MODEL(model);
    fsdp_load_options known;
    TRY(read_load_options(options, &known));
    fsdp_status status = check_from(model, from, known.from_rank0);
    if (status != FSDP_OK && !known.from_rank0) return status;
    return model_load_state_dict(model, from, &known, status);
}
