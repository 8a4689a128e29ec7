"""Every public function, given nothing, or one wrong pointer: a status and a sentence that names the argument.

The functions and their parameters come from the header, so a new one is tested from its first day. Each call is made in
a child of its own; a crash there is a failure here that says which call it was.
"""
import ctypes
import os
import re
import signal
import time

import pytest

from conftest import LIBRARY, prototypes

OK, INVALID, STRUCT_SIZE, STATE = "OK", "INVALID", "STRUCT_SIZE", "STATE"

# Parameters that may be NULL, by the header. The rest may not.
NULLABLE = {"options", "work", "user", "reason"}
NULLABLE_IN = {
    ("fsdp_set_log", "fn"), ("fsdp_set_allocator", "alloc"), ("fsdp_set_allocator", "release"),
    ("fsdp_group_create", "store"), ("fsdp_store_set", "value"), ("fsdp_store_get", "buffer"),  # with 0 bytes
    ("fsdp_unit_create", "name"), ("fsdp_mesh_group", "name"),
    ("fsdp_unit_set_callbacks", "valid"), ("fsdp_unit_set_callbacks", "invalid"),
    ("fsdp_checkpoint_save", "group"), ("fsdp_checkpoint_save", "save"), ("fsdp_checkpoint_read", "offset"),
    ("fsdp_checkpoint_verify", "on_progress"),
}
REQUIRED_ALTHOUGH = {  # names that are nullable elsewhere
    ("fsdp_store_options_init", "options"), ("fsdp_group_options_init", "options"),
    ("fsdp_model_options_init", "options"), ("fsdp_scaler_options_init", "options"),
    ("fsdp_unit_options_init", "options"), ("fsdp_state_dict_options_init", "options"),
    ("fsdp_load_options_init", "options"), ("fsdp_save_options_init", "options"),
    ("fsdp_store_from_callbacks", "options"),
    *((name, "work") for name in prototypes() if name.startswith("fsdp_work_")),
}
HANDLES = {"fsdp_store *": "store", "fsdp_group *": "group", "fsdp_work *": "work", "fsdp_model *": "model",
           "fsdp_unit *": "unit", "fsdp_scaler *": "scaler", "fsdp_mesh *": "mesh", "fsdp_state_dict *": "state_dict",
           "fsdp_save *": "save", "fsdp_checkpoint *": "checkpoint"}
SIZES = {"fsdp_store_options": 32, "fsdp_group_options": 48, "fsdp_model_options": 88, "fsdp_unit_options": 24,
         "fsdp_error_info": 1056, "fsdp_group_info": 136, "fsdp_mesh_info": 408, "fsdp_param_info": 72,
         "fsdp_unit_info": 168, "fsdp_memory_info": 144, "fsdp_scaler_options": 40, "fsdp_scaler_info": 40,
         "fsdp_entry": 72, "fsdp_state_dict_info": 40, "fsdp_state_dict_options": 32, "fsdp_load_options": 48,
         "fsdp_save_options": 32, "fsdp_save_info": 32, "fsdp_checkpoint_info": 96, "fsdp_checkpoint_part": 48}
WITH_STATUS = {name: params for name, (returns, params) in prototypes().items() if returns == "fsdp_status"}
RELEASES = [name for name, (returns, _) in prototypes().items() if returns == "void"]


def parameter(declaration):
    """("const DLTensor *", "in") of "const DLTensor *in"."""
    kind, star, name = re.fullmatch(r"(.*?)(\**)\s*(\w+)", declaration).groups()
    return f"{kind.strip()} {star}".strip(), name


def is_pointer(kind):
    return "*" in kind or kind.endswith("_fn")


def required(function, name):
    if (function, name) in REQUIRED_ALTHOUGH:
        return True
    return name not in NULLABLE and (function, name) not in NULLABLE_IN


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("dtype", DLDataType), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]


class Param(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("full", ctypes.c_void_p),
                ("frozen", ctypes.c_int32), ("shard_dim", ctypes.c_int32), ("meta", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("id", ctypes.c_uint64)]


class Precision(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("dtypes", DLDataType * 4), ("keep", ctypes.c_int32 * 2)]


class UnitOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("strategy", ctypes.c_int32), ("reshard", ctypes.c_int32),
                ("precision", ctypes.c_void_p)]


class ModelOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("strategy", ctypes.c_int32),
                ("reshard", ctypes.c_int32), ("private_unshard", ctypes.c_int32), ("sync", ctypes.c_int32),
                ("gradient_divisor", ctypes.c_double), ("precision", ctypes.c_void_p), ("shard_dim", ctypes.c_char_p),
                ("replicate_dim", ctypes.c_char_p), ("forward_prefetch", ctypes.c_int32),
                ("backward_prefetch", ctypes.c_int32), ("prefetch_limit", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("offload_dir", ctypes.c_char_p)]


class Collective(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int32), ("op", ctypes.c_int32),
                ("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("in_rows", ctypes.c_void_p),
                ("out_rows", ctypes.c_void_p), ("peer", ctypes.c_int32), ("tag", ctypes.c_int32)]


class ScalerState(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("scale", ctypes.c_double), ("growth_factor", ctypes.c_double),
                ("backoff_factor", ctypes.c_double), ("growth_interval", ctypes.c_int32),
                ("growth_tracker", ctypes.c_int32), ("steps", ctypes.c_int64), ("skipped", ctypes.c_int64)]


class Entry(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("kind", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("shape", ctypes.c_void_p), ("offset", ctypes.c_void_p),
                ("length", ctypes.c_void_p), ("dtype", DLDataType), ("copies", ctypes.c_int32),
                ("copy", ctypes.c_int32), ("rank", ctypes.c_int32), ("tied_to", ctypes.c_char_p)]


class Callbacks(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), *((name, ctypes.c_void_p) for name in
                ("user", "set", "get", "add", "wait", "release"))]


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """Where a test's world writes its checkpoint."""
    World.folder = tmp_path


