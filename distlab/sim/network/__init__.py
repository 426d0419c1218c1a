"""Bytes on their way: they share links, and arrive."""
