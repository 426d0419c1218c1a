"""Known-wrong and unusual but right answers, which grade the grader."""
