"""Exceptions that are torch's and the library's at once.

A lost peer is raised as a class of its own that is torch.distributed.DistNetworkError, as torch's own backends would
say, and libfsdp.PeerLost, which knows the rank; a timeout, an abort and whatever else ends a group is a
DistBackendError. All are RuntimeErrors, which is all that gloo raises. Wrong arguments stay libfsdp.InvalidArgument,
a RuntimeError and a ValueError, and Unsupported, a RuntimeError and a NotImplementedError.
"""

import torch.distributed as dist

from .. import errors

_ARGUMENTS = (errors.InvalidArgument, errors.Unsupported)
_BASES = {errors.PeerLost: dist.DistNetworkError}
_of = {}  # class of the library: the class raised for it


def _class_for(kind):
    found = _of.get(kind)
    if found is None:
        if kind in _ARGUMENTS or issubclass(kind, dist.DistError):
            found = kind
        else:
            found = type(
                kind.__name__,
                (_BASES.get(kind, dist.DistBackendError), kind),
                {"__module__": __name__, "__doc__": kind.__doc__},
            )
        _of[kind] = found
    return found


def in_torch(error):
    """A failure of the library as torch's programs expect it."""
    kind = _class_for(type(error))
    if kind is type(error):
        return error
    raised = kind(
        error.message, status=error.status, operation=error.operation, sequence=error.sequence, ranks=error.ranks
    )
    raised.__cause__ = error.__cause__
    return raised


def last(status):
    """The exception for a call on this thread that has just returned `status`."""
    return in_torch(errors.last(status))


def __getattr__(name):
    """The class raised for the library's of that name: pickle finds it so, which takes exceptions of a DataLoader's
    workers to their parent."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.FsdpError):
        return _class_for(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
