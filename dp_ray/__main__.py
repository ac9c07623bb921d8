"""`python -m dp_ray` is the `dp-ray` program."""

from dp_ray.cli import main

main()
