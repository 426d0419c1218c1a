"""Benchmarks: each speed is compared with a rival's from the same run, as a ratio of medians."""
