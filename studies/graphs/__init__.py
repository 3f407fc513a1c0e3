"""Graphs of clients over a grid of class and data imbalance: figures 3.3 to 3.5 of Buttaci 2024."""
