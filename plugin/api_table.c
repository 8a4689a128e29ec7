/* The function table that fsdp_get_api hands out, for hosts that load the library with dlopen.
 *
 * One static constant; its slots are written by abi/generate.py from the header's prototypes, so the table
 * and the exported symbols can't differ. What can't be generated is checked by the compiler here: that a slot
 * has the type of the function that fills it, and that it lies where every host that was ever compiled
 * expects it.
 */
#include "fsdp.h"

#include "base/error.h"

static const fsdp_api table = {
    .struct_size = sizeof(fsdp_api),
    .major = FSDP_VERSION_MAJOR,
    .minor = FSDP_VERSION_MINOR,
#define SLOT(name, index) .name = fsdp_##name,
#include "api_table.inc"
#undef SLOT
};

/* The header is a size_t and two int32: 16 bytes with 64-bit pointers, 12 with 32-bit ones, a whole number of
 * pointers either way. Slots follow without gaps. */
#define HEADER_SIZE (sizeof(size_t) + 2 * sizeof(int32_t))
_Static_assert(offsetof(fsdp_api, struct_size) == 0, "fsdp_api.struct_size moved");
_Static_assert(offsetof(fsdp_api, major) == sizeof(size_t), "fsdp_api.major moved");
_Static_assert(offsetof(fsdp_api, minor) == sizeof(size_t) + sizeof(int32_t), "fsdp_api.minor moved");

#define SLOT(name, index)                                                                                              \
    _Static_assert(offsetof(fsdp_api, name) == HEADER_SIZE + (index) * sizeof(void *),                                 \
                   "slot " #name " of fsdp_api moved");                                                                \
    _Static_assert(__builtin_types_compatible_p(__typeof__(((fsdp_api *)0)->name), __typeof__(&fsdp_##name)),          \
                   "slot " #name " of fsdp_api has another type than fsdp_" #name);
#include "api_table.inc"
#undef SLOT

enum {
#define SLOT(name, index) SLOT_##name,
#include "api_table.inc"
#undef SLOT
    SLOT_COUNT
};
_Static_assert(sizeof(fsdp_api) == HEADER_SIZE + SLOT_COUNT * sizeof(void *), "fsdp_api has a slot without a function");

fsdp_status fsdp_get_api(int32_t major, int32_t minor, const fsdp_api **api)
{
    CHECK_ARG(api != NULL, "api is NULL: pass the address of a const fsdp_api *");
    if (major != FSDP_VERSION_MAJOR || minor < 0 || minor > FSDP_VERSION_MINOR)
        return err(FSDP_ERR_VERSION,
                   "no ABI version %d.%d here: this library is %d.%d.%d and has major %d, minor 0 to %d", (int)major,
                   (int)minor, FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH, FSDP_VERSION_MAJOR,
                   FSDP_VERSION_MINOR);
    *api = &table;
    return FSDP_OK;
}
