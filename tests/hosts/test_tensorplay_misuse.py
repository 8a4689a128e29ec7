"""What programs do wrong with TensorPlay's fully_shard, where its own computes with a part of a parameter: named in
words; and what is right, although in torch it is not."""

import inspect
import sys

import pytest

tp = pytest.importorskip("tensorplay", reason="TensorPlay is not installed here: ci/test tensorplay")
from tensorplay import nn

import libfsdp.tensorplay as ours
from libfsdp.tensorplay import fully_shard

RANK = "tensorplay_rank.py"


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        tp.manual_seed(4)
        self.up = nn.Linear(5, 4)

    def forward(self, x, loud=False):
        """Speak."""
        return self.up(x) * (2.0 if loud else 1.0)

    def speak(self, x):
        return self.up(x) * 2.0


def refused(call, words):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")


def early(job):
    """An optimizer that was built first: the parameters stay the objects that they were."""
    x = tp.ones(3, 5)
    results = []
    for first in (True, False):
        model = Speaker()
        optimizer = tp.optim.SGD(model.parameters(), lr=0.1) if first else None
        fully_shard(model)
        optimizer = optimizer or tp.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([value.tolist() for value in model.state_dict().values()])
    assert results[0] == results[1]
    plain = Speaker()
    assert results[0][0] != plain.state_dict()["up.weight"].tolist()[2 * job.rank : 2 * job.rank + 2]


def outside(job):
    x = tp.ones(3, 5)
    plain = Speaker()
    wanted = plain(x).tolist(), plain.speak(x).tolist()
    model = fully_shard(Speaker())
    for _ in range(2):  # before the first forward, and after
        refused(lambda: model.forward(x), "forward of Speaker was called while its parameters are sharded")
        for call in (lambda: model.speak(x), lambda: model.up(x)):
            refused(call, "forward of Linear, which has")
        assert model(x).tolist() == wanted[0]
        model.reshard()
    model.unshard()
    assert model.forward(x).tolist() == wanted[0] and model.up(x).tolist() == wanted[0]
    model.reshard()
    ours.register_fsdp_forward_method(model, "speak")
    ours.register_fsdp_forward_method(model, "forward")
    assert model.speak(x).tolist() == wanted[1] and model.forward(x).tolist() == wanted[0]
    model = fully_shard(Speaker())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward) and model.forward.__doc__ == "Speak."


@pytest.mark.parametrize("worker", [early, outside])
def test_together(hosted, worker):
    hosted(2, worker)


def test_a_tensorplay_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr(tp, "__version__", "0.9.2")
    with pytest.raises(ImportError, match="needs tensorplay 1.0 or newer, and this is 0.9.2"):
        ours.register()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
