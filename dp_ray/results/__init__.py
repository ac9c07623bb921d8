"""The results of runs, as a user reads them.

Begin with `result.py`: `Result` is what `dp_ray.run` returns, and `load` reads it from a run directory. `compare.py`
sets several runs side by side, `replayed.py` shows a step that was run again, and `text.py` formats values for a
terminal or a notebook.
The docs begin at docs/outputs.md.
"""
