"""Functions that the ranks run for tests/test_phase1.py (bodies), and judges of their results."""
