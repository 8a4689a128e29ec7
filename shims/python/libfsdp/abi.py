"""The C ABI of libfsdp (abi/fsdp.h) in ctypes: every constant, struct and function under its C name, nothing added.

Use it to call the library as C does, or to build another layer; most programs want `libfsdp` itself.

    from libfsdp import abi
    group = ctypes.c_void_p()
    status = abi.lib.fsdp_group_create(None, None, ctypes.byref(group))

Structs that the caller allocates set their own `struct_size`. Handles (`fsdp_group *` and so on) are `c_void_p`.
Functions are reached through `abi.lib`; the shared object is looked for when the first of them is used, so this module
imports where the library is not built. Calls release the interpreter lock; callbacks take it.
"""

import ctypes
import os
import pathlib
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8
from ctypes import c_uint16, c_uint32, c_uint64, c_void_p

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = 0, 1, 0  # of the header that this file mirrors

# ---- Numbers ---------------------------------------------------------------------------------------------------------

FSDP_OK = 0
FSDP_ERR_INVALID = 1
FSDP_ERR_STRUCT_SIZE = 2
FSDP_ERR_VERSION = 3
FSDP_ERR_UNSUPPORTED = 4
FSDP_ERR_NOMEM = 5
FSDP_ERR_SYSTEM = 6
FSDP_ERR_TIMEOUT = 7
FSDP_ERR_PENDING = 8
FSDP_ERR_MISMATCH = 9
FSDP_ERR_PEER_LOST = 10
FSDP_ERR_ABORTED = 11
FSDP_ERR_FORKED = 12
FSDP_ERR_STATE = 13
FSDP_ERR_RENDEZVOUS = 14
FSDP_ERR_CALLBACK = 15
FSDP_ERR_INTERNAL = 16
FSDP_ERR_CORRUPT = 17
FSDP_ERR_NOT_FOUND = 18

FSDP_SUM = 0
FSDP_AVG = 1
FSDP_PROD = 2
FSDP_MIN = 3
FSDP_MAX = 4
FSDP_BAND = 5
FSDP_BOR = 6
FSDP_BXOR = 7

FSDP_OP_NONE = 0
FSDP_OP_ALL_GATHER = 1
FSDP_OP_REDUCE_SCATTER = 2
FSDP_OP_ALL_REDUCE = 3
FSDP_OP_REDUCE = 4
FSDP_OP_BROADCAST = 5
FSDP_OP_GATHER = 6
FSDP_OP_SCATTER = 7
FSDP_OP_ALL_TO_ALL = 8
FSDP_OP_SEND = 9
FSDP_OP_RECV = 10
FSDP_OP_BARRIER = 11
FSDP_OP_SPLIT = 12
FSDP_OP_UNSHARD = 13
FSDP_OP_REDUCE_GRADS = 14
FSDP_OP_CREATE_UNIT = 15
FSDP_OP_RESET = 16
FSDP_OP_GRAD_NORM = 17
FSDP_OP_CLIP_GRAD_NORM = 18
FSDP_OP_UNSCALE = 19
FSDP_OP_CREATE_MESH = 20
FSDP_OP_CREATE_SLOT = 21
FSDP_OP_REPLICATE_GRADS = 22
FSDP_OP_SYNC_STATES = 23
FSDP_OP_GATHER_PARAM = 24
FSDP_OP_GATHER_STATE = 25
FSDP_OP_LOAD_STATE = 26
FSDP_OP_SAVE_STATE = 27

FSDP_LOG_ERROR = 1
FSDP_LOG_WARN = 2
FSDP_LOG_INFO = 3
FSDP_LOG_DEBUG = 4

FSDP_ANY_RANK = -1

FSDP_MESH_MAX_DIMS = 8

FSDP_STRATEGY_DEFAULT = 0
FSDP_FULL_SHARD = 1
FSDP_SHARD_GRAD_OP = 2
FSDP_NO_SHARD = 3
FSDP_HYBRID_SHARD = 4
FSDP_HYBRID_SHARD_GRAD_OP = 5

