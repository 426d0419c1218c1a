"""One process that looks like many: what each rank has of its own."""
