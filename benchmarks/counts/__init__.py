"""Does a program end with the same numbers on 1, 2 and 3 processes? Five libraries, twelve programs.

`python -m benchmarks counts [--only accelerate]` prints the table. Begin at `main` in `table.py`.
"""
