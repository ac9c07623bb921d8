"""Load a worker's shards: begin at `loading`, which reads from `make_loader` in `loader`.

`items` finds inputs and target in what a dataset gives; `bad_samples` leaves samples out, `packing` fills windows.
"""