class World:
    """One rank's live objects, and a valid argument for every parameter."""

    folder = None

    def __init__(self):
        self.lib = ctypes.CDLL(str(LIBRARY))
        self.lib.fsdp_last_error.restype = ctypes.c_char_p
        self.lib.fsdp_status_name.restype = ctypes.c_char_p
        self.kept = []

    def call(self, function, *arguments):
        """The status' name and, for a failure, the message."""
        status = self.lib.__getattr__(function)(*arguments)
        return self.lib.fsdp_status_name(status).decode(), self.lib.fsdp_last_error().decode() if status else ""

    def made(self, function, *arguments):
        """The object that a function gives through its last argument."""
        handle = ctypes.c_void_p()
        result = self.call(function, *arguments, ctypes.byref(handle))
        assert result[0] == OK, (function, result)
        return handle

    def keep(self, thing):
        self.kept.append(thing)
        return thing

    def address(self, thing):
        return ctypes.c_void_p(ctypes.addressof(self.keep(thing)))

    def tensor(self, rows=4):
        data = self.keep((ctypes.c_float * rows)())
        shape = self.keep((ctypes.c_int64 * 1)(rows))
        return self.address(DLTensor(ctypes.addressof(data), 1, 0, 1, DLDataType(2, 32, 1), ctypes.addressof(shape)))

    def entry(self, name):
        return Entry(ctypes.sizeof(Entry), name, 0, 1, self.valid("", "const int64_t *", "shape"))

    def zeros(self):
        return self.made("fsdp_zeros", self.valid("", "const DLDataType *", ""), 1, self.valid("", "const int64_t *", ""))

    def open(self):
        """Everything that takes time to make. FSDP_STORE and the launchers' variables are taken away first."""
        for name in list(os.environ):
            if re.match(r"FSDP_|RANK$|WORLD_SIZE$|OMPI_|PMI_|SLURM_|MASTER_", name):
                del os.environ[name]
        self.store = self.made("fsdp_store_open", b"env://", None)
        self.group = self.made("fsdp_group_create", None, None)
        self.model = self.made("fsdp_model_create", self.group, None)
        self.params = (Param * 1)(Param(ctypes.sizeof(Param), b"weight", self.tensor().value))
        self.unit = self.made("fsdp_unit_create", self.model, b"unit", self.params, 1, None)
        self.work = self.made("fsdp_barrier", self.group)
        self.scaler = self.made("fsdp_scaler_create", self.group, None)
        self.mesh = self.made("fsdp_mesh_create", self.group, 1, self.valid("", "const int64_t *", "sizes"),
                              self.valid("", "const char *const *", "names"))
        self.state_dict = self.made("fsdp_state_dict_create")
        entry = self.address(self.entry(b"weight"))
        assert self.call("fsdp_state_dict_add", self.state_dict, entry, self.zeros()) == (OK, "")
        assert self.call("fsdp_state_dict_set_json", self.state_dict, b"groups", b"[]") == (OK, "")
        self.path = os.fsencode(self.folder / "saved")
        self.save = self.made("fsdp_checkpoint_save", self.group, self.state_dict, self.path, None)
        self.checkpoint = self.made("fsdp_checkpoint_open", self.path)
        return self

    def valid(self, function, kind, name):
        """A good value for a parameter; pointers are never NULL."""
        if kind in HANDLES:
            return getattr(self, HANDLES[kind])
        if kind in ("const DLTensor *", "const DLTensor *const *"):
            tensor = self.tensor()
            return tensor if kind.count("*") == 1 else self.address((ctypes.c_void_p * 1)(tensor.value))
        if kind == "const fsdp_param *":
            return self.address((Param * 1)(Param(ctypes.sizeof(Param), b"another", self.tensor().value)))
        if kind == "const fsdp_collective *":
            return self.address((Collective * 1)(Collective(ctypes.sizeof(Collective), 3, 0, self.tensor().value,
                                                            self.tensor().value)))
        if kind == "const fsdp_store_callbacks *":
            function_pointers = [ctypes.cast(self.lib.fsdp_version, ctypes.c_void_p).value] * 4
            return self.address(Callbacks(ctypes.sizeof(Callbacks), None, *function_pointers))
        if kind == "const fsdp_entry *":
            return self.address(self.entry(b"another"))
        if kind == "DLManagedTensorVersioned *":
            return self.zeros()
        if re.search(r"(options|_info|fsdp_entry|_part) \*$", kind):
            block = self.keep((ctypes.c_size_t * 512)())  # zeros, and a size that is right for any
            block[0] = SIZES[kind.replace("const ", "").rstrip(" *")]
            if "store_options" in kind and function == "fsdp_store_from_callbacks":
                ctypes.cast(block, ctypes.POINTER(ctypes.c_int32))[2] = 1
            return self.address(block)
        if kind.endswith("fsdp_scaler_state *"):
            return self.address(ScalerState(ctypes.sizeof(ScalerState), 1024, 2, 0.5, 100))
        if kind == "const char *":
            path = self.path if function == "fsdp_checkpoint_open" else os.fsencode(self.folder / "another")
            return {"url": b"env://", "path": path, "text": b"{}"}.get(name, b"weight")
        if kind == "const char *const *":
            return self.address((ctypes.c_char_p * 1)(b"name"))
        if kind == "fsdp_unit *const *":
            return self.address((ctypes.c_void_p * 1)(self.unit.value))
        if kind == "const DLDataType *":
            return self.address(DLDataType(2, 32, 1))
        if kind == "const int64_t *":
            return self.address((ctypes.c_int64 * 1)(1 if name == "sizes" else 4))
        if kind == "fsdp_done_fn":
            return self.keep(ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_void_p)(lambda *_: None))
        if kind == "fsdp_unit_fn":
            return self.keep(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None))
        if is_pointer(kind):  # an output, or a buffer
            return self.address((ctypes.c_char * 4096)())
        if name == "bytes" or name == "capacity":
            return ctypes.c_size_t(8)
        if name == "struct_size":
            return ctypes.c_size_t(SIZES[function.removesuffix("_init")])
        if kind == "double":
            return ctypes.c_double(1)
        if kind == "int64_t":
            return ctypes.c_int64(name not in ("index", "part"))
        return ctypes.c_int32({"n": 1, "ndim": 1, "world_size": 1, "minor": 1}.get(name, -(name == "rank" and "find" in function)))

    def nothing(self, kind):
        if is_pointer(kind):
            return None
        return {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "double": ctypes.c_double}.get(kind, ctypes.c_int32)(0)