FSDP_RESHARD_NEVER = -1
FSDP_RESHARD_DEFAULT = 0
FSDP_RESHARD_ALWAYS = 1

FSDP_BACKWARD_NONE = 0
FSDP_BACKWARD_PRE = 1
FSDP_BACKWARD_POST = 2

FSDP_UNIT_SHARDED = 0
FSDP_UNIT_UNSHARDING = 1
FSDP_UNIT_UNSHARDED = 2

FSDP_FORWARD = 0
FSDP_BACKWARD = 1

FSDP_CAST_INPUT = 0
FSDP_CAST_OUTPUT = 1
FSDP_CAST_BUFFER = 2

FSDP_ENTRY_TENSOR = 0
FSDP_ENTRY_OF_RANK = 1

FSDP_STATE_SHARDED = 0
FSDP_STATE_FULL = 1
FSDP_STATE_LOCAL = 2

FSDP_NAME_MISSING = 0
FSDP_NAME_UNEXPECTED = 1

FSDP_CHECKPOINT_SHARDED = 0
FSDP_CHECKPOINT_FULL = 1

# ---- DLPack ----------------------------------------------------------------------------------------------------------

DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION = 1, 3
kDLCPU = 1
kDLInt, kDLUInt, kDLFloat, kDLOpaqueHandle, kDLBfloat, kDLComplex, kDLBool = range(7)
kDLFloat8_e4m3fn, kDLFloat8_e5m2 = 10, 12
DLPACK_FLAG_BITMASK_READ_ONLY = 1
DLPACK_FLAG_BITMASK_IS_COPIED = 2


class DLPackVersion(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32)]


class DLDevice(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(Structure):
    pass


class DLManagedTensorVersioned(Structure):
    pass


LegacyDeleter = CFUNCTYPE(None, POINTER(DLManagedTensor))
VersionedDeleter = CFUNCTYPE(None, POINTER(DLManagedTensorVersioned))

DLManagedTensor._fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", LegacyDeleter)]
DLManagedTensorVersioned._fields_ = [
    ("version", DLPackVersion),
    ("manager_ctx", c_void_p),
    ("deleter", VersionedDeleter),
    ("flags", c_uint64),
    ("dl_tensor", DLTensor),
]


class DLPackExchangeAPIHeader(Structure):
    pass


DLPackExchangeAPIHeader._fields_ = [("version", DLPackVersion), ("prev_api", POINTER(DLPackExchangeAPIHeader))]


class DLPackExchangeAPI(Structure):
    """The table behind a type's `__dlpack_c_exchange_api__`. Its functions need the interpreter lock."""

    _fields_ = [
        ("header", DLPackExchangeAPIHeader),
        ("managed_tensor_allocator", c_void_p),
        ("managed_tensor_from_py_object_no_sync", c_void_p),
        ("managed_tensor_to_py_object_no_sync", c_void_p),
        ("dltensor_from_py_object_no_sync", c_void_p),
        ("current_work_stream", c_void_p),
    ]


# ---- Callbacks -------------------------------------------------------------------------------------------------------

fsdp_log_fn = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
fsdp_alloc_fn = CFUNCTYPE(c_void_p, c_size_t, c_void_p)
fsdp_free_fn = CFUNCTYPE(None, c_void_p, c_void_p)
fsdp_done_fn = CFUNCTYPE(None, c_int32, c_void_p)
fsdp_unit_fn = CFUNCTYPE(None, c_void_p, c_void_p)
fsdp_name_fn = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
fsdp_progress_fn = CFUNCTYPE(c_int32, c_int64, c_int64, c_void_p)
fsdp_store_set_fn = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t)
fsdp_store_get_fn = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_size_t), c_int64)
fsdp_store_add_fn = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_int64, POINTER(c_int64))
fsdp_store_wait_fn = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_int64)
fsdp_store_release_fn = CFUNCTYPE(None, c_void_p)

# ---- Structs that the caller allocates -------------------------------------------------------------------------------


class _Sized(Structure):
    """A struct whose first field is its own size."""

    def __init__(self, *args, **fields):
        super().__init__(ctypes.sizeof(type(self)), *args, **fields)


