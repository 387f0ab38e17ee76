"""Fuzzers: each module has a `check(seed)` that makes one hostile case from its seed and raises if
the package does not do what it promises. `python -m tests.fuzz` runs them; see docs/testing.md."""
