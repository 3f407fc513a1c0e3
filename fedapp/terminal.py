"""Text for terminals that can't show it: letters and signs of a page of formulas in ASCII."""

import codecs
import sys
import unicodedata

# What isn't a letter with an accent or of the Greek alphabet.
_SIGNS = {
    "±": "+-",
    "…": "...",
    "–": "-",
    "—": "-",
    "→": "->",
    "←": "<-",
    "≥": ">=",
    "≤": "<=",
    "×": "x",
    "·": "*",
    "−": "-",
    "≈": "~",
    "∞": "inf",
    "√": "sqrt",
    "‖": "||",
    "Σ": "sum",
    "∇": "grad ",
    "∈": "in",
    "∝": "~",
    "⁻": "-",
    "′": "'",
    "§": "sec. ",
    "⌊": "floor(",
    "⌋": ")",
    "⌈": "ceil(",
    "⌉": ")",
    "⟨": "<",
    "⟩": ">",
    "“": '"',
    "”": '"',
    "’": "'",
}
_HANDLER = "fedapp.in-ascii"


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return what stands in for characters that a codec has no code for, as an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_sign, error.object[error.start : error.end])), error.end


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    if plain or unicodedata.combining(character):
        return plain
    name = unicodedata.name(character, "")  # such as GREEK SMALL LETTER GAMMA
    return name.rpartition(" ")[2].lower() if name.startswith("GREEK") else "?"


def show_in_ascii() -> None:
    """Let this process print what its terminal has no code for in ASCII."""
    codecs.register_error(_HANDLER, in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)
