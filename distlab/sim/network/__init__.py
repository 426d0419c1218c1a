"""Bytes on their way, which share links and arrive."""
