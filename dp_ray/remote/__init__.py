"""A cluster's dashboard, from another machine: submit a job, follow it, stop it, and fetch its files.

Begin at `submit.submit_and_follow`. `fetch.fetch_run` brings a run here; `offer.py` is the program that it starts on
the head node. Only the command line imports them. The docs begin at docs/places/any-ray-cluster.md.
"""
