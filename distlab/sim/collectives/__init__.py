"""Plans of the built-in collectives: which rank sends how much to which, phase by phase."""
