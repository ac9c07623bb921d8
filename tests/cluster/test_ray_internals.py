"""Ray behind one wall: nobody else names its private things, and each of them is still what we rely on.

The first part reads our sources: only `cluster/ray_internals/` (and this file, which holds Ray to its contract) may
name what is private in Ray. The second part names each private thing, one test each, so that a new Ray fails here.
"""

import ast
import importlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import dp_ray
from dp_ray.cluster.connect import check_fits, connected, without_gpus, worker_resources
from dp_ray.cluster.internals import core
from dp_ray.cluster.internals.agents import OPTION
from dp_ray.cluster.internals.core import find_users_token
from dp_ray.cluster.internals.quick_start import (
    AGENTS,
    DEFAULT_WORKER,
    SWITCH,
    WITHOUT_SPARE_WORKERS,
)
from dp_ray.cluster.internals.variables import AUTH_MODE, AUTH_TOKEN
from dp_ray.driver.sessions import worker_keys
from dp_ray.errors import ClusterError
from dp_ray.system.process import own_folder, short_folder
from tests.support.cluster import ROOT, end, free_port, wait_for_port
from tests.support.sources import nodes_of
from tests.support.within import within

RAY = Path(ray.__file__).parent
WALL = Path(dp_ray.__file__).parent / "cluster" / "internals"
FOLDERS = ("dp_ray", "tests", "benchmarks", "jobs")
ALLOWED = {
    ("dp_ray/cli/options.py", "RAY_ADDRESS"),  # documented; it stands in the command line's help, which loads no Ray
    ("tests/conftest.py", "RAY_CLIENT_MODE"),  # Ray leaves it behind
    (
        "tests/support/host_forks.py",
        "RAY_RAYLET_PID",
    ),  # whose host a worker enters; it imports nothing of the project
    ("tests/cluster/test_first_start.py", "ray._private"),  # sends a signal in the midst of ray.init
    ("tests/cluster/test_placement.py", "ray.autoscaler._private"),  # checks a cluster file as `ray up` does
    # A process that unpickles knows no class of the one that pickled.
    ("tests/engine/test_ship.py", "ray.cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID"),
    ("tests/support/ray_forks.py", "ray._private.parameter.RayParams"),  # forks the workers of the tests' cluster
    ("benchmarks/channel.py", "RayTrainWorker"),  # as a process's title
    # For commands of others, which need these to run here at all.
    ("benchmarks/peers/gate.py", "RAY_TRAIN_V2_ENABLED"),
    ("benchmarks/peers/images.py", "RAY_OVERRIDE_RESOURCES"),
    ("benchmarks/peers/images.py", "RAY_TMPDIR"),
}

