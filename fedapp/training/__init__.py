"""Local training: everything between a message and a trained model. Without Flower.

- ``task``: what one client's training needs; ``batches``, ``work`` and ``schedule`` are what it is made of: which
  examples, how many steps, which step size;
- ``rule``: the local step of every method, written once; ``vectors``, ``span``: the arithmetic it is written in;
- ``autograd``, ``dense`` and ``dual``: the three representations of a model that the step is taken in. ``autograd``
  trains any model; the two others are there for their speed, and share ``backpropagation``;
- ``choose``: which of them trains a task; ``chunks`` and ``trainer``: many tasks at once, on threads;
- ``evaluation`` and ``divergence``: what a model scores, and how far clients drift apart.
"""
