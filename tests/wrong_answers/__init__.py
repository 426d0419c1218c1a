"""Known-wrong answers, and right but unusual ones, which grade the grader."""
