/* State dicts: the container. See state.h.
 *
 * Entries lie in the order of adding, with an index by name beside them: open addressing, half empty at least. An
 * entry's tensor is a handle of the library's own on whatever memory the host gave, so that it can be shared with
 * whoever asks for it and outlives the dict where it must. JSON values are parsed when they are set and kept as compact
 * text.
 *
 * One thread at a time; nothing here talks to other ranks.
 */
#include "state/files.h"

#include "base/mem.h"

#include <string.h>

/* Slots hold an entry's number + 1, or 0. */
struct state_index {
    uint64_t mask;
    int64_t slots[];
};

int state_dict_is(const fsdp_state_dict *dict)
{
    return dict && ref_is(&dict->ref, REF_STATE_DICT);
}

fsdp_status state_dict_create(fsdp_state_dict **out)
{
    fsdp_state_dict *dict = mem_alloc(sizeof *dict);
    if (!dict) return mem_none("a state dict", sizeof *dict);
    ref_init(&dict->ref, REF_STATE_DICT);
    *out = dict;
    return FSDP_OK;
}

static void entry_free(struct state_entry *entry)
{
    managed_delete(entry->tensor);
    mem_free(entry->home);
    mem_free(entry->name);
    mem_free(entry);
}

void state_dict_release(fsdp_state_dict *dict)
{
    if (!dict || !ref_put(&dict->ref)) return;
    for (int64_t i = 0; i < dict->n_entries; i++) entry_free(dict->entries[i]);
    for (int64_t i = 0; i < dict->n_json; i++) {
        mem_free(dict->json[i].name);
        mem_free(dict->json[i].text);
    }
    mem_free(dict->entries);
    mem_free(dict->json);
    mem_free(dict->index);
    mem_free(dict);
}

/* ---- names */

/* The number of bytes of the UTF-8 character at p, by RFC 3629; 0: it is none. */
static size_t utf8_length(const unsigned char *p)
{
    unsigned low = 0x80, high = 0xbf; /* of the second byte */
    size_t length;
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4) return 0;
    length = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0) low = 0xa0;
    if (p[0] == 0xed) high = 0x9f;
    if (p[0] == 0xf0) low = 0x90;
    if (p[0] == 0xf4) high = 0x8f;
    if (p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return length;
}

static fsdp_status check_name(const char *name, const char *what)
{
    CHECK_ARG(name && *name, "%s is %s: 1 to %d bytes of UTF-8", what, name ? "empty" : "NULL", STATE_NAME_MOST);
    size_t bytes = 0;
    while (name[bytes]) {
        size_t length = utf8_length((const unsigned char *)name + bytes);
        CHECK_ARG(length, "%s is not UTF-8: byte %zu is 0x%02x", what, bytes, (unsigned)(unsigned char)name[bytes]);
        bytes += length;
        CHECK_ARG(bytes <= STATE_NAME_MOST, "%s '%.60s...' is longer than %d bytes", what, name, STATE_NAME_MOST);
    }
    return FSDP_OK;
}

static int64_t *index_slot(const fsdp_state_dict *dict, struct state_index *index, const char *name)
{
    uint64_t at = hash_bytes(HASH_START, name, strlen(name));
    for (at ^= at >> 32;; at++) {
        int64_t *slot = &index->slots[at & index->mask];
        if (!*slot || strcmp(dict->entries[*slot - 1]->name, name) == 0) return slot;
    }
}

int64_t state_dict_find(const fsdp_state_dict *dict, const char *name)
{
    return dict->index ? *index_slot(dict, dict->index, name) - 1 : -1;
}

/* Room for one more entry, in the list and in the index: what comes after can't fail. */
static fsdp_status make_room(fsdp_state_dict *dict)
{
    if (dict->n_entries < dict->room_entries) return FSDP_OK;
    int64_t room = dict->room_entries ? 2 * dict->room_entries : 16;
    struct state_entry **entries = mem_array((size_t)room, sizeof *entries);
    struct state_index *index = mem_alloc(sizeof *index + 2 * (size_t)room * sizeof *index->slots);
    if (!entries || !index) {
        mem_free(entries);
        mem_free(index);
        return mem_none("a state dict's entries", (size_t)room * sizeof *entries);
    }
    if (dict->n_entries) memcpy(entries, dict->entries, (size_t)dict->n_entries * sizeof *entries);
    mem_free(dict->entries);
    mem_free(dict->index);
    dict->entries = entries;
    dict->index = index;
    dict->room_entries = room;
    index->mask = 2 * (uint64_t)room - 1;
    for (int64_t i = 0; i < dict->n_entries; i++) *index_slot(dict, index, entries[i]->name) = i + 1;
    return FSDP_OK;
}