# Ray's private things, as module:attribute, with the parameters that we give where we call or override them.
CONTRACT: dict[str, tuple[str, ...] | None] = {
    "ray:init": None,  # takes _temp_dir, see below
    "ray._private:__path__": None,
    "ray._private.node:Node.start_api_server": ("include_dashboard", "raise_on_failure"),
    "ray._private.node:Node.start_log_monitor": (),
    "ray._private.node:Node.start_monitor": (),
    "ray._private.node:Node.start_raylet": (),
    "ray._private.parameter:RayParams.update_if_absent": None,
    "ray._private.ray_constants:DEBUG_AUTOSCALING_STATUS": None,
    "ray._private.ray_constants:KV_NAMESPACE_JOB": None,
    "ray._private.ray_constants:PROCESS_TYPE_DASHBOARD_AGENT": None,
    "ray._private.ray_constants:PROCESS_TYPE_RUNTIME_ENV_AGENT": None,
    "ray._private.ray_constants:RAY_DISABLE_FAILURE_SIGNAL_HANDLER": None,
    "ray._private.ray_constants:RAY_ENABLE_UV_RUN_RUNTIME_ENV": None,
    "ray._private.ray_constants:RAY_RUNTIME_ENV_IGNORE_GITIGNORE": None,
    "ray._private.runtime_env.packaging:_dir_travel": ("path", "excludes", "handler", "include_gitignore"),
    "ray._private.runtime_env.packaging:_get_excludes": ("path", "excludes"),
    "ray._private.services:_build_python_executable_command_memory_profileable": ("component", "session_dir"),
    "ray._private.utils:get_dashboard_dependency_error": (),
    "ray._private.state:available_resources_per_node": (),
    "ray._private.state:state.get_draining_nodes": (),
    "ray._private.state:state.get_cluster_config": (),
    "ray._private.state:state.get_max_resources_from_cluster_config": (),
    "ray._private.utils:get_entrypoint_name": (),
    "ray._private.utils:set_sigterm_handler": ("sigterm_handler",),
    "ray._private.worker:global_worker": None,
    "ray._private.worker:_worker_logs_enabled": None,
    "ray._raylet:AuthenticationTokenLoader.instance": (),
    "ray._raylet:AuthenticationTokenLoader.has_token": None,
    "ray._raylet:AuthenticationTokenLoader.reset_cache": None,
    "ray._raylet:Config.initialize": None,
    "ray._raylet:GcsClient": None,
    "ray._raylet:InnerGcsClient.drain_node": ("node_id", "reason", "reason_message", "deadline_timestamp_ms"),
    "ray._raylet:InnerGcsClient.get_cluster_status": ("timeout_s",),
    "ray._raylet:InnerGcsClient.internal_kv_del": ("key", "del_by_prefix", "namespace"),
    "ray._raylet:InnerGcsClient.internal_kv_get": ("key", "namespace"),
    "ray._raylet:InnerGcsClient.internal_kv_put": ("key", "value", "overwrite", "namespace"),
    "ray._raylet:RAY_NODE_GROUP_KEY": None,
    "ray._raylet:RAY_NODE_ID_KEY": None,
    "ray.air._internal.device_manager:get_torch_device_manager_by_context": (),
    "ray.core.generated.autoscaler_pb2:DrainNodeReason.Value": None,
    "ray.core.generated.autoscaler_pb2:DRAIN_NODE_REASON_PREEMPTION": None,
    "ray.core.generated.autoscaler_pb2:GetClusterStatusReply.FromString": None,
    "ray.core.generated.gcs_service_pb2:GetClusterIdRequest": None,
    "ray.core.generated.gcs_service_pb2_grpc:NodeInfoGcsServiceStub": ("channel",),
    "ray.dashboard.modules.job.common:JobInfoStorageClient.JOB_DATA_KEY": None,
    "ray.job_submission:JobSubmissionClient._do_request": ("method", "endpoint", "data"),
    "ray.job_submission:JobSubmissionClient._package_exists": ("package_uri",),
    "ray.train.torch:TorchTrainer._create_default_callbacks": (),
    "ray.train.torch:TorchTrainer._initialize_and_run_controller": ("controller_init_kwargs",),
    "ray.train:ScalingConfig._resources_per_worker_not_none": None,
    "ray.train.v2._internal.callbacks:__path__": None,
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback": None,
    "ray.train.v2._internal.constants:get_env_vars_to_propagate": (),
    "ray.train.v2._internal.exceptions:WorkerGroupStartupFailedError": None,
    "ray.train.v2._internal.exceptions:WorkerGroupStartupTimeoutError": None,
    "ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError": ("message", "failure"),
    "ray.train.v2._internal.execution.callback:WorkerGroupCallback.before_init_train_context": ("workers",),
    "ray.train.v2._internal.execution.callback:WorkerGroupCallback.before_worker_group_start": (
        "worker_group_context",
    ),
    "ray.train.v2._internal.execution.worker_group:WorkerGroupContext": (
        "num_workers",
        "resources_per_worker",
        "placement_strategy",
    ),
    "ray.train.v2._internal.execution.context:get_train_context": (),
    "ray.train.v2._internal.execution.context:TrainContext.get_world_rank": (),
    "ray.train.v2._internal.execution.context:TrainContext.get_world_size": (),
    "ray.train.v2._internal.execution.controller:TrainController": (
        "train_fn_ref",
        "train_run_context",
        "scaling_policy",
        "failure_policy",
        "callbacks",
        "validation_config",
    ),
    "ray.train.v2._internal.execution.controller:TrainController.get_result": (),
    "ray.train.v2._internal.execution.controller:TrainController.run": (),
    "ray.train.v2._internal.execution.controller:TrainController.worker_group_cls": None,
    "ray.train.v2._internal.execution.controller:TrainController._execute_failure_decision": (
        "failure_decision",
        "training_failed_error",
        "invoke_failure_decision_callbacks",
    ),
    "ray.train.v2._internal.execution.controller:TrainController._execute_resize_decision": ("decision",),
    "ray.train.v2._internal.execution.controller:TrainController._get_run_attempt_id": (),
    "ray.train.v2._internal.execution.controller:TrainController._replace_bad_workers": ("poll_status",),
    "ray.train.v2._internal.execution.controller:TrainController._start_worker_group": (
        "num_workers",
        "resources_per_worker",
    ),
    "ray.train.v2._internal.execution.controller:TrainController.get_state": (),
    "ray.train.v2._internal.execution.controller.controller:TrainControllerLoopIterationResult": (
        "run_attempt_id",
        "previous_state",
        "next_state",
        "training_failed_error",
    ),
    "ray.train.v2._internal.execution.controller.state:ReschedulingState": None,
    "ray.train.v2._internal.execution.controller.state:RunningState": (),
    "ray.train.v2._internal.execution.controller.state:SchedulingState": ("scaling_decision",),
    "ray.train.v2._internal.execution.failure_handling:FailureDecision.NOOP": None,
    "ray.train.v2._internal.execution.failure_handling:FailureDecision.RAISE": None,
    "ray.train.v2._internal.execution.failure_handling:FailureDecision.RETRY": None,
    "ray.train.v2._internal.execution.failure_handling:FailurePolicy": ("failure_config",),
    "ray.train.v2._internal.execution.failure_handling:FailurePolicy.make_decision": ("training_failed_error",),
    "ray.train.v2._internal.execution.scaling_policy:NoopDecision": (),
    "ray.train.v2._internal.execution.scaling_policy:ResizeDecision": ("num_workers", "resources_per_worker"),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy": ("scaling_config",),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy._cancel_resource_request": (),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy._get_num_workers_for_resource_request": (),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy._maybe_send_resource_request": (),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.after_controller_start": ("train_run_context",),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.after_controller_state_update": (
        "previous_state",
        "current_state",
    ),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.make_decision_for_non_running_worker_group": (),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.make_decision_for_running_worker_group": (
        "worker_group_state",
        "worker_group_status",
    ),
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.on_controller_start_worker_group": (
        "scaling_config",
        "num_workers",
    ),
    "ray.train.v2._internal.execution.worker_group:Worker.execute_async": ("fn", "fn_args"),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup": (
        "train_run_context",
        "worker_group_context",
        "callbacks",
    ),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._clear_state": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._create_workers": (
        "num_workers",
        "placement_group",
        "resources_per_worker",
        "starting_world_rank",
        "world_size",
        "replica_group_size",
    ),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._init_train_context": ("workers", "sync_actor"),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._get_worker_runtime_env": ("custom_runtime_env",),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._start": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._worker_cls": None,
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.get_latest_poll_status": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.get_replica_groups": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.get_worker_group_context": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.get_worker_group_state": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.get_workers": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.has_started": (),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.poll_status": ("timeout",),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.replace_replica_group": ("replica_group_index",),
    "ray.train.v2._internal.execution.worker_group:WorkerGroupPollStatus.all_replica_group_indices": None,
    "ray.train.v2._internal.execution.worker_group:WorkerGroupPollStatus.failing_replica_group_indices": None,
    "ray.train.v2._internal.execution.worker_group:WorkerGroupPollStatus.errors": None,
    "ray.train.v2._internal.execution.worker_group:WorkerGroupPollStatus.finished": None,
    "ray.train.v2._internal.execution.worker_group:WorkerGroupState": (
        "start_time",
        "workers",
        "placement_group_handle",
        "sync_actor",
    ),
    "ray.train.v2._internal.execution.worker_group:WorkerGroupState.shutdown": (),
    "ray.train.v2._internal.execution.worker_group:state._shutdown_sync_actor": ("sync_actor",),
    "ray.train.v2._internal.execution.worker_group:worker_group.SynchronizationActor": None,
    "ray.train.v2._internal.execution.worker_group:worker_group.bundle_to_remote_args": ("bundle",),
    "ray.train.v2._internal.execution.worker_group.execution_group:ReplicaGroup": (
        "workers",
        "resources_per_worker",
        "callbacks",
    ),
    "ray.train.v2._internal.execution.worker_group.execution_group:ReplicaGroup.shutdown": (),
    "ray.train.v2._internal.execution.worker_group.execution_group:ReplicaGroup.start_training": (
        "worker_group_context",
    ),
    "ray.train.v2._internal.execution.worker_group.worker:ActorMetadata": ("node_id",),
    "ray.train.v2._internal.execution.worker_group.worker:RayTrainWorker": None,
    "ray.train.v2._internal.execution.worker_group.worker:Worker": (
        "actor",
        "metadata",
        "placement_group_bundle_index",
    ),
    "ray.train.v2._internal.util:bundle_to_remote_args": ("bundle",),
    "ray.train.v2.api.data_parallel_trainer:DatasetsCallback": None,
}
# What our code must not only have but find used there: a text of the source of the thing.
USED: dict[str, tuple[str, str]] = {
    "the dashboard's log files may be links": (
        "ray.dashboard.modules.log.log_agent:LogAgentV1Grpc._resolve_filename",
        "os.path.abspath(filepath)",
    ),
    "a job prints to a file in the log folder": (
        "ray.dashboard.modules.job.job_supervisor:JobSupervisor._exec_entrypoint",
        "stdout=logs_file",
    ),
    "the dashboard sends a log file by its name": (
        "ray.dashboard.modules.state.state_head:StateHead.get_logs",
        'req.query.get("filename", None)',
    ),
    "the job client has what a request needs": (
        "ray.dashboard.modules.dashboard_sdk:SubmissionClient._do_request",
        "cookies=self._cookies",
    ),
    "ray.init takes a folder": ("ray._private.worker:init", '"_temp_dir"'),
    "ray.init asks for the command line": ("ray._private.worker:init", "ray._private.utils.get_entrypoint_name()"),
    "a raylet's agent": (
        "ray._private.services:start_raylet",
        "_memory_profileable(\n            ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, session_dir\n",
    ),
    "a raylet's agent of environments": (
        "ray._private.services:start_raylet",
        "_memory_profileable(\n            ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT, session_dir\n",
    ),
    "the agent's address": ("ray._private.services:start_raylet", 'f"--node-ip-address={node_ip_address}",'),
    "the agent's port": ("ray._private.services:start_raylet", f'f"{OPTION}{{runtime_env_agent_port}}",'),
    "the agent's packages": (
        "ray._private.services:start_raylet",
        "if ray._private.utils.get_dashboard_dependency_error() is not None:",
    ),
    "the agent's node": ("ray._private.services:start_raylet", 'f"--node-id={node_id}",'),
    "the agent's folder": ("ray._private.services:start_raylet", 'f"--session-dir={session_dir}",'),
    "a node's program for workers": ("ray._private.node:Node.start_raylet", "self._ray_params.worker_path,"),
    "a raylet's program for workers": ("ray._private.services:start_raylet", "        + [\n            worker_path,"),
    "ray.init takes settings": ("ray._private.worker:init", '"_system_config"'),
    "workers' logs ask for their switch": ("ray._private.worker:print_worker_logs", "if not _worker_logs_enabled"),
    "the controller makes its worker group": (
        "ray.train.v2._internal.execution.controller:TrainController",
        "self.worker_group_cls.create(",
    ),
    "the worker group's state": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup",
        "self._worker_group_state: ",
    ),
    "the callback for datasets": (
        "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._create_default_callbacks",
        "datasets_callback = DatasetsCallback(",
    ),
    "the options of workers' actors": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._create_workers",
        "**bundle_to_remote_args(resources_per_worker),",
    ),
    "replica groups, always of one worker": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._start_impl",
        "self._replica_groups = [\n",
    ),
    "a worker group's workers have replica groups by their ranks": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._start_impl",
        "self._worker_rank_to_replica_group_rank = {\n",
    ),
    "what a replica group calls": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._start_impl",
        "self._replica_group_callbacks,\n",
    ),
    "a worker in the place of another has its rank": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._replace_replica_group_impl",
        "starting_world_rank=replica_group_index,",
    ),
    "a running worker group is resized by a decision": (
        "ray.train.v2._internal.execution.controller:TrainController._step",
        "scaling_decision=controller_state.scaling_decision\n",
    ),
    "failed workers are replaced alone": (
        "ray.train.v2._internal.execution.controller:TrainController._execute_resize_decision",
        "self._manages_replica_groups\n            and bool(failing_rgs)\n            and failing_rgs != all_rgs",
    ),
    "a replaced worker's barrier": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._replace_replica_group_impl",
        "ray.get(sync_actor.reset.remote())",
    ),
    "the start of a worker in the place of another": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._replace_replica_group_impl",
        "self._init_train_context(new_workers, sync_actor)",
    ),
    "a worker group's barrier": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._start_impl",
        "sync_actor = SynchronizationActor.options(",
    ),
    "the end of a worker group's barrier": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroupState.shutdown",
        "_shutdown_sync_actor(self.sync_actor)",
    ),
    "workers' environment": (
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._create_workers",
        "self._get_worker_runtime_env(",
    ),
    "the failure of a health check": (
        "ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError",
        "self.health_check_failure = failure",
    ),
    "a scaling policy's end": (
        "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy.before_controller_shutdown",
        "self._cancel_resource_request()",
    ),
    "the client of the head": ("ray._private.worker:connect", "worker.gcs_client = node.get_gcs_client()"),
    "the monitor's cluster file": (
        "ray._private.services:start_monitor",
        'command.append("--autoscaling-config=" + str(autoscaling_config))',
    ),
    "the monitor's folder": ("ray._private.services:start_monitor", 'f"--logs-dir={logs_dir}",'),
    "the report of the first autoscaler": (
        "ray.autoscaler._private.monitor:Monitor._run",
        'status["autoscaler_report"] = asdict(autoscaler_summary)',
    ),
    "the types in it": ("ray.autoscaler._private.autoscaler:StandardAutoscaler.summary", "node_type_mapping="),
    "a type of a node that no autoscaler added": (
        "ray.autoscaler._private.util:format_readonly_node_type",
        '"node_{}".format(node_id)',
    ),
    "a raylet knows its node": ("ray._private.services:start_raylet", 'f"--node_id={node_id}"'),
    "ray start leaves the address in its folder once it is up": (
        "ray._private.utils:write_ray_address",
        "get_ray_address_file(temp_dir)",
    ),
    "a raylet knows its cluster": ("ray._private.services:start_raylet", '"--gcs-address='),
    "packages by HTTP": ("ray.job_submission:JobSubmissionClient._package_exists", "self._do_request"),
    "packages' names": ("ray._private.runtime_env.packaging:RAY_PKG_PREFIX", "_ray_pkg_"),
    "the stub of the head's service": (
        "ray.core.generated.gcs_service_pb2_grpc:NodeInfoGcsServiceStub",
        "self.GetClusterId = ",
    ),
}
# Ray's own constants of its environment variables, or the binary in which they are read.
VARIABLES = {
    "RAY_ADDRESS": "ray._private.ray_constants:RAY_ADDRESS_ENVIRONMENT_VARIABLE",
    "RAY_API_SERVER_ADDRESS": "ray._private.ray_constants:RAY_API_SERVER_ADDRESS_ENVIRONMENT_VARIABLE",
    "RAY_AUTH_MODE": "_raylet.so",
    "RAY_AUTH_TOKEN": "_raylet.so",
    "RAY_AUTH_TOKEN_PATH": "_raylet.so",
    "RAY_CHDIR_TO_TRIAL_DIR": "ray.train.constants:RAY_CHDIR_TO_TRIAL_DIR",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "_private/ray_constants.py",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": "ray._private.runtime_env.constants:RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_STOP_WAIT_TIME_S": "dashboard/modules/job/job_supervisor.py",
    "RAY_RAYLET_PID": "core/src/ray/raylet/raylet",
    "RAY_TMPDIR": "_common/utils.py",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "ray.train.v2._internal.constants:ENABLE_PREEMPTION_WATCHER_ENV_VAR",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "ray.train.v2._internal.constants:ENABLE_PRINT_PATCH_ENV_VAR",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "ray.train.v2._internal.constants:HEALTH_CHECK_INTERVAL_S_ENV_VAR",
    "RAY_TRAIN_METRICS_ENABLED": "ray.train.v2._internal.constants:METRICS_ENABLED_ENV_VAR",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": (
        "ray.train.v2._internal.constants:WORKER_GROUP_START_TIMEOUT_S_ENV_VAR"
    ),
    "RAY_USE_TLS": "_raylet.so",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "ray._common.constants:RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR",
}
SINCE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": (2, 57)}  # variables that older versions of the range do not have
BINARIES = ("_raylet.so", "core/src/ray/raylet/raylet", "core/src/ray/gcs/gcs_server")


