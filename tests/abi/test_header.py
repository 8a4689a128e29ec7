"""The header: any compiler takes it, any FFI reads it, and it documents what it declares."""
import ctypes
import re
import shutil
import sys

import pytest

from conftest import HEADER, ROOT, dlpack_flags, dlpack_include, prototypes, run, slots, structs, without_comments

STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-Wundef", "-Wshadow", "-fsyntax-only", f"-I{HEADER.parent}"]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("flags", [["-x", "c", "-std=c11"], ["-x", "c", "-std=c17"], ["-x", "c++", "-std=c++17"]],
                         ids=["c11", "c17", "c++17"])
def test_header_compiles_alone(compiler, flags, tmp_path):
    assert shutil.which(compiler), f"{compiler} is not installed"
    source = tmp_path / "alone.c"
    source.write_text('#include "fsdp.h"\n#include "fsdp.h"\nextern int unused;\n')
    run(compiler, *flags, *STRICT, *dlpack_flags(), source)


def test_header_includes_only_what_it_may():
    included = re.findall(r"^\s*#\s*include\s*[<\"](.*?)[>\"]", HEADER.read_text(), flags=re.M)
    assert sorted(included) == ["dlpack/dlpack.h", "stddef.h", "stdint.h"]


def test_nothing_hostile_to_an_ffi():
    code = without_comments(HEADER.read_text())
    code = re.sub(r"^\s*#.*$", "", code, flags=re.M)
    code = re.sub(r"enum \{[^}]*\};", "", code)  # constants: no type of theirs is used
    assert not re.search(r"\b(long|bool|_Bool|enum|inline|static|union|va_list|wchar_t|int|unsigned)\b", code)
    assert "..." not in code
    assert not re.search(r"\w+\s*:\s*\d+\s*;", code), "a bit-field"


def test_no_struct_is_passed_by_value():
    """Rust's and LuaJIT's FFIs can, Lua's and many JITs can't; and how it is done differs between architectures."""
    scalars = {"int32_t", "int64_t", "uint64_t", "size_t", "double", "fsdp_status", "fsdp_reduce_op", "fsdp_op_kind",
               "fsdp_log_level", "fsdp_unit_state", "fsdp_strategy", "fsdp_backward_prefetch", "fsdp_phase",
               "fsdp_cast_kind", "fsdp_log_fn", "fsdp_alloc_fn", "fsdp_free_fn", "fsdp_done_fn", "fsdp_unit_fn",
               "fsdp_progress_fn"}
    for name, (returns, params) in prototypes().items():
        for param in params:
            kind = param.rsplit(" ", 1)[0].replace("const ", "")
            assert "*" in param or kind in scalars, f"{name}: {param}"
        assert "*" in returns or returns in scalars | {"void"}, f"{name} returns {returns}"


def test_no_hidden_padding(tmp_path):
    """A field added later must not land in bytes that older callers never cleared."""
    source = tmp_path / "padded.c"
    source.write_text('#include <dlpack/dlpack.h>\n#pragma GCC diagnostic error "-Wpadded"\n#include "fsdp.h"\n')
    run("cc", "-std=c11", "-fsyntax-only", f"-I{HEADER.parent}", *dlpack_flags(), source)


def test_every_struct_starts_with_its_size():
    for name, fields in structs().items():
        assert fields[0] == "struct_size", name


def documented(text):
    """Names of functions with a comment of their own, or one above the group of lines they are in."""
    names, commented, in_comment = set(), False, False
    statement = ""
    for line in text.splitlines():
        if in_comment or line.lstrip().startswith("/*"):
            in_comment = "*/" not in line
            commented = not line.startswith("/* ----")
            continue
        if line.startswith("#"):
            continue
        statement += line + "\n"
        if not line.strip():
            commented, statement = False, ""
        if re.search(r";\s*(/\*|$)", line):
            match = re.match(r"FSDP_API[^;(]*?\b(fsdp_\w+)\s*\(", statement.strip(), flags=re.S)
            if match and (commented or "/*" in statement):
                names.add(match[1])
            statement = ""
    return names


def test_every_function_is_documented():
    missing = set(prototypes()) - documented(HEADER.read_text())
    # What these do is in the header's first comment.
    missing = {name for name in missing if not re.search(r"_(retain|release|options_init)$", name)}
    assert not missing


def test_generated_files_are_up_to_date():
    run(sys.executable, ROOT / "abi" / "generate.py", "--check")


def test_table_has_a_slot_for_every_function():
    assert {"fsdp_" + slot for slot in slots()} == set(prototypes()) - {"fsdp_get_api"}


