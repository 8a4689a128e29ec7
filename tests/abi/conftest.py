"""What the ABI tests share: where things are, the header's declarations, and compiling small programs.

FSDP_BUILD_DIR names the build to test (default: build/release). Everything here sees the library as a host does: the header,
the shared object, the installed tree.
"""
import ctypes
import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "abi" / "fsdp.h"
BUILD = pathlib.Path(os.environ.get("FSDP_BUILD_DIR", ROOT / "build" / "release")).resolve()
LIBRARY = BUILD / "libfsdp.so"
os.environ.setdefault("FSDP_LIBRARY", str(LIBRARY))  # for libfsdp.abi


def dlpack_include():
    """The folder the build took dlpack/dlpack.h from; "" when that was the compiler's own path."""
    if "DLPACK_INCLUDE" in os.environ:
        return os.environ["DLPACK_INCLUDE"]
    options = json.loads((BUILD / "meson-info" / "intro-buildoptions.json").read_text())
    return next(option["value"] for option in options if option["name"] == "dlpack_include")


def dlpack_flags():
    folder = dlpack_include()
    return ["-isystem", folder] if folder else []


def run(*command, **options):
    """Run a command, which must succeed; its output."""
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def prototypes():
    """Exported functions by the header: name -> (return type, [parameter declarations]), in its order."""
    found = {}
    for match in re.finditer(r"^FSDP_API\s+(.*?)\b(fsdp_\w+)\s*\(([^;]*)\);", without_comments(HEADER.read_text()),
                             flags=re.M | re.S):
        returns, name, params = (" ".join(part.split()) for part in match.groups())
        found[name] = (returns, [] if params == "void" else [param.strip() for param in params.split(",")])
    return found


def structs():
    """Public structs by the header: name -> [field names], the generated table left out."""
    found = {}
    for match in re.finditer(r"typedef struct (\w+) \{(.*?)\} \1;", without_comments(HEADER.read_text()), flags=re.S):
        declarations = [" ".join(part.split()) for part in match[2].split(";") if part.strip()]
        found[match[1]] = [(re.search(r"\(\*(\w+)\)", text) or re.search(r"(\w+)(\[\w+\])*$", text))[1]
                           for text in declarations]
    return found


def slots():
    """The function table's slots in their order."""
    table = HEADER.read_text().split("struct fsdp_api {")[1].split("};")[0]
    return re.findall(r"\(\*(\w+)\)\(", table)


@pytest.fixture
def compile_and_run(tmp_path):
    """Compile C source against the header (no library) and give what it prints."""

    def go(source, *flags):
        file = tmp_path / "program.c"
        file.write_text(source)
        run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", *dlpack_flags(), file,
            "-o", tmp_path / "program", *flags)
        return run(tmp_path / "program")

    return go


@pytest.fixture(scope="session")
def library():
    """The shared object, by ctypes and nothing else."""
    lib = ctypes.CDLL(str(LIBRARY))
    lib.fsdp_last_error.restype = ctypes.c_char_p
    lib.fsdp_status_name.restype = ctypes.c_char_p
    return lib
