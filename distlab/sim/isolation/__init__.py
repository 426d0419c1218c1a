"""One process that looks like many: the state of each rank, and patches of torch and Python."""
