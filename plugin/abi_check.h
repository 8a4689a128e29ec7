/* Caller-allocated structs cross the ABI here and nowhere else.
 *
 * A caller may be older than the library (its struct is smaller, and fields added since read as zero, the
 * default) or newer (its struct is larger: refused only where it sets a field that this library doesn't
 * know). So no function reads a caller's struct in place: it takes a copy of the size it knows, or writes its
 * answer through abi_write.
 *
 *     fsdp_group_options o = {0};
 *     TRY(ABI_READ(fsdp_group_options, options, &o));       (options may be NULL: o stays zero, all defaults)
 *
 * Every message names the struct and both sizes. Nothing here keeps a pointer or takes a lock.
 */
#ifndef FSDP_ABI_CHECK_H
#define FSDP_ABI_CHECK_H

#include "fsdp.h"

/* Each struct's last field in the first release. From it follows the smallest struct_size that was ever
 * valid, so these lines stay as they are when a struct grows. */
#define ABI_LAST_fsdp_error_info message
#define ABI_LAST_fsdp_store_options job_key
#define ABI_LAST_fsdp_store_callbacks release
#define ABI_LAST_fsdp_group_options spin_us
#define ABI_LAST_fsdp_group_info timeout_ms
#define ABI_LAST_fsdp_collective tag
#define ABI_LAST_fsdp_mesh_info names
#define ABI_LAST_fsdp_precision keep_inputs
#define ABI_LAST_fsdp_model_options offload_dir
#define ABI_LAST_fsdp_param id
#define ABI_LAST_fsdp_param_info used
#define ABI_LAST_fsdp_unit_options precision
#define ABI_LAST_fsdp_unit_info name
#define ABI_LAST_fsdp_memory_info replicated_bytes
#define ABI_LAST_fsdp_scaler_options disabled
#define ABI_LAST_fsdp_scaler_info skipped
#define ABI_LAST_fsdp_scaler_state skipped
#define ABI_LAST_fsdp_entry tied_to
#define ABI_LAST_fsdp_state_dict_info whole_bytes
#define ABI_LAST_fsdp_state_dict_options prefix
#define ABI_LAST_fsdp_load_options user
#define ABI_LAST_fsdp_save_options reserved
#define ABI_LAST_fsdp_save_info total_bytes
#define ABI_LAST_fsdp_checkpoint_info save_id
#define ABI_LAST_fsdp_checkpoint_part bytes

#define ABI_END(type, field) (offsetof(type, field) + sizeof(((type *)NULL)->field))
#define ABI_END_EXPANDED(type, field) ABI_END(type, field) /* field may be a macro */
#define ABI_FIRST(type)                                                                                                \
    ((ABI_END_EXPANDED(type, ABI_LAST_##type) + sizeof(void *) - 1) / sizeof(void *) * sizeof(void *))

/* Copy the caller's struct `from` to `to`, which has this library's size `known_size`; what `from` lacks
 * becomes zero, and to->struct_size becomes known_size. `from` NULL: all zero. STRUCT_SIZE (and `to` all
 * zero) when from->struct_size is below first_size, above ABI_SIZE_LIMIT, or has a byte set beyond
 * known_size. */
fsdp_status abi_read(const char *type, const void *from, size_t first_size, size_t known_size, void *to);

/* Copy element `index` of a caller's array. struct_size is also the distance from one element to the next, so
 * all elements must have the first one's, and it must keep them aligned; STRUCT_SIZE names the index
 * otherwise. */
fsdp_status abi_read_element(const char *type, const void *array, int32_t index, size_t first_size, size_t known_size,
                             void *to);

/* Is `to` fit to be written? For functions whose work should not be done in vain. INVALID for NULL, else
 * STRUCT_SIZE as above; what the caller's struct contains is never looked at. */
fsdp_status abi_write_check(const char *type, const void *to, size_t first_size);

/* The reverse of abi_read: fill the caller's struct, as much of it as it has; fields that only the caller
 * knows become zero, to->struct_size stays. Writes nothing on failure. */
fsdp_status abi_write(const char *type, void *to, size_t first_size, const void *from, size_t known_size);

/* What fsdp_*_options_init does: zero `struct_size` bytes, which is the caller's sizeof, and set the field.
 */
fsdp_status abi_init(const char *type, void *options, size_t struct_size, size_t first_size);

/* No public struct is ever larger. Catches a struct_size that nobody set before it makes us run over memory.
 */
#define ABI_SIZE_LIMIT ((size_t)4096)

#define ABI_READ(type, from, to) abi_read(#type, from, ABI_FIRST(type), sizeof(type), to)
#define ABI_READ_ELEMENT(type, array, index, to)                                                                       \
    abi_read_element(#type, array, index, ABI_FIRST(type), sizeof(type), to)
#define ABI_WRITE_CHECK(type, to) abi_write_check(#type, to, ABI_FIRST(type))
#define ABI_WRITE(type, to, from) abi_write(#type, to, ABI_FIRST(type), from, sizeof(type))
#define ABI_INIT(type, options, struct_size) abi_init(#type, options, struct_size, ABI_FIRST(type))

#endif
