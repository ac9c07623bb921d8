"""Places: a private Ray on the hosts that a launcher has given, and jobs handed to Slurm and Kubernetes.

Begin at `kuberay.py`, which writes the RayJob of a job for KubeRay; `pod.py` runs in its pods. They start programs
and know nothing of what these run. The docs begin at docs/places/.
"""
