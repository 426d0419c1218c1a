"""Campaigns that test checkpoints: they kill real processes, and damage files."""
