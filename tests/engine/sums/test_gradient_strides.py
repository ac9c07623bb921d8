"""Gradients whose strides differ from their buckets' in name alone: DDP says nothing, and all else is as it was."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import training
from tests.support.group import ProcessExit, run_group
from tests.support.trainings import assert_close, initial, job_of, mean_loss

SAYS = "Grad strides do not match bucket view strides"


class Depthwise(nn.Module):
    """Convolutions on images in channels_last; in the worker's process DDP's warning is an error."""

    def __init__(self, turns_after: int = 10**9) -> None:
        super().__init__()
        warnings.filterwarnings("error", message=SAYS)
        self.first = nn.Conv2d(1, 4, 2, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 2, groups=4, bias=False)  # weight [4, 1, 2, 2]
        self.pointwise = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(4 * 2 * 3, 3)
        self.turns_after = turns_after
        self.forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == self.turns_after:
            self.first.weight.data = self.first.weight.data.expand(4, 1, 2, 2).permute(0, 1, 3, 2).contiguous().mT
        hidden = self.first(images).contiguous(memory_format=torch.channels_last)
        outputs: torch.Tensor = self.last(self.pointwise(torch.relu(self.depthwise(hidden))).flatten(1))
        return outputs


@pytest.mark.full(but=["keys2"])
@pytest.mark.parametrize("keys", [{"bitwise": True, "workers": 3}, {"workers": 2}, {"workers": 2, "shards": 4}])
def test_a_training_of_depthwise_convolutions_says_nothing(tmp_path: Path, keys: dict[str, object]) -> None:
    run_group(job_of({"target": "tests.engine.sums.test_gradient_strides:Depthwise"}, "Images", **keys), tmp_path)
    model = initial(Depthwise)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = training.plain_loop(model, training.Images(), 7, 2, mean_loss, optimizer)
    assert_close(tmp_path, model, losses)


def test_strides_that_do_differ_are_still_told(tmp_path: Path) -> None:
    """A weight that is laid out otherwise in the midst of the training costs DDP's copies."""
    model = {"target": "tests.engine.sums.test_gradient_strides:Depthwise", "args": {"turns_after": 3}}
    with pytest.raises(ProcessExit, match=SAYS):
        run_group(job_of(model, "Images", workers=2), tmp_path)
