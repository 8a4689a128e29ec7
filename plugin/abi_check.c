/* Checks of caller-allocated structs; abi_check.h has the rules.
 *
 * Only struct_size is read before it is known to be sane, and always with memcpy: a host's FFI layer need not
 * have aligned the struct. No shared state, so any thread.
 */
#include "abi_check.h"

#include <string.h>

#include "base/error.h"

static size_t claimed_size(const void *object)
{
    size_t size;
    memcpy(&size, object, sizeof(size));
    return size;
}

static fsdp_status check_size(const char *type, size_t size, size_t first_size)
{
    if (size < first_size)
        return err(FSDP_ERR_STRUCT_SIZE, "%s.struct_size is %zu, the smallest valid size is %zu: set it to sizeof(%s)",
                   type, size, first_size, type);
    if (size > ABI_SIZE_LIMIT)
        return err(FSDP_ERR_STRUCT_SIZE, "%s.struct_size is %zu, no struct is larger than %zu: set it to sizeof(%s)",
                   type, size, ABI_SIZE_LIMIT, type);
    return FSDP_OK;
}

fsdp_status abi_read(const char *type, const void *from, size_t first_size, size_t known_size, void *to)
{
    memset(to, 0, known_size);
    if (from == NULL) return FSDP_OK;

    size_t size = claimed_size(from);
    TRY(check_size(type, size, first_size));
    const unsigned char *bytes = from;
    for (size_t i = known_size; i < size; i++)
        if (bytes[i] != 0)
            return err(FSDP_ERR_STRUCT_SIZE,
                       "%s.struct_size is %zu and byte %zu is set, this library (%d.%d.%d) knows %zu bytes: leave "
                       "newer fields zero, or use a newer library",
                       type, size, i, FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH, known_size);

    memcpy(to, from, size < known_size ? size : known_size);
    memcpy(to, &known_size, sizeof(known_size));
    return FSDP_OK;
}

fsdp_status abi_read_element(const char *type, const void *array, int32_t index, size_t first_size, size_t known_size,
                             void *to)
{
    memset(to, 0, known_size);
    size_t stride = claimed_size(array);
    TRY(check_size(type, stride, first_size));
    if (stride % sizeof(void *) != 0)
        return err(FSDP_ERR_STRUCT_SIZE, "%s.struct_size is %zu, which is no multiple of %zu: set it to sizeof(%s)",
                   type, stride, sizeof(void *), type);

    const void *element = (const char *)array + stride * (size_t)index;
    if (claimed_size(element) != stride)
        return err(FSDP_ERR_STRUCT_SIZE,
                   "%s[%d].struct_size is %zu, but element 0 has %zu: all elements of an array have one size", type,
                   (int)index, claimed_size(element), stride);
    fsdp_status status = abi_read(type, element, first_size, known_size, to);
    return status == FSDP_OK ? FSDP_OK : err_prefix(status, "element %d: ", (int)index);
}

fsdp_status abi_write_check(const char *type, const void *to, size_t first_size)
{
    CHECK_ARG(to != NULL, "info is NULL: pass a %s", type);
    return check_size(type, claimed_size(to), first_size);
}

fsdp_status abi_write(const char *type, void *to, size_t first_size, const void *from, size_t known_size)
{
    TRY(abi_write_check(type, to, first_size));
    size_t size = claimed_size(to);
    size_t common = size < known_size ? size : known_size;
    memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t), common - sizeof(size_t));
    memset((char *)to + common, 0, size - common);
    return FSDP_OK;
}

fsdp_status abi_init(const char *type, void *options, size_t struct_size, size_t first_size)
{
    CHECK_ARG(options != NULL, "options is NULL: pass a %s to initialise", type);
    TRY(check_size(type, struct_size, first_size));
    memset(options, 0, struct_size);
    memcpy(options, &struct_size, sizeof(struct_size));
    return FSDP_OK;
}
