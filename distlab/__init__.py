"""distlab: the support package of the course. See README.md for what each part is for."""
