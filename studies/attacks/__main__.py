"""Run the study without the command ``fedapp``: ``python -m studies.attacks``."""

import typer

from studies.attacks.command import attacks_command

if __name__ == "__main__":
    typer.run(attacks_command)
