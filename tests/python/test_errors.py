"""Exceptions: one for each status, with its details, also where they come from another process or thread."""

import pickle
import re

import numpy as np
import pytest
from conftest import ROOT, environment, run_python

import libfsdp
from libfsdp import abi, errors


def test_every_status_of_the_header_has_its_exception():
    header = (ROOT / "abi" / "fsdp.h").read_text()
    statuses = {int(number) for number in re.findall(r"FSDP_ERR_\w+ = (\d+)", header)}
    assert statuses == set(errors.BY_STATUS)
    for status, kind in errors.BY_STATUS.items():
        assert kind.status == status
        assert kind is getattr(libfsdp, kind.__name__)
        assert kind.__name__ in libfsdp.__all__


@pytest.mark.parametrize(
    "kind, builtin",
    [
        (libfsdp.InvalidArgument, ValueError),
        (libfsdp.Unsupported, NotImplementedError),
        (libfsdp.OutOfMemory, MemoryError),
        (libfsdp.Timeout, TimeoutError),
        (libfsdp.Pending, TimeoutError),
        (libfsdp.PeerLost, ConnectionError),
        (libfsdp.Mismatch, RuntimeError),
    ],
)
def test_exceptions_are_also_pythons_own(kind, builtin):
    with pytest.raises(builtin) as caught:
        raise kind("what happened")
    assert isinstance(caught.value, libfsdp.FsdpError) and isinstance(caught.value, RuntimeError)
    assert str(caught.value) == caught.value.message == "what happened"


def info(**fields):
    made = abi.fsdp_error_info()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_details_come_from_the_record():
    error = errors.from_info(
        info(status=abi.FSDP_ERR_MISMATCH, operation=abi.FSDP_OP_ALL_REDUCE, sequence=7, rank_a=0, rank_b=3, message=b"why")
    )
    assert type(error) is libfsdp.Mismatch
    assert (error.operation, error.sequence, error.ranks, error.message) == ("all_reduce", 7, (0, 3), "why")
    lost = errors.from_info(info(status=abi.FSDP_ERR_PEER_LOST, rank_a=2, rank_b=-1, message=b"gone"))
    assert (lost.ranks, lost.operation) == ((2,), None)


def test_a_status_that_this_package_does_not_know_is_still_an_error():
    error = errors.from_info(info(status=99, rank_a=-1, rank_b=-1))
    assert type(error) is libfsdp.FsdpError
    assert error.status == 99 and "99" in str(error)


def test_exceptions_can_be_pickled():
    error = libfsdp.PeerLost("rank 2 is gone", status=10, operation="barrier", sequence=4, ranks=[2])
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is libfsdp.PeerLost
    assert vars(twin) == vars(error) and str(twin) == str(error)


def test_the_package_imports_without_the_library_and_says_what_it_tried(tmp_path):
    code = """
import libfsdp
try:
    libfsdp.zeros(3)
except ImportError as error:
    assert type(error) is libfsdp.abi.LibraryNotFound
    print(error)
"""
    done = run_python("-c", code, env=environment(FSDP_LIBRARY="/no/such/libfsdp.so"))
    assert done.returncode == 0, done.stderr
    assert "/no/such/libfsdp.so: no such file" in done.stdout and "FSDP_LIBRARY" in done.stdout
    wrong = tmp_path / "libfsdp.so"
    wrong.write_text("not a shared object")
    done = run_python("-c", code, env=environment(FSDP_LIBRARY=str(wrong)))
    assert str(wrong) in done.stdout, done.stderr


def test_a_library_that_lacks_functions_is_refused():
    done = run_python("-c", "import libfsdp; libfsdp.zeros(3)", env=environment(FSDP_LIBRARY="libc.so.6"))
    assert done.returncode == 1
    assert "libc.so.6: lacks fsdp_last_error" in done.stderr


# ---- With the library ------------------------------------------------------------------------------------------------


def test_the_librarys_words_reach_the_exception():
    with pytest.raises(libfsdp.InvalidArgument) as caught:
        libfsdp.shard_extent(3, 5, 2)
    assert "rank" in str(caught.value) and caught.value.status == abi.FSDP_ERR_INVALID


def test_check_passes_ok_and_names_what_it_can_not_explain():
    errors.check(abi.FSDP_OK)
    with pytest.raises(libfsdp.FsdpError):
        errors.check(99)


def test_messages_speak_of_what_python_has():
    group = libfsdp.Group.single()
    x = np.ones(3, "float32")
    with pytest.raises(libfsdp.Unsupported, match="^op 'band' is not defined for float32: see libfsdp.ReduceOp$"):
        group.all_reduce(x, op="band")
    with pytest.raises(libfsdp.Unsupported, match="^op 'avg' .*: use 'sum' and divide"):
        group.all_reduce(np.ones(3, "int32"), op="avg")
    with pytest.raises(libfsdp.InvalidArgument, match=r"^out is \(2,\) float32"):
        group.all_gather(x, np.ones(2, "float32"))
    with pytest.raises(libfsdp.InvalidArgument, match=r"operations\[1\]\.out overlap"):
        with group.coalesced() as several:
            several.all_gather(x, np.ones(3, "float32"))
            several.all_reduce(x)
    with pytest.raises(libfsdp.InvalidArgument, match="^strategy is 'hybrid_shard', .*: give Model a Mesh$"):
        libfsdp.Model(group, strategy="hybrid_shard")
    with pytest.raises(libfsdp.InvalidArgument, match="^reshard_after_forward is 2, but with 'no_shard' nothing"):
        libfsdp.Model(group, strategy="no_shard", reshard_after_forward=2)
    unit = libfsdp.Model(group).unit("u", {"w": np.zeros(2)})
    with pytest.raises(libfsdp.InvalidState, match=r"call Unit\.unshard first$"):
        unit.write_back()
    kept = "parameter 'output' of unit 'op 1 output': its output, timeout_msg"
    assert errors.in_python(kept) == kept
