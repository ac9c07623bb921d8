"""The part `outputs` of a job: what is kept of a prediction's outputs, and how it is written."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from dp_ray.job_target import Strict, Targeted


class Outputs(Strict):
    """What is kept of a prediction's outputs, and how it is written."""

    after: Targeted | None = Field(
        default=None,
        description="A function of a shard's outputs, on its device: what it returns is kept in their place. If it "
        "has a parameter `inputs`, it gets the model's inputs too.",
    )
    keep: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="The outputs that are kept, by path, like `[logits, hidden_states.0]`, or `hidden_states.*`. "
        "null: all of them.",
    )
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = Field(
        default=None,
        description="The type in which floating outputs are kept. null: as the model gives them.",
    )
    carry: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Keys of the dataset's items whose values are written beside each row, like `[id, path]`: "
        "numbers, text, truth values, lists of these.",
    )
    file_bytes: PositiveInt = Field(
        default=1 << 30,
        description="About how many bytes each file of the outputs has. A resumed run keeps the files with which it "
        "began.",
    )

    @model_validator(mode="after")
    def _carries_once(self) -> "Outputs":
        if twice := [key for key in self.carry or () if (self.carry or []).count(key) > 1]:
            raise ValueError(f"carry names {twice[0]!r} twice")
        return self
