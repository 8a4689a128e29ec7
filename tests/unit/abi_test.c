/* struct_size: what old, new and careless callers get, and that nothing is read or written beyond it. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "abi_check.h"
#include "base/error.h"

/* A struct as the first release had it, as this library has it, and as a later one will. */
typedef struct thing_first {
    size_t struct_size;
    int32_t a, b;
} thing_first;

typedef struct thing {
    size_t struct_size;
    int32_t a, b;
    int64_t added;
} thing;

typedef struct thing_later {
    size_t struct_size;
    int32_t a, b;
    int64_t added;
    int64_t unknown;
    double much;
} thing_later;

#define FIRST sizeof(thing_first)

static fsdp_status read_thing(const void *from, thing *to)
{
    memset(to, 0xAB, sizeof(*to));
    return abi_read("thing", from, FIRST, sizeof(thing), to);
}

static void expect_message(const char *word)
{
    cr_expect(strstr(err_message(), word) != NULL, "no \"%s\" in \"%s\"", word, err_message());
}

Test(abi, no_struct_means_all_defaults)
{
    thing t, zero = {0};
    cr_assert_eq(read_thing(NULL, &t), FSDP_OK);
    cr_expect_arr_eq(&t, &zero, sizeof(t));
}

Test(abi, struct_of_this_size_is_copied)
{
    thing from = {.struct_size = sizeof(from), .a = 1, .b = 2, .added = 3}, t;
    cr_assert_eq(read_thing(&from, &t), FSDP_OK);
    cr_expect_arr_eq(&t, &from, sizeof(t));
}

Test(abi, older_caller_gets_defaults_for_what_it_lacks)
{
    thing_first from = {.struct_size = sizeof(from), .a = 1, .b = 2};
    thing t;
    cr_assert_eq(read_thing(&from, &t), FSDP_OK);
    cr_expect_eq(t.a, 1);
    cr_expect_eq(t.b, 2);
    cr_expect_eq(t.added, 0);
    cr_expect_eq(t.struct_size, sizeof(thing));
}

Test(abi, newer_caller_is_taken_if_it_asks_for_nothing_new)
{
    thing_later from = {.struct_size = sizeof(from), .a = 1, .added = 3};
    thing t;
    cr_assert_eq(read_thing(&from, &t), FSDP_OK);
    cr_expect_eq(t.a, 1);
    cr_expect_eq(t.added, 3);
    cr_expect_eq(t.struct_size, sizeof(thing));
}

Test(abi, newer_caller_that_asks_for_something_unknown_is_refused)
{
    thing zero = {0}, t;
    for (size_t byte = sizeof(thing); byte < sizeof(thing_later); byte++) {
        thing_later from = {.struct_size = sizeof(from), .a = 1};
        ((unsigned char *)&from)[byte] = 1;
        cr_assert_eq(read_thing(&from, &t), FSDP_ERR_STRUCT_SIZE);
        cr_expect_arr_eq(&t, &zero, sizeof(t));
    }
    expect_message("thing");
    expect_message("40"); /* what it has */
    expect_message("24"); /* what we know */
    expect_message("39"); /* where the byte is */
}

Test(abi, forgotten_small_and_absurd_sizes_are_refused)
{
    const size_t sizes[] = {0, 1, sizeof(size_t), FIRST - 1, ABI_SIZE_LIMIT + 1, SIZE_MAX};
    thing zero = {0}, t;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        thing from = {.struct_size = sizes[i], .a = 1};
        cr_assert_eq(read_thing(&from, &t), FSDP_ERR_STRUCT_SIZE, "size %zu", sizes[i]);
        cr_expect_arr_eq(&t, &zero, sizeof(t));
        char number[32];
        snprintf(number, sizeof(number), "%zu", sizes[i]);
        expect_message("thing");
        expect_message(number);
    }
}

Test(abi, nothing_is_read_beyond_struct_size)
{
    struct {
        thing_first first;
        int64_t next; /* not the caller's struct, though ours has a field here */
    } memory = {{.struct_size = FIRST, .a = 1, .b = 2}, -1};
    thing t;
    cr_assert_eq(read_thing(&memory, &t), FSDP_OK);
    cr_expect_eq(t.added, 0);
}

Test(abi, struct_need_not_be_aligned)
{
    unsigned char memory[sizeof(thing) + 1];
    thing from = {.struct_size = sizeof(from), .a = 1, .added = 3}, t;
    memcpy(memory + 1, &from, sizeof(from));
    cr_assert_eq(read_thing(memory + 1, &t), FSDP_OK);
    cr_expect_eq(t.added, 3);
}

