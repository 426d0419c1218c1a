"""distlab: the support package of the course. docs/architecture.md says what each part is for."""
