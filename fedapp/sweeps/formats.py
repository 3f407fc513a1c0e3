"""The formats of figures that compare settings: PNG always, PDF and SVG beside it for a paper."""

from fedapp.config import ConfigError

FORMATS = ("pdf", "svg", "png")


def read_formats(text: str) -> tuple[str, ...]:
    """Return the formats that a list with commas names, each once; () of an empty text.

    Raises
    ------
    ConfigError
        If it names another format.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    if unknown := [name for name in names if name not in FORMATS]:
        raise ConfigError(
            f"--format {text}: {unknown[0]!r} is no format of figures; allowed are {', '.join(FORMATS)}"
        )
    return names
