"""A language model of Hugging Face's, built from a config without a download. It needs the package `transformers`."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from jobs.characters import LETTERS, Characters


def causal_model(kind: str = "gpt2", **sizes: int) -> nn.Module:
    """A causal language model of characters, with random weights; `sizes` are keys of the kind's config."""
    from transformers import AutoConfig, AutoModelForCausalLM  # an extra

    config = AutoConfig.for_model(kind, vocab_size=len(LETTERS), bos_token_id=None, eos_token_id=None, **sizes)
    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """The windows of characters as the model's keywords; it compares each character with the one before by itself."""

    def __init__(self, length: int = 64, windows: int = 512) -> None:
        self.windows = Characters(length, windows)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers, _ = self.windows[index]
        return {"input_ids": numbers, "labels": numbers}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A step: the model's own loss, which is a mean over all labels but each row's first."""
    outputs = model(**batch, use_cache=False)
    count = (batch["labels"][:, 1:] != -100).sum()
    return {"loss": (outputs.loss * count, count), "outputs": outputs.logits, "target": batch["labels"]}