def in_child(body, seconds=20):
    """Run body() in a child and give the text that it returns. A signal or an exception there fails the test."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(seconds)
        code = 1
        try:
            os.write(write, body().encode())
            code = 0
        except BaseException as error:  # pytest must not see it twice
            os.write(write, repr(error).encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFSIGNALED(status), f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    assert os.WEXITSTATUS(status) == 0, text
    return text


def outcome(call):
    """(status name, message) of World.call, from a child."""
    status, _, message = in_child(lambda: "\n".join(call())).partition("\n")
    return status, message


def names_one_of(message, names):
    return any(re.search(rf"\b{name}\b", message) for name in names)


HARMLESS = {"fsdp_set_log", "fsdp_set_allocator", "fsdp_set_thread_timeout"}  # all-NULL, or 0, means the defaults


@pytest.mark.parametrize("function", WITH_STATUS)
def test_given_nothing(function):
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World()
        return world.call(function, *(world.nothing(kind) for kind, _ in params))

    status, message = outcome(call)
    if function in HARMLESS:
        assert status == OK
    else:
        assert status == INVALID, (status, message)
        assert names_one_of(message, [name for _, name in params]), message


ONE_NULL = [(function, index) for function, params in WITH_STATUS.items() for index, text in enumerate(params)
            if is_pointer(parameter(text)[0]) and required(function, parameter(text)[1])]


@pytest.mark.parametrize("function, index", ONE_NULL,
                         ids=[f"{function}-{parameter(WITH_STATUS[function][index])[1]}" for function, index in ONE_NULL])
def test_given_null_for_one_argument(function, index):
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World().open()
        arguments = [world.valid(function, kind, name) for kind, name in params]
        arguments[index] = None
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == INVALID, (status, message)
    assert names_one_of(message, [params[index][1]]), message


TAKES_A_HANDLE = [name for name, params in WITH_STATUS.items() if params and parameter(params[0])[0] in HANDLES]


@pytest.mark.parametrize("function", TAKES_A_HANDLE)
def test_given_a_handle_of_another_kind(function):
    params = [parameter(text) for text in WITH_STATUS[function]]
    kind, name = params[0]

    def call():
        world = World().open()
        arguments = [world.valid(function, *param) for param in params]
        arguments[0] = world.group if HANDLES[kind] != "group" else world.model
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == INVALID, (status, message)
    assert names_one_of(message, [name]), message


@pytest.mark.parametrize("function", TAKES_A_HANDLE)
def test_given_a_released_handle(function):
    """It can be told as long as the memory isn't used again; a host allocator that frees nothing makes that certain."""
    params = [parameter(text) for text in WITH_STATUS[function]]
    handle = HANDLES[params[0][0]]

    def call():
        world = World()
        libc = ctypes.CDLL(None)
        never_free = world.keep(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None))
        status = world.call("fsdp_set_allocator", ctypes.cast(libc.malloc, ctypes.c_void_p), never_free, None)
        assert status[0] == OK, status
        world.open()
        arguments = [world.valid(function, *param) for param in params]
        time.sleep(0.1)  # the library drops its own reference to a work just after it is complete
        held_by = {"group": ["save", "scaler", "work", "unit", "model", "mesh"], "model": ["unit"]}
        for name in [*held_by.get(handle, []), handle]:
            getattr(world.lib, f"fsdp_{name}_release")(getattr(world, name))
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == INVALID, (status, message)
    assert names_one_of(message, [params[0][1]]), message


@pytest.mark.parametrize("function", RELEASES)
def test_release_of_nothing_does_nothing(function):
    assert in_child(lambda: str(World().lib.__getattr__(function)(None) and "" or "done")) == "done"


SIZED = [(function, index) for function, params in WITH_STATUS.items() for index, text in enumerate(params)
         if re.search(r"(_options|_info|scaler_state|_callbacks|fsdp_param|fsdp_collective|fsdp_entry|_part) \*$",
                      parameter(text)[0])
         and not function.endswith("_init")]


@pytest.mark.parametrize("size", [0, 8, 2**40], ids=["unset", "too_small", "absurd"])
@pytest.mark.parametrize("function, index", SIZED,
                         ids=[f"{function}-{parameter(WITH_STATUS[function][index])[1]}" for function, index in SIZED])
def test_given_a_wrong_struct_size(function, index, size):
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World().open()
        arguments = [world.valid(function, *param) for param in params]
        ctypes.c_size_t.from_address(arguments[index].value).value = size
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == STRUCT_SIZE, (status, message)
    struct = re.search(r"fsdp_\w+", params[index][0])[0]
    assert struct in message and str(size) in message, message


NEWER = [(function, index) for function, index in SIZED if "const " in WITH_STATUS[function][index]]


