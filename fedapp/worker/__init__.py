"""A long-lived process on a device that works in place of the processes which Flower starts for every message.

``command`` is ``fedapp-worker``, which serves (``serving``) on a socket of its user (``listening``); ``asking`` is
what Flower's process does; ``protocol`` is what they say to each other, and ``sources`` how they know that they are
the same app.
"""
