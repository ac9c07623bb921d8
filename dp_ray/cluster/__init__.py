"""All of Ray: find or start it, start workers on it, run jobs on them, and decide when to resize and restart them.

Begin at `kinds.Workers`, which runs jobs and serves modules: `own.OwnWorkers` is its usual kind, and starts what
`workers.StartedWorkers` follows; `serving.RayServing` is the driver's side of a module's calls. On a worker, begin at
`loop.train_loop_per_worker`; the actor of `channel.py` is between them. `policies.py` runs in Ray Train's controller,
`internals/` holds each private interface of Ray.
See docs/contributing/how-it-runs.md and docs/places/.
"""

import logging

# In a notebook without ipywidgets, Ray's import would otherwise print three hints to install them.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