class fsdp_error_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int32),
        ("operation", c_int32),
        ("sequence", c_uint64),
        ("rank_a", c_int32),
        ("rank_b", c_int32),
        ("message", c_char * 1024),
    ]


class fsdp_store_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("world_size", c_int32),
        ("rank", c_int32),
        ("timeout_ms", c_int64),
        ("job_key", c_char_p),
    ]


class fsdp_store_callbacks(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("user", c_void_p),
        ("set", fsdp_store_set_fn),
        ("get", fsdp_store_get_fn),
        ("add", fsdp_store_add_fn),
        ("wait", fsdp_store_wait_fn),
        ("release", fsdp_store_release_fn),
    ]


class fsdp_group_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("transport", c_char_p),
        ("timeout_ms", c_int64),
        ("staging_bytes", c_int64),
        ("direct_read", c_int32),
        ("spin_us", c_int32),
    ]


class fsdp_group_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("status", c_int32),
        ("direct_read", c_int32),
        ("transport", c_char * 16),
        ("name", c_char * 64),
        ("operations", c_uint64),
        ("bytes_moved", c_uint64),
        ("segment_bytes", c_int64),
        ("timeout_ms", c_int64),
    ]


class fsdp_collective(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("op", c_int32),
        ("input", POINTER(DLTensor)),
        ("output", POINTER(DLTensor)),
        ("input_rows", POINTER(c_int64)),
        ("output_rows", POINTER(c_int64)),
        ("peer", c_int32),
        ("tag", c_int32),
    ]


class fsdp_mesh_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ndim", c_int32),
        ("rank", c_int32),
        ("size", c_int32),
        ("reserved", c_int32),
        ("sizes", c_int64 * FSDP_MESH_MAX_DIMS),
        ("coordinates", c_int64 * FSDP_MESH_MAX_DIMS),
        ("names", c_char * 32 * FSDP_MESH_MAX_DIMS),
    ]


class fsdp_precision(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("param_dtype", DLDataType),
        ("reduce_dtype", DLDataType),
        ("output_dtype", DLDataType),
        ("buffer_dtype", DLDataType),
        ("keep_low_precision_grads", c_int32),
        ("keep_inputs", c_int32),
    ]


class fsdp_model_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("strategy", c_int32),
        ("reshard_after_forward", c_int32),
        ("private_unshard", c_int32),
        ("sync_module_states", c_int32),
        ("gradient_divisor", c_double),
        ("precision", POINTER(fsdp_precision)),
        ("shard_dim", c_char_p),
        ("replicate_dim", c_char_p),
        ("forward_prefetch", c_int32),
        ("backward_prefetch", c_int32),
        ("prefetch_limit", c_int32),
        ("reserved", c_int32),
        ("offload_dir", c_char_p),
    ]


class fsdp_param(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("full", POINTER(DLTensor)),
        ("frozen", c_int32),
        ("shard_dim", c_int32),
        ("meta", c_int32),
        ("reserved", c_int32),
        ("id", c_uint64),
    ]


class fsdp_unit_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("strategy", c_int32),
        ("reshard_after_forward", c_int32),
        ("precision", POINTER(fsdp_precision)),
    ]


class fsdp_param_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("ndim", c_int32),
        ("shard_dim", c_int32),
        ("shape", POINTER(c_int64)),
        ("shard_start", c_int64),
        ("shard_length", c_int64),
        ("dtype", DLDataType),
        ("full_dtype", DLDataType),
        ("grad_dtype", DLDataType),
        ("frozen", c_int32),
        ("tied_to", c_int32),
        ("used", c_int32),
    ]


class fsdp_unit_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("state", c_int32),
        ("n_params", c_int32),
        ("strategy", c_int32),
        ("reshard_after_forward", c_int32),
        ("shard_rank", c_int32),
        ("shard_size", c_int32),
        ("replicate_rank", c_int32),
        ("replicate_size", c_int32),
        ("full_bytes", c_int64),
        ("shard_bytes", c_int64),
        ("publications", c_int64),
        ("published_bytes", c_int64),
        ("reduced_bytes", c_int64),
        ("replicated_bytes", c_int64),
        ("name", c_char * 64),
        ("gradient_sync", c_int32),
        ("all_reduce", c_int32),
        ("gradient_divisor", c_double),
    ]