/* ---- adding */

/* The whole's shape, and that the number of elements fits, whichever part of it is taken: so boxes never overflow. */
static fsdp_status read_whole(const fsdp_entry *given, struct box *whole)
{
    CHECK_ARG(given->ndim >= 0 && given->ndim <= TENSOR_MAX_DIMS, "entry.ndim is %d: 0 to %d", given->ndim,
              TENSOR_MAX_DIMS);
    CHECK_ARG(given->shape || !given->ndim, "entry.shape is NULL, but entry.ndim is %d", given->ndim);
    int64_t most = 16; /* bytes of an element */
    for (int32_t d = 0; d < given->ndim; d++) {
        CHECK_ARG(given->shape[d] >= 0, "entry.shape[%d] is %lld: sizes can't be negative", d,
                  (long long)given->shape[d]);
        CHECK_ARG(!given->shape[d] || !__builtin_mul_overflow(most, given->shape[d], &most),
                  "entry.shape: the number of elements overflows");
    }
    box_make(whole, given->ndim, NULL, given->shape);
    return FSDP_OK;
}

static fsdp_status read_part(const fsdp_entry *given, struct state_entry *entry)
{
    char text[TENSOR_TEXT];
    const struct tensor *data = &entry->data;
    CHECK_ARG(data->ndim == entry->whole.ndim, "tensor is %s, but entry '%.200s' has %d dimensions",
              tensor_text(data, text), given->name, entry->whole.ndim);
    for (int32_t d = 0; given->length && d < data->ndim; d++)
        CHECK_ARG(given->length[d] == data->shape[d],
                  "tensor is %s, but entry.length[%d] of '%.200s' is %lld: the tensor has just the part",
                  tensor_text(data, text), d, given->name, (long long)given->length[d]);
    box_make(&entry->part, data->ndim, given->offset, data->shape);
    if (box_fits(&entry->part, entry->whole.size)) return FSDP_OK;
    struct tensor whole;
    char want[TENSOR_TEXT];
    tensor_make(&whole, NULL, data->type, entry->whole.ndim, entry->whole.size);
    return err(FSDP_ERR_INVALID, "entry '%.200s': a part %s at its offset does not lie in the whole, which is %s",
               given->name, tensor_text(data, text), tensor_text(&whole, want));
}

static fsdp_status read_copies(const fsdp_entry *given, struct state_entry *entry)
{
    entry->copies = given->copies ? given->copies : 1;
    entry->copy = given->copy;
    CHECK_ARG(entry->copies > 0 && entry->copy >= 0 && entry->copy < entry->copies,
              "entry '%.200s': copy is %d and copies is %d: copy is 0 to copies - 1", given->name, given->copy,
              given->copies);
    return FSDP_OK;
}

static fsdp_status read_tensor(const fsdp_entry *given, DLManagedTensorVersioned *tensor, struct state_entry *entry)
{
    TRY(tensor_import(&tensor->dl_tensor, "tensor", &entry->data));
    entry->type = entry->data.type;
    const DLDataType *type = &given->dtype;
    if (type->code || type->bits || type->lanes) TRY(dtype_from_dl(*type, "entry.dtype", &entry->type));
    CHECK_ARG(entry->type == entry->data.type || (dtype_is_float(entry->type) && dtype_is_float(entry->data.type)),
              "entry.dtype of '%.200s' is %s, but tensor is %s: only floats are converted on their way to files",
              given->name, dtype_name(entry->type), dtype_name(entry->data.type));
    TRY(read_whole(given, &entry->whole));
    TRY(read_part(given, entry));
    TRY(read_copies(given, entry));
    if (given->kind == FSDP_ENTRY_TENSOR) return FSDP_OK;
    CHECK_ARG(entry->copies == 1 && box_same(&entry->whole, &entry->part),
              "entry '%.200s' is of this rank alone: offset is zero, length is shape, copies is 1", given->name);
    return FSDP_OK;
}

