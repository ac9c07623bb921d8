"""The jobs of `jobs/` that train language models with `strategy: fsdp`, and the one whose loss is over the batch."""

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau

import dp_ray
from dp_ray.job.files import load_job
from jobs import gpt, table, vae, webdataset
from jobs.augmented import Moved
from jobs.bad_records import Damaged
from jobs.characters import LETTERS, Characters, Gpt, of_run, written
from jobs.digits import Digits, Net
from jobs.loops import words
from jobs.loops.gan import NOISE, Gan
from jobs.simclr import Encoder, by_plain_torch, found
from tests.support.cluster import ROOT
from tests.support.group import history_of, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, initial, mean_loss


def job_of_file(name: str, **keys: Any) -> Any:
    return load_job(ROOT / "jobs" / name, keys)


@pytest.mark.full
@pytest.mark.slow
def test_the_characters_are_learned_on_two_workers_as_by_plain_torch(tmp_path: Path) -> None:
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.5}}
    small = {"model.args": {"width": 32, "depth": 2}, "dataset.args": {"windows": 128}, "batch_size": 16}
    run_group(job_of_file("characters.yaml", **small, optimizer=sgd), tmp_path)
    model = initial(lambda: Gpt(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    losses = plain_loop(model, Characters(windows=128), 16, 2, mean_loss, optimizer, after_backward=clip)
    assert_close(tmp_path, model, losses, 1e-4)
    assert losses[0] == pytest.approx(math.log(len(LETTERS)), rel=0.1), "a guess"
    assert losses[-1] < 0.9 * losses[0]


def test_what_a_model_writes_is_drawn_by_its_seed(tmp_path: Path) -> None:
    keys = {"model": {"target": "jobs.characters:Gpt", "args": {"width": 32}}, "max_steps": 2, "batch_size": 8}
    result = dp_ray.run(ROOT / "jobs" / "characters.yaml", **keys, workers=0, storage=str(tmp_path), quiet=True)
    model = of_run(result)
    text = "".join(written(model, count=80))
    assert len(text) == 80 and set(text) <= set(LETTERS)
    assert text == "".join(written(model, count=80)) != "".join(written(model, count=80, seed=1))


@pytest.mark.slow
def test_the_gpt_learns_packed_text_on_two_workers(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model.args": {"width": 32, "depth": 1, "length": 64}, "max_steps": 20, "batch_size": 8}
    small |= {"pack": {"length": 64, "how": "cut"}}
    run_group(job_of_file("gpt.yaml", **small), tmp_path)
    losses = [row["loss"] for row in history_of(tmp_path)]
    assert all(row["loss_of_words"] and row["loss_of_code"] for row in history_of(tmp_path)), "each batch has both"
    assert losses[0] == pytest.approx(math.log(256), rel=0.1), "a guess"
    assert losses[-1] < 0.9 * losses[0]


def test_what_the_gpt_writes_is_drawn_by_its_seed() -> None:
    torch.manual_seed(0)
    model = gpt.Gpt(16, 1, 2, 32).eval()
    text = "".join(gpt.written(model, count=80))
    assert len(text) == 80
    assert text == "".join(gpt.written(model, count=80)) != "".join(gpt.written(model, count=80, seed=1))


def test_the_documents_of_the_gpt_are_those_of_python() -> None:
    for source in ("words", "code"):
        texts = gpt.Texts(source, longest=50, documents=10)
        assert len(texts) == 10 and texts.lengths("input_ids").tolist() == [
            len(texts[at]["input_ids"]) for at in range(10)
        ]
        for number, text in enumerate(gpt.texts_of(source)[:10]):
            assert bytes(texts[number]["input_ids"].tolist()) == text.encode()[:50]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_hugging_face_trains_on_two_workers(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers: pip install 'dp-ray[transformers]'")
    from jobs.hugging_face import Labelled, causal_model, step

    sizes = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0}
        | {"attn_pdrop": 0},
        "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    }[kind]
    target = {"target": "jobs.hugging_face:causal_model", "args": {"kind": kind, **sizes}}
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 1.0}}
    keys = {"model": target, "max_steps": 6, "shuffle": False, "optimizer": sgd}
    run_group(job_of_file("hugging_face.yaml", **keys), tmp_path)
    model = initial(lambda: causal_model(kind, **sizes))
    optimizer, data, losses = torch.optim.SGD(model.parameters(), 1.0), Labelled(), []
    for at in range(6):
        rows = torch.stack([data[at * 32 + row]["input_ids"] for row in range(32)])
        total, count = step(model, {"input_ids": rows, "labels": rows})["loss"]
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    assert [row["loss"] for row in history_of(tmp_path)] == pytest.approx(losses, rel=1e-4)
    trained = weights_of(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-3, atol=1e-4), name


@pytest.mark.full
@pytest.mark.slow
def test_simclr_is_plain_torchs_on_any_workers(tmp_path: Path) -> None:
    losses = by_plain_torch(initial(Encoder), 4)
    for workers in (1, 2, 3):
        run_group(job_of_file("simclr.yaml", workers=workers, max_steps=4), tmp_path / str(workers))
        assert [row["loss"] for row in history_of(tmp_path / str(workers))] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_simclr_learns_to_find_the_other_view() -> None:
    model = initial(Encoder)
    before = found(model)
    by_plain_torch(model, 30)
    assert found(model) > 2 * before


class Still(vae.Vae):
    """A VAE that draws nothing."""

    def drawn(self, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
        return mean


@pytest.mark.full
@pytest.mark.slow
def test_the_vae_is_plain_torchs_on_any_workers_and_learns(tmp_path: Path) -> None:
    model, data = initial(Still), Digits("train")
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.003), []
    for at in range(0, 1437, 128):
        loss = vae.step(model, (data.images[at : at + 128], None))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    for workers in (1, 3):
        keys = {"workers": workers, "epochs": 1, "shuffle": False, "model": "tests.test_examples:Still"}
        run_group(job_of_file("vae.yaml", **keys), tmp_path / str(workers))
        assert [row["loss"] for row in history_of(tmp_path / str(workers))] == pytest.approx(losses, rel=1e-4)
    result = small_run(tmp_path, "vae", epochs=8)
    first, last = (
        row["eval_loss"] for row in result.history if row.get("eval_loss") is not None and row["epoch"] in (0, 7)
    )
    assert last < 0.85 * first


def trained_here(folder: Path, name: str, **keys: Any) -> dp_ray.Result:
    file = ROOT / "jobs" / "loops" / f"{name}.yaml"
    return dp_ray.run(file, workers=0, storage=str(folder), quiet=True, **keys)


@pytest.mark.full
@pytest.mark.slow
def test_the_generator_of_the_gan_finds_the_circle(tmp_path: Path) -> None:
    def distance(model: torch.nn.Module) -> float:
        with torch.no_grad():
            made = model(torch.randn(500, NOISE, generator=torch.Generator().manual_seed(1)))
        return float((made.norm(dim=1) - 1).abs().mean())

    result = trained_here(tmp_path, "gan", epochs=12)
    model = initial(Gan)
    before = distance(model)
    model.load_state_dict(result.weights)
    assert distance(model) < 0.5 * before
    assert {"critic", "generator", "learning_rate_1"} <= result.history[0].keys()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("in_project")
def test_a_student_learns_from_its_teacher_which_stays(tmp_path: Path) -> None:
    teacher = dp_ray.run("jobs/digits.yaml", workers=0, epochs=2, storage=str(tmp_path), quiet=True)
    result = trained_here(tmp_path, "distillation", epochs=6, model_args={"teacher": teacher.weights_path})
    assert result.metrics["eval_accuracy"] > 0.85
    for name, tensor in teacher.weights.items():
        assert torch.equal(result.weights[f"teacher.{name}"], tensor), name


@pytest.mark.full
@pytest.mark.slow
def test_the_walker_learns_to_go_to_the_middle(tmp_path: Path) -> None:
    rewards = [row["reward"] for row in trained_here(tmp_path, "reinforce", epochs=12).history]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.5


def words_by_hand(epochs: int, length: int, pieces: int) -> tuple[dict[str, torch.Tensor], list[Any], list[float]]:
    """The weights of a small reader, the loss and the rate of each step, and each evaluation, in plain torch."""
    model: Any = initial(lambda: words.Reader(8, dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), 20.0)
    plateau = ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    data, test = words.Pieces("train", length, pieces), words.Pieces("test", length, pieces)
    steps, evaluated = [], []

    def loss_of(columns: torch.Tensor, at: int, state: Any) -> Any:
        seen, state = model.lstm(model.embedding(columns[:, at : at + length]), state)
        following = columns[:, at + 1 : at + length + 1]
        return cross_entropy(model.head(seen).flatten(0, 1), following.flatten()), state

    for _ in range(epochs):
        state = None
        for at in range(0, pieces * length, length):
            loss, state = loss_of(data.columns, at, state)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            state = tuple(part.detach() for part in state)
            steps.append((loss.item(), optimizer.param_groups[0]["lr"]))
        with torch.no_grad():
            each = [loss_of(test.columns, at, None)[0].item() for at in range(0, pieces * length, length)]
        evaluated.append(sum(each) / len(each))
        plateau.step(evaluated[-1])
    return model.state_dict(), steps, evaluated


def test_a_state_that_is_kept_from_step_to_step_is_that_of_plain_torch(tmp_path: Path) -> None:
    """As truncated back-propagation through time by hand, its rate lowered by what was evaluated."""
    weights, steps, evaluated = words_by_hand(8, 5, 3)
    small: dict[str, Any] = {"model.args": {"width": 8, "dropout": 0.0}, "epochs": 8, "workers": 2}
    small |= {
        "dataset.args": {"length": 5, "pieces": 3},
        "eval.dataset.args": {"split": "test", "length": 5, "pieces": 3},
    }
    run_group(job_of_file("loops/words.yaml", **small), tmp_path)
    history = history_of(tmp_path)
    assert [row["loss"] for row in history] == pytest.approx([loss for loss, _ in steps], rel=1e-3)
    assert [row["learning_rate"] for row in history] == [rate for _, rate in steps]
    found = [row["eval_loss_of_words"] for row in history if row["eval_loss_of_words"] is not None]
    assert found == pytest.approx(evaluated, rel=1e-4)
    assert history[-1]["learning_rate"] < 20.0, "the plateau has lowered it"
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of(tmp_path)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.slow
def test_the_reader_learns_the_next_word(tmp_path: Path) -> None:
    losses = [row["loss"] for row in trained_here(tmp_path, "words", epochs=2).history]
    assert losses[0] == pytest.approx(math.log(len(words.KNOWN) + 1), rel=0.05), "a guess"
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]


