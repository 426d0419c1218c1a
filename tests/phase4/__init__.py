"""Bodies and judges of tests/test_phase4.py. Bodies run on the ranks, and assert nothing."""
