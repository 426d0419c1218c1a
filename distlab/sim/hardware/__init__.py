"""The cluster's hardware: GPUs, links and routes; knows nothing of time or ranks."""
