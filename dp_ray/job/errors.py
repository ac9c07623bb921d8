"""Pydantic's errors as messages for users: the key, what it may be, what it got, and a hint. Begin at `explain`.

The table above it names keys of other libraries and of earlier versions, each with the key that does the same here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError

from dp_ray.job.keys import JobKeys, Target
from dp_ray.text import did_you_mean, hide

# A line for each answer, which begins with dp_ray's key, and after "=" the names for it elsewhere.
_TABLE = """
shards: a worker runs its shards of a batch one after another and adds up their gradients, so shards: 8 on 2
    workers accumulates over 4; batch_size stays that of the whole batch = gradient_accumulation_steps
    gradient_accumulation accumulate accumulate_grad_batches accumulation_steps grad_accum grad_accum_steps
    micro_batches num_microbatches update_freq iters_to_accumulate
workers: one process and one GPU each; the processes of each worker's DataLoader are loader.processes =
    num_workers n_workers
workers: one GPU each (gpus_per_worker), on as many nodes as they need (placement) = gpus num_gpus n_gpus n_gpu
    ngpus nodes num_nodes nnodes n_nodes nproc_per_node nproc world_size num_processes num_replicas replicas
gpus_per_worker: auto takes a GPU for each worker where there are any; devices: [cpu] stays on the CPU = device
    accelerator use_gpu use_cuda cuda use_cpu no_cuda tpu
optimizer.args.lr = lr learning_rate base_lr max_lr init_lr
optimizer.args.weight_decay = weight_decay wd
optimizer.args.momentum = momentum
optimizer.args.betas = betas adam_betas
optimizer.groups = param_groups parameter_groups
optimizer = optim optimiser
optimizer: a job has one, with optimizer.groups for parts of the model; several, as of a GAN, are not supported =
    optimizers
scheduler: a target that is called with the optimizer, like 'torch.optim.lr_scheduler:OneCycleLR', or {warmup:
    0.05, shape: cosine} = lr_scheduler lr_schedule schedule scheduler_type lr_scheduler_type warmup warmup_steps
    warmup_ratio warmup_epochs
precision: bf16 or fp16 = amp use_amp fp16 bf16 half autocast mixed_precision dtype torch_dtype float16 bfloat16
eval.dataset: evaluated while training and at its end; a dataset by itself is scored by task: evaluate = val valid
    validation test eval_dataset val_dataset valid_dataset validation_dataset test_dataset val_data test_data
    eval_data val_dataloader val_dataloaders test_dataloader val_loader dev_dataset
eval.every_steps = eval_steps eval_every eval_interval eval_freq val_every val_interval val_check_interval
    validation_steps evaluation_strategy eval_strategy
eval.every_epochs = check_val_every_n_epoch eval_epochs val_epochs
eval.batch_size = eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size
init_from: weights, a run or a checkpoint to start another run from; to resume an unfinished run, run the same
    command again = resume resume_from resume_from_checkpoint resume_training ckpt ckpt_path checkpoint_path load
    load_from load_checkpoint pretrained pretrained_weights weights init_weights state_dict
strict: false loads what fits of init_from = strict_loading load_strict ignore_mismatched_sizes
strategy: fsdp shards a model over the workers; that workers share each batch needs no key = backend ddp deepspeed
    zero distributed dist distributed_backend parallel data_parallel
device_map: auto spreads a model over several devices of a worker = model_parallel tensor_parallel
    pipeline_parallel
epochs = num_epochs max_epochs n_epochs nb_epochs num_train_epochs train_epochs total_epochs epoch
max_steps = num_steps n_steps total_steps train_steps steps iterations iters max_iters num_iterations
batch_size: of the whole batch, over all workers = train_batch_size global_batch_size per_device_train_batch_size
    per_gpu_train_batch_size micro_batch_size bs batch
