"""Who runs when, what goes wrong on purpose, and what has happened."""