@pytest.mark.full
@pytest.mark.slow
def test_the_carts_learn_to_balance_their_poles(tmp_path: Path) -> None:
    fell = [row["fell"] for row in trained_here(tmp_path, "actor_critic").history]
    assert sum(fell[-150:]) / 150 < 0.3 * sum(fell[:50]) / 50


@pytest.mark.full
@pytest.mark.slow
def test_lbfgs_finds_the_curve_through_the_noise(tmp_path: Path) -> None:
    losses = [row["loss"] for row in trained_here(tmp_path, "lbfgs", epochs=12).history]
    assert losses[-1] < 0.01 < 0.3 < losses[0]


def small_run(folder: Path, name: str, **keys: Any) -> dp_ray.Result:
    return dp_ray.run(ROOT / "jobs" / f"{name}.yaml", workers=0, storage=str(folder), quiet=True, **keys)


@pytest.mark.full
@pytest.mark.slow
def test_digits_are_augmented_anew_and_alike_on_any_workers(tmp_path: Path) -> None:
    data, plain = Moved(), Digits("train")
    assert len({str(data[5][0]) for _ in range(20)}) == 20 and data[5][1] == plain[5][1]
    still = Moved(noise=0.0)
    places = {str(image) for image in (still[5][0] for _ in range(100))}
    assert len(places) == 9 and str(plain[5][0]) in places, "nine directions, of which one moves nothing"
    for workers in (1, 2):
        run_group(job_of_file("augmented.yaml", workers=workers, max_steps=3), tmp_path / str(workers))
    alone, shared = (weights_of(tmp_path / str(workers)) for workers in (1, 2))
    assert all(torch.equal(tensor, shared[name]) for name, tensor in alone.items())


