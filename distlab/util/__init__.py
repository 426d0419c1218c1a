"""Helpers that know nothing of the course: text, files and tracebacks."""