class fsdp_memory_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("shards", c_int64),
        ("gradients", c_int64),
        ("unsharded", c_int64),
        ("staging", c_int64),
        ("shards_peak", c_int64),
        ("gradients_peak", c_int64),
        ("unsharded_peak", c_int64),
        ("host_shards", c_int64),
        ("host_gradients", c_int64),
        ("host_unsharded", c_int64),
        ("host_unsharded_peak", c_int64),
        ("total_parameters", c_int64),
        ("largest_unit", c_int64),
        ("slots", c_int64),
        ("published_bytes", c_int64),
        ("reduced_bytes", c_int64),
        ("replicated_bytes", c_int64),
    ]


class fsdp_scaler_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("init_scale", c_double),
        ("growth_factor", c_double),
        ("backoff_factor", c_double),
        ("growth_interval", c_int32),
        ("disabled", c_int32),
    ]


class fsdp_scaler_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("scale", c_double),
        ("growth_tracker", c_int32),
        ("found_inf", c_int32),
        ("steps", c_int64),
        ("skipped", c_int64),
    ]


class fsdp_scaler_state(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("scale", c_double),
        ("growth_factor", c_double),
        ("backoff_factor", c_double),
        ("growth_interval", c_int32),
        ("growth_tracker", c_int32),
        ("steps", c_int64),
        ("skipped", c_int64),
    ]


class fsdp_entry(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("kind", c_int32),
        ("ndim", c_int32),
        ("shape", POINTER(c_int64)),
        ("offset", POINTER(c_int64)),
        ("length", POINTER(c_int64)),
        ("dtype", DLDataType),
        ("copies", c_int32),
        ("copy", c_int32),
        ("rank", c_int32),
        ("tied_to", c_char_p),
    ]


class fsdp_state_dict_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("n_entries", c_int64),
        ("n_json", c_int64),
        ("bytes", c_int64),
        ("whole_bytes", c_int64),
    ]


class fsdp_state_dict_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("rank0_only", c_int32),
        ("copy", c_int32),
        ("reserved", c_int32),
        ("prefix", c_char_p),
    ]


class fsdp_load_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("partial", c_int32),
        ("from_rank0", c_int32),
        ("prefix", c_char_p),
        ("on_name", fsdp_name_fn),
        ("on_progress", fsdp_progress_fn),
        ("user", c_void_p),
    ]


class fsdp_save_options(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("format", c_int32),
        ("no_sync", c_int32),
        ("max_file_bytes", c_int64),
        ("background", c_int32),
        ("reserved", c_int32),
    ]


class fsdp_save_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("done", c_int32),
        ("status", c_int32),
        ("written_bytes", c_int64),
        ("total_bytes", c_int64),
    ]


class fsdp_checkpoint_info(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("format", c_int32),
        ("ranks", c_int32),
        ("checksums", c_int32),
        ("reserved", c_int32),
        ("n_entries", c_int64),
        ("n_json", c_int64),
        ("n_files", c_int64),
        ("bytes", c_int64),
        ("save_id", c_char * 40),
    ]


class fsdp_checkpoint_part(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("file", c_char_p),
        ("ndim", c_int32),
        ("reserved", c_int32),
        ("offset", POINTER(c_int64)),
        ("length", POINTER(c_int64)),
        ("bytes", c_int64),
    ]


# ---- Functions -------------------------------------------------------------------------------------------------------

_H = c_void_p  # any handle
_H_out = POINTER(c_void_p)  # where a handle goes, or an array of handles
_T = POINTER(DLTensor)
_T_out = POINTER(POINTER(DLManagedTensorVersioned))
_rows = POINTER(c_int64)
_status = c_int32

