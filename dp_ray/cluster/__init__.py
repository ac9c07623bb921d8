"""All of Ray: find or start it, start workers on it, run jobs on them, and decide when to resize and restart them.

Begin at `workers.Workers.run` and `serving.Serving` on the driver, and at `loop.train_loop_per_worker` on a worker;
the actor of `channel.py` is between them. `policies.py` runs in Ray Train's controller, `internals/` holds each
private interface of Ray.
See docs/how-it-works.md and docs/clusters.md.
"""

import logging

# In a notebook without ipywidgets, Ray's import would otherwise print three hints to install them.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
