"""Places: a private Ray on the hosts that a launcher has given, jobs handed to Slurm, and manifests for Kubernetes.

Begin at `node.run_on_this_host`. `launchers.py` reads from a launcher's variables how many hosts there are, which one
this is and where they meet. `meeting.py` has the hosts tell each other what they need to know, and `own_ray.py` is a
host's part of the Ray. `slurm.py` writes the script of a job for Slurm, submits it, and looks after it. `kuberay.py`
writes a job as a RayJob, and `pod.py` runs in its pods. They start programs and know nothing of what these run. The
docs begin at docs/places/.
"""
