"""Run a job with torch on one worker: load shards, run the model, sum gradients, update, evaluate, predict.

Nothing here knows of Ray: the same code runs in one process and in processes of torch.distributed.

Begin reading at `trainer.py`: a `TrainingStep` trains on a global batch. A prediction begins at `prediction.predict`.
docs/contributing/how-it-runs.md tells the story of a step.
"""
