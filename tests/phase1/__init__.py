"""What tests/test_phase1.py runs: bodies, which run on every rank, and judges of their results."""
