"""Answers known to be wrong, or right but unusual, for grading the grader."""
