"""Plans of the built-in collectives: how much each rank sends to which other, phase by phase."""
