/* The table of element types. One row per type; everything else in this file reads it. */
#include "tensor/dtype.h"

static const struct {
    const char *name;
    DLDataType dl;
} dtypes[DTYPE_COUNT] = {
    [DTYPE_F64] = {"float64", {kDLFloat, 64, 1}},
    [DTYPE_F32] = {"float32", {kDLFloat, 32, 1}},
    [DTYPE_F16] = {"float16", {kDLFloat, 16, 1}},
    [DTYPE_BF16] = {"bfloat16", {kDLBfloat, 16, 1}},
    [DTYPE_F8E4M3FN] = {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    [DTYPE_F8E5M2] = {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
    [DTYPE_I8] = {"int8", {kDLInt, 8, 1}},
    [DTYPE_I16] = {"int16", {kDLInt, 16, 1}},
    [DTYPE_I32] = {"int32", {kDLInt, 32, 1}},
    [DTYPE_I64] = {"int64", {kDLInt, 64, 1}},
    [DTYPE_U8] = {"uint8", {kDLUInt, 8, 1}},
    [DTYPE_U16] = {"uint16", {kDLUInt, 16, 1}},
    [DTYPE_U32] = {"uint32", {kDLUInt, 32, 1}},
    [DTYPE_U64] = {"uint64", {kDLUInt, 64, 1}},
    [DTYPE_BOOL] = {"bool", {kDLBool, 8, 1}},
    [DTYPE_C64] = {"complex64", {kDLComplex, 64, 1}},
    [DTYPE_C128] = {"complex128", {kDLComplex, 128, 1}},
};

size_t dtype_size(enum dtype type)
{
    return dtypes[type].dl.bits / 8;
}

const char *dtype_name(enum dtype type)
{
    return dtypes[type].name;
}

int dtype_is_float(enum dtype type)
{
    return type <= DTYPE_F8E5M2;
}

int dtype_is_complex(enum dtype type)
{
    return type == DTYPE_C64 || type == DTYPE_C128;
}

DLDataType dtype_to_dl(enum dtype type)
{
    return dtypes[type].dl;
}

fsdp_status dtype_from_dl(DLDataType dl, const char *name, enum dtype *out)
{
    if (dl.lanes != 1) {
        return err(FSDP_ERR_UNSUPPORTED,
                   "%s has dtype (code %d, bits %d, lanes %d): only 1 lane is supported; pass a view with one more "
                   "dimension",
                   name, dl.code, dl.bits, dl.lanes);
    }
    for (int type = 0; type < DTYPE_COUNT; type++) {
        if (dtypes[type].dl.code == dl.code && dtypes[type].dl.bits == dl.bits) {
            *out = (enum dtype)type;
            return FSDP_OK;
        }
    }
    return err(FSDP_ERR_UNSUPPORTED,
               "%s has dtype (code %d, bits %d), which is not supported; cast it, or pass a view as uint8", name,
               dl.code, dl.bits);
}
