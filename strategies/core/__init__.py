"""What every strategy has: its config, its memory, evaluation, reporting and the base class."""
