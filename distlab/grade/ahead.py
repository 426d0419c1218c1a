"""Loaded by pytest before the grader: a fork server starts while the grader imports torch.

It loads what every simulated world needs: the first verdict comes sooner, and what a world computes
is the submission's work.

PYTEST_DONT_REWRITE: the learner's commands have imported this before pytest could.
"""

from distlab.launch import nursery

nursery.start_ahead("distlab.launch.simulated", "distlab.grade.running")
