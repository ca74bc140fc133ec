"""What a captured graph takes as its inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
