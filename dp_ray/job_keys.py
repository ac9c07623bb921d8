"""The keys of a job: the type, the default and the meaning of each."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dp_ray.job_parts import Checkpoint, Elastic, Eval, Loader, Optimizer, Scheduler, Timeouts, location
from dp_ray.job_target import Strict, Targeted, target_parser


class JobKeys(Strict):
    """The keys of a job."""

    name: str | None = None
    task: Literal["predict", "evaluate", "train"] = "predict"
    model: Targeted
    dataset: Targeted
    batch_size: PositiveInt
    shards: PositiveInt | None = None
    workers: NonNegativeInt | Elastic = 1
    gpus_per_worker: Literal["auto"] | NonNegativeFloat = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle: bool = False
    order: Literal["dataset", "shuffled"] = "dataset"
    drop_last: bool = False
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    inputs: Literal["auto", "all", "first"] = "auto"
    call: Literal["auto", "one", "args", "kwargs"] = "auto"
    collate: Targeted | None = None
    scatter: Literal["samples", "batch"] = "samples"
    batch_dim: NonNegativeInt = 0
    loader: Loader = Loader()
    loss: Targeted | None = None
    step: Targeted | None = None
    metrics: dict[str, Targeted] = Field(default_factory=dict)
    eval: Eval | None = None
    optimizer: Annotated[Any, target_parser(Optimizer)] | None = None
    scheduler: Annotated[Any, target_parser(Scheduler)] | None = None
    grad_clip: PositiveFloat | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    sync_batchnorm: bool = False
    find_unused_parameters: Literal["auto"] | bool = "auto"
    bitwise: bool = False
    checkpoint: Checkpoint = Checkpoint()
    init_from: Annotated[str, Field(min_length=1), BeforeValidator(location)] | None = None
    cpus_per_worker: NonNegativeFloat = 1
    resources_per_worker: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    accelerator_type: str | None = None
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    input_device: str | None = None
    device_map: Literal["auto"] | None = None
    blocks: Annotated[list[str], Field(min_length=1)] | None = None
    retries: NonNegativeInt = 3
    timeouts: Timeouts = Timeouts()
    storage: Annotated[str, Field(min_length=1)] = "runs"
    env: dict[str, str] = Field(default_factory=dict, repr=False)
