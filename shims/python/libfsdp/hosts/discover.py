"""Which modules and parameters a call of fully_shard is about: those of the given modules and below, but for what an
earlier call has taken, and what is to be ignored.

Works on what modules of both frameworks have: children(), modules(), _parameters.
"""


HIDDEN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # modules that wrap another, and are no part of its name


def clean(path):
    """A module's or parameter's path without the wrappers' parts."""
    return ".".join(part for part in path.split(".") if part not in HIDDEN)


def outermost(modules):
    """Those of the modules that are not inside another of them, in order."""
    inside = {id(below) for module in modules for below in module.modules() if below is not module}
    return [module for module in modules if id(module) not in inside]


def managed_modules(roots, taken):
    """The modules whose parameters belong to the call, children first. taken(module): an earlier call has it."""
    found, visited = [], set()

    def visit(module):
        if id(module) in visited or (taken(module) and not any(module is root for root in roots)):
            return
        visited.add(id(module))
        for child in module.children():
            visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def places_of(modules, ignored=()):
    """{id of a parameter: (parameter, [(module, attribute), ...])}, in order; shared ones with all their places."""
    ignored = {id(parameter) for parameter in ignored}
    places = {}
    for module in modules:
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            places.setdefault(id(parameter), (parameter, []))[1].append((module, attribute))
    return places
