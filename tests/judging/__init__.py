"""What the judges of all phases share: calling a lesson, groups, devices, comparing."""
