"""Run a shard through the model: begin at `Replica.run` in `replica`.

`model` builds and calls it, `step` makes loss and metrics of its outputs. `state` holds what forwards write,
`buffers` the copies of it; `carried` looks for state in attributes, `call_state` is that of a parallel module.
"""
