"""Meshes: a group's ranks as a grid of named dimensions, with a sub-group for each.

    mesh = Mesh(group, {"replicate": 2, "shard": 4})        # 8 ranks; ranks 0 to 3 are one "shard" group
    model = Model(mesh, strategy="hybrid_shard")            # shard inside, replicate across
    mesh.group("replicate").all_reduce(x)                   # with this rank's fellows of that dimension
"""

from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int64, c_void_p

from . import abi
from .errors import InvalidArgument, check
from .group import Group
from .handle import Handle, integer, text

lib = abi.lib


class Mesh:
    """A group's ranks as a row-major grid: ranks that differ in the last dimension only are neighbours.

    group  a Group
    dims   {name: size}, 1 to 8 of them, whose product is the group's size; names are 1 to 31 bytes

    Collective: all ranks give the same dims (Mismatch otherwise). A context manager; closes itself.

    names, sizes  of the dimensions, in their order     coordinates  this rank's place in each
    rank, size    of this rank in the whole, and of all  store        the group's Store

    Raises InvalidArgument for dims that leave ranks out or lack some, and says which.
    """

    def __init__(self, group, dims):
        if not isinstance(group, Group):
            raise TypeError(f"group: {type(group).__name__} is not a libfsdp.Group; Group.single() is one of one rank")
        if not isinstance(dims, Mapping):
            raise TypeError(f"dims: {dims!r} is not a dict of names and sizes, such as {{'replicate': 2, 'shard': 4}}")
        for name in dims:
            if not isinstance(name, str):
                raise TypeError(f"dims: {name!r} is not a name")
        if not dims:
            raise InvalidArgument("dims: a mesh has at least one dimension")
        names = (c_char_p * len(dims))(*(text(name, "dims") for name in dims))
        sizes = (c_int64 * len(dims))(*(integer(size, f"dims[{name!r}]", bits=64) for name, size in dims.items()))
        pointer = c_void_p()
        check(lib.fsdp_mesh_create(group._handle, len(dims), sizes, names, byref(pointer)))
        self._owned = Handle(pointer, lib.fsdp_mesh_release)
        self.store = group.store
        info = abi.fsdp_mesh_info()
        check(lib.fsdp_mesh_query(self._owned, byref(info)))
        self.rank, self.size = info.rank, info.size
        self.names = tuple(bytes(name.value).decode() for name in info.names[: info.ndim])
        self.sizes = tuple(info.sizes[: info.ndim])
        self.coordinates = tuple(info.coordinates[: info.ndim])

    @property
    def _handle(self):
        handle = self._owned
        if handle is None:
            raise InvalidArgument("the mesh is closed")
        return handle

    def __reduce__(self):
        raise TypeError("a libfsdp.Mesh can't be copied or pickled: make another one of the same group")

    def group(self, name=None):
        """This rank's Group of a dimension: the ranks that share its coordinates in all others, in the order of their
        coordinate. None: the whole. Not collective; each call gives another object for the same group.

        Raises InvalidArgument, naming the dimensions that there are.
        """
        pointer = c_void_p()
        check(lib.fsdp_mesh_group(self._handle, text(name, "name"), byref(pointer)))
        group = Group.__new__(Group)
        group._take(pointer, self.store)
        return group

    def close(self):
        """Give the mesh back; a second close does nothing. Its groups and models keep what they need."""
        self._owned = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        dims = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))
        return f"<libfsdp.Mesh {dims}, here {self.coordinates}>"
