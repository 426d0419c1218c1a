"""Bodies that run on the ranks for tests/test_phase1.py; judges check what they return."""
