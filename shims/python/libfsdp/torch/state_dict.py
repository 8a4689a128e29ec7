"""torch's checkpoint functions (torch.distributed.checkpoint.state_dict) on models with the classic wrapper.

They take the wrapper for a plain module with DTensor parameters, which is all that they need to know, but for names:
where they ask `_get_fqns` for a parameter's name without wrappers, torch's answer leaves out only torch's own wrapper.
`replace` puts one in its place that leaves out ours as well; `import libfsdp.torch.classic` does so. Then
get_state_dict, set_state_dict and the four others give and take the same names as model.state_dict().
"""

import functools

from torch.distributed.checkpoint import state_dict

from ..hosts.classic import WRAPPED

_original = getattr(state_dict, "_get_fqns", None)


def replace():
    if _original is not None and state_dict._get_fqns is _original:
        state_dict._get_fqns = _get_fqns


@functools.wraps(_original or replace)
def _get_fqns(model, name, *args, **kwargs):
    return {fqn.replace(f"{WRAPPED}.", "") for fqn in _original(model, name, *args, **kwargs)}
