"""The shared object: it exports what the header declares and nothing else, and asks nothing of its host."""
import ctypes
import re

from conftest import LIBRARY, ROOT, prototypes, run, slots


def nm(*flags):
    """[(name, version)] of dynamic symbols."""
    found = []
    for line in run("nm", "--dynamic", *flags, LIBRARY).splitlines():
        name, _, version = line.split()[-1].partition("@")
        found.append((name, version.lstrip("@")))
    return found


def readelf(*flags):
    return run("readelf", "--wide", *flags, LIBRARY)


def test_exports_are_the_headers_functions():
    exported = [name for name, version in nm("--defined-only") if name != version and name != "FSDP_0"]
    assert sorted(exported) == sorted(prototypes())


def test_every_export_carries_its_version():
    assert {version for name, version in nm("--defined-only") if name.startswith("fsdp_")} == {"FSDP_0"}


def test_version_script_names_the_headers_functions():
    names = re.findall(r"^\s+(\w+);", (ROOT / "abi" / "fsdp.map").read_text(), flags=re.M)
    assert sorted(names) == sorted(prototypes())


def test_soname():
    assert re.findall(r"\(SONAME\).*\[(.*)\]", readelf("--dynamic")) == ["libfsdp.so.0"]


def test_needs_only_the_c_library_and_jansson():
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic"))
    assert [name for name in needed
            if not re.match(r"(libc|libm|libpthread|libdl|librt|ld-linux.*|libgcc_s|libjansson)\.so", name)] == []
    foreign = [name for name, version in nm("--undefined-only")
               if not re.match(r"(GLIBC|GCC|libjansson\.so)", version)
               and name not in ("__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable",
                                "__cxa_finalize")]
    assert foreign == []


def test_code_and_stack_are_not_writable_and_executable():
    dynamic = readelf("--dynamic")
    assert "TEXTREL" not in dynamic
    assert re.search(r"BIND_NOW|\bNOW\b", dynamic)
    headers = readelf("--program-headers")
    assert re.search(r"GNU_STACK.* RW +0x", headers)
    assert "GNU_RELRO" in headers
    assert not re.search(r"LOAD.* RWE ", headers)


def test_no_rpath():
    assert not re.search(r"\((RPATH|RUNPATH)\)", readelf("--dynamic"))


class Api(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("major", ctypes.c_int32), ("minor", ctypes.c_int32),
                ("slots", ctypes.c_void_p * len(slots()))]


def get_api(library, major, minor):
    api = ctypes.POINTER(Api)()
    return library.fsdp_get_api(ctypes.c_int32(major), ctypes.c_int32(minor), ctypes.byref(api)), api


def test_table_holds_the_exported_functions(library):
    status, api = get_api(library, 0, 1)
    assert status == 0
    assert (api.contents.struct_size, api.contents.major) == (ctypes.sizeof(Api), 0)
    for slot, address in zip(slots(), api.contents.slots):
        assert address == ctypes.cast(getattr(library, "fsdp_" + slot), ctypes.c_void_p).value, slot


def test_table_is_given_for_every_older_minor_and_is_one(library):
    first = get_api(library, 0, 0)[1]
    second = get_api(library, 0, 1)[1]
    assert ctypes.addressof(first.contents) == ctypes.addressof(second.contents)


def test_unknown_versions_are_refused_with_those_there_are(library):
    for major, minor in [(1, 0), (-1, 0), (0, 2), (0, -1), (2**31 - 1, 2**31 - 1)]:
        status, api = get_api(library, major, minor)
        assert library.fsdp_status_name(status) == b"VERSION"
        message = library.fsdp_last_error().decode()
        assert f"{major}.{minor}" in message and "0.1.0" in message and "major 0" in message, message
        assert not api


def test_table_needs_somewhere_to_go(library):
    assert library.fsdp_status_name(library.fsdp_get_api(0, 1, None)) == b"INVALID"
    assert b"api" in library.fsdp_last_error()
