"""Plans of the built-in collectives: which rank sends how much to whom, phase by phase."""
