"""The asynchronous loop."""
