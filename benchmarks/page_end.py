"""Seconds for the page in a process that has run a job: first with its imports, then without."""

import json
import sys
import tempfile
import time
from unittest import mock

import torch
from torch import nn

import dp_ray
from dp_ray.driver.run import Execution
from dp_ray.storage import Storage


def main(folder: str) -> None:
    run_a_job()
    run, seconds = Storage(folder), []
    for _ in range(2):
        started = time.perf_counter()
        from dp_ray.report.page import write_page

        write_page(run)
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


def run_a_job() -> None:
    """A short training, as a run that ends has one behind it, but without its page."""
    rows = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    given = {"model": nn.Linear(2, 1), "dataset": rows, "loss": nn.MSELoss, "optimizer": torch.optim.SGD}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Execution, "write_page"):
        dp_ray.run(task="train", **given, batch_size=4, workers=0, quiet=True, storage=folder, name="run")
    assert "dp_ray.report.page" not in sys.modules, "the page is still to be imported"


if __name__ == "__main__":
    main(sys.argv[1])
