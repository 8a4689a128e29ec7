/* Element types: the library's own small enumeration, and how it maps to DLPack's (code, bits, lanes) and to names. */
#ifndef FSDP_TENSOR_DTYPE_H
#define FSDP_TENSOR_DTYPE_H

#include "base/error.h"

enum dtype {
    DTYPE_F64,
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_F8E4M3FN,
    DTYPE_F8E5M2,
    DTYPE_I8,
    DTYPE_I16,
    DTYPE_I32,
    DTYPE_I64,
    DTYPE_U8,
    DTYPE_U16,
    DTYPE_U32,
    DTYPE_U64,
    DTYPE_BOOL,
    DTYPE_C64,
    DTYPE_C128,
    DTYPE_COUNT
};

size_t dtype_size(enum dtype type);      /* bytes */
const char *dtype_name(enum dtype type); /* "float32", "bfloat16", "float8_e4m3fn", "complex64", ... */
int dtype_is_float(enum dtype type);     /* f64 ... f8; not complex */
int dtype_is_complex(enum dtype type);
DLDataType dtype_to_dl(enum dtype type);

/* FSDP_ERR_UNSUPPORTED for lanes other than 1, sub-byte types and types not listed above; `name` is the argument's. */
fsdp_status dtype_from_dl(DLDataType dl, const char *name, enum dtype *out);

#endif
