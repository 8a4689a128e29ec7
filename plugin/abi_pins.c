/* The layout of every public struct, pinned: a change that would break a compiled host doesn't compile.
 *
 * No code. The numbers are those of LP64 (x86-64, aarch64, riscv64), where hosts exist today; on other data
 * models only the rules that don't depend on it are checked. Adding a field at the end of a struct adds a
 * line and changes its SIZE; changing or removing a line breaks the ABI. Each line is: struct, field, offset,
 * size, and each field begins where the one before it ends: padding that isn't named can't be used later,
 * because callers don't clear it.
 */
#include "fsdp.h"

#include "abi_check.h"

/* Enums are int32_t, whatever flags the host's compiler has. */
_Static_assert(sizeof(fsdp_status) == 4 && sizeof(fsdp_reduce_op) == 4 && sizeof(fsdp_op_kind) == 4 &&
                   sizeof(fsdp_log_level) == 4 && sizeof(fsdp_unit_state) == 4,
               "an enum is not 32 bits wide");

/* struct_size comes first everywhere; a struct never shrinks below its first release, nor outgrows the sanity
 * limit. */
#define STRUCT(type)                                                                                         \
    _Static_assert(offsetof(type, struct_size) == 0, #type " must start with struct_size");                  \
    _Static_assert(sizeof(type) >= ABI_FIRST(type), #type " is smaller than its first release");             \
    _Static_assert(sizeof(type) <= ABI_SIZE_LIMIT, #type " is larger than ABI_SIZE_LIMIT");
STRUCT(fsdp_error_info)
STRUCT(fsdp_store_options)
STRUCT(fsdp_store_callbacks)
STRUCT(fsdp_group_options)
STRUCT(fsdp_group_info)
STRUCT(fsdp_collective)
STRUCT(fsdp_model_options)
STRUCT(fsdp_param)
STRUCT(fsdp_memory_info)

#if defined(__LP64__)

#define FIELD(type, field, offset, size)                                                                     \
    _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved");                            \
    _Static_assert(sizeof(((type *)0)->field) == (size), #type "." #field " changed its size");
#define SIZE(type, size) _Static_assert(sizeof(type) == (size), #type " changed its size");

FIELD(fsdp_error_info, struct_size, 0, 8)
FIELD(fsdp_error_info, status, 8, 4)
FIELD(fsdp_error_info, operation, 12, 4)
FIELD(fsdp_error_info, sequence, 16, 8)
FIELD(fsdp_error_info, rank_a, 24, 4)
FIELD(fsdp_error_info, rank_b, 28, 4)
FIELD(fsdp_error_info, message, 32, 1024)
SIZE(fsdp_error_info, 1056)

FIELD(fsdp_store_options, struct_size, 0, 8)
FIELD(fsdp_store_options, world_size, 8, 4)
FIELD(fsdp_store_options, rank, 12, 4)
FIELD(fsdp_store_options, timeout_ms, 16, 8)
FIELD(fsdp_store_options, job_key, 24, 8)
SIZE(fsdp_store_options, 32)

FIELD(fsdp_store_callbacks, struct_size, 0, 8)
FIELD(fsdp_store_callbacks, user, 8, 8)
FIELD(fsdp_store_callbacks, set, 16, 8)
FIELD(fsdp_store_callbacks, get, 24, 8)
FIELD(fsdp_store_callbacks, add, 32, 8)
FIELD(fsdp_store_callbacks, wait, 40, 8)
FIELD(fsdp_store_callbacks, release, 48, 8)
SIZE(fsdp_store_callbacks, 56)

FIELD(fsdp_group_options, struct_size, 0, 8)
FIELD(fsdp_group_options, name, 8, 8)
FIELD(fsdp_group_options, transport, 16, 8)
FIELD(fsdp_group_options, timeout_ms, 24, 8)
FIELD(fsdp_group_options, staging_bytes, 32, 8)
FIELD(fsdp_group_options, direct_read, 40, 4)
FIELD(fsdp_group_options, spin_us, 44, 4)
SIZE(fsdp_group_options, 48)

FIELD(fsdp_group_info, struct_size, 0, 8)
FIELD(fsdp_group_info, rank, 8, 4)
FIELD(fsdp_group_info, size, 12, 4)
FIELD(fsdp_group_info, failed, 16, 4)
FIELD(fsdp_group_info, direct_read, 20, 4)
FIELD(fsdp_group_info, transport, 24, 16)
FIELD(fsdp_group_info, name, 40, 64)
FIELD(fsdp_group_info, operations, 104, 8)
FIELD(fsdp_group_info, bytes_moved, 112, 8)
FIELD(fsdp_group_info, segment_bytes, 120, 8)
SIZE(fsdp_group_info, 128)

FIELD(fsdp_collective, struct_size, 0, 8)
FIELD(fsdp_collective, kind, 8, 4)
FIELD(fsdp_collective, op, 12, 4)
FIELD(fsdp_collective, in, 16, 8)
FIELD(fsdp_collective, out, 24, 8)
FIELD(fsdp_collective, in_rows, 32, 8)
FIELD(fsdp_collective, out_rows, 40, 8)
FIELD(fsdp_collective, peer, 48, 4)
FIELD(fsdp_collective, tag, 52, 4)
SIZE(fsdp_collective, 56)

FIELD(fsdp_model_options, struct_size, 0, 8)
FIELD(fsdp_model_options, name, 8, 8)
FIELD(fsdp_model_options, no_reshard_after_forward, 16, 4)
FIELD(fsdp_model_options, private_unshard, 20, 4)
FIELD(fsdp_model_options, gradient_divisor, 24, 8)
SIZE(fsdp_model_options, 32)

FIELD(fsdp_param, struct_size, 0, 8)
FIELD(fsdp_param, name, 8, 8)
FIELD(fsdp_param, full, 16, 8)
FIELD(fsdp_param, frozen, 24, 4)
SIZE(fsdp_param, 32)

FIELD(fsdp_memory_info, struct_size, 0, 8)
FIELD(fsdp_memory_info, shards, 8, 8)
FIELD(fsdp_memory_info, gradients, 16, 8)
FIELD(fsdp_memory_info, unsharded, 24, 8)
FIELD(fsdp_memory_info, unsharded_peak, 32, 8)
FIELD(fsdp_memory_info, host_parameters, 40, 8)
FIELD(fsdp_memory_info, total_parameters, 48, 8)
FIELD(fsdp_memory_info, reduced_bytes, 56, 8)
FIELD(fsdp_memory_info, published_bytes, 64, 8)
SIZE(fsdp_memory_info, 72)

/* What we share with every DLPack producer. */
SIZE(DLDataType, 4)
SIZE(DLDevice, 8)
FIELD(DLTensor, data, 0, 8)
FIELD(DLTensor, device, 8, 8)
FIELD(DLTensor, ndim, 16, 4)
FIELD(DLTensor, dtype, 20, 4)
FIELD(DLTensor, shape, 24, 8)
FIELD(DLTensor, strides, 32, 8)
FIELD(DLTensor, byte_offset, 40, 8)
SIZE(DLTensor, 48)
FIELD(DLManagedTensor, manager_ctx, 48, 8)
FIELD(DLManagedTensor, deleter, 56, 8)
FIELD(DLManagedTensorVersioned, version, 0, 8)
FIELD(DLManagedTensorVersioned, manager_ctx, 8, 8)
FIELD(DLManagedTensorVersioned, deleter, 16, 8)
FIELD(DLManagedTensorVersioned, flags, 24, 8)
FIELD(DLManagedTensorVersioned, dl_tensor, 32, 48)

#endif
