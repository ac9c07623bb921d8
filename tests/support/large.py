"""Models large enough that their tensors are most of a process's memory, and a plain loop that measures its peak."""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

STATUS = Path("/proc/self/status")
GROUP_ROWS = 512


class Rows(Dataset[Any]):
    """Pairs of normal numbers of a size, and a class of 10; of tokens, if that is asked for."""

    def __init__(self, *size: int, tokens: int = 0) -> None:
        self.size = size
        self.tokens = tokens

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        if self.tokens:
            return torch.randint(self.tokens, self.size), torch.randint(self.tokens, self.size)
        return torch.randn(self.size), index % 10


def mlp(width: int = 1024, depth: int = 6) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def conv() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Gpt(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, width: int = 384, depth: int = 4, words: int = 2000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer: dict[str, Any] = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, width // 64, **layer) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def peak_of(run: Callable[[], object]) -> int:
    """The bytes by which a call makes this process larger at its peak, as Linux counts them."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is there now
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def plain_training(
    model: Callable[[], nn.Module], data: Rows, rows: int, precision: str, shards: int, checkpointed: bool
) -> None:
    """Two steps of plain torch, the first of a row: `shards` of a batch one after another, then AdamW."""
    torch.manual_seed(0)
    made = model()
    if checkpointed:
        for block in made.blocks:  # type: ignore[union-attr]
            block.forward = _checkpointed(block.forward)
    optimizer = torch.optim.AdamW(made.parameters())
    for step in range(2):
        for shard in range(shards):
            items = [data[shard * rows + row] for row in range(rows if step else 1)]
            inputs, targets = torch.utils.data.default_collate(items)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(made(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        optimizer.step()
        optimizer.zero_grad()


def _checkpointed(forward: Any) -> Any:
    def again(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    return again


CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "size": [1024], "rows": 1024},
    "mlp, two shards": {"model": "mlp", "size": [1024], "rows": 512, "shards": 2},
    "conv": {"model": "conv", "size": [3, 48, 48], "rows": 64},
    "gpt, tied": {"model": "Gpt", "size": [64], "rows": 16, "tokens": 2000},
    "gpt, bf16": {"model": "Gpt", "size": [64], "rows": 4, "tokens": 2000, "precision": "bf16"},
    "gpt, checkpointed": {"model": "Gpt", "size": [64], "rows": 32, "tokens": 2000, "checkpointed": True},
}


def job_keys(case: dict[str, Any]) -> dict[str, Any]:
    """The job that does what `plain_training` does."""
    rows, shards = case["rows"], case.get("shards", 1)
    return {
        "task": "train",
        "model": f"tests.support.large:{case['model']}",
        "dataset": {
            "target": "tests.support.large:rows_of",
            "args": {"size": case["size"], "tokens": case.get("tokens", 0)},
        },
        "batch_size": rows * shards,
        "shards": shards,
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:AdamW"},
        "precision": case.get("precision", "fp32"),
        "activation_checkpointing": case.get("checkpointed", False),
        "devices": ["cpu"],
    }


def rows_of(size: list[int], tokens: int) -> Rows:
    return Rows(*size, tokens=tokens)


def measured(name: str) -> int:
    """The peak of a case in bytes; a small run first loads what torch loads once."""
    case = CASES[name]
    model: Any = globals()[case["model"]]
    data = rows_of(case["size"], case.get("tokens", 0))
    keys = {"precision": case.get("precision", "fp32"), "checkpointed": case.get("checkpointed", False)}
    plain_training(model, data, 1, shards=1, **keys)
    return peak_of(lambda: plain_training(model, data, case["rows"], shards=case.get("shards", 1), **keys))


def measured_in_group(strategy: str) -> int:
    """The peak of a worker of plain torch that trains the mlp with others, by DDP or FSDP2.

    With FSDP2 torch's own tracker counts: the process also has gloo's copies, which NCCL does not make.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # it imports torch._inductor

    tracker = MemTracker() if strategy == "fsdp" else None

    def peak_of_steps(width: int) -> int:
        gc.collect()
        before = _status("VmRSS")
        model = mlp(width)
        if tracker is not None:
            for block in model:  # type: ignore[attr-defined]
                fully_shard(block)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        inputs, targets = torch.randn(GROUP_ROWS, width), torch.zeros(GROUP_ROWS, dtype=torch.long)
        peaks = []
        for step in range(5 if tracker is None else 2):
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            if tracker is not None and step == 1:
                tracker.track_external(model, optimizer, inputs, targets)
                tracker.__enter__()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(_status("VmHWM") - before)
        if tracker is not None:
            tracker.__exit__(None, None, None)
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
        return min(peaks[2:])  # before, DDP has yet to make its last buckets; and at times gloo's copies wait longer

    if strategy == "ddp":
        peak_of_steps(64)  # what torch loads once
    return peak_of_steps(1024)


def planned_very_large() -> tuple[int, float, int]:
    """Plan a language model of 2 billion parameters: their number, this process's seconds and its largest size."""
    from dp_ray.driver.planning import plan_memory_of
    from dp_ray.job.job import Job

    case = {"model": "Gpt", "size": [1024], "rows": 4, "tokens": 50000, "shards": 2}
    args = {"width": 2560, "depth": 26, "words": 50000}
    keys = {**job_keys(case), "model": {"target": "tests.support.large:Gpt", "args": args}, "workers": 2}
    plan = plan_memory_of(Job.make(keys, "planned"), 80)
    assert [(worker.strategy, worker.workers) for worker in plan.workers][-1] == ("fsdp", 2)
    size = plan.workers[0].devices[0].parameters // 4
    # Not `ru_maxrss`: Linux begins it with the size of the process that started this one.
    return size, time.process_time(), _status("VmHWM")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "plan":
        print(json.dumps(planned_very_large()))
    elif sys.argv[1] == "group":
        meeting, rank, workers = f"file://{sys.argv[2]}", int(sys.argv[3]), int(sys.argv[4])
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
        print(json.dumps({strategy: measured_in_group(strategy) for strategy in ("ddp", "fsdp")}))
    else:
        for name in sys.argv[1:]:
            print(name, measured(name), sep="\t", flush=True)
