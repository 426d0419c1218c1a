"""The cluster: GPUs, links and routes, without time or ranks."""