static fsdp_status read_tied(const fsdp_state_dict *dict, const fsdp_entry *given, struct state_entry *entry)
{
    int64_t to = state_dict_find(dict, given->tied_to);
    CHECK_ARG(to >= 0, "entry '%.200s': tied_to is '%.200s', which is not in the dict: add that one first", given->name,
              given->tied_to);
    const struct state_entry *first = dict->entries[to];
    CHECK_ARG(given->kind == FSDP_ENTRY_TENSOR && first->kind == FSDP_ENTRY_TENSOR,
              "entry '%.200s' is tied_to '%.200s': entries of a rank can't be tied", given->name, given->tied_to);
    if (first->tied_to >= 0) first = dict->entries[to = first->tied_to];
    struct box whole = first->whole;
    if (given->shape) TRY(read_whole(given, &whole));
    CHECK_ARG(box_same(&whole, &first->whole),
              "entry '%.200s' is tied_to '%.200s', but has another shape: they are one tensor", given->name,
              given->tied_to);
    char *name = entry->name;
    *entry = *first;
    entry->name = name;
    entry->tied_to = to;
    entry->tensor = NULL;
    entry->data = (struct tensor){0};
    entry->home = NULL;
    return FSDP_OK;
}

fsdp_status state_dict_add(fsdp_state_dict *dict, const fsdp_entry *given, DLManagedTensorVersioned *tensor)
{
    TRY(check_name(given->name, "entry.name"));
    CHECK_ARG(state_dict_find(dict, given->name) < 0, "entry.name '%.200s' is in the dict already", given->name);
    CHECK_ARG(given->kind == FSDP_ENTRY_TENSOR || given->kind == FSDP_ENTRY_OF_RANK,
              "entry.kind of '%.200s' is %d: FSDP_ENTRY_TENSOR (0) or FSDP_ENTRY_OF_RANK (1)", given->name,
              given->kind);
    CHECK_ARG(tensor || given->tied_to, "tensor is NULL, but entry '%.200s' is not tied to another", given->name);
    CHECK_ARG(!tensor || !given->tied_to,
              "tensor is given, but entry '%.200s' is tied_to '%.200s': it has no values of "
              "its own, so tensor must be NULL",
              given->name, given->tied_to);
    TRY(make_room(dict));
    struct state_entry *entry = mem_alloc(sizeof *entry);
    if (!entry) return mem_none("an entry", sizeof *entry);
    *entry = (struct state_entry){.kind = given->kind, .rank = -1, .tied_to = -1, .name = mem_strdup(given->name)};
    fsdp_status status = entry->name ? FSDP_OK : mem_none("a name", strlen(given->name) + 1);
    if (status == FSDP_OK) status = tensor ? read_tensor(given, tensor, entry) : read_tied(dict, given, entry);
    if (status == FSDP_OK && tensor) status = managed_adopt(tensor, &entry->tensor);
    if (status != FSDP_OK) {
        entry_free(entry);
        return status;
    }
    *index_slot(dict, dict->index, entry->name) = dict->n_entries + 1;
    dict->entries[dict->n_entries++] = entry;
    return FSDP_OK;
}

/* ---- JSON */

/* How deep a value nests. It is sound JSON. */
static int json_depth(const char *text)
{
    int depth = 0, most = 0, in_string = 0;
    for (; *text; text++) {
        if (in_string) {
            if (*text == '\\')
                text++;
            else if (*text == '"')
                in_string = 0;
        } else if (*text == '"') {
            in_string = 1;
        } else if (*text == '{' || *text == '[') {
            if (++depth > most) most = depth;
        } else if (*text == '}' || *text == ']') {
            depth--;
        }
    }
    return most;
}

static fsdp_status json_compact(const char *name, const char *text, char **out)
{
    CHECK_ARG(strnlen(text, STATE_JSON_MOST + 1) <= STATE_JSON_MOST, "the JSON value '%.200s' is longer than %lld MiB",
              name, STATE_JSON_MOST >> 20);
    json_error_t failure;
    json_t *value = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &failure);
    if (!value && json_error_code(&failure) == json_error_out_of_memory) return mem_none("a JSON value", strlen(text));
    CHECK_ARG(value, "text is not one JSON value, for '%.200s': %s (line %d, column %d)", name, failure.text,
              failure.line, failure.column);
    char *compact = json_text(value);
    json_decref(value);
    if (!compact) return mem_none("a JSON value", strlen(text));
    int depth = json_depth(compact);
    if (depth > STATE_JSON_DEPTH) {
        mem_free(compact);
        return err(FSDP_ERR_INVALID, "the JSON value '%.200s' nests %d levels deep: at most %d", name, depth,
                   STATE_JSON_DEPTH);
    }
    *out = compact;
    return FSDP_OK;
}

