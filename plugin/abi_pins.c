/* The layout of every public struct and the value of every constant, pinned: a change that would break a
 * compiled host doesn't compile.
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

/* Numbers mean what they meant: a compiled host holds them, not their names. Given out once, never again; a
 * line of one that is gone stays here as a comment. Not in the abidw snapshot, which doesn't see macros. */
#define NUMBER(name, value) _Static_assert((name) == (value), #name " has another number");
NUMBER(FSDP_OK, 0)
NUMBER(FSDP_ERR_INVALID, 1)
NUMBER(FSDP_ERR_STRUCT_SIZE, 2)
NUMBER(FSDP_ERR_VERSION, 3)
NUMBER(FSDP_ERR_UNSUPPORTED, 4)
NUMBER(FSDP_ERR_NOMEM, 5)
NUMBER(FSDP_ERR_SYSTEM, 6)
NUMBER(FSDP_ERR_TIMEOUT, 7)
NUMBER(FSDP_ERR_PENDING, 8)
NUMBER(FSDP_ERR_MISMATCH, 9)
NUMBER(FSDP_ERR_PEER_LOST, 10)
NUMBER(FSDP_ERR_ABORTED, 11)
NUMBER(FSDP_ERR_FORKED, 12)
NUMBER(FSDP_ERR_STATE, 13)
NUMBER(FSDP_ERR_RENDEZVOUS, 14)
NUMBER(FSDP_ERR_CALLBACK, 15)
NUMBER(FSDP_ERR_INTERNAL, 16)
NUMBER(FSDP_SUM, 0)
NUMBER(FSDP_AVG, 1)
NUMBER(FSDP_PROD, 2)
NUMBER(FSDP_MIN, 3)
NUMBER(FSDP_MAX, 4)
NUMBER(FSDP_BAND, 5)
NUMBER(FSDP_BOR, 6)
NUMBER(FSDP_BXOR, 7)
NUMBER(FSDP_OP_NONE, 0)
NUMBER(FSDP_OP_ALL_GATHER, 1)
NUMBER(FSDP_OP_REDUCE_SCATTER, 2)
NUMBER(FSDP_OP_ALL_REDUCE, 3)
NUMBER(FSDP_OP_REDUCE, 4)
NUMBER(FSDP_OP_BROADCAST, 5)
NUMBER(FSDP_OP_GATHER, 6)
NUMBER(FSDP_OP_SCATTER, 7)
NUMBER(FSDP_OP_ALL_TO_ALL, 8)
NUMBER(FSDP_OP_SEND, 9)
NUMBER(FSDP_OP_RECV, 10)
NUMBER(FSDP_OP_BARRIER, 11)
NUMBER(FSDP_OP_SPLIT, 12)
NUMBER(FSDP_OP_UNSHARD, 13)
NUMBER(FSDP_OP_REDUCE_GRADS, 14)
NUMBER(FSDP_OP_CREATE_UNIT, 15)
NUMBER(FSDP_OP_RESET, 16)
NUMBER(FSDP_OP_GRAD_NORM, 17)
NUMBER(FSDP_OP_CLIP_GRAD_NORM, 18)
NUMBER(FSDP_OP_UNSCALE, 19)
NUMBER(FSDP_LOG_ERROR, 1)
NUMBER(FSDP_LOG_WARN, 2)
NUMBER(FSDP_LOG_INFO, 3)
NUMBER(FSDP_LOG_DEBUG, 4)
NUMBER(FSDP_ANY_RANK, -1)
NUMBER(FSDP_UNIT_SHARDED, 0)
NUMBER(FSDP_UNIT_UNSHARDING, 1)
NUMBER(FSDP_UNIT_UNSHARDED, 2)

/* struct_size comes first everywhere; a struct never shrinks below its first release, nor outgrows the sanity
 * limit. */
#define STRUCT(type)                                                                                                   \
    _Static_assert(offsetof(type, struct_size) == 0, #type " must start with struct_size");                            \
    _Static_assert(sizeof(type) >= ABI_FIRST(type), #type " is smaller than its first release");                       \
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
STRUCT(fsdp_scaler_options)
STRUCT(fsdp_scaler_info)
STRUCT(fsdp_scaler_state)

#if defined(__LP64__)

#define FIELD(type, field, offset, size)                                                                               \
    _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved");                                      \
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
FIELD(fsdp_group_info, status, 16, 4)
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
FIELD(fsdp_collective, input, 16, 8)
FIELD(fsdp_collective, output, 24, 8)
FIELD(fsdp_collective, input_rows, 32, 8)
FIELD(fsdp_collective, output_rows, 40, 8)
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
FIELD(fsdp_param, reserved, 28, 4)
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

FIELD(fsdp_scaler_options, struct_size, 0, 8)
FIELD(fsdp_scaler_options, init_scale, 8, 8)
FIELD(fsdp_scaler_options, growth_factor, 16, 8)
FIELD(fsdp_scaler_options, backoff_factor, 24, 8)
FIELD(fsdp_scaler_options, growth_interval, 32, 4)
FIELD(fsdp_scaler_options, disabled, 36, 4)
SIZE(fsdp_scaler_options, 40)

FIELD(fsdp_scaler_info, struct_size, 0, 8)
FIELD(fsdp_scaler_info, scale, 8, 8)
FIELD(fsdp_scaler_info, growth_tracker, 16, 4)
FIELD(fsdp_scaler_info, found_inf, 20, 4)
FIELD(fsdp_scaler_info, steps, 24, 8)
FIELD(fsdp_scaler_info, skipped, 32, 8)
SIZE(fsdp_scaler_info, 40)

FIELD(fsdp_scaler_state, struct_size, 0, 8)
FIELD(fsdp_scaler_state, scale, 8, 8)
FIELD(fsdp_scaler_state, growth_factor, 16, 8)
FIELD(fsdp_scaler_state, backoff_factor, 24, 8)
FIELD(fsdp_scaler_state, growth_interval, 32, 4)
FIELD(fsdp_scaler_state, growth_tracker, 36, 4)
FIELD(fsdp_scaler_state, steps, 40, 8)
FIELD(fsdp_scaler_state, skipped, 48, 8)
SIZE(fsdp_scaler_state, 56)

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
