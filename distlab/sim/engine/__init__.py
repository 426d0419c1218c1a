"""Scheduling of ranks, injected faults, and the record of events."""
