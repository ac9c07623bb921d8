"""The keys of a job: the type, the default and the meaning of each.

The job file's reference and its JSON schema are made from these descriptions.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from dp_ray.job_outputs import Outputs
from dp_ray.job_parts import (
    ActivationBudget,
    BlocksKey,
    Checkpoint,
    EarlyStopping,
    Elastic,
    Ema,
    Eval,
    Fsdp,
    Hooks,
    Loader,
    OnError,
    Optimizer,
    SchedulerKey,
    Timeouts,
    location,
)
from dp_ray.job_target import Strict, Targeted, target_parser


def _in_order(samples: list[int]) -> list[int]:
    return sorted(set(samples))


class WorkKeys(Strict):
    """What to run, on what data, and how it is cut."""

    name: str | None = Field(
        default=None,
        description="Name of the run: its directory is STORAGE/NAME. Default: the job file's name; from Python, the "
        "time.",
    )
    task: Literal["predict", "evaluate", "train"] = Field(
        default="predict",
        description="What to do. A key that only another task needs is ignored, so one file serves all three. "
        "evaluate uses `eval.dataset` and `eval.batch_size` if there is an `eval`.",
    )
    model: Targeted = Field(
        description="A class or function that gives a torch.nn.Module. For a TorchScript file: `torch.jit:load` with "
        "args `{f: PATH}`."
    )
    dataset: Targeted = Field(
        description="A class or function that gives a map-style dataset, with `__len__` and `__getitem__`. "
        "`__getitems__` is used if there is one."
    )
    batch_size: PositiveInt = Field(description="Samples in a global batch, over all workers.")
    shards: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Pieces into which each global batch is cut. Default: the largest number of workers. auto: the "
        "fewest that fit the workers' GPUs, which the run finds once before its first step. A resumed run keeps the "
        "number with which it began.",
    )


class WorkerKeys(Strict):
    """On what to run: the workers, and what each of them takes from the cluster."""

    workers: NonNegativeInt | Elastic = Field(
        default=1,
        description="Number of workers. A range, like `{min: 1, max: 8}`, grows and shrinks with the cluster. 0 runs "
        "in this process, without Ray.",
    )
    gpus_per_worker: Literal["auto"] | NonNegativeFloat = Field(
        default="auto",
        description="GPUs of each worker. auto: 1 if the cluster has GPUs or its autoscaler may add some, else 0. "
        "2 or more: for a model over several GPUs. 0.5: two workers share a GPU, and communicate by gloo.",
    )
    cpus_per_worker: NonNegativeFloat = Field(
        default=1,
        description="CPUs that Ray reserves for each worker, and the threads of torch on it. With `workers: 0` torch "
        "keeps its own number, but with `bitwise`.",
    )
    resources_per_worker: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="Other Ray resources of each worker, like `{slot: 1}`."
    )
    accelerator_type: str | None = Field(
        default=None, description="Use only nodes with this type of accelerator, as Ray names it, like `A100`."
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="Ray's placement strategy: workers on as few nodes as possible, or on as many. STRICT_PACK needs "
        "one node for all workers, STRICT_SPREAD a node for each.",
    )
    devices: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="The devices of each worker, by hand: `[cpu]`, or `[cuda:0, cpu]` for a model over both. With "
        "several workers `cuda:0` is the first of a worker's own GPUs, which Ray reserves; else it is the machine's.",
    )
    timeouts: Timeouts = Field(
        default=Timeouts(), description="How long a step may take, and how long to wait for nodes that were lost."
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Environment variables of the workers, and of the driver while it builds the dataset. Their "
        "values are not kept in the run directory.",
    )

    @property
    def min_workers(self) -> int:
        """The fewest workers with which the job runs."""
        return self.workers.min if isinstance(self.workers, Elastic) else self.workers

    @property
    def max_workers(self) -> int:
        """The most workers with which the job runs."""
        return self.workers.max if isinstance(self.workers, Elastic) else self.workers

    @property
    def own_gpus(self) -> int:
        """How many GPUs of its own each worker needs for its `devices`; 0 if a worker is alone on its node.

        The devices of such a worker are those of its machine, as they are named. Others would take the same GPU.
        """
        if self.max_workers < 2 or self.placement == "STRICT_SPREAD":
            return 0
        return max((number + 1 for number in map(gpu_number, self.devices or ()) if number is not None), default=0)


def gpu_number(device: str) -> int | None:
    """The number in a GPU's name, as of `cuda:1`, which is 0 in `cuda`; None for another device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" and (number.isdecimal() or not number) else None


