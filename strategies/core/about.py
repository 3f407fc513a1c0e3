"""What a method says of itself, in the docstring of its class.

    class FedFix(AsynchronousStrategy):
        '''FedFix (Fraboni et al. 2023, eq. 40).

        New model: every Δt seconds, of what has arrived.
        Rule: each counts ⌈τ_i/Δt⌉ p_i, so that all count p_i in the long run.
        Helps: where …
        '''

A line that begins with one of ``FIELDS`` and a colon says it; more lines of the same paragraph go on with it. What a
class doesn't say is what the nearest class above it says.
"""

import inspect
import re
from dataclasses import dataclass

FIELDS = ("New model", "Rule", "Needs", "Sent", "Kept", "Helps")

_FIELD = re.compile(rf"^({'|'.join(FIELDS)}): (.*(?:\n(?!(?:{'|'.join(FIELDS)}): ).+)*)", re.M)


@dataclass(frozen=True)
class About:
    """A method in words; "" for what no class says.

    Attributes
    ----------
    source : str
        Name and, in brackets, where it was published.
    new_model : str
        When there is one.
    rule : str
        What is done with clients' work.
    needs : str
        Of clients, beside training.
    sent, kept : str
        By the server, beside the model.
    helps : str
        Where it does, and what it costs.
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
