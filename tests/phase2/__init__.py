"""Functions that the ranks run for tests/test_phase2.py (bodies), and judges of their results."""
