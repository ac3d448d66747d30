"""The parts of `benchmarks/train.py`."""
