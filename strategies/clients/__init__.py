"""Who the clients are, how much each counts, and what is recorded of each one's work."""
