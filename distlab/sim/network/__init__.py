"""The network: bytes in transit, which share links until they arrive."""
