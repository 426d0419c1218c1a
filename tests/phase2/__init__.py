"""What tests/test_phase2.py runs: bodies, which run on every rank, and judges of their results."""
