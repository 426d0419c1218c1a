"""How a world ends that does not end well: who waits for whom, and why."""
