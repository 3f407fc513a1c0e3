"""Which method wins where: a map over how unlike clients' data are, and how unlike their speed.

``plan`` reads a map's TOML and says which runs it has, ``making`` makes those that aren't there, cell by cell, by the
means of ``fedapp.sweeps``; ``curves`` keeps of them what the rest needs, in one file; ``scores`` picks the tuned
value and takes the measures, ``rule`` says who wins; ``picture`` and ``report`` show it.
"""
