"""Local training: everything between a message and a trained model. Without Flower.

- ``task``: what one client's training needs, and the tasks of many clients; ``batches`` and ``work`` are what a task
  is made of: which examples, how many steps, which step size;
- ``rule``: the local step of every method, written once, and the vectors that it is written in; ``span``: the vectors
  of a model in its dual form;
- ``autograd``, ``dense`` and ``dual``: the three representations of a model in which the step is taken. ``autograd``
  trains any model; the two others are there for their speed, and share ``layers``;
- ``trainer``: which representation trains a task, and many tasks at once, on threads; ``chunks``: how many at once;
- ``evaluation`` and ``divergence``: what a model scores, and how far clients drift apart.
"""