class JobKeys(WorkerKeys, WorkKeys):
    """The keys of a job, each by itself; `Job` adds what must hold among them."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0,
        description="Seed of the samples' order, of the model's initial weights and of all other random numbers.",
    )
    shuffle: bool | BlocksKey = Field(
        default=False,
        description="train only: take the samples in another random order in each epoch. blocks: shuffle blocks, "
        "like the row groups of files, and the samples in windows of them.",
    )
    order: Literal["dataset", "shuffled"] = Field(
        default="dataset",
        description="predict and evaluate only: take the samples in the dataset's order, or shuffled.",
    )
    drop_last: bool = Field(
        default=False, description="Drop an epoch's last global batch if it is smaller than `batch_size`."
    )
    epochs: PositiveInt = Field(
        default=1,
        description="train only: how many times to go through the dataset. With more of them a finished run goes on.",
    )
    max_steps: PositiveInt | None = Field(
        default=None,
        description="train only: the most steps in all. null: no limit. With more of them a finished run goes on.",
    )

    inputs: Literal["auto", "all", "first"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="auto",
        description="What the model gets: all of an item, or the first of a pair (input, target). A list picks "
        "values of a dict: of `[image]` the value itself, of several keys a dict. auto: first in train and evaluate. "
        "In predict auto follows the model's `forward`, and a line says if the target is left out.",
    )
    target: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="The key of an item's target, like `label`, if `inputs` is a list of keys; several give a dict.",
    )
    call: Literal["auto", "one", "args", "kwargs"] = Field(
        default="auto",
        description="How the model is called. one: `model(inputs)`. args: `model(*inputs)`. kwargs: "
        "`model(**inputs)`. auto: args for a tuple or list, else one.",
    )
    collate: Targeted | None = Field(
        default=None,
        description="A function that makes a batch of a list of samples, or a class of such; its args are keywords. "
        "Default: torch's default_collate.",
    )
    scatter: Literal["samples", "batch"] = Field(
        default="samples",
        description="samples: collate each shard by itself. batch: collate the whole global batch, then cut it, for "
        "a collate that pads to the longest sample.",
    )
    batch_dim: NonNegativeInt = Field(
        default=0,
        description="The dimension of tensors that holds the rows, as `dim` of nn.DataParallel. One-dimensional "
        "tensors hold them in dimension 0.",
    )
    loader: Loader = Field(default=Loader(), description="The torch DataLoader of each worker.")
    on_error: OnError | None = Field(
        default=None,
        description="Set samples aside that raise, hang or cannot be collated, like `{quarantine: 100}`, and go on "
        "without them. null: such a sample ends the job.",
    )

    skip: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_in_order)] | None = Field(
        default=None,
        description="train only: samples of `dataset` to leave out, by their indices, like `[812, 1007]`. They are "
        "not read, and count with weight 0.",
    )
    stop_on_nan: bool = Field(
        default=False,
        description="train only: end the run with an error at the first step whose loss is NaN or infinite. No "
        "checkpoint of that step or a later one is kept.",
    )

    loss: Targeted | None = Field(
        default=None,
        description="A function of (outputs, target) that returns a number for each row or element, or (sum, "
        "weight). A loss of torch.nn or torch.nn.functional, named as a target, is built to do so.",
    )
    step: Targeted | None = Field(
        default=None,
        description="A function `step(model, batch)` in place of the model's call and the loss, for items or models "
        "of another kind.",
    )
    metrics: dict[str, Targeted] = Field(
        default_factory=dict,
        description="Metrics by name. Each returns what a loss returns, or is a torchmetrics class, which is "
        "measured in evaluations only and needs the extra `metrics`. A name must not be a column of the history.",
    )
    eval: Eval | None = Field(default=None, description="Evaluate the model during a training and at its end.")
    optimizer: Annotated[Any, target_parser(Optimizer)] | None = Field(
        default=None, description="A class or function that is called with the trainable parameters. train needs one."
    )
    scheduler: SchedulerKey | None = Field(
        default=None,
        description="A class or function that is called with the optimizer and gives a learning rate scheduler; or "
        "`{warmup: 0.05, shape: cosine}`. Its args `T_max`, `total_steps`, `total_iters` and `num_training_steps` "
        "may be `auto`: how often the training steps it in all.",
    )
    early_stopping: EarlyStopping | None = Field(
        default=None,
        description="train only: end the training once a metric has not improved for a while, like `{metric: "
        "eval_loss, patience: 3}`. With more patience a run that it has ended goes on.",
    )
    ema: Ema | None = Field(
        default=None,
        description="train only: also keep the exponential moving average of the weights, `ema.safetensors`, like "
        "`{decay: 0.999, evaluate: true}`.",
    )
    hooks: Hooks = Field(
        default=Hooks(),
        description="train only: functions that rank 0 calls with a view of the training, like `{on_step: "
        "'my_hooks:log'}`.",
    )
    grad_clip: PositiveFloat | None = Field(
        default=None, description="The largest norm of the whole batch's gradient. null: gradients are not clipped."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="bf16 and fp16 run the model under autocast. fp16 adds a loss scaler on which all workers agree.",
    )
    activation_checkpointing: bool | Annotated[list[str], Field(min_length=1)] | ActivationBudget = Field(
        default=False,
        description="train only: blocks keep their inputs alone, and their backward runs their forward again. true: "
        "the blocks that `fsdp.blocks: auto` finds. A list names their classes. The numbers stay the same bits.",
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    sync_batchnorm: bool = Field(
        default=False,
        description="BatchNorm over the whole global batch, for GPUs only. Needs a worker for each shard.",
    )
    find_unused_parameters: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the model may leave parameters unused. auto: with several workers, each looks once: it "
        "runs its first shard twice, and restores the model; what else a forward changes, it changes twice. Set "
        "true if the parameters that it uses change from step to step. With `strategy: fsdp`, auto looks every time.",
    )
    bitwise: bool = Field(
        default=False,
        description="Weights, losses and outputs are the same bits on any number of workers from 1 to `shards`.",
    )
    checkpoint: Checkpoint = Field(
        default=Checkpoint(),
        description="When a training writes checkpoints, besides at its end, and which it keeps.",
    )
    init_from: Annotated[str, Field(min_length=1), BeforeValidator(location)] | None = Field(
        default=None,
        description="Start from a weights file (`.safetensors`, `.pt`), a run directory or a checkpoint. From "
        "Python, a Result too.",
    )

    input_device: str | None = Field(
        default=None, description="The device to which inputs go. Default: that of the model's first parameter."
    )
    device_map: Literal["auto"] | None = Field(
        default=None,
        description="auto: place the model's blocks on the worker's devices, about the same bytes of parameters on "
        "each. null: the model places its parts itself.",
    )
    blocks: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="The modules that `device_map: auto` places, by name, in the order in which they run. Default: "
        "the children of a torch.nn.Sequential.",
    )

    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="ddp: each worker holds the whole model. fsdp: each worker holds a part of each parameter, of "
        "its gradient and of its optimizer state (torch's FSDP2).",
    )
    fsdp: Fsdp = Field(default=Fsdp(), description="How `strategy: fsdp` shards the model over the workers.")

    outputs: Outputs = Field(
        default=Outputs(), description="predict only: what is kept of the outputs, and how it is written."
    )
    retries: NonNegativeInt = Field(
        default=3,
        description="How many times all workers are started again, after a loss, a hang or an error that may pass, "
        "before the job fails.",
    )
    flops: bool = Field(
        default=False,
        description="train and predict: count the floating-point operations of a row. Rank 0 runs its first shard "
        "once more for it, without a trace in the result.",
    )
    profile: str | None = Field(
        default=None,
        description="Steps to trace with torch.profiler, and the rank: `10-20:3`, or `10-20:slowest` in a training. "
        "Without a rank: rank 0. slowest alone: five steps from step 10 on.",
    )
    trackers: list[Literal["tensorboard", "mlflow", "wandb", "trackio"]] | None = Field(
        default=None,
        description="Where a run's history goes besides its directory, like `[tensorboard, mlflow]`. null: "
        "tensorboard. The others are extras, which their own environment variables configure.",
    )
    storage: Annotated[str, Field(min_length=1)] = Field(
        default="runs",
        description="Folder or URL (`s3://...`, `gs://...`) of the run directories. All workers must share it.",
    )

    @property
    def skipped(self) -> list[int]:
        """The samples that the job's task leaves out, by their indices, in order; none unless it is a training."""
        return (self.skip or []) if self.task == "train" else []

    @property
    def may_lose_rows(self) -> bool:
        """Whether shards may have fewer rows than the split says."""
        return bool(self.skipped) or self.on_error is not None