def is_private(module: str) -> bool:
    """Whether a dotted name of Ray is private."""
    parts = module.split(".")
    hidden = any(part.startswith("_") for part in parts[1:])
    return parts[0] == "ray" and (hidden or parts[1:3] in (["train", "v2"], ["core", "generated"]))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression that is one."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def nodes_of_the_wall() -> Iterator[ast.AST]:
    """All nodes of the wall's modules."""
    for path in sorted(WALL.glob("*.py")):
        yield from nodes_of(path)


def names_of_the_wall() -> tuple[set[str], set[str]]:
    """The classes and functions of Ray that the wall imports, and the texts of Ray's messages that it knows."""
    classes, texts = {"RayTrainWorker"}, set()
    for node in nodes_of_the_wall():
        if isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
            classes |= {alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "_DEATHS":
            assert isinstance(node.value, ast.Dict)
            texts |= {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "_EXIT_DETAIL":
            texts.add(str(ast.literal_eval(node.value)))
    return classes, texts


CLASSES, TEXTS = names_of_the_wall()
MEMBERS = {name.split(".")[-1] for name in CONTRACT if re.search(r":\w+\._\w+$", name)} - {"_start"}
IN_STRINGS = re.compile(
    r"(?<![A-Z_])RAY_[A-Z]\w*|\bray(?:\.\w+)*\._\w+|\bray\.(?:train\.v2|core\.generated)\b"
    rf"|\b(?:{'|'.join(sorted(CLASSES))})\b|{'|'.join(sorted(map(re.escape, TEXTS)))}"
)


def private_names(source: str) -> Iterator[str]:
    """What a source names of Ray's private things, in code and in strings; docstrings may explain."""
    tree = ast.parse(source)
    explaining = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if is_private(name) or node.attr in MEMBERS:
                yield name
        elif isinstance(node, ast.FunctionDef) and node.name in MEMBERS:
            yield node.name
        elif isinstance(node, ast.Call):
            given = [keyword.arg or "" for keyword in node.keywords]
            is_rays = dotted(node.func).startswith("ray.")
            yield from (one for one in given if one.startswith("RAY_") or (is_rays and one.startswith("_")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explaining:
            yield from IN_STRINGS.findall(node.value)


def sources() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.parent != WALL and path != Path(__file__))


def test_private_ray_stands_behind_the_wall() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name) for path in sources() for name in private_names(path.read_text())
    }
    assert named == ALLOWED, f"what these files name belongs into {WALL.relative_to(ROOT)}: {named - ALLOWED}"


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.worker",
        "def f():\n    from ray._raylet import GcsClient",
        "from ray import _raylet",
        "from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError",
        "from ray.train.v2.api.exceptions import WorkerGroupError",
        "from ray.core.generated import gcs_service_pb2",
        "import ray\nray._private.worker._worker_logs_enabled = False",
        "ray.init('local', _temp_dir='/tmp')",
        "client._do_request('PUT', '/')",
        "class A(B):\n    def _create_default_callbacks(self): pass",
        "os.environ.get('RAY_ADDRESS')",
        "command(RAY_ADDRESS='x')",
        "f'{name}: set RAY_TRAIN_METRICS_ENABLED'",
        "code = 'import ray; ray._raylet.GcsClient()'",
        "'RayTrainWorker' in line",
        "name == 'TrainController'",
        "'temporarily unavailable' in str(error)",
    ],
)
def test_what_the_wall_does_not_let_through(source: str) -> None:
    assert list(private_names(source))


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    [
        "import ray\nray.nodes()",
        "from ray.train import ScalingConfig",
        "from ray.job_submission import JobSubmissionClient",
        "'''Sets RAY_ADDRESS, for the TrainController.'''",
        "os.environ['DP_RAY_ROWS']",
        "self._start()",
    ],
)
def test_what_the_wall_lets_through(source: str) -> None:
    assert not list(private_names(source))


