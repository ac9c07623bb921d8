"""The keys of a job: each says what it means."""

import pytest

from dp_ray.job.keys import JobKeys, Strict


def models(base: type[Strict] = Strict) -> list[type[Strict]]:
    """The models of which a job is made: the keys, and each part that has keys of its own."""
    return [
        model
        for cls in base.__subclasses__()
        for model in (cls, *models(cls))
        if model.__module__.startswith("dp_ray")
    ]


def test_the_job_and_its_parts_are_found() -> None:
    assert JobKeys in models()
    assert {"Target", "Optimizer", "Loader", "CheckpointKeys", "Best"} <= {model.__name__ for model in models()}


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_key_says_what_it_means(model: type[Strict]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, f"{name} has no description"
        says = " ".join(field.description.split())
        assert says.endswith(".")
        assert all(len(sentence.split()) <= 25 for sentence in says.split(". ")), f"{name}: a sentence is too long"
