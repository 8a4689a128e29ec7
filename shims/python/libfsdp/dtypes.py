"""Dtypes by name: what the library calls them, and what Python's array packages call the same thing."""

from . import abi
from .errors import Unsupported

# name: (DLPack type code, bits, typestr of NumPy's array interface). bfloat16 and float8 have no NumPy dtype of their
# own; the array interface shows their bits.
TABLE = {
    "float64": (abi.kDLFloat, 64, "f8"),
    "float32": (abi.kDLFloat, 32, "f4"),
    "float16": (abi.kDLFloat, 16, "f2"),
    "bfloat16": (abi.kDLBfloat, 16, "u2"),
    "float8_e4m3fn": (abi.kDLFloat8_e4m3fn, 8, "u1"),
    "float8_e5m2": (abi.kDLFloat8_e5m2, 8, "u1"),
    "int8": (abi.kDLInt, 8, "i1"),
    "int16": (abi.kDLInt, 16, "i2"),
    "int32": (abi.kDLInt, 32, "i4"),
    "int64": (abi.kDLInt, 64, "i8"),
    "uint8": (abi.kDLUInt, 8, "u1"),
    "uint16": (abi.kDLUInt, 16, "u2"),
    "uint32": (abi.kDLUInt, 32, "u4"),
    "uint64": (abi.kDLUInt, 64, "u8"),
    "bool": (abi.kDLBool, 8, "b1"),
    "complex64": (abi.kDLComplex, 64, "c8"),
    "complex128": (abi.kDLComplex, 128, "c16"),
}
NAMES = {(code, bits): name for name, (code, bits, _) in TABLE.items()}
_ALIASES = {"float": "float64", "int": "int64", "complex": "complex128"}  # Python's own types, as NumPy reads them


def name_of(dtype, argument="dtype"):
    """The library's name for a dtype: a name, a NumPy, ml_dtypes or torch dtype, or a Python number type.

    Raises TypeError for what is no dtype at all and Unsupported for one that the library does not handle.
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    name = _ALIASES.get(name, name)
    if name in TABLE:
        if getattr(dtype, "isnative", True) is False:
            raise Unsupported(f"{argument}: {dtype} is not in this machine's byte order; convert it first")
        return name
    if isinstance(dtype, (str, type)) or hasattr(dtype, "itemsize"):
        raise Unsupported(f"{argument}: dtype {name!r} is not one of {', '.join(TABLE)}")
    raise TypeError(f"{argument}: {dtype!r} is not a dtype; give a name such as 'float32', or a NumPy dtype")


def name_in(tensor):
    """The name of a DLTensor's dtype."""
    dtype = tensor.dtype
    name = NAMES.get((dtype.code, dtype.bits))
    return name if name and dtype.lanes == 1 else f"dlpack({dtype.code}, {dtype.bits}, {dtype.lanes})"
