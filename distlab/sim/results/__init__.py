"""What a run takes and gives, for people and for tools."""