# Ray is what we rely on


def found_at(place: str) -> Any:
    """The thing at module:attribute."""
    module, _, attributes = place.partition(":")
    found = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def parameters_of(thing: Any) -> set[str]:
    """The names of a callable's parameters; of a compiled one, as its documentation begins."""
    try:
        return set(inspect.signature(thing).parameters)
    except ValueError:
        head = (thing.__doc__ or "").partition("(")[2].partition(") ")[0].partition(")\n")[0]
        return {part.split(":")[0].split("=")[0].split()[-1] for part in head.split(",") if part.split()}


@pytest.mark.full
@pytest.mark.parametrize("place", CONTRACT)
def test_ray_has(place: str) -> None:
    thing, wanted = found_at(place), CONTRACT[place]
    if wanted is not None:
        missing = set(wanted) - parameters_of(thing)
        assert not missing, f"{place} takes no {missing}, but {parameters_of(thing)}"


@pytest.mark.full
@pytest.mark.parametrize("what", USED)
def test_ray_uses(what: str) -> None:
    place, text = USED[what]
    thing = found_at(place)
    is_used = text in (thing if isinstance(thing, str) else inspect.getsource(thing))
    assert is_used, f"{place} does not say {text!r} any more"


@pytest.mark.full
@pytest.mark.parametrize("variable", VARIABLES)
def test_ray_reads(variable: str) -> None:
    where = VARIABLES[variable]
    if tuple(map(int, ray.__version__.split(".")[:2])) < SINCE.get(variable, ()):
        assert not any(variable in path.read_text() for path in (RAY / "train").rglob("*.py"))
    elif ":" in where:
        assert found_at(where) == variable
    else:
        is_read = variable.encode() in (RAY / where).read_bytes()
        assert is_read, f"ray/{where} does not name {variable}"


