"""The smallest program: every rank brings a row, all get the sum.

    python -m libfsdp.run -n 2 all_reduce.py
"""

import numpy as np

import libfsdp

with libfsdp.init() as group:
    x = np.arange(4, dtype="float32") + 10 * group.rank
    group.all_reduce(x)
    print(f"rank {group.rank} of {group.size}: {x}")

    # The same while doing something else.
    y = np.full((2, 3), group.rank, "int64")
    out = np.empty((group.size, 2, 3), "int64")
    work = group.all_gather(y, out, async_op=True)
    work.on_done(lambda work: None if work.error is None else print("failed:", work.error))
    work.wait()
    assert [block.flat[0] for block in out] == list(range(group.size))
