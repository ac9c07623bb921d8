"""What there is before Ray is imported: its version, its variables, and the quick start of a Ray of dp_ray's own.

Begin at `quick_start.start_local`. A fork server (`fork_server.py`) has imported torch, and `forked_worker.py` has it
fork each worker. `agents.py` stands in for processes that nobody asks. `ray_version.py` says which Ray will do.
See docs/contributing/ray.md.
"""
