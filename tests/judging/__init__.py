"""Helpers for the judges of all phases: calls of a lesson, groups, devices, comparisons."""
