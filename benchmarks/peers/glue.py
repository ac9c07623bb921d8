"""Fine-tune a tiny BERT on sentences: run_glue.py, run_glue_no_trainer.py, and dp_ray.

Sentences, tokenizer and weights are made on the spot, the same for all sides; batches of 36 rows in all, AdamW, a
rate that falls in a line. Each command begins with empty caches. `python -m benchmarks.peers.glue FOLDER` makes what
the sides read.
"""

import csv
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster import scratch
from benchmarks.compare import at_most
from benchmarks.peers.needed import environment, script
from benchmarks.peers.sides import Timed, in_turns, rows, timed
from benchmarks.table import Row, ratio_text, time_text

ROOT = Path(__file__).parents[2]
TRANSFORMERS = ("huggingface/transformers", "ae05b2ae619aa28fdfdcb8244009d585b7e1fed7")
EVALUATE = ("huggingface/evaluate", "a4fcb45252709bd07fba897afd4575735716664f")
PACKAGES = ("transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "evaluate==0.4.6", "scikit-learn==1.9.1")
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "ACCELERATE_USE_CPU"), "1")
ROWS, BATCH, LENGTH, EPOCHS = 2000, 36, 32, 2
HALF = -(-ROWS // BATCH)  # steps of an epoch
PEERS = ("run_glue.py", "run_glue_no_trainer.py")
COUNTS = (1, 2, 3)
AHEAD = at_most(1.0, "ahead")


def measure() -> Iterator[Row]:
    with scratch() as folder:
        place = Place(environment("glue", *PACKAGES), folder)
        place.make()
        for side in ("dp_ray", *PEERS):  # files are read into memory
            place.run(side, 2, "warm-up")
        found = in_turns({side: partial(place.run, side, 2, "turn") for side in ("dp_ray", *PEERS)})
        what = f"glue: tiny BERT, {ROWS:,} sentences, {EPOCHS} epochs, 2 workers"
        goals = dict.fromkeys(PEERS, AHEAD)
        yield from rows(f"{what}, the whole command", found, lambda run: run.whole, goals)
        yield from rows(f"{what}, until the first step has ended", found, lambda run: run.start, goals)
        yield from rows(f"{what}, from then to the last step's end", found, lambda run: run.stepping, goals)
        yield from place.on_workers()
        yield from place.resumed()


@dataclass(frozen=True)
class Place:
    """A folder with the data and the scripts, and the python that runs all sides there."""

    python: Path
    folder: Path

    def make(self) -> None:
        """Bring the scripts here, and make what all sides read."""
        for name in PEERS:
            shutil.copy(script(*TRANSFORMERS, f"examples/pytorch/text-classification/{name}"), self.folder)
        (self.folder / "accuracy").mkdir()  # evaluate.load("accuracy") finds it where it stands, without the hub
        shutil.copy(script(*EVALUATE, "metrics/accuracy/accuracy.py"), self.folder / "accuracy")
        made = [str(self.python), "-m", "benchmarks.peers.glue", str(self.folder)]
        subprocess.run(made, cwd=ROOT, env={**os.environ, **OFFLINE}, capture_output=True, check=True)

    def run(self, side: str, workers: int, name: str, *more: str) -> Timed:
        """Run a side's whole command; what it leaves is in its folder of this name."""
        shutil.rmtree(self.out(side, name), ignore_errors=True)
        return timed([*self.command(side, workers, name), *more], self.folder, **self.variables(side, name))

    def out(self, side: str, name: str) -> Path:
        return self.folder / "runs" / side / name

    def variables(self, side: str, name: str) -> dict[str, str]:
        return {**OFFLINE, "PYTHONPATH": str(ROOT), "HF_HOME": str(self.out(side, name) / "cache")}

    def command(self, side: str, workers: int, name: str) -> list[str]:
        out = self.out(side, name)
        if side == "dp_ray":
            job = ROOT / "benchmarks" / "peers" / "glue.yaml"
            words = ["-m", "dp_ray", "run", job, f"--storage={out.parent}", f"--name={name}", f"--workers={workers}"]
            return [str(self.python), *map(str, words), "--quiet"]
        options = {
            "model_name_or_path": "model",
            "train_file": "train.csv",
            "validation_file": "validation.csv",
            "output_dir": out,
            "per_device_train_batch_size": BATCH // workers,
            "per_device_eval_batch_size": BATCH // workers,
            "learning_rate": 0.001,
            "num_train_epochs": EPOCHS,
            "seed": 0,
        }
        given = [f"--{key}={value}" for key, value in options.items()]
        if side == "run_glue.py":
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
            given += ["--do_train", "--do_eval", f"--max_seq_length={LENGTH}", "--max_grad_norm=0"]
            given += ["--save_strategy=epoch", "--use_cpu", "--ddp_backend=gloo"]
        else:
            # Without --multi_gpu, accelerate launches one process on a machine without GPUs.
            launch = ["-m", "accelerate.commands.accelerate_cli", "launch", f"--num_processes={workers}"]
            launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
            launch += ["--multi_gpu"] if workers > 1 else []
            given += ["--pad_to_max_length", f"--max_length={LENGTH}", "--checkpointing_steps=epoch"]
        return [str(self.python), *launch, side, *given]

    def ended(self, side: str, name: str) -> tuple[float, str]:
        """The accuracy of a run, and a hash of its weights."""
        out = self.out(side, name)
        if side == "dp_ray":
            result: dict[str, Any] = json.loads((out / "result.json").read_text())
            return result["metrics"]["eval_accuracy"], result["weights_sha256"]
        weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
        return json.loads((out / "all_results.json").read_text())["eval_accuracy"], weights

    def on_workers(self) -> Iterator[Row]:
        """The accuracy on several numbers of workers, and whether the weights are the same bits."""
        texts = {}
        for side in ("dp_ray", *PEERS):
            more = ["--set=shards=6"] if side == "dp_ray" else []
            for count in COUNTS:
                self.run(side, count, f"on-{count}", *more)
            found = [self.ended(side, f"on-{count}") for count in COUNTS]
            accuracies = ", ".join(f"{accuracy:.3f}" for accuracy, _ in found)
            different = len({weights for _, weights in found})
            texts[side] = f"{accuracies}; weights: {'the same bits' if different == 1 else f'{different} different'}"
        what = f"glue: accuracy on {', '.join(map(str, COUNTS))} workers (dp_ray: 6 shards)"
        for peer in PEERS:
            reached = texts["dp_ray"].endswith("the same bits")
            yield Row(what, texts["dp_ray"], f"{texts[peer]} {peer}", "", "the same bits", reached)

    def resumed(self) -> Iterator[Row]:
        """Go on at half: dp_ray's driver is killed, and the same command comes again; the peers name a checkpoint."""
        ours, variables = self.command("dp_ray", 2, "half"), self.variables("dp_ray", "half")
        killed = [*ours, f"--inject=kill driver at step {HALF + 5}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        assert subprocess.run(killed, cwd=self.folder, env=environ, capture_output=True, check=False).returncode
        again = timed(ours, self.folder, **variables)
        for peer, checkpoint in zip(PEERS, (f"checkpoint-{HALF}", "epoch_0"), strict=True):
            theirs = self.run(peer, 2, "half", f"--resume_from_checkpoint={self.out(peer, 'turn') / checkpoint}")
            bits = [
                "the same bits" if self.ended(side, "half") == self.ended(side, "turn") else "other bits"
                for side in ("dp_ray", peer)
            ]
            yield Row(
                "glue: resumed at half on 2 workers: the whole command, and the weights beside a run without a stop",
                f"{time_text(again.whole)}, {bits[0]}",
                f"{time_text(theirs.whole)}, {bits[1]} {peer}",
                ratio_text(again.whole / theirs.whole),
                "the same bits",
                bits[0] == "the same bits",
            )


def make(folder: Path) -> None:
    """Write sentences, good or bad by their words, a tokenizer of these words, and a BERT with random weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    good, bad = (
        ["good", "great", "fine", "warm", "bright", "clever"],
        ["bad", "dull", "poor", "cold", "weak", "silly"],
    )
    plain = ["the", "a", "film", "story", "it", "was", "and", "of", "with", "scene", "actor", "music", "end"]
    draw = random.Random(0)
    for name, count in (("train", ROWS), ("validation", 500)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence", "label"])
            for _ in range(count):
                most, others = (good, bad) if (label := draw.random() < 0.5) else (bad, good)
                words = (
                    draw.choices(most, k=3) + draw.choices(others, k=1) + draw.choices(plain, k=draw.randint(4, 12))
                )
                draw.shuffle(words)
                writer.writerow([" ".join(words), int(label != (draw.random() < 0.05))])  # some labels are wrong
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *good, *bad, *plain]
    tokenizer: Any = BertTokenizer(vocab={word: number for number, word in enumerate(words)}, model_max_length=64)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    bert: Any = BertForSequenceClassification(BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes))
    bert.save_pretrained(folder / "model")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
