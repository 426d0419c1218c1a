"""Bodies that run on the ranks for tests/test_phase2.py; judges check what they return."""
