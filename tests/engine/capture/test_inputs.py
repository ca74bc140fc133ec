"""What a captured graph takes as its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from annotations.engines.torch.capture.call_inputs import CaptureError
from annotations.engines.torch.capture.capture import capture


class Weighted(nn.Module):
    """Two inputs, one of which ``**kwargs`` takes."""

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        return 2 * x + 3 * given["y"]


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    """Other calls give two."""
    twice = torch.ones(4)
    graph = capture(Weighted(), {"x": twice, "y": twice}).graph
    taken = {n.name: len(n.users) for n in graph.nodes if n.op == "placeholder"}
    assert taken == {"x": 1, "y": 1}


def test_keywords_may_come_in_any_order() -> None:
    x, y, z = (torch.full((4,), float(n)) for n in range(3))
    inputs = capture(Weighted(), {"x": x, "y": y, "z": z}).inputs
    assert [t.max() for t in inputs.flatten((x,), {"z": z, "y": y})] == [0, 1, 2]
    with pytest.raises(CaptureError, match="with the arguments x, y, z, called with x, y;"):
        inputs.flatten((x,), {"y": y})
    with pytest.raises(CaptureError, match=r"^z: expected"):
        inputs.flatten((x,), {"z": z.long(), "y": y})
