"""Many runs: a plan of axes, the runs that are missing, and what came of them all.

``plan`` reads a plan and expands it into planned runs (``point``), ``runner`` makes those that aren't there yet,
``tuning`` picks values on seeds of their own, ``sweep`` puts it together and writes what comes of it. ``fedapp
reproduce`` (studies) stands on the same ``plan``, ``point`` and ``runner``.
"""
