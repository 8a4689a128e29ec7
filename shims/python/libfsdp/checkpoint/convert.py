"""Converting a checkpoint: read, choose, write beside the target, and put that into the target's place in one step, so
that there never is half a target, and an earlier one stays until the new one is complete.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
import time

from ..errors import FsdpError, InvalidArgument, NotFound, SystemFailure
from .formats import PICKLES, TARGETS, kind_of, open_any, select, some
from .table import Progress, count, human

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_TRIES = 50  # to remove a folder, 0.1 s apart
_libc = ctypes.CDLL(None, use_errno=True)
_FOREIGN = {  # endings of what else belongs to a checkpoint's folder, by its kind
    "sharded": (".safetensors", "manifest.json"),
    "full": (".safetensors", ".safetensors.index.json"),
    "dcp": (".distcp", ".metadata"),
    "mega": (".mega", ".mega.index.json"),
    "ranks": (*PICKLES, ".bin.index.json"),
}


def target_of(dst, to):
    """What to write, by the ending of `dst` where `to` is None. Raises InvalidArgument."""
    ending = os.path.splitext(dst)[1]
    if to is None:
        for known, endings in (("full", (".safetensors",)), ("torch", PICKLES), ("tensorplay", (".mega",))):
            if ending in endings:
                return known
        raise InvalidArgument(f"--to: give one of {', '.join(TARGETS)}: the ending of {dst!r} does not tell")
    wrong = {
        "sharded": ending in (".safetensors", ".mega", *PICKLES),
        "full": ending in (".mega", *PICKLES),
        "dcp": ending in (".safetensors", ".mega", *PICKLES),
        "torch": ending in (".safetensors", ".mega"),
        "tensorplay": ending in (".safetensors", ".bin", ".ckpt"),
    }[to]
    if wrong:
        raise InvalidArgument(f"{dst}: ends like another kind; --to {to} makes {TARGETS[to]}")
    return to


def convert(
    src, dst, *, to=None, ranks=1, max_file_bytes=None, dtype=None, names=(), force=False, trust=False, stream=None
):
    """Write the checkpoint at `src`, of any kind, to `dst`. Gives (a Content of what was written, what was left
    out)."""
    dst = os.path.abspath(os.fspath(dst))
    to = target_of(dst, to)
    check_target(dst, force)
    source = open_any(src, trust)
    content = select(source, names, dtype)
    if not content.items and not content.json:
        raise InvalidArgument(f"{src}: has no tensors")
    folder = os.path.dirname(dst)
    made = _make_folders(folder)
    own = _own_folder(folder)
    beside = os.path.join(own, os.path.basename(dst))
    try:
        with contextlib.ExitStack() as stack:
            reading = stack.enter_context(Progress("reading", stream=stream))
            writing = Progress("writing", lambda: (_size(beside), content.nbytes), stream=stream)
            stack.enter_context(writing)
            left_out = _write(content, beside, reading, to, ranks, max_file_bytes)
        put_in_place(beside, dst)
    except BaseException as error:
        _remove(own)
        for each in made:
            with contextlib.suppress(OSError):  # another program has put something there
                os.rmdir(each)
        if isinstance(error, FsdpError):
            error.message = error.message.replace(own, folder)  # of the file that is gone now
        elif isinstance(error, OSError):
            raise SystemFailure(f"{error.filename or dst}: {error.strerror}".replace(own, folder)) from error
        raise
    _remove(own)  # and what was in the target's place
    return content, [*content.left_out, *left_out, *_beside(content.path)]


def _write(content, path, progress, to, ranks, max_file_bytes):
    from . import formats_dcp, formats_libfsdp, formats_pickle

    if to == "sharded":
        return formats_libfsdp.write_sharded(content, path, progress, ranks)
    if to == "full":
        return formats_libfsdp.write_full(content, path, progress, max_file_bytes)
    if to == "dcp" or (to == "tensorplay" and not path.endswith((".pt", ".pth", ".mega"))):
        return formats_dcp.write(content, path, progress, to)
    return formats_pickle.write(content, path, progress, to)


def _beside(path):
    """Files in a checkpoint's folder that are none of it: Hugging Face's config.json and tokenizer, say."""
    if not os.path.isdir(path):
        return []
    ours = _FOREIGN[kind_of(path)]
    others = sorted(name for name in os.listdir(path) if not name.endswith(ours))
    return [f"{some(others)} in {path}: no part of the checkpoint"] if others else []


def summary(content, dst):
    n = sum(1 for item in content.items.values() if item.tied_to)
    tied = f" ({n} of them tied to another)" if n else ""
    size = f"{count(len(content.items), 'tensor')}{tied}, {human(content.nbytes)}"
    return f"{dst}: {size}, from {content.path} ({content.kind})"


# ---- The target's place ----------------------------------------------------------------------------------------------


def check_target(dst, force):
    """Refuse a target that is there, but with `force` one that is a checkpoint and nothing else."""
    if not os.path.lexists(dst):
        return
    if not force:
        raise InvalidArgument(f"{dst}: is there already; --force replaces it")
    if os.path.islink(dst):
        raise InvalidArgument(f"{dst}: is a symbolic link; give the path that it leads to")
    if os.path.isdir(dst):
        names = os.listdir(dst)
        try:
            known = _FOREIGN[kind_of(dst)] if names else ()
        except (NotFound, FsdpError):
            raise InvalidArgument(
                f"{dst}: is a folder but no checkpoint, and is not replaced; give another path"
            ) from None
        others = [name for name in names if not name.endswith(known)]
        if others:
            raise InvalidArgument(
                f"{dst}: holds other things beside the checkpoint ({', '.join(sorted(others)[:3])}), which would be "
                "lost; give "
                "another path"
            )
    elif os.path.getsize(dst):
        try:
            kind_of(dst)
        except (NotFound, FsdpError):
            raise InvalidArgument(f"{dst}: is no checkpoint, and is not replaced; give another path") from None


def _make_folders(path):
    """Make a folder and those that it is in. Gives those that were not there, the innermost first."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise SystemFailure(f"{folder}: is a file, and no folder can be made there") from None
        except OSError as error:
            raise SystemFailure(f"{folder}: {error.strerror}") from error
    return missing


def _own_folder(folder):
    """Make a folder in this one that is a conversion's alone: of saves, only one at a time goes into a folder."""
    try:
        return tempfile.mkdtemp(prefix=".converting-", dir=folder)
    except OSError as error:
        raise SystemFailure(f"{folder}: {error.strerror}") from error


def put_in_place(beside, dst):
    """Rename `beside` to `dst`. What is there is exchanged with it in one step, where the file system can, and
    removed."""
    try:
        if not os.path.lexists(dst):
            os.rename(beside, dst)
        elif os.path.isdir(beside) or os.path.isdir(dst):
            _exchange(beside, dst)
        else:
            os.replace(beside, dst)
        folder = os.open(os.path.dirname(dst), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise SystemFailure(f"{dst}: can't be put in place: {error.strerror}") from error


def _exchange(beside, dst):
    paths = os.fsencode(beside), os.fsencode(dst)
    if not hasattr(_libc, "renameat2") or _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        old = f"{beside}.old"
        os.rename(dst, old)
        os.rename(beside, dst)
        _remove(old)


def _remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        for _ in range(_TRIES):  # a rank's thread that was interrupted may be about to make or remove a file in it
            try:
                return shutil.rmtree(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    break
            time.sleep(0.1)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # it is not there, or nothing can be written there now
            os.unlink(path)


def _size(path):
    """The bytes in a file or folder."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.path.getsize(path)
    except OSError:  # not there yet
        return 0
