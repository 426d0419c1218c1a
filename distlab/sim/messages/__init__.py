"""Communication between ranks: messages, collectives, and the store."""
