"""The losses of 001-floor, and what is measured on them."""