@pytest.mark.parametrize("function, index", NEWER, ids=[function for function, _ in NEWER])
@pytest.mark.parametrize("newer_field", [0, 1], ids=["zero", "set"])
def test_given_a_struct_of_a_newer_library(function, index, newer_field):
    """Larger than we know: taken when what we don't know is zero, refused otherwise."""
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World().open()
        arguments = [world.valid(function, *param) for param in params]
        old = ctypes.c_size_t.from_address(arguments[index].value).value
        block = world.keep((ctypes.c_char * (old + 16))())
        ctypes.memmove(block, arguments[index], old)
        ctypes.c_size_t.from_buffer(block).value = old + 16
        block[old + 9] = bytes([newer_field])
        arguments[index] = world.address(block)
        return world.call(function, *arguments)

    status, message = outcome(call)
    if newer_field:
        assert status == STRUCT_SIZE, (status, message)
    else:
        assert status != STRUCT_SIZE, message


INFOS = [("fsdp_last_error_info", None), ("fsdp_group_query", "group"), ("fsdp_work_error", "work"),
         ("fsdp_mesh_query", "mesh"), ("fsdp_unit_query", "unit"), ("fsdp_unit_param_query", "unit"),
         ("fsdp_model_memory", "model"), ("fsdp_scaler_query", "scaler"), ("fsdp_scaler_save", "scaler"),
         ("fsdp_state_dict_query", "state_dict"), ("fsdp_state_dict_entry", "state_dict"),
         ("fsdp_unit_param_entry", "unit"), ("fsdp_save_query", "save"), ("fsdp_checkpoint_query", "checkpoint"),
         ("fsdp_checkpoint_entry", "checkpoint"), ("fsdp_checkpoint_part_of", "checkpoint")]


@pytest.mark.parametrize("function, handle", INFOS)
def test_infos_fill_a_larger_struct_and_not_more(function, handle):
    kind, name = parameter(WITH_STATUS[function][-1])

    def call():
        world = World().open()
        old = ctypes.c_size_t.from_address(world.valid(function, kind, name).value).value
        block = (ctypes.c_ubyte * (old + 64))(*[0xAB] * (old + 64))
        ctypes.c_size_t.from_buffer(block).value = old + 32
        arguments = [world.valid(function, *parameter(text)) for text in WITH_STATUS[function][:-1]]
        assert not handle or arguments[0] is getattr(world, handle)
        status, message = world.call(function, *arguments, block)
        assert ctypes.c_size_t.from_buffer(block).value == old + 32
        assert bytes(block[old:old + 32]) == bytes(32), "fields we don't know read as zero"
        assert bytes(block[old + 32:]) == b"\xab" * 32, "written beyond struct_size"
        return status, message

    assert outcome(call) == (OK, "")


def test_every_info_is_among_them():
    filled = {name for name, params in WITH_STATUS.items()
              if re.match(r"fsdp_(\w+_info|scaler_state|entry|checkpoint_part) \*", params[-1])}
    assert filled == {name for name, _ in INFOS}


# ---- Arrays and structs inside of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("function, name, entry", [
    ("fsdp_unit_set_prefetch", "units", None), ("fsdp_unit_set_prefetch", "units", "group"),
    ("fsdp_mesh_create", "names", None), ("fsdp_model_broadcast", "tensors", None),
])
def test_given_a_wrong_entry_of_an_array(function, name, entry):
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World().open()
        arguments = [world.valid(function, *param) for param in params]
        index = [param[1] for param in params].index(name)
        arguments[index] = world.address((ctypes.c_void_p * 1)(getattr(world, entry).value if entry else None))
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == INVALID, (status, message)
    assert re.search(rf"\b{name}\b", message), message


@pytest.mark.parametrize("size", [0, 8, 2**40], ids=["unset", "too_small", "absurd"])
@pytest.mark.parametrize("function, options", [
    ("fsdp_model_create", ModelOptions), ("fsdp_model_create_on_mesh", ModelOptions), ("fsdp_unit_create", UnitOptions),
])
def test_given_a_wrong_struct_size_of_the_precision(function, options, size):
    params = [parameter(text) for text in WITH_STATUS[function]]

    def call():
        world = World().open()
        arguments = [world.valid(function, *param) for param in params]
        struct = options(ctypes.sizeof(options), precision=world.address(Precision(size)).value)
        arguments[[param[1] for param in params].index("options")] = world.address(struct)
        return world.call(function, *arguments)

    status, message = outcome(call)
    assert status == STRUCT_SIZE, (status, message)
    assert "fsdp_precision" in message and str(size) in message, message
