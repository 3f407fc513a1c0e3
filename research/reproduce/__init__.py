"""The papers' figures and tables, one command each: ``fedapp reproduce NAME``.

``experiments/NAME.toml`` says which runs a figure needs (`research.reproduce.plan`), `fedapp.sweeps.runner`
makes those that aren't there yet, and a function of the paper's module turns the run directories into a report
(`research.reproduce.experiment`). What needs no runs, such as a graph of clients, is a study: a module with
``measure`` and ``report``.
"""
