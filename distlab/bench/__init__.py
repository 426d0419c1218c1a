"""Benchmarks: every speed is measured beside its rival, in the same run, as a ratio of medians."""
