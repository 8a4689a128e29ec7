"""Train a small model with its parameters sharded over the ranks.

    python -m libfsdp.run -n 2 train.py
"""

import numpy as np

import libfsdp
from libfsdp.numpy import Adam, Linear, Sequential, Tanh, fully_shard, softmax_cross_entropy

group = libfsdp.init()
rng = np.random.default_rng(0)  # the same on every rank: same weights, same data
points = rng.uniform(-1, 1, (512, 2)).astype("float32")
labels = (points[:, 0] * points[:, 1] > 0).astype(int)  # which diagonal a point is nearer to

net = Sequential(Linear(2, 32, rng=rng), Tanh(), Linear(32, 2, rng=rng))
net = fully_shard(net, group)
optimizer = Adam(net.parameters(), lr=0.02)
mine = slice(group.rank, None, group.size)  # each rank trains on its part of the batch

for step in range(201):
    loss, slope = softmax_cross_entropy(net.forward(points[mine]), labels[mine])
    net.backward(slope)
    optimizer.step()
    net.zero_grad()
    if group.rank == 0 and step % 50 == 0:
        print(f"step {step:3}  loss {loss:.4f}")

memory = net.model.memory()
print(f"rank {group.rank} keeps {memory.shards} of {memory.total_parameters} bytes of parameters")
group.barrier()