@pytest.mark.full
@pytest.mark.slow
def test_the_table_is_learned_from_its_files(tmp_path: Path) -> None:
    table.write(tmp_path / "data")
    paths = {split: str(tmp_path / "data" / f"patients-{split}.csv") for split in ("train", "test")}
    keys: dict[str, Any] = {"dataset.args.paths": paths["train"], "eval.dataset.args.paths": paths["test"]}
    keys |= {"workers": 0, "storage": str(tmp_path), "epochs": 8}
    result = dp_ray.run(load_job(ROOT / "jobs" / "table.yaml", keys))
    progressions = [float(line.split(",")[-1]) for line in Path(paths["test"]).read_text().split()[1:]]
    mean = sum(progressions) / len(progressions)
    guess = sum(abs(value - mean) for value in progressions) / len(progressions)
    assert (result.rows, len(progressions)) == (353, 89)
    assert result.metrics["eval_error"] < 0.8 * guess, "of someone who tells the mean of all"


@pytest.mark.full
@pytest.mark.slow
def test_the_shards_of_webdataset_hold_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs the package pillow: pip install 'dp-ray[images]'")
    webdataset.write(tmp_path / "data")
    shards = str(tmp_path / "data" / "digits-{}-*.tar")
    data, digits = dp_ray.data.WebDataset(shards.format("train"), columns=["png", "cls"]), Digits("train")
    assert len(data) == len(digits) == 1437
    for number in (0, 700, 1436):
        image = data[number]["png"].float() / 255
        assert torch.allclose(image, digits[number][0].expand(3, 8, 8), atol=1 / 255)
        assert data[number]["cls"] == digits[number][1]
    keys = {"dataset.args.paths": shards.format("train"), "eval.dataset.args.paths": shards.format("test")}
    job = load_job(ROOT / "jobs" / "webdataset.yaml", {**keys, "workers": 0, "storage": str(tmp_path), "epochs": 1})
    assert dp_ray.run(job).metrics["eval_accuracy"] > 0.7


@pytest.mark.slow
def test_damaged_digits_are_set_aside_and_the_others_train(tmp_path: Path) -> None:
    result = small_run(tmp_path, "bad_records", epochs=1)
    set_aside = pq.read_table(f"{result.run_dir}/quarantine.parquet")
    bad = {number for number in range(len(Damaged())) if number % 200 in (7, 99)}
    assert set(set_aside.column("sample_index").to_pylist()) == bad
    assert result.quarantined == len(bad) == 15 and math.isfinite(result.metrics["eval_loss"])


def test_the_embeddings_are_the_last_inputs_of_the_net(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(16).eval()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    result = small_run(tmp_path, "embeddings", init_from=str(tmp_path / "net.pt"))
    with torch.no_grad():
        embeddings = net.layers[:-1](Digits().images)
        guesses = net.layers[-1](embeddings).argmax(1)
    assert torch.allclose(result.outputs["embedding"].float(), embeddings, atol=2e-3)
    assert torch.equal(result.outputs["guess"], guesses)
    rows = pq.read_table(f"{result.run_dir}/outputs")
    assert rows.column("id")[3].as_py() == "digit-0003"
    assert rows.column("label").to_pylist() == Digits().labels.tolist()
