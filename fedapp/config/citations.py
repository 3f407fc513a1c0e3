"""How the papers of methods are cited: the docstrings of the methods' modules have the papers, in full.

'''FedBuff: a new model when m contributions have arrived.

J. Nguyen, K. Malik and M. Rabbat, "Federated learning with buffered asynchronous aggregation", AISTATS 2022: …
'''
"""

import inspect
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fedapp.config.strategy_keys import strategy_class
from strategies import REGISTRY
from strategies.core.about import About

_AUTHOR = r"(?:[A-Z]\.[ -])+(?:y )?[A-Z][\w-]+(?: [A-Z][\w-]+)*"
_CITATION = re.compile(
    rf'(?P<authors>{_AUTHOR}(?:(?:, and |, | & | and ){_AUTHOR})*(?P<more> et al\.)?), "(?P<title>[^"]+)"'
    r"(?: \([^)]*\))?, (?P<where>arXiv [\d.]+, |[A-Z][\w ]*?,? |)(?P<year>\d{4})"
)
# A paper in short, as the first lines of the methods' classes have it: "Wang and Ji 2024".
_SHORT = re.compile(r"(?P<surname>[^\W\d_][\w-]+)(?: et al\.| and [^\W\d_][\w-]+)? (?P<year>\d{4})")
_ARTICLES = ("a", "an", "the", "on")


@dataclass(frozen=True)
class Paper:
    """A published paper.

    Attributes
    ----------
    authors : tuple of str
        Initials and surname of each.
    has_more : bool
        Whether there are authors beside these.
    where : str
        Where it appeared: a conference, a journal and its volume, ``arXiv`` and its number, or nothing.
    """

    authors: tuple[str, ...]
    has_more: bool
    title: str
    where: str
    year: str

    @property
    def surname(self) -> str:
        """The first author's surname."""
        return re.sub(r"^(?:[A-Z]\.[ -])+", "", self.authors[0])

    @property
    def key(self) -> str:
        r"""The key of ``\cite``: surname, year and the title's first word, in ASCII."""
        words = re.findall(r"\w+", _ascii(self.title).lower())
        first = next(word for word in words if word not in _ARTICLES)
        return f"{re.sub(r'[^a-z]', '', _ascii(self.surname).lower())}{self.year}{first}"

    @property
    def short(self) -> str:
        """The authors and the year in short: ``Wang and Ji 2024``."""
        surnames = [re.sub(r"^(?:[A-Z]\.[ -])+", "", author) for author in self.authors]
        if self.has_more or len(surnames) > 2:
            return f"{surnames[0]} et al. {self.year}"
        return f"{' and '.join(surnames)} {self.year}"

    @property
    def entry(self) -> str:
        """The entry of a BibTeX file."""
        volume = re.fullmatch(r"(.+) (\d+)", self.where)
        fields = {
            "author": " and ".join([*self.authors, *(["others"] if self.has_more else [])]),
            "title": f"{{{self.title}}}",
            "year": self.year,
        }
        kind = "inproceedings"
        if self.where.startswith("arXiv "):
            kind, number = "misc", self.where.removeprefix("arXiv ")
            fields |= {"eprint": number, "archivePrefix": "arXiv", "note": f"arXiv:{number}"}
        elif volume:
            kind = "article"
            fields |= {"journal": volume[1], "volume": volume[2]}
        elif self.where:
            fields["booktitle"] = self.where
        else:
            kind = "misc"
        lines = [f"  {name} = {{{value}}},".replace("&", r"\&") for name, value in fields.items()]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"]) + "\n"


def paper_name(strategy: str) -> str:
    """Return what a method is called in its paper; of a strategy of one's own the name of its class."""
    if strategy not in REGISTRY:
        return strategy.rpartition(":")[2]
    name = About.of(REGISTRY[strategy]).source.partition(" (")[0].removeprefix("The ")
    return name[0].upper() + name[1:]


def papers_of(strategy: str) -> list[Paper]:
    """Return the papers that a method is from; [] of a strategy of one's own.

    Those are the papers that the first line of the method's class names before a semicolon: its own one, or of a
    method of this project the papers that it builds on.

    Raises
    ------
    LookupError
        If no docstring has a paper in full.
    """
    if strategy not in REGISTRY:
        return []
    source = About.of(REGISTRY[strategy]).source.partition(";")[0]
    own = _in_docstring(strategy)
    return [
        _known(found["surname"], found["year"], (*own, *_all_papers())) for found in _SHORT.finditer(source)
    ]


def bibliography(strategies: Iterable[str]) -> str:
    """Return a BibTeX file of the papers of methods, by key."""
    entries = {paper.key: paper.entry for name in strategies for paper in papers_of(name)}
    return "\n".join(entries[key] for key in sorted(entries))


def _known(surname: str, year: str, papers: Iterable[Paper]) -> Paper:
    for paper in papers:
        if (paper.surname.rpartition(" ")[2], paper.year) == (surname, year):
            return paper
    raise LookupError(f"no docstring of a method has the paper of {surname} {year} in full")


@cache
def _in_docstring(strategy: str) -> tuple[Paper, ...]:
    """Return the papers in the docstring of a method's module, in its order."""
    text = " ".join((inspect.getdoc(inspect.getmodule(strategy_class(strategy))) or "").split())
    return tuple(
        Paper(
            tuple(re.findall(_AUTHOR, found["authors"])),
            bool(found["more"]),
            found["title"],
            found["where"].strip(" ,"),
            found["year"],
        )
        for found in _CITATION.finditer(text)
    )


def _all_papers() -> Iterable[Paper]:
    return (paper for name in REGISTRY for paper in _in_docstring(name))


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
