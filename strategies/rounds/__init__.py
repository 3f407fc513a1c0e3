"""The synchronous loop."""
