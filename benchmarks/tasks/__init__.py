"""Tasks with an answer that a program can check. Run as `python -m benchmarks.tasks`."""
