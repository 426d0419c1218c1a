"""Plans of the built-in collectives: the sender, receiver and size of every transfer."""