grad_clip = clip clip_grad clip_grad_norm gradient_clip gradient_clip_val gradient_clipping max_grad_norm max_norm
loss = criterion loss_fn loss_func loss_function objective
step = training_step train_step
metrics = metric compute_metrics eval.metrics
dataset: a job has one; join several by torch's ConcatDataset, or mix them in a class of your own
    (docs/recipes.md) = datasets mixture mixtures mix mixing interleave data_mix data_mixture dataset_weights
    mixing_weights
dataset: the job orders its samples by shuffle and seed; to draw some more often, name them several times in
    torch's Subset (docs/recipes.md) = sampler batch_sampler train_sampler weighted_sampler sample_weights
    loader.sampler loader.batch_sampler
loss.args.weight: a number for each class = class_weight class_weights
model: a function that builds the model with its adapters, by peft or by hand; parameters that require no gradient
    are not trained (docs/recipes.md) = lora lora_config lora_r lora_rank lora_alpha use_lora qlora peft
    peft_config use_peft adapter adapters
dataset = data train_dataset train_data training_data train train_dataloader train_loader dataloader
model = net network module model_name model_name_or_path
inputs = input input_keys input_columns
collate = collate_fn collator data_collator loader.collate_fn loader.collate
loader.processes = dataloader_num_workers loader_workers data_workers loader.num_workers loader.workers
loader.prefetch = prefetch prefetch_factor loader.prefetch_factor
loader.pin_memory = pin_memory
loader.persistent = persistent_workers loader.persistent_workers
storage: the run's folder is STORAGE/NAME = output_dir output out_dir save_dir log_dir logdir logging_dir
    default_root_dir root_dir work_dir run_dir results_dir checkpoint_dir ckpt_dir save_path storage_path
name = run_name experiment experiment_name exp_name job_name project
seed = random_seed random_state manual_seed rng_seed
checkpoint.every_steps = save_steps save_every save_interval checkpoint_every checkpoint_interval save_freq
    checkpoint.save_steps checkpoint.every checkpoint.interval checkpoint.every_n_steps
checkpoint.keep = save_total_limit save_top_k keep_checkpoints max_checkpoints checkpoint.save_top_k
    checkpoint.save_total_limit checkpoint.num_to_keep
checkpoint.best.metric = metric_for_best_model monitor load_best_model_at_end save_best checkpoint.best.monitor
    checkpoint.best.name checkpoint.best.key
stop_on_nan = terminate_on_nan detect_anomaly stop_on_non_finite
skip: samples of the dataset by their indices = skip_samples skip_indices exclude ignore_samples
early_stopping: {metric: eval_loss, patience: 3} = early_stop early_stopping_patience early_stopping_rounds
    early_stopping_callback patience
ema: {decay: 0.999}, the average of the weights = ema_decay model_ema model_ema_decay use_ema swa averaged_model
    weight_averaging exponential_moving_average
hooks: on_step, on_evaluate and on_end, functions that rank 0 calls with a view of the training = callback
    callbacks hook on_step on_evaluate on_end on_epoch_end on_train_end
bitwise = deterministic reproducible use_deterministic_algorithms
activation_checkpointing = gradient_checkpointing grad_checkpointing use_checkpoint activation_checkpoint
    recompute remat
