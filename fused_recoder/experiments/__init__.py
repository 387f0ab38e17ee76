"""The thesis's experiments, and the ones it left open, as resumable jobs."""
