"""Run a step of a training again, to see what each of its parts does: begin with `replay.py`.

`inspect_step.py` looks at the step: the samples, the layers and the gradients, and the first that is not finite.
"""
