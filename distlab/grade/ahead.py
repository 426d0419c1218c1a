"""Loaded by pytest before the grader: a fork server starts while the grader imports torch."""

from distlab.launch import nursery

nursery.start_ahead()
