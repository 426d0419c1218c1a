"""What tests/test_phase4.py runs on the ranks. No body asserts: it returns what is to be judged."""
