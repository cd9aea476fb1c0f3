"""The parts of `benchmarks/scale.py`: one file for each benchmark, and what they share."""