# name: (result, parameters), in the header's order.
PROTOTYPES = {
    "fsdp_last_error": (c_char_p, ()),
    "fsdp_last_error_info": (_status, (POINTER(fsdp_error_info),)),
    "fsdp_status_name": (c_char_p, (c_int32,)),
    "fsdp_version": (c_int32, ()),
    "fsdp_set_log": (_status, (fsdp_log_fn, c_void_p, c_int32)),
    "fsdp_set_allocator": (_status, (fsdp_alloc_fn, fsdp_free_fn, c_void_p)),
    "fsdp_store_options_init": (_status, (POINTER(fsdp_store_options), c_size_t)),
    "fsdp_store_open": (_status, (c_char_p, POINTER(fsdp_store_options), _H_out)),
    "fsdp_store_from_callbacks": (_status, (POINTER(fsdp_store_callbacks), POINTER(fsdp_store_options), _H_out)),
    "fsdp_store_identity": (_status, (_H, POINTER(c_int32), POINTER(c_int32))),
    "fsdp_store_set": (_status, (_H, c_char_p, c_void_p, c_size_t)),
    "fsdp_store_get": (_status, (_H, c_char_p, c_void_p, c_size_t, POINTER(c_size_t))),
    "fsdp_store_add": (_status, (_H, c_char_p, c_int64, POINTER(c_int64))),
    "fsdp_store_wait": (_status, (_H, c_char_p)),
    "fsdp_store_retain": (_status, (_H,)),
    "fsdp_store_release": (None, (_H,)),
    "fsdp_tensor_share": (_status, (POINTER(DLManagedTensorVersioned), _T_out)),
    "fsdp_work_source": (_status, (_H, POINTER(c_int32))),
    "fsdp_zeros": (_status, (POINTER(DLDataType), c_int32, POINTER(c_int64), _T_out)),
    "fsdp_copy": (_status, (_T, _T)),
    "fsdp_shard_extent": (_status, (c_int64, c_int32, c_int32, POINTER(c_int64), POINTER(c_int64))),
    "fsdp_shard": (_status, (_T, c_int32, c_int32, c_int32, _T)),
    "fsdp_tensor_from_legacy": (_status, (POINTER(DLManagedTensor), _T_out)),
    "fsdp_tensor_to_legacy": (_status, (POINTER(DLManagedTensorVersioned), POINTER(POINTER(DLManagedTensor)))),
    "fsdp_group_options_init": (_status, (POINTER(fsdp_group_options), c_size_t)),
    "fsdp_group_create": (_status, (_H, POINTER(fsdp_group_options), _H_out)),
    "fsdp_group_split": (_status, (_H, c_int32, c_int32, POINTER(fsdp_group_options), _H_out)),
    "fsdp_group_query": (_status, (_H, POINTER(fsdp_group_info))),
    "fsdp_group_set_timeout": (_status, (_H, c_int64)),
    "fsdp_set_thread_timeout": (_status, (c_int64,)),
    "fsdp_group_abort": (_status, (_H, c_char_p)),
    "fsdp_group_retain": (_status, (_H,)),
    "fsdp_group_release": (None, (_H,)),
    "fsdp_work_test": (_status, (_H, POINTER(c_int32))),
    "fsdp_work_wait": (_status, (_H, c_int64)),
    "fsdp_work_on_done": (_status, (_H, fsdp_done_fn, c_void_p)),
    "fsdp_work_keep": (_status, (_H, POINTER(DLManagedTensorVersioned))),
    "fsdp_work_error": (_status, (_H, POINTER(fsdp_error_info))),
    "fsdp_work_retain": (_status, (_H,)),
    "fsdp_work_release": (None, (_H,)),
    "fsdp_all_gather": (_status, (_H, _T, _T, _H_out)),
    "fsdp_all_gather_v": (_status, (_H, _T, _T, _rows, _H_out)),
    "fsdp_reduce_scatter": (_status, (_H, _T, _T, c_int32, _H_out)),
    "fsdp_reduce_scatter_v": (_status, (_H, _T, _T, _rows, c_int32, _H_out)),
    "fsdp_all_reduce": (_status, (_H, _T, _T, c_int32, _H_out)),
    "fsdp_reduce": (_status, (_H, _T, _T, c_int32, c_int32, _H_out)),
    "fsdp_broadcast": (_status, (_H, _T, c_int32, _H_out)),
    "fsdp_gather": (_status, (_H, _T, _T, c_int32, _H_out)),
    "fsdp_scatter": (_status, (_H, _T, _T, c_int32, _H_out)),
    "fsdp_all_to_all": (_status, (_H, _T, _T, _H_out)),
    "fsdp_all_to_all_v": (_status, (_H, _T, _T, _rows, _rows, _H_out)),
    "fsdp_send": (_status, (_H, _T, c_int32, c_int32, _H_out)),
    "fsdp_recv": (_status, (_H, _T, c_int32, c_int32, _H_out)),
    "fsdp_barrier": (_status, (_H, _H_out)),
    "fsdp_coalesced": (_status, (_H, POINTER(fsdp_collective), c_int32, _H_out)),
    "fsdp_mesh_create": (_status, (_H, c_int32, POINTER(c_int64), POINTER(c_char_p), _H_out)),
    "fsdp_mesh_retain": (_status, (_H,)),
    "fsdp_mesh_release": (None, (_H,)),
    "fsdp_mesh_query": (_status, (_H, POINTER(fsdp_mesh_info))),
    "fsdp_mesh_group": (_status, (_H, c_char_p, _H_out)),
    "fsdp_model_options_init": (_status, (POINTER(fsdp_model_options), c_size_t)),
    "fsdp_model_create": (_status, (_H, POINTER(fsdp_model_options), _H_out)),
    "fsdp_model_create_on_mesh": (_status, (_H, POINTER(fsdp_model_options), _H_out)),
    "fsdp_model_retain": (_status, (_H,)),
    "fsdp_model_release": (None, (_H,)),
    "fsdp_unit_options_init": (_status, (POINTER(fsdp_unit_options), c_size_t)),
    "fsdp_unit_create": (
        _status,
        (_H, c_char_p, POINTER(fsdp_param), c_int32, POINTER(fsdp_unit_options), _H_out),
    ),
    "fsdp_unit_retain": (_status, (_H,)),
    "fsdp_unit_release": (None, (_H,)),
    "fsdp_unit_param_shard": (_status, (_H, c_int32, _T_out)),
    "fsdp_unit_param_full": (_status, (_H, c_int32, _T_out)),
    "fsdp_unit_param_grad": (_status, (_H, c_int32, _T_out)),
    "fsdp_unit_param_query": (_status, (_H, c_int32, POINTER(fsdp_param_info))),
    "fsdp_unit_used": (_status, (_H, POINTER(c_int32), c_int32)),
    "fsdp_unit_pre_forward": (_status, (_H,)),
    "fsdp_unit_post_forward": (_status, (_H,)),
    "fsdp_unit_pre_backward": (_status, (_H,)),
    "fsdp_unit_post_backward": (_status, (_H, POINTER(_T), c_int32, _H_out)),
    "fsdp_unit_unshard": (_status, (_H, _H_out)),
    "fsdp_unit_reshard": (_status, (_H,)),
    "fsdp_unit_write_back": (_status, (_H,)),
    "fsdp_unit_gather_param": (_status, (_H, c_int32, _T_out)),
    "fsdp_unit_load_param": (_status, (_H, c_int32, _T)),
    "fsdp_unit_query_state": (_status, (_H, POINTER(c_int32))),
    "fsdp_unit_query": (_status, (_H, POINTER(fsdp_unit_info))),
    "fsdp_unit_shard_changed": (_status, (_H,)),
    "fsdp_unit_set_frozen": (_status, (_H, c_int32, c_int32)),
    "fsdp_unit_set_reshard_after_forward": (_status, (_H, c_int32)),
    "fsdp_unit_set_reshard_after_backward": (_status, (_H, c_int32)),
    "fsdp_unit_set_gradient_sync": (_status, (_H, c_int32)),
    "fsdp_unit_set_all_reduce": (_status, (_H, c_int32)),
    "fsdp_unit_set_gradient_divisor": (_status, (_H, c_double)),
    "fsdp_unit_zero_grad": (_status, (_H, c_int32)),
    "fsdp_unit_set_callbacks": (_status, (_H, fsdp_unit_fn, fsdp_unit_fn, c_void_p)),
    "fsdp_unit_set_prefetch": (_status, (_H, c_int32, _H_out, c_int32)),
    "fsdp_unit_cast": (_status, (_H, c_int32, _T, _T_out)),
    "fsdp_model_set_gradient_sync": (_status, (_H, c_int32)),
    "fsdp_model_set_all_reduce": (_status, (_H, c_int32)),
    "fsdp_model_set_gradient_divisor": (_status, (_H, c_double)),
    "fsdp_model_finish_backward": (_status, (_H,)),
    "fsdp_model_zero_grad": (_status, (_H,)),
    "fsdp_model_reset": (_status, (_H,)),
    "fsdp_model_broadcast": (_status, (_H, POINTER(_T), c_int32)),
    "fsdp_model_memory": (_status, (_H, POINTER(fsdp_memory_info))),
    "fsdp_model_grad_norm": (_status, (_H, c_double, POINTER(c_double))),
    "fsdp_model_clip_grad_norm": (_status, (_H, c_double, c_double, c_int32, POINTER(c_double))),
    "fsdp_scaler_options_init": (_status, (POINTER(fsdp_scaler_options), c_size_t)),
    "fsdp_scaler_create": (_status, (_H, POINTER(fsdp_scaler_options), _H_out)),
    "fsdp_scaler_retain": (_status, (_H,)),
    "fsdp_scaler_release": (None, (_H,)),
    "fsdp_scaler_query": (_status, (_H, POINTER(fsdp_scaler_info))),
    "fsdp_scaler_unscale": (_status, (_H, _H)),
    "fsdp_scaler_unscale_tensors": (_status, (_H, POINTER(_T), c_int32)),
    "fsdp_scaler_step": (_status, (_H, POINTER(c_int32))),
    "fsdp_scaler_update": (_status, (_H,)),
    "fsdp_scaler_save": (_status, (_H, POINTER(fsdp_scaler_state))),
    "fsdp_scaler_load": (_status, (_H, POINTER(fsdp_scaler_state))),
    "fsdp_state_dict_create": (_status, (_H_out,)),
    "fsdp_state_dict_retain": (_status, (_H,)),
    "fsdp_state_dict_release": (None, (_H,)),
    "fsdp_state_dict_add": (_status, (_H, POINTER(fsdp_entry), POINTER(DLManagedTensorVersioned))),
    "fsdp_state_dict_set_json": (_status, (_H, c_char_p, c_char_p)),
    "fsdp_state_dict_query": (_status, (_H, POINTER(fsdp_state_dict_info))),
    "fsdp_state_dict_entry": (_status, (_H, c_int64, POINTER(fsdp_entry))),
    "fsdp_state_dict_find": (_status, (_H, c_char_p, POINTER(c_int64))),
    "fsdp_state_dict_tensor": (_status, (_H, c_int64, _T_out)),
    "fsdp_state_dict_json": (_status, (_H, c_int64, POINTER(c_char_p), POINTER(c_char_p))),
    "fsdp_state_dict_options_init": (_status, (POINTER(fsdp_state_dict_options), c_size_t)),
    "fsdp_model_state_dict": (_status, (_H, POINTER(fsdp_state_dict_options), _H_out)),
    "fsdp_unit_param_entry": (_status, (_H, c_int32, POINTER(fsdp_entry))),
    "fsdp_state_dict_gather": (_status, (_H, _H, POINTER(fsdp_state_dict_options), _H_out)),
    "fsdp_load_options_init": (_status, (POINTER(fsdp_load_options), c_size_t)),
    "fsdp_state_dict_load": (_status, (_H, _H, POINTER(fsdp_load_options))),
    "fsdp_model_load_state_dict": (_status, (_H, _H, POINTER(fsdp_load_options))),
    "fsdp_save_options_init": (_status, (POINTER(fsdp_save_options), c_size_t)),
    "fsdp_checkpoint_save": (_status, (_H, _H, c_char_p, POINTER(fsdp_save_options), _H_out)),
    "fsdp_save_query": (_status, (_H, POINTER(fsdp_save_info))),
    "fsdp_save_wait": (_status, (_H, c_int64)),
    "fsdp_save_retain": (_status, (_H,)),
    "fsdp_save_release": (None, (_H,)),
    "fsdp_checkpoint_open": (_status, (c_char_p, _H_out)),
    "fsdp_checkpoint_retain": (_status, (_H,)),
    "fsdp_checkpoint_release": (None, (_H,)),
    "fsdp_checkpoint_query": (_status, (_H, POINTER(fsdp_checkpoint_info))),
    "fsdp_checkpoint_entry": (_status, (_H, c_int64, POINTER(fsdp_entry))),
    "fsdp_checkpoint_find": (_status, (_H, c_char_p, c_int32, POINTER(c_int64))),
    "fsdp_checkpoint_json": (_status, (_H, c_int64, POINTER(c_char_p), POINTER(c_char_p))),
    "fsdp_checkpoint_n_parts": (_status, (_H, c_int64, POINTER(c_int64))),
    "fsdp_checkpoint_part_of": (_status, (_H, c_int64, c_int64, POINTER(fsdp_checkpoint_part))),
    "fsdp_checkpoint_read": (_status, (_H, c_int64, _rows, _T)),
    "fsdp_checkpoint_load": (_status, (_H, _H, POINTER(fsdp_load_options))),
    "fsdp_checkpoint_verify": (_status, (_H, fsdp_progress_fn, c_void_p)),
    "fsdp_get_api": (_status, (c_int32, c_int32, POINTER(c_void_p))),
}

