"""Answers that are known to be wrong, or right but unusual, with which to grade the grader."""
