"""Judges of tests/test_phase3.py, and the bodies that they run on ranks and that return facts."""
