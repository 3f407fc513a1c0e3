"""Flower's quickstarts on PyTorch, numpy or scikit-learn, with data from a file and one evaluation, at the end."""