def constants():
    """Names of the header's numbers, enumerated and defined."""
    code = without_comments(HEADER.read_text())
    found = re.findall(r"\b(FSDP_\w+) = -?\d+", code) + re.findall(r"^#define (FSDP_\w+) \d+$", code, flags=re.M)
    assert len(found) == len(set(found)) > 70
    return found


def layout_program():
    lines = ['#include <stdio.h>', '#include "fsdp.h"', "int main(void)", "{"]
    for name, fields in structs().items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in fields:
            lines.append(f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    for name in constants():
        lines.append(f'printf("= {name} %d\\n", {name});')
    return "\n".join([*lines, "return 0;", "}", ""])


def layout(text):
    """Of layout_program's output: sizes, {(struct, field): (offset, size)}, constants."""
    sizes, fields, constants = {}, {}, {}
    for words in map(str.split, text.splitlines()):
        if words[0] == "=":
            constants[words[1]] = int(words[2])
        elif len(words) == 2:
            sizes[words[0]] = int(words[1])
        else:
            fields[words[0], words[1]] = int(words[2]), int(words[3])
    return sizes, fields, constants


def test_cffi_reads_the_header(compile_and_run, tmp_path):
    """As cffi users do it: preprocess, drop attributes and the system's own lines, cdef."""
    cffi = pytest.importorskip("cffi")
    source = tmp_path / "all.c"
    source.write_text('#include "fsdp.h"\n')
    text = run("cc", "-std=c11", "-E", "-P", f"-I{HEADER.parent}", *dlpack_flags(), source)
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", text)
    text = text[text.index("typedef struct", text.index("DLPackVersion") - 200):]  # after the C library's typedefs
    ffi = cffi.FFI()
    ffi.cdef(re.sub(r"\(?\b1U?L << \d+U?L?\)?", "1", text))

    sizes, fields, _ = layout(compile_and_run(layout_program()))
    assert sizes
    for name, size in sizes.items():
        assert ffi.sizeof(name) == size
    for (name, field), (offset, _) in fields.items():
        assert ffi.offsetof(name, field) == offset
    assert ffi.sizeof("fsdp_api") == 16 + ffi.sizeof("void *") * len(slots())


def test_ctypes_declarations_agree_with_the_compiler(compile_and_run):
    """libfsdp.abi writes its structs and constants by hand; the compiler has the last word on them."""
    sys.path.insert(0, str(ROOT / "shims" / "python"))
    abi = pytest.importorskip("libfsdp.abi")
    declared = {cls.__name__: cls for cls in vars(abi).values()
                if isinstance(cls, type) and issubclass(cls, ctypes.Structure) and hasattr(cls, "_fields_")}
    by_field_names = {tuple(field[0].rstrip("_") for field in cls._fields_): cls for cls in declared.values()}

    sizes, fields, constants = layout(compile_and_run(layout_program()))
    for name, names in structs().items():
        cls = declared.get(name) or by_field_names.get(tuple(names))
        assert cls is not None, f"libfsdp.abi has no struct with {name}'s fields"
        spelling = {field[0].rstrip("_"): field[0] for field in cls._fields_}  # in_, as `in` is taken in Python
        assert list(spelling) == names
        assert ctypes.sizeof(cls) == sizes[name], name
        for field in names:
            descriptor = getattr(cls, spelling[field])
            assert (descriptor.offset, descriptor.size) == fields[name, field], f"{name}.{field}"
    for name, value in constants.items():
        spelling = name if not name.startswith("FSDP_VERSION_") else name.removeprefix("FSDP_")
        assert getattr(abi, spelling) == value, spelling
    assert {name for name in vars(abi) if name.startswith("FSDP_")} <= set(constants), "a number that is not the header's"


def test_ctypes_prototypes_agree_with_the_header():
    """By name, number of parameters, and the width of each: what a wrong call would trip over."""
    sys.path.insert(0, str(ROOT / "shims" / "python"))
    abi = pytest.importorskip("libfsdp.abi")
    wide = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
    for name, (returns, params) in prototypes().items():
        if name == "fsdp_get_api":
            continue
        result, arguments = abi.PROTOTYPES[name]
        assert (result is None) == (returns == "void"), name
        assert len(arguments) == len(params), name
        for argument, param in zip(arguments, params):
            pointer = "*" in param or param.split()[0].endswith("_fn")
            kind = ctypes.c_void_p if pointer else wide.get(param.split()[0], ctypes.c_int32)
            assert ctypes.sizeof(argument) == ctypes.sizeof(kind), f"{name}: {param}"
    assert set(abi.PROTOTYPES) <= set(prototypes())
