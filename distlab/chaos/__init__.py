"""Campaigns against checkpoints: real processes that are killed, and files that are damaged."""
