"""The part `outputs` of a job: how a prediction's outputs are written."""

from pydantic import Field, PositiveInt

from dp_ray.job_target import Strict


class Outputs(Strict):
    """How a prediction's outputs are written."""

    file_bytes: PositiveInt = Field(
        default=1 << 30,
        description="About how many bytes each file of the outputs has. A resumed run keeps the files with which it "
        "began.",
    )
