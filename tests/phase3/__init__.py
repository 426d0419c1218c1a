"""Bodies, which run on every rank, and judges of their results, for tests/test_phase3.py."""
