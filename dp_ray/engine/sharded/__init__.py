"""Models of which each worker holds a part, by torch's FSDP2 (`strategy: fsdp`).

Begin reading at `../placement.py`: `place` builds a job's model, and the workers run it in rounds. `build.py`
shards it, `state.Sharded` is the model in a training, and `reduce.py` sums its gradients. The page for users is
docs/sharding.md.
"""
