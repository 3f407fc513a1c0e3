"""Makes ``fedapp/manual.json``, from which ``fedapp keys`` and ``fedapp methods`` print.

python -m fedapp.config.manual
"""

import json
from typing import Any

from fedapp.config.document import EVERYDAY, TOPICS, words_of_keys
from fedapp.config.methods import words_of
from fedapp.manual import FILE
from strategies import REGISTRY


def made() -> dict[str, Any]:
    """Return the content of ``manual.json``."""
    return {
        "keys": words_of_keys(),
        "everyday": [*EVERYDAY],
        "topics": {topic: [*keys()] for topic, keys in TOPICS.items()},
        "methods": {name: words_of(name, full=True) for name in REGISTRY},
        "methods-in-short": {name: words_of(name, full=False) for name in REGISTRY},
    }


def text() -> str:
    """Return ``manual.json``."""
    return json.dumps(made(), ensure_ascii=False, indent=0) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
