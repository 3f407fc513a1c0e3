"""A long-lived process on a device that works in place of the processes which Flower starts for every message.

``command`` is ``fedapp-worker``, which serves (``serving``) on a socket of its user (``listening``). ``asking`` is
the side of Flower's process. ``protocol`` has the frames that the two exchange, and ``sources`` the check that both
run the same app.
"""
