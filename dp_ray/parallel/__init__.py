"""`dp_ray.DataParallel`: nn.DataParallel's one line, on workers of a Ray cluster.

Begin at `module.py`, what the user calls. `exchange.py` runs a module's calls on the workers of this process, and
runs again what a lost worker held. `weights.py` finds what has changed since the last call. A worker's side is
`serving/served.py`, and `serving/wire.py` has the messages.
"""
