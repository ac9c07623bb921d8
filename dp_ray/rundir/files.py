"""The names of the files in a run directory."""

RUN = "run.json"  # the job, and which driver runs it
RESULT = "result.json"
SHAPES = "shapes.parquet"
