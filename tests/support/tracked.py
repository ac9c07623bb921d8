"""A model whose steps take a moment; a server of Trackio as a process: `python -m tests.support.tracked PORT`."""

import sys
import time

import torch
from torch import nn

SLOW = "tests.support.tracked:SlowNet"


class SlowNet(nn.Sequential):
    """Takes 0.1 s for each batch."""

    def __init__(self) -> None:
        from tests.support.training import mlp

        super().__init__(mlp())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        result: torch.Tensor = self[0](inputs)
        return result


if __name__ == "__main__":
    import trackio

    trackio.show(open_browser=False, block_thread=True, server_port=int(sys.argv[1]), host="127.0.0.1")