/* Arrays: struct_size is also the distance between elements. */

Test(abi, elements_of_older_and_newer_callers_are_found)
{
    thing_first older[3] = {{FIRST, 1, 10}, {FIRST, 2, 20}, {FIRST, 3, 30}};
    thing_later newer[3] = {{.struct_size = sizeof(thing_later), .a = 1},
                            {.struct_size = sizeof(thing_later), .a = 2},
                            {.struct_size = sizeof(thing_later), .a = 3}};
    for (int32_t i = 0; i < 3; i++) {
        thing t;
        cr_assert_eq(abi_read_element("thing", older, i, FIRST, sizeof(thing), &t), FSDP_OK);
        cr_expect_eq(t.a, i + 1);
        cr_expect_eq(t.added, 0);
        cr_assert_eq(abi_read_element("thing", newer, i, FIRST, sizeof(thing), &t), FSDP_OK);
        cr_expect_eq(t.a, i + 1);
    }
}

Test(abi, elements_of_different_sizes_are_refused)
{
    thing array[3] = {{.struct_size = sizeof(thing)}, {.struct_size = FIRST}, {.struct_size = 0}}, t;
    cr_expect_eq(abi_read_element("thing", array, 0, FIRST, sizeof(thing), &t), FSDP_OK);
    cr_expect_eq(abi_read_element("thing", array, 1, FIRST, sizeof(thing), &t), FSDP_ERR_STRUCT_SIZE);
    expect_message("thing[1]");
    cr_expect_eq(abi_read_element("thing", array, 2, FIRST, sizeof(thing), &t), FSDP_ERR_STRUCT_SIZE);
    expect_message("thing[2]");
}

Test(abi, element_with_an_unknown_field_is_named)
{
    thing_later array[2] = {{.struct_size = sizeof(thing_later)}, {.struct_size = sizeof(thing_later), .much = 1}};
    thing t;
    cr_assert_eq(abi_read_element("thing", array, 1, FIRST, sizeof(thing), &t), FSDP_ERR_STRUCT_SIZE);
    expect_message("element 1");
}

Test(abi, elements_that_would_be_misaligned_are_refused)
{
    thing array[2] = {{.struct_size = sizeof(thing) + 1}}, t;
    cr_expect_eq(abi_read_element("thing", array, 0, FIRST, sizeof(thing), &t), FSDP_ERR_STRUCT_SIZE);
}

/* Output structs. */

Test(abi, output_fills_as_much_as_the_caller_has)
{
    const thing from = {.struct_size = sizeof(from), .a = 1, .b = 2, .added = 3};
    struct {
        thing_first first;
        int64_t next;
    } older = {{.struct_size = FIRST}, -1};
    cr_assert_eq(abi_write("thing", &older, FIRST, &from, sizeof(from)), FSDP_OK);
    cr_expect_eq(older.first.a, 1);
    cr_expect_eq(older.first.b, 2);
    cr_expect_eq(older.first.struct_size, FIRST, "the caller's size stays, so that it can use the struct again");
    cr_expect_eq(older.next, -1);

    thing_later newer;
    memset(&newer, 0xAB, sizeof(newer)); /* an output struct need not be initialised */
    newer.struct_size = sizeof(newer);
    cr_assert_eq(abi_write("thing", &newer, FIRST, &from, sizeof(from)), FSDP_OK);
    cr_expect_eq(newer.added, 3);
    cr_expect_eq(newer.unknown, 0);
    cr_expect_eq(newer.much, 0);
    cr_expect_eq(newer.struct_size, sizeof(newer));
}

Test(abi, output_that_is_too_small_is_left_alone)
{
    const thing from = {.struct_size = sizeof(from), .a = 1};
    thing to = {.struct_size = FIRST - 1, .a = 7};
    cr_expect_eq(abi_write("thing", &to, FIRST, &from, sizeof(from)), FSDP_ERR_STRUCT_SIZE);
    cr_expect_eq(to.a, 7);
    expect_message("thing");
    cr_expect_eq(abi_write("thing", NULL, FIRST, &from, sizeof(from)), FSDP_ERR_INVALID);
    expect_message("info");
}

