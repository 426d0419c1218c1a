"""What tests/test_phase4.py runs: bodies, which run on every rank, and judges of their results."""
