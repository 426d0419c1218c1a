"""Reports of worlds that fail: which ranks wait for which, and why."""
