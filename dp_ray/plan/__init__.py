"""The pure arithmetic of a run, without tensors and files: what runs, in which order, on which worker.

Begin at `split.Split`, which cuts an epoch into global batches and shards. `order.py` has the order of the samples,
`tree.py` the order of sums, `costs.py` the plan that `dp-ray plan` shows, `history.py` the rows of a history. See
docs/how-it-works.md.
"""
