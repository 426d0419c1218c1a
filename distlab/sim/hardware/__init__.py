"""The cluster's hardware: GPUs, links and routes, independent of time and ranks."""