compile = torch_compile jit
sync_batchnorm = sync_bn convert_sync_batchnorm
find_unused_parameters = ddp_find_unused_parameters
cpus_per_worker = cpus num_cpus cpu cpus_per_task
resources_per_worker = resources memory
retries = max_retries max_failures max_restarts num_retries
timeouts.step = timeout step_timeout ddp_timeout
env = environment env_vars
outputs.keep: the outputs that are kept; outputs.after computes what is kept = output_columns keep_outputs
outputs.after: computes what is kept of the outputs, on the device = postprocess post_process postprocessing
outputs.carry: writes values of the items beside the outputs = keep_columns passthrough id_column id_key
device_map: the new name of split = split
loader.context = loader.multiprocessing_context
batch_size = loader.batch_size
shuffle = loader.shuffle
drop_last = loader.drop_last
checkpoint.best = checkpoint.monitor checkpoint.metric checkpoint.save_best
early_stopping.metric = early_stopping.monitor early_stopping.name early_stopping.watch
early_stopping.min_delta = early_stopping.delta early_stopping.threshold early_stopping.tolerance
early_stopping.mode = early_stopping.direction early_stopping.maximize early_stopping.greater_is_better
ema.decay = ema.beta ema.momentum ema.alpha
hooks.on_step = hooks.on_batch_end hooks.on_train_batch_end hooks.after_step hooks.on_step_end
hooks.on_evaluate = hooks.on_eval hooks.on_validation_end hooks.on_evaluation hooks.on_epoch_end
hooks.on_end = hooks.on_train_end hooks.on_fit_end hooks.on_finish
scheduler.per = scheduler.interval
scheduler.metric = scheduler.monitor
workers.min = workers.min_workers
workers.max = workers.max_workers
loader = eval.loader
outputs.keep = outputs.columns outputs.select outputs.fields outputs.names outputs.only
outputs.carry = outputs.id outputs.ids outputs.passthrough outputs.metadata outputs.include
outputs.after = outputs.transform outputs.postprocess outputs.post_process outputs.function outputs.fn
outputs.dtype = outputs.precision outputs.type
timeouts.capacity: the new name of timeouts.room = timeouts.room
"""
_LINES = [line.partition(" = ") for line in _TABLE.replace("\n    ", " ").strip().split("\n")]
OTHER_NAMES = {name: answer for answer, _, names in _LINES for name in names.split()}
SAMPLER = OTHER_NAMES["sampler"]
# Inside a target: other names of `target` and `args`; any other key is taken for one of its args.
TARGET = {
    **dict.fromkeys(("class", "cls", "class_path", "type", "path", "function"), "target"),
    **dict.fromkeys(("params", "parameters", "init_args", "config", "options"), "args"),
}


def shards_of(path: str, value: Any, workers: Any) -> str:
    """Return what to write in place of a number of batches to accumulate; "" for any other key or value.

    `workers` is the job's number of workers, a range of them, or None.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_number or not OTHER_NAMES.get(path.lower().replace("-", "_"), "").startswith("shards:"):
        return ""
    most = workers.get("max") if isinstance(workers, Mapping) else getattr(workers, "max", workers)
    count = max(1, most) if isinstance(most, int) else 1
    each = f"{value} for each of {count} workers" if count > 1 else f"{value} for one worker"
    return (
        f"shards: {value * count}, {each}, which runs them one after another and adds up their gradients; "
        "batch_size is that of the whole batch, over all of its shards"
    )


def renamed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job in a run's run.json, with the keys of earlier versions renamed to the current ones."""
    timeouts = job.get("timeouts")
    if isinstance(timeouts, Mapping):
        timeouts = {"capacity" if key == "room" else key: value for key, value in timeouts.items()}
        job = {**job, "timeouts": timeouts}
    return {"device_map" if key == "split" else key: value for key, value in job.items()}


def explain(error: ValidationError, workers: Any = None) -> list[str]:
    """Return a line for each wrong key; for a union of types, the line that says most.

    `workers` is what the job says of its workers, if there is a job.
    """
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _path(detail["loc"])
        if path in _MAPPED and isinstance(detail["input"], Mapping) and detail["type"] != "value_error":
            continue  # a mapping was meant as the key's own: what is wrong inside it says more
        lines.setdefault(path, f"{path}: {_message(path, detail, workers)}" if path else _message(path, detail))
    return list(lines.values())


_MEMBERS = {
    *("Elastic", "ActivationBudget", "ShuffleBlocks", "Target", "Optimizer", "Scheduler"),
    *("int", "bool", "str", "float", "none"),
}
_INNER = ("literal[", "constrained-", "list[", "function-", "nullable")