@pytest.mark.full
@pytest.mark.parametrize("text", sorted(TEXTS))
def test_ray_says(text: str) -> None:
    fixed = text.rstrip("0123456789").encode()  # a number is put behind when it is said
    is_said = any(fixed in (RAY / name).read_bytes() for name in BINARIES)
    assert is_said, f"nothing of Ray says {text!r}"


@pytest.mark.full
def test_ray_has_a_program_for_workers_and_settings_for_them() -> None:
    assert (RAY / "_private" / DEFAULT_WORKER).is_file()
    for setting in WITHOUT_SPARE_WORKERS:
        assert setting.encode() in (RAY / "core/src/ray/raylet/raylet").read_bytes()


@pytest.mark.full
def test_a_token_is_shown_to_the_cluster_that_wants_it_and_to_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that still knows a token demands it from the workers of a cluster without, and loses them."""
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.setenv(AUTH_TOKEN, "0123456789abcdef" * 4)
    core.read_variables_anew()  # an earlier test may have had others
    loader = ray._raylet.AuthenticationTokenLoader.instance()
    assert not loader.has_token()
    with core.environment_kept():
        assert find_users_token()
        assert loader.has_token()
    assert not loader.has_token()
    assert not loader.get_token_for_http_header()


@pytest.mark.full
@pytest.mark.parametrize("home", ["folder", "file"])
def test_a_ray_that_is_started_where_no_token_can_be_kept_gets_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """Ray alone makes one in ~/.ray, and fails if HOME is a file, or cannot be written."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv(AUTH_MODE, "token")
    monkeypatch.delenv(AUTH_TOKEN, raising=False)
    core.read_variables_anew()
    setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
    try:
        if home == "file":
            with pytest.raises(NotADirectoryError):
                setup.ensure_token_if_auth_enabled()
        core.give_token()
        assert (AUTH_TOKEN in os.environ) == (home == "file"), "what is in ~/.ray stays what Ray makes of it"
        setup.ensure_token_if_auth_enabled()
        assert ray._raylet.AuthenticationTokenLoader.instance().has_token()
        given = os.environ.get(AUTH_TOKEN)
        core.give_token()
        assert os.environ.get(AUTH_TOKEN) == given
    finally:
        os.environ.pop(AUTH_TOKEN, None)
        monkeypatch.undo()
        core.read_variables_anew()