fsdp_status state_json_room(fsdp_state_dict *dict, int64_t more)
{
    int64_t room = dict->room_json ? dict->room_json : 4;
    while (room < dict->n_json + more) room *= 2;
    if (room == dict->room_json) return FSDP_OK;
    struct state_json *json = mem_array((size_t)room, sizeof *json);
    if (!json) return mem_none("a state dict's JSON values", (size_t)room * sizeof *json);
    if (dict->n_json) memcpy(json, dict->json, (size_t)dict->n_json * sizeof *json);
    mem_free(dict->json);
    dict->json = json;
    dict->room_json = room;
    return FSDP_OK;
}

void state_json_put(fsdp_state_dict *dict, struct state_json *value)
{
    int64_t i = 0;
    while (i < dict->n_json && strcmp(dict->json[i].name, value->name) != 0) i++;
    if (i < dict->n_json) {
        mem_free(dict->json[i].name);
        mem_free(dict->json[i].text);
    } else {
        dict->n_json++;
    }
    dict->json[i] = *value;
    *value = (struct state_json){0};
}

fsdp_status state_dict_set_json(fsdp_state_dict *dict, const char *name, const char *text)
{
    TRY(check_name(name, "name"));
    struct state_json value = {0};
    TRY(json_compact(name, text, &value.text));
    value.name = mem_strdup(name);
    fsdp_status status = value.name ? state_json_room(dict, 1) : mem_none("a name", strlen(name) + 1);
    if (status == FSDP_OK) state_json_put(dict, &value);
    mem_free(value.name);
    mem_free(value.text);
    return status;
}

/* ---- questions */

const struct state_entry *state_dict_values(const fsdp_state_dict *dict, int64_t index)
{
    const struct state_entry *entry = dict->entries[index];
    return entry->tied_to < 0 ? entry : dict->entries[entry->tied_to];
}

static int64_t add_bytes(int64_t sum, const struct box *box, enum dtype type)
{
    return __builtin_add_overflow(sum, box_count(box) * (int64_t)dtype_size(type), &sum) ? INT64_MAX : sum;
}

void state_dict_query(const fsdp_state_dict *dict, fsdp_state_dict_info *info)
{
    *info = (fsdp_state_dict_info){.struct_size = sizeof *info, .n_entries = dict->n_entries, .n_json = dict->n_json};
    for (int64_t i = 0; i < dict->n_entries; i++) {
        const struct state_entry *entry = dict->entries[i];
        if (entry->tied_to >= 0) continue;
        info->bytes = add_bytes(info->bytes, &entry->part, entry->type);
        info->whole_bytes = add_bytes(info->whole_bytes, &entry->whole, entry->type);
    }
}

fsdp_status state_dict_tensor(fsdp_state_dict *dict, int64_t index, DLManagedTensorVersioned **out)
{
    return managed_share(state_dict_values(dict, index)->tensor, out);
}

uint64_t state_entry_hash(const fsdp_state_dict *dict, int64_t index)
{
    const struct state_entry *entry = dict->entries[index];
    uint64_t h = hash_bytes(HASH_START, entry->name, strlen(entry->name) + 1);
    h = hash_number(h, (uint64_t)entry->type);
    h = hash_number(h, (uint64_t)entry->whole.ndim);
    h = hash_bytes(h, entry->whole.size, (size_t)entry->whole.ndim * sizeof *entry->whole.size);
    const char *tied = entry->tied_to < 0 ? "" : dict->entries[entry->tied_to]->name;
    return hash_bytes(h, tied, strlen(tied) + 1);
}

void state_entry_tell(const struct state_entry *entry, const char *tied_to, fsdp_entry *out)
{
    *out = (fsdp_entry){.struct_size = sizeof *out,
                        .name = entry->name,
                        .kind = entry->kind,
                        .ndim = entry->whole.ndim,
                        .shape = entry->whole.size,
                        .offset = entry->part.at,
                        .length = entry->part.size,
                        .dtype = dtype_to_dl(entry->type),
                        .copies = entry->copies,
                        .copy = entry->copy,
                        .rank = entry->rank,
                        .tied_to = tied_to};
}
