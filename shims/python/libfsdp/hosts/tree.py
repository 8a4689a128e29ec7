"""Tensors in what a module takes and gives: nested tuples, lists, dicts, and objects made of fields."""

import dataclasses


def tensors_in(value, kind):
    """All tensors (of class `kind`) in `value`, in order."""
    found = []
    _visit(value, kind, found.append, set())
    return found


def _visit(value, kind, function, above):
    if isinstance(value, kind):
        function(value)
        return
    parts = _parts(value)
    if parts is None or id(value) in above:
        return
    above.add(id(value))
    for part in parts:
        _visit(part, kind, function, above)
    above.discard(id(value))


def _parts(value):
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def mapped(value, kind, function):
    """`value` with function(tensor) in place of each tensor; what holds none of them stays the same object."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        items = {key: mapped(part, kind, function) for key, part in value.items()}
        if all(items[key] is part for key, part in value.items()):
            return value
        if type(value) is dict:
            return items
        copied = value.copy()  # an OrderedDict, or a model's output that is a dict as well
        for key, part in items.items():
            copied[key] = part
        return copied
    if isinstance(value, (list, tuple)):
        parts = [mapped(part, kind, function) for part in value]
        if all(new is old for new, old in zip(parts, value)):
            return value
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            if field.init:
                old = getattr(value, field.name, None)
                new = mapped(old, kind, function)
                if new is not old:
                    changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    return value