def _path(location: tuple[int | str, ...]) -> str:
    """Return the dotted key, without pydantic's names for the members of a union."""
    parts = [str(part) for part in location if str(part) not in _MEMBERS and not str(part).startswith(_INNER)]
    return ".".join(parts)


def _message(path: str, detail: Any, workers: Any = None) -> str:
    kind, got = detail["type"], detail["input"]
    if kind == "extra_forbidden" and (says := shards_of(path, got, workers)):
        return f"is no key of a job; here it is {says}"
    if kind == "extra_forbidden":
        return "is no key of a job" + _nearest(path)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "literal_error" and isinstance(got, str) and path not in _ALLOWED:
        meant = did_you_mean(got, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
        return f"{detail['msg'].replace('Input should be', 'must be')}, got {got!r:.80}{meant}"
    allowed = _ALLOWED.get(path)
    says = f"must be {allowed}" if allowed else detail["msg"].replace("Input should be", "must be")
    secret = path.startswith("env.")  # its values may be secrets, and errors end up in logs
    return f"{says}, got a {type(got).__name__}" if secret else f"{says}, got {hide(repr(got)):.80}"


_MAPPED = ("workers", "shuffle", "activation_checkpointing")  # keys that are a number or the like, or a mapping

_ALLOWED = {
    "activation_checkpointing": "true, false, a list of classes like [Block], or {budget: 0.5}",
    "shuffle": "true, false, 'blocks' or {window_blocks: N, block_rows: M}",
    "workers": "a number of workers from 0 up, or {min: N, max: M}",
    "gpus_per_worker": "'auto' or a number from 0 up",
    "checkpoint.every_seconds": "'auto', null or seconds from 0 up",
    "loader.pin_memory": "'auto', true or false",
    "loader.context": "null, 'fork', 'spawn' or 'forkserver'",
    "find_unused_parameters": "'auto', true or false",
    "devices": "null or a list of devices, like [cpu] or ['cuda:0', 'cuda:1']",
    "device_map": "null or 'auto'",
    "on_error": "null or a mapping, like {quarantine: 100, timeout: 30, finite: true}",
    "scheduler.warmup": "a share of all updates from 0 up and below 1, like 0.05, or a number of updates from 1 up",
    "skip": "null or a list of samples' indices, like [812, 1007]",
    "outputs.keep": "null or a list of paths, like [logits, hidden_states.0]",
    "outputs.carry": "null or a list of keys of an item, like [id, path]",
    "eval": "null or a mapping, like {dataset: 'jobs.digits:Digits'}",
    "early_stopping": "null or a mapping, like {metric: eval_loss, patience: 3}",
    "ema": "null or a mapping, like {decay: 0.999, evaluate: true}",
    "hooks": "a mapping, like {on_step: 'my_hooks:log'}",
}


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a key, also those that its validator takes."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    inner = (kind.json_schema_input_type,) if isinstance(kind, BeforeValidator) else get_args(kind)
    for one in inner:
        yield from _models(one)


def _nearest(path: str) -> str:
    """Return a hint on an unknown key: dp_ray's key for it, the one that was meant, or all keys."""
    *parents, key = path.split(".")
    owner: type[BaseModel] = JobKeys
    for parent in parents:
        field = owner.model_fields.get(parent)
        kinds = (field.annotation, *field.metadata) if field else ()
        owner = next((model for one in kinds for model in _models(one)), Target)
    is_of_target = issubclass(owner, Target)
    close = difflib.get_close_matches(key, owner.model_fields, n=1, cutoff=0.8 if is_of_target else 0.5)
    word = key.lower().replace("-", "_")
    answer = OTHER_NAMES.get(path if parents else word)
    if answer is None and is_of_target and not close:
        # Inside a target, any other key is taken for one of its args.
        answer = ".".join([*parents, TARGET[word]]) if word in TARGET else ".".join([*parents, "args", key])
    if answer is not None:
        return f"; here it is {answer}"
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; its keys are {', '.join(owner.model_fields)}"