@pytest.mark.full
def test_the_contract_names_all_that_the_wall_uses() -> None:
    nodes = list(nodes_of_the_wall())
    told = {place.replace(":", ".") for place in CONTRACT}
    imported = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and is_private(node.module or "")
        for alias in node.names
    }
    accessed = {dotted(node) for node in nodes if isinstance(node, ast.Attribute) and is_private(dotted(node))}
    for used in sorted(imported | accessed):
        assert any(one.startswith(used) or used.startswith(one) for one in told), f"the contract lacks {used}"
    source = "".join(path.read_text() for path in WALL.glob("*.py"))
    assert set(re.findall(r'"(RAY_[A-Z]\w*[A-Z])"', source)) == set(VARIABLES)


@pytest.mark.full
def test_the_agents_stand_in_writes_the_ports_that_the_raylet_waits_for(tmp_path: Path) -> None:
    """As `ray._raylet.persist_port` writes them; and it lives as long as its raylet, which is this process here."""
    ports = ray._raylet.METRICS_AGENT_PORT_NAME, ray._raylet.METRICS_EXPORT_PORT_NAME
    names, node = {*ports, ray._raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME}, "1f" * 28
    files = {tmp_path / f"{name}_{node}" for name in names}
    line = [*AGENTS, "never", "agent.py", f"--node-id={node}", f"--session-dir={tmp_path}", "--head"]
    with subprocess.Popen(line, env={"RAY_RAYLET_PID": str(os.getpid())}) as running:
        until = time.monotonic() + 30
        while not all(path.exists() for path in files) and time.monotonic() < until:
            time.sleep(0.05)
        assert running.poll() is None
        running.kill()
    written = {path: path.read_text() for path in files}
    for name in names:
        ray._raylet.persist_port(str(tmp_path), node, name, -1)
    assert written == {path: path.read_text() for path in tmp_path.iterdir()}
    assert subprocess.run(line, env={"RAY_RAYLET_PID": "1"}, timeout=30).returncode == 0, "its raylet has ended"


