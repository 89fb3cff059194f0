"""Faults injected on purpose into real runs; `python -m tests.chaos` runs the campaign, docs/recovering.md says how."""
