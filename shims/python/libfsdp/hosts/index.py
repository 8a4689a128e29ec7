"""Which parameters a model has: their names without wrappers, and which of them are sharded, over which ranks. State
dicts of optimizers (optim_state.py) and checkpoints (checkpoint.py) go by it.

It is of the time of its making, and looks at the modules alone: nothing is written, and no other rank is asked.
"""

from .iteration import state_of
from .state_dict import clean_name


class UnknownName(KeyError, ValueError):
    """A name in a dict that the model does not have, or the other way round."""

    def __str__(self):
        return str(self.args[0])


class Index:
    """The parameters of a model.

    names    {id of a parameter: its first name without wrappers}
    params   {name: parameter}, tied ones under each
    units    {id of a parameter: (its ShardedParameter, the Ranks that it is sharded over)}, of those that are
    places   {(id of a module, attribute): (its ShardedParameter, the Ranks that it is sharded over)}
    ranks    the different Ranks, in order
    """

    def __init__(self, model):
        self.names, self.params, self.units, self.places, ranks = {}, {}, {}, {}, {}
        for module in model.modules():
            state = state_of(module)
            for param in state.params if state is not None else ():
                ranks.setdefault(state.ranks.key, state.ranks)
                for owner, attribute in param.places:
                    self.places[id(owner), attribute] = param, state.ranks
        self.ranks = list(ranks.values())
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = clean_name(model, f"{path}.{attribute}" if path else attribute)
                unit = self.places.get((id(module), attribute))
                if unit is not None:  # which the module may show whole just now, or a program may have replaced
                    self.units[id(parameter)] = unit
                    self.names.setdefault(id(parameter), name)
                    parameter = unit[0].parameter
                    self.units[id(parameter)] = unit
                self.names.setdefault(id(parameter), name)
                self.params[name] = parameter

    def unit(self, name):
        """(ShardedParameter, Ranks) of a name; (None, None) for a parameter that is whole on each rank."""
        return self.units.get(id(self.params[name]), (None, None))

    def name_of(self, parameter):
        try:
            return self.names[id(parameter)]
        except KeyError:
            raise UnknownName(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the model's: build "
                "the optimizer from the parameters of the sharded model, or pass the model that it was built from"
            ) from None

    def groups(self, model, optim, optim_input):
        """The parameters' names as the optimizer has them: a list for each of its groups. Without it, as `optim_input`
        says: what it was built from; by default all of the model's."""
        if optim_input is not None:
            groups = _input_groups(optim_input)
        elif optim is not None:
            groups = [group["params"] for group in optim.param_groups]
        else:
            groups = [list(model.parameters())]
        return [[self.name_of(parameter) for parameter in group] for group in groups]


def _input_groups(optim_input):
    try:
        given = list(optim_input)
    except TypeError:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from None
    if not given:
        raise ValueError("Optimizer input should not be empty")
    kinds = {isinstance(item, dict) for item in given}
    if len(kinds) > 1:
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    return [list(group["params"]) for group in given] if kinds == {True} else [given]
