"""Functions that the ranks run for tests/test_phase3.py (bodies), and judges of their results."""
