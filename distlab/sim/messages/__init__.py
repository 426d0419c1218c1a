"""What ranks do to each other: messages, collectives, and the store."""
