"""Flower's PyTorch quickstart, with its data from a file and one evaluation, at the end."""
