"""Benchmarks: `python -m bench`. Every speed is a ratio of things interleaved in one process."""
