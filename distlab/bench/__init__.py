"""Benchmarks: every speed is compared with a rival's in the same run, as a ratio of medians."""
