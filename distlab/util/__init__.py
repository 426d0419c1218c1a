"""Helpers that do not depend on the course: text, files, processes and tracebacks."""
