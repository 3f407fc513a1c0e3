"""Examples, which tests run."""
