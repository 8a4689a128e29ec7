/* The header of a safetensors file: what is taken, and what is refused, each with words that name file and tensor.
 * Headers are text here; files in checkpoint_test.c. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state/files.h"

TestSuite(safetensors, .timeout = 60);

static struct st_file file;

static fsdp_status parse(const char *header, int64_t data)
{
    return st_parse("dir/file.safetensors", header, strlen(header), data, &file);
}

#define REFUSED(header, data, status, word)                                                                            \
    do {                                                                                                               \
        cr_expect_eq(parse(header, data), status, "%s: %s", header, err_message());                                    \
        cr_expect(strstr(err_message(), "dir/file.safetensors"), "no file in '%s'", err_message());                    \
        cr_expect(strstr(err_message(), word), "no '%s' in '%s'", word, err_message());                                \
    } while (0)
#define CORRUPT(header, data, word) REFUSED(header, data, FSDP_ERR_CORRUPT, word)

Test(safetensors, tensors_come_in_the_order_of_their_data)
{
    const char *header = "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
                         "\"__metadata__\":{\"format\":\"pt\",\"fsdp\":\"what\"},"
                         "\"a\":{\"shape\":[],\"data_offsets\":[0,8],\"dtype\":\"I64\",\"later\":{}},"
                         "\"c\":{\"dtype\":\"BOOL\",\"shape\":[0,7],\"data_offsets\":[32,32]}}   ";
    cr_assert_eq(parse(header, 32), FSDP_OK, "%s", err_message());
    cr_assert_eq(file.n, 3);
    int64_t at = 8 + (int64_t)strlen(header);
    cr_expect_str_eq(file.tensors[0].name, "a");
    cr_expect(file.tensors[0].ndim == 0 && file.tensors[0].begin == at && file.tensors[0].bytes == 8);
    cr_expect_str_eq(file.tensors[1].name, "b");
    cr_expect(file.tensors[1].ndim == 2 && file.tensors[1].shape[0] == 2 && file.tensors[1].shape[1] == 3);
    cr_expect(file.tensors[1].begin == at + 8 && file.tensors[1].type == DTYPE_F32);
    cr_expect_str_eq(file.tensors[2].name, "c");
    cr_expect(file.tensors[2].bytes == 0);
    cr_expect_str_eq(file.fsdp, "what");
    st_free(&file);
}

Test(safetensors, every_dtype_has_its_name_there_and_back)
{
    char header[256];
    for (int type = 0; type < DTYPE_COUNT; type++) {
        const char *name = st_dtype_name((enum dtype)type);
        cr_expect((name == NULL) == (type == DTYPE_C128), "%s", dtype_name((enum dtype)type));
        if (!name) continue;
        int64_t bytes = 3 * (int64_t)dtype_size((enum dtype)type);
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%lld]}}", name,
                 (long long)bytes);
        cr_expect_eq(parse(header, bytes), FSDP_OK, "%s", err_message());
        cr_expect_eq((int)file.tensors[0].type, type);
        st_free(&file);
    }
}

Test(safetensors, an_empty_file_has_no_tensors)
{
    cr_expect_eq(parse("{}", 0), FSDP_OK);
    cr_expect_eq(file.n, 0);
    st_free(&file);
    CORRUPT("{}", 5, "end at byte");
}

#define T(dtype, shape, offsets) "{\"t\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

Test(safetensors, what_is_no_header_is_refused)
{
    CORRUPT("", 0, "not a safetensors file");
    CORRUPT("PK\003\004", 0, "not a safetensors file");
    CORRUPT(" {}", 0, "not a safetensors file");
    CORRUPT("[]", 0, "not a safetensors file");
    CORRUPT("{", 0, "not sound JSON");
    CORRUPT("{}}", 0, "not sound JSON");
    CORRUPT("{\"t\":1}", 0, "'t' is not an object");
    CORRUPT("{\"t\":{}}", 0, "dtype");
    CORRUPT("{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "name");
    CORRUPT("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "not sound JSON");
    CORRUPT("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "not sound JSON");
    CORRUPT("{\"__metadata__\":[]}", 0, "__metadata__");
    CORRUPT("{\"__metadata__\":{\"a\":1}}", 0, "'a' in __metadata__");
    CORRUPT("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
            1, "duplicate");
}

Test(safetensors, shapes_and_places_that_cannot_be_are_refused)
{
    CORRUPT(T("F32", "[2]", "[0,4]"), 4, "8");
    CORRUPT(T("F32", "[2]", "[0,12]"), 12, "12 bytes");
    CORRUPT(T("F32", "[2]", "[0,8]"), 7, "data_offsets");
    CORRUPT(T("F32", "[2]", "[8,0]"), 8, "data_offsets");
    CORRUPT(T("F32", "[2]", "[-8,0]"), 8, "data_offsets");
    CORRUPT(T("F32", "[2]", "[0]"), 8, "data_offsets");
    CORRUPT(T("F32", "[2]", "[0,8,16]"), 8, "data_offsets");
    CORRUPT(T("F32", "[2]", "[0.0,8.0]"), 8, "data_offsets");
    CORRUPT(T("F32", "[2]", "[9223372036854775800,9223372036854775808]"), 8, "JSON");
    CORRUPT(T("F32", "[2]", "[0,9223372036854775807]"), 8, "data_offsets");
    CORRUPT(T("F32", "[-1]", "[0,0]"), 0, "size 0");
    CORRUPT(T("F32", "[1.5]", "[0,0]"), 0, "size 0");
    CORRUPT(T("F32", "[true]", "[0,0]"), 0, "size 0");
    CORRUPT(T("F32", "2", "[0,8]"), 8, "shape");
    CORRUPT(T("F32", "[4611686018427387904,4]", "[0,0]"), 0, "larger than any memory");
    CORRUPT(T("F32", "[4294967296,4294967296]", "[0,0]"), 0, "larger than any memory");
    CORRUPT(T("U8", "[9223372036854775807,2,0]", "[0,1]"), 1, "needs 0");
    CORRUPT(T("F32", "[9223372036854775807]", "[0,8]"), 8, "larger than any memory");
    REFUSED(T("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4,
            FSDP_ERR_UNSUPPORTED, "33 dimensions");
}

Test(safetensors, dtypes_that_this_library_lacks_are_named)
{
    REFUSED(T("F4", "[2]", "[0,1]"), 1, FSDP_ERR_UNSUPPORTED, "'t' has dtype F4");
    REFUSED(T("F8_E8M0", "[2]", "[0,2]"), 2, FSDP_ERR_UNSUPPORTED, "F8_E8M0");
    CORRUPT(T("f32", "[2]", "[0,8]"), 8, "f32");
    CORRUPT(T("", "[2]", "[0,8]"), 8, "dtype");
}

Test(safetensors, tensors_neither_overlap_nor_leave_holes)
{
#define AB(a, b)                                                                                                       \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" a "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],"            \
    "\"data_offsets\":" b "}}"
    cr_expect_eq(parse(AB("[4,8]", "[0,4]"), 8), FSDP_OK, "%s", err_message());
    st_free(&file);
    CORRUPT(AB("[0,4]", "[0,4]"), 4, "overlap");
    CORRUPT(AB("[0,4]", "[3,7]"), 7, "overlap");
    CORRUPT(AB("[0,4]", "[5,9]"), 9, "hole of 1 bytes before tensor 'b'");
    CORRUPT(AB("[1,5]", "[5,9]"), 9, "hole");
    CORRUPT(AB("[0,4]", "[4,8]"), 9, "end at byte");
}

Test(safetensors, json_of_any_depth_is_an_error_and_no_overflow)
{
    size_t depth = 1000000;
    char *header = malloc(depth * 6 + 64);
    char *at = header;
    for (size_t i = 0; i < depth; i++) at = memcpy(at, "{\"a\":", 5), at += 5;
    *at = 0;
    CORRUPT(header, 0, "not sound JSON");
    memset(header, '[', depth);
    memcpy(header, "{\"a\":", 5);
    header[depth] = 0;
    CORRUPT(header, 0, "not sound JSON");
    free(header);
}

/* Every header that differs from a sound one in one byte is taken or refused, and nothing worse. */
Test(safetensors, no_damaged_byte_does_harm)
{
    const char *sound = "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],"
                        "\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[24,25]}}";
    char header[256];
    size_t n = strlen(sound);
    int taken = 0;
    for (size_t i = 0; i < n; i++)
        for (int c = 0; c < 256; c++) {
            memcpy(header, sound, n);
            header[i] = (char)c;
            fsdp_status status = st_parse("f", header, n, 25, &file);
            cr_expect(status == FSDP_OK || status == FSDP_ERR_CORRUPT || status == FSDP_ERR_UNSUPPORTED, "%d", status);
            taken += status == FSDP_OK;
            if (status == FSDP_OK) st_free(&file);
        }
    cr_expect(taken > 0 && taken < 256 * (int)n);
}

/* Known answers of XXH3 (seed 0), as its own documentation and the xxhash package of Python have them. */
Test(safetensors, checksums_are_xxh3_whatever_the_processor)
{
    static char bytes[1 << 20];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(i * 7 + i / 251);
    cr_expect_eq(block_sum("", 0), UINT64_C(0x2d06800538d394c2));
    cr_expect_eq(block_sum(bytes, 1), UINT64_C(0xc44bdff4074eecdb));
    cr_expect_eq(block_sum(bytes, 200), UINT64_C(0x7c64f3b17285e96a));
    cr_expect_eq(block_sum(bytes, sizeof bytes), UINT64_C(0x4d13e3faf4e0828a));
}