Test(abi, init_clears_what_the_caller_has_and_no_more)
{
    unsigned char memory[sizeof(thing_later) + 8];
    memset(memory, 0xAB, sizeof(memory));
    cr_assert_eq(abi_init("thing", memory, sizeof(thing_later), FIRST), FSDP_OK);
    thing_later t;
    memcpy(&t, memory, sizeof(t));
    cr_expect_eq(t.struct_size, sizeof(thing_later));
    cr_expect(t.a == 0 && t.b == 0 && t.added == 0 && t.unknown == 0 && t.much == 0);
    for (size_t i = sizeof(thing_later); i < sizeof(memory); i++) cr_expect_eq(memory[i], 0xAB);

    cr_expect_eq(abi_init("thing", NULL, sizeof(thing), FIRST), FSDP_ERR_INVALID);
    expect_message("options");
    cr_expect_eq(abi_init("thing", memory, FIRST - 1, FIRST), FSDP_ERR_STRUCT_SIZE);
    cr_expect_eq(abi_init("thing", memory, SIZE_MAX, FIRST), FSDP_ERR_STRUCT_SIZE);
}

/* The public structs: the rules hold for each of them by name. */

#define ROUND_TRIP(type)                                                                                               \
    do {                                                                                                               \
        type from = {.struct_size = sizeof(type)}, to;                                                                 \
        cr_expect_eq(ABI_READ(type, &from, &to), FSDP_OK);                                                             \
        cr_expect_eq(to.struct_size, sizeof(type));                                                                    \
        from.struct_size = ABI_FIRST(type) - 1;                                                                        \
        cr_expect_eq(ABI_READ(type, &from, &to), FSDP_ERR_STRUCT_SIZE);                                                \
        expect_message(#type);                                                                                         \
    } while (0)

Test(abi, public_structs_know_their_sizes)
{
    ROUND_TRIP(fsdp_error_info);
    ROUND_TRIP(fsdp_store_options);
    ROUND_TRIP(fsdp_store_callbacks);
    ROUND_TRIP(fsdp_group_options);
    ROUND_TRIP(fsdp_group_info);
    ROUND_TRIP(fsdp_collective);
    ROUND_TRIP(fsdp_model_options);
    ROUND_TRIP(fsdp_param);
    ROUND_TRIP(fsdp_memory_info);
}

Test(abi, init_functions_leave_defaults)
{
    fsdp_store_options store;
    fsdp_group_options group;
    fsdp_model_options model;
    memset(&store, 0xAB, sizeof(store));
    memset(&group, 0xAB, sizeof(group));
    memset(&model, 0xAB, sizeof(model));
    cr_assert_eq(fsdp_store_options_init(&store, sizeof(store)), FSDP_OK);
    cr_assert_eq(fsdp_group_options_init(&group, sizeof(group)), FSDP_OK);
    cr_assert_eq(fsdp_model_options_init(&model, sizeof(model)), FSDP_OK);
    cr_expect(store.struct_size == sizeof(store) && store.job_key == NULL && store.timeout_ms == 0);
    cr_expect(group.struct_size == sizeof(group) && group.name == NULL && group.spin_us == 0);
    cr_expect(model.struct_size == sizeof(model) && model.name == NULL && model.gradient_divisor == 0);
    cr_expect_eq(fsdp_group_options_init(NULL, sizeof(group)), FSDP_ERR_INVALID);
    cr_expect_eq(fsdp_group_options_init(&group, 4), FSDP_ERR_STRUCT_SIZE);
}

Test(abi, error_details_are_the_callers_own_copy)
{
    fsdp_error_info info = {.struct_size = sizeof(info)};
    cr_assert_eq(fsdp_group_options_init(NULL, sizeof(fsdp_group_options)), FSDP_ERR_INVALID);
    cr_assert_eq(fsdp_last_error_info(&info), FSDP_OK);
    cr_expect_eq(info.status, FSDP_ERR_INVALID);
    cr_expect_str_eq(info.message, fsdp_last_error());
    cr_expect_eq(info.struct_size, sizeof(info));

    fsdp_error_info small = {.struct_size = sizeof(size_t)};
    cr_expect_eq(fsdp_last_error_info(&small), FSDP_ERR_STRUCT_SIZE);
}

Test(abi, function_table_is_complete)
{
    const fsdp_api *api = NULL;
    cr_assert_eq(fsdp_get_api(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, &api), FSDP_OK);
    cr_expect_eq(api->struct_size, sizeof(*api));
    cr_expect_eq(api->major, FSDP_VERSION_MAJOR);
    cr_expect_eq(api->minor, FSDP_VERSION_MINOR);
    const unsigned char *slots = (const unsigned char *)&api->last_error;
    for (size_t at = 0; at < sizeof(*api) - offsetof(fsdp_api, last_error); at += sizeof(void *)) {
        void *slot;
        memcpy(&slot, slots + at, sizeof(slot));
        cr_expect_not_null(slot, "slot %zu", at / sizeof(void *));
    }
    cr_expect_eq(api->version(), fsdp_version());
}
