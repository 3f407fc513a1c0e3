"""Which setting leads, by how much, what may spoil that, and what it costs.

`judging.judge` is a pure function of results by setting and seed; `of_runs.verdict_of` applies it to recorded runs.
"""
