"""Helpers of the judges of all phases: calling a lesson, groups, devices, comparing."""
