"""What the adapters of frameworks with modules and autograd share: fully_shard, its hooks and its module methods.

`libfsdp.torch` and `libfsdp.tensorplay` are two such adapters. An adapter describes its framework to the core once, as a
`Host` (host.py); everything else is here:

  host.py        what an adapter has to provide
  discover.py    which modules and parameters a call of fully_shard is about
  parameter.py   one sharded parameter: what the module shows when, and its gradient
  state.py       one unit: full or sharded, and the hooks around its forward
  backward.py    its backward: the autograd function, and the reduction of gradients
  iteration.py   what the units of one root share: the library's models, where forward and backward begin and end
  api.py         the methods that a sharded module has
  tree.py        tensors in nested arguments and results
  classic.py     the wrapper FullyShardedDataParallel; with wrap.py (what is wrapped and ignored), summon.py (whole
                 parameters), classic_state.py and classic_names.py (its state dicts' types and functions) and norm.py
  state_dict.py  whole tensors, shards and parts of a model, saved and loaded; optim_state.py: of an optimizer
  index.py       which parameters a model has, by name, and which are sharded over which ranks
  checkpoint.py  modules and optimizers for libfsdp.checkpoint
  comm.py        what programs put in place of the library's communication

and, for the backends: collectives.py, tensors.py, work.py, options.py, rendezvous.py, interrupt.py (Ctrl-C while a call waits)

The life of a unit. `fully_shard` cuts the parameters and puts this rank's shards in the module. The first forward of the
outermost module finds out which units belong together, makes the library's units and moves the shards into their
memory. From then on, around each forward:

  pre-forward    unit.pre_forward(); the module shows full parameters, which come out of an autograd function
  post-forward   unit.post_forward(); the module shows the shards again; outputs get a hook
  that hook      the first gradient of an output arrives: unit.pre_backward()
  the function   backward of the autograd function has the gradients of all full parameters: unit.post_backward(grads)
  the end        a callback of the autograd engine: model.finish_backward(); sharded gradients become `.grad`

Because gradients come from an autograd function and not from hooks on parameters, a module may be called twice before
backward, two graphs may be alive at a time, and a part of them may be computed again (activation checkpointing).

Without this core, an adapter is what shims/python/examples/adapter.py shows in under 100 lines.

Threads: forward and backward of one root run on one thread at a time, as the library's models ask for.
"""
