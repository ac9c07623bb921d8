"""The job of torchvision's detector, beside plain torchvision; skipped where that is not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dp_ray
from dp_ray.job.files import load_job
from dp_ray.outputs.files import prove_outputs
from dp_ray.storage import Storage
from jobs.detection import AveragePrecision, Rectangles, collate, detector
from tests.support.cluster import ROOT
from tests.support.group import history_of, run_group, weights_of
from tests.support.trainings import assert_close, initial

FILE = ROOT / "jobs" / "detection.yaml"
SGD = {"target": "torch.optim:SGD", "args": {"lr": 0.01}}
IMAGES = 22


def job(workers: int, **keys: Any) -> Any:
    small = {"model.args": {"width": 4}, "dataset.args": {"images": IMAGES}, "eval.dataset.args": {"images": 5}}
    return load_job(FILE, {**small, "workers": workers, "batch_size": 8, "shards": 3, "epochs": 1, **keys})


@pytest.mark.slow
def test_torchvisions_detector_trains_and_predicts_as_alone_on_any_number_of_workers(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs the package torchvision: pip install torchvision")
    for workers in (1, 2):
        run_group(job(workers, optimizer=SGD, shuffle=False), tmp_path / f"train-{workers}")
    (images,), targets = collate([Rectangles()[at] for at in range(IMAGES)])
    model = initial(lambda: detector(4))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for at in range(0, IMAGES, 8):
        loss = sum(model(images[at : at + 8], targets[at : at + 8]).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert_close(tmp_path / "train-2", model, losses, 1e-4)
    for name, tensor in weights_of(tmp_path / "train-1").items():
        assert torch.equal(weights_of(tmp_path / "train-2")[name], tensor)
    last, alone = history_of(tmp_path / "train-2")[-1], AveragePrecision()
    model.eval()
    with torch.no_grad():
        alone.update(model(images[:5]), targets[:5])
    assert last["eval_ap_mean"] == pytest.approx(alone.compute()["mean"], abs=1e-4) and last["eval_loss"] is None

    predicted = {"task": "predict", "init_from": str(tmp_path / "train-2" / "weights.safetensors")}
    for workers in (1, 2):
        run_group(job(workers, **predicted), tmp_path / f"predict-{workers}")
        prove_outputs(Storage(str(tmp_path / f"predict-{workers}")), IMAGES)
    files = [sorted((tmp_path / f"predict-{workers}" / "outputs").iterdir()) for workers in (1, 2)]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    result = dp_ray.run(job(0, **predicted), storage=str(tmp_path), name="run", quiet=True)
    model.load_state_dict(weights_of(tmp_path / "train-2"))
    with torch.inference_mode():
        wanted = [found for at in range(IMAGES) for found in model(images[at : at + 1])]
    assert len(result.outputs) == IMAGES
    for output, found in zip(result.outputs, wanted, strict=True):
        assert torch.equal(output["labels"], found["labels"])
        assert torch.allclose(output["boxes"], found["boxes"], atol=1e-3)
        assert torch.allclose(output["scores"], found["scores"], atol=1e-5)


def test_rectangles_are_drawn_where_their_boxes_are() -> None:
    items = [Rectangles()[at] for at in range(20)]
    assert {len(target["labels"]) for _, target in items} == {0, 1, 2, 3}
    assert len({image.shape for image, _ in items}) > 10
    for image, target in items:
        assert target["boxes"].shape == (len(target["labels"]), 4)
        for (left, top, right, bottom), label in zip(
            target["boxes"].int().tolist()[-1:], target["labels"][-1:], strict=True
        ):
            inside = image[:, top:bottom, left:right].flatten(1)
            assert (inside == inside[:, :1]).all() and inside[label - 1, 0] > 0.8


def test_the_average_precision_is_that_of_its_definition() -> None:
    def of(*boxes: list[float], labels: list[int], scores: list[float] | None = None) -> dict[str, torch.Tensor]:
        made = {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64)}
        return made if scores is None else {**made, "scores": torch.tensor(scores)}

    one, other, none = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0], [50.0, 50.0, 60.0, 60.0]
    near = [0.0, 0.0, 10.0, 9.0]
    first, second = AveragePrecision(), AveragePrecision()
    # Of label 1: right, wrong, right (a second box on a true one that is taken is wrong). One is never found.
    first.update([of(one, near, labels=[1, 1], scores=[0.9, 0.8])], [of(one, other, labels=[1, 1])])
    second.update([of(none, one, labels=[2, 1], scores=[0.95, 0.5])], [of(one, labels=[1])])
    first.merge_state(second)
    assert first.compute() == pytest.approx({"1": (1 / 1 + 2 / 3) / 3, "2": 0.0, "mean": (1 + 2 / 3) / 6})
