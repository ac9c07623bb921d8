"""A model whose steps take a moment; a server of Trackio as a process: `python -m tests.support.tracked PORT`."""

import os
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


WAITING = "tests.support.tracked:WaitingNet"


class WaitingNet(SlowNet):
    """Its sixth batch waits for the file that WAITED_FOR names, a minute at most."""

    num_batches = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_batches += 1
        until = time.monotonic() + 60
        while self.num_batches == 6 and not os.path.exists(os.environ["WAITED_FOR"]):
            assert time.monotonic() < until, "nobody has seen the rows before"
            time.sleep(0.05)
        return super().forward(inputs)


if __name__ == "__main__":
    import trackio

    trackio.show(open_browser=False, block_thread=True, server_port=int(sys.argv[1]), host="127.0.0.1")
