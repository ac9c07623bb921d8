"""Places: a private Ray on the hosts that a launcher has given, and the files of a job for Slurm and for Kubernetes.

Begin at `node.run_on_this_host`. `launchers.py` has the table of launchers' variables: how many hosts there are,
which one this is and where they meet. `meeting.py` has the hosts tell each other what they need to know, and
`own_ray.py` is a host's part of the Ray. `templates.py` fills in `job.sbatch` and `rayjob.yaml`; what else the latter
needs is in `kuberay.py`, and `pod.py` runs in its pods. They start programs and know nothing of what these run. The
docs begin at docs/places/.
"""
