"""Communication of ranks: messages, collectives, and the store."""