@pytest.mark.full
@pytest.mark.slow
def test_the_agent_of_environments_comes_when_it_is_asked_at_the_port_that_the_raylet_knows(
    tmp_path: Path, many_files: list[int]
) -> None:
    """Its raylet may have passed on many open files."""
    agent, node = tmp_path / "agent.py", "2e" * 28
    agent.write_text(
        "import os, socket, sys\n"
        f"port = next(int(one.removeprefix('{OPTION}')) for one in sys.argv if one.startswith('{OPTION}'))\n"
        "with socket.socket() as listener:\n"
        "    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"  # as Ray's own
        "    listener.bind(('127.0.0.1', port)); listener.listen()\n"
        "    listener.accept()[0].sendall(str([os.getpid(), *sys.argv[1:]]).encode())\n"
    )
    given = [f"--node-id={node}", "--node-ip-address=127.0.0.1", f"--session-dir={tmp_path}"]
    line = [*AGENTS, "late", sys.executable, str(agent), *given, f"{OPTION}0", "--rest"]
    written = tmp_path / f"{ray._raylet.RUNTIME_ENV_AGENT_PORT_NAME}_{node}"
    with subprocess.Popen(line, env={"RAY_RAYLET_PID": str(os.getpid())}, pass_fds=many_files) as running:
        assert within(30, written.exists)
        port = int(written.read_text())
        time.sleep(0.2)
        assert Path(f"/proc/{running.pid}/cmdline").read_text().split("\0")[3] == AGENTS[-1], "nobody has asked yet"
        assert not answer_at(port), "the first connection is closed"
        answers = (answer_at(port) for _ in iter(lambda: time.sleep(0.05), 0))
        answer = next(one for one in answers if one or running.poll() is not None)
        assert running.wait(30) == 0
    assert ast.literal_eval(answer.decode()) == [running.pid, *given, f"{OPTION}{port}", "--rest"]
    assert subprocess.run(line, env={"RAY_RAYLET_PID": "1"}, timeout=30).returncode == 0, "its raylet has ended"


