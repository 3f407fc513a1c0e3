"""What a method says of itself, in the docstring of its class.

    class FedFix(AsynchronousStrategy):
        '''FedFix (Fraboni et al. 2023, eq. 40).

        New model: every Δt seconds, of what has arrived.
        Rule: each counts ⌈τ_i/Δt⌉ p_i, so that all count p_i in the long run.
        Helps: where …
        '''

A field begins with a line of one of ``FIELDS`` and a colon, and ends with its paragraph. A field that the docstring
of a class lacks is taken from the nearest base class that has it.
"""

import inspect
import re
from dataclasses import dataclass

FIELDS = ("New model", "Rule", "Needs", "Sent", "Kept", "Helps")

_FIELD = re.compile(rf"^({'|'.join(FIELDS)}): (.*(?:\n(?!(?:{'|'.join(FIELDS)}): ).+)*)", re.M)


@dataclass(frozen=True)
class About:
    """A method in words; a field is "" if no class has it.

    Attributes
    ----------
    source : str
        Name of the method and, in brackets, its publication.
    new_model : str
        When the server makes a new model.
    rule : str
        How the server aggregates the clients' updates.
    needs : str
        What the method asks of clients, beside training.
    sent, kept : str
        What the server sends, and keeps, beside the model.
    helps : str
        Where the method helps, and what it costs.
    """

    source: str
    new_model: str
    rule: str
    needs: str
    sent: str
    kept: str
    helps: str

    @classmethod
    def of(cls, kind: type) -> "About":
        """Return what a strategy's class says of itself."""
        said: dict[str, str] = {}
        for each in kind.__mro__:
            text = inspect.cleandoc(each.__dict__.get("__doc__") or "")
            for name, value in _FIELD.findall(text):
                said.setdefault(name, " ".join(value.split()).removesuffix("."))
        first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        return cls(" ".join(first.split()).removesuffix("."), *(said.get(name, "") for name in FIELDS))
