"""Functions that the ranks run for tests/test_phase4.py (bodies), and judges of their results."""
