"""Plans of the built-in collectives: senders, receivers and sizes, phase by phase."""
