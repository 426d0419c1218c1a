"""The cluster: GPUs, links and routes. No time, no ranks."""
