"""A client's side: from a message to its reply."""
