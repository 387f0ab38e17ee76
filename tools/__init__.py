"""Commands for developers; run as `python -m tools.NAME` in a clone."""
