"""The outputs of a prediction: from each worker's rows to files in the job's order, each row exactly once.

Begin with `parts.py`: `PartWriter` streams a worker's outputs to parts. `merging.py` merges them in a thread,
with the file format, hashes and proofs of `files.py`. `columns.py` converts between tensors and Arrow, and
`read.py` reads the files back. `reopen.py` has shards of a finished prediction run again; `previews.py` keeps some
inputs for the run's page. The docs begin at docs/outputs.md.
"""
