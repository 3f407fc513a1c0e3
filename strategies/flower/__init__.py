"""What is used of Flower: messages, arrays, Grids, and the internals that no public call stands in for."""
