"""The papers' figures and tables, one command each: ``fedapp reproduce NAME``.

``studies/experiments/NAME.toml`` says which runs a figure needs (`studies.reproduce.plan`), `fedapp.sweeps.runner`
makes those that aren't there yet, and a function of the paper's module turns the run directories into a report
(`studies.reproduce.experiment`). What needs no runs, such as a graph of clients, is a study: a module with
``measure`` and ``report``.
"""
