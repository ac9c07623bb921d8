"""Names environment variables of Ray; it does not import Ray, so that they are known before.

Public: ADDRESS to USE_TLS are documented; for the rest there is no argument of ray.init or of ray.train.RunConfig.
"""

VARIABLES = "RAY_"  # the prefix of all names
TRAIN_VARIABLES = "RAY_TRAIN_"
ADDRESS = "RAY_ADDRESS"  # where a driver finds its cluster; Ray sets it in its jobs
AUTH_MODE = "RAY_AUTH_MODE"  # "token": show one
AUTH_TOKEN = "RAY_AUTH_TOKEN"
AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # a file with it
API_SERVER_ADDRESS = "RAY_API_SERVER_ADDRESS"  # where `ray job` finds the dashboard
TMPDIR = "RAY_TMPDIR"  # where a Ray that is started here keeps its sessions
USE_TLS = "RAY_USE_TLS"  # if set, an address cannot be probed in plain text
JOB_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # how long Ray waits for a job that it has asked to stop
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in each process of a submitted job
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"  # whether a driver under `uv run` starts its workers by `uv run` too
WARN_BLOCKING = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"  # the controller waits for our channel in its event loop

# Set in the driver's environment, from where Ray Train copies them to its own processes.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # Ray's 2 s delay each start, end and failure
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # the patch would print each line twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a user's relative paths keep their meaning
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # saves a process; our scaling checks the nodes itself
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # not Ray's 60: workers start only where room was just free
}
