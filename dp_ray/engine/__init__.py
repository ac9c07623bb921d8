"""Run a job with torch on one worker: load shards, run the model, sum gradients, update, evaluate, predict.

Nothing here knows of Ray: the same code runs in one process and in processes of torch.distributed.

Begin reading at `trainer.py`: a `TrainingStep` trains on a global batch. A prediction begins at `prediction.predict`.
Four rooms serve both: `loads` reads a worker's shards, `forward` runs them, `sums` adds up their gradients, and
`sharded` does so where each worker holds a part of the model. `update` and `optimizer` make the step.
docs/contributing/how-it-runs.md tells the story of a step.
"""