def answer_at(port: int) -> bytes:
    """All that comes from a port; nothing if nobody listens there."""
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            return connection.makefile("rb").read()
    except OSError:
        return b""


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_that_dp_ray_starts_still_runs_a_task_in_an_environment_of_its_own() -> None:
    code = """
import os, sys, psutil, ray
from dp_ray.cluster.internals.quick_start import start_local
start_local(1, sys.argv[1], False, None)

def agents():
    lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if "late" in line and sys.argv[1] in str(line)]

value = ray.remote(lambda: os.environ.get("MARK"))
print(ray.get(value.remote()), len(agents()))
print(ray.get(value.options(runtime_env={"env_vars": {"MARK": "7"}}).remote(), timeout=100), len(agents()))
"""
    with own_folder(short_folder()) as folder:
        line = [sys.executable, "-c", code, folder]
        environment = {**os.environ, SWITCH: "1"}
        done = subprocess.run(line, capture_output=True, text=True, timeout=150, env=environment)
    assert done.stdout.splitlines() == ["None 1", "7 0"], done.stderr


@pytest.fixture
def autoscaling() -> Iterator[str]:
    """A head of four CPUs, and an autoscaler that adds at most two nodes of two GPUs, which nobody built.

    `ray.cluster_utils.AutoscalingCluster` would do the same, but it ends all other Rays of the machine.
    """
    port, head = free_port(), "f" * 51 + "00000"
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "launch_multiple": True,
        "head_node_id": head,
        "gcs_address": f"127.0.0.1:{port}",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    types: dict[str, Any] = {
        "ray.head.default": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
        "gpus": {"resources": {"CPU": 4, "GPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    lists: tuple[str, ...] = (
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
    )
    lists += ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    file: dict[str, Any] = {name: [] for name in lists}
    file |= {"cluster_name": "fake", "max_workers": 4, "idle_timeout_minutes": 9, "upscaling_speed": 1.0, "auth": {}}
    file |= {"provider": provider, "available_node_types": types, "head_node_type": "ray.head.default"}
    file |= {"docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False}
    environment = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        # As `ray up` sets them on the head.
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": head,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head,
    }
    with tempfile.TemporaryDirectory(prefix="auto-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder, "cluster.json").write_text(json.dumps(file))
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        line += ["--num-cpus=4", "--num-gpus=0", f"--autoscaling-config={folder}/cluster.json"]
        line += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
        line += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
        line += ["--min-worker-port=0", "--max-worker-port=0"]
        environment["RAY_TMPDIR"] = folder
        with (
            open(f"{folder}/log", "wb") as log,
            subprocess.Popen(line, stdout=log, stderr=log, cwd="/", env=environment) as process,
        ):
            try:
                wait_for_port(port, process)
                yield f"127.0.0.1:{port}"
            finally:
                end(process)


@pytest.mark.full
@pytest.mark.ray
def test_gpu_nodes_that_an_autoscaler_may_add_are_the_clusters(
    autoscaling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder that is quickly sent
    two, five = (worker_keys({"workers": workers}) for workers in (2, 5))
    each = {"CPU": 1, "GPU": 1}
    with connected(two, autoscaling, False):
        assert within(30, lambda: worker_resources(two) == each), "the autoscaler reports within seconds"
        assert without_gpus(two, each) is None
        assert re.fullmatch(
            "2 workers need .* room for 0 workers.*; waiting for the autoscaler", str(check_fits(two, each))
        )
        with pytest.raises(ClusterError, match=r"5 GPU .*all nodes that its autoscaler may add it has room for 4;"):
            check_fits(five, each)
        monkeypatch.setattr(core, "node_types", lambda: None)  # as with KubeRay, whose file is elsewhere
        assert worker_resources(two) == {"CPU": 1}
        assert "set gpus_per_worker: 1 to have it add GPU nodes" in str(without_gpus(two, {"CPU": 1}))
        assert re.fullmatch("5 workers need .*; waiting for the autoscaler", str(check_fits(five, each)))