# ---- Finding the shared object ---------------------------------------------------------------------------------------


class LibraryNotFound(ImportError):
    """libfsdp.so could not be loaded. The message lists each place that was tried and what was wrong there."""


def candidates():
    """The places where the shared object is looked for, in order, as strings for dlopen."""
    if os.environ.get("FSDP_LIBRARY"):
        return [os.environ["FSDP_LIBRARY"]]  # asked for: nothing else will do
    package = pathlib.Path(__file__).resolve().parent
    found = [package / "libfsdp.so", package.parent / ".libfsdp.mesonpy.libs" / "libfsdp.so"]  # pip puts it there
    if len(package.parents) > 2 and (package.parents[2] / "abi" / "fsdp.h").exists():
        found.append(package.parents[2] / "build" / "release" / "libfsdp.so")
    return [str(path) for path in found] + ["libfsdp.so.0", "libfsdp.so"]


def _open():
    tried = []
    for path in candidates():
        if "/" in path and not os.path.exists(path):
            tried.append(f"{path}: no such file")
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
            continue
        missing = [name for name in PROTOTYPES if not hasattr(library, name)]
        if missing:
            tried.append(f"{path}: lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}")
            continue
        library.fsdp_version.restype = c_int32
        version = library.fsdp_version()
        if version // 10000 != VERSION_MAJOR or version // 100 % 100 < VERSION_MINOR:
            tried.append(
                f"{path}: is version {version // 10000}.{version // 100 % 100}, "
                f"this package needs {VERSION_MAJOR}.{VERSION_MINOR} or a later {VERSION_MAJOR}.x"
            )
            continue
        return path, library
    raise LibraryNotFound(
        "libfsdp.so could not be loaded; build it with ci/build, or name it in the environment variable "
        "FSDP_LIBRARY. Tried:\n  " + "\n  ".join(tried)
    )


class _Library:
    """The functions of the shared object, bound to their prototypes when the first of them is asked for."""

    path = None  # where the shared object was found; None before it is loaded

    def __getattr__(self, name):
        if name not in PROTOTYPES:
            raise AttributeError(f"libfsdp has no function {name!r}")
        path, library = _open()
        for function_name, (result, parameters) in PROTOTYPES.items():
            function = getattr(library, function_name)
            function.restype, function.argtypes = result, parameters
            setattr(self, function_name, function)
        self.path = path
        return getattr(self, name)


lib = _Library()
