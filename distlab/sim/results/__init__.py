"""Options and results of a run, for people and for tools."""
