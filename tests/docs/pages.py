"""The README and the guides, and their blocks of code.

A block begins with three backticks and a language, and is one of these:

- ``sh``: commands, which run in a copy of the project as they stand there, one block after the other;
- ``python``, ``toml`` and ``yaml`` with a ``title``: a file of that name;
- ``python`` without: those of a page are one script, which runs after the commands;
- ``text``: what a program says;
- ``title="needs …"``: what can't run here. All of these are in ``NOT_RUN``, with what tries them instead.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOT_GUIDES = {"api.md", "architecture.md", "config.md"}  # generated, or drawings; none has commands
GUIDES = [
    "README.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md") if p.name not in NOT_GUIDES),
]

LOCAL = "needs minutes, and starts a SuperLink and three SuperNodes here"

# How many blocks of a page don't run here, and why not. What tries them is in brackets.
NOT_RUN = {
    ("README.md", "needs minutes: the tests themselves"): 1,
    ("README.md", "needs a package index"): 1,  # (make run, by who clones the project)
    ("README.md", "needs a package index, and minutes"): 1,  # (lint and docs: .ci/run, test_site.py)
    ("README.md", LOCAL): 1,  # (tests/deploy/test_local.py)
    (
        "docs/compression.md",
        "needs minutes",
    ): 1,  # (its bytes: tests/docs/test_pages.py; the codes: tests/fedapp)
    ("docs/corrections.md", "needs a client of your own"): 1,  # (fedapp/client/training.py does the same)
    ("docs/data.md", "needs data of yours"): 1,  # (tests/data)
    ("docs/data.md", "needs the Hugging Face hub"): 1,  # (tests/data, on a copy of a set)
    ("docs/deploy.md", LOCAL): 1,  # (tests/deploy/test_local.py)
    ("docs/deploy.md", "needs root"): 3,
    ("docs/deploy.md", "needs root, on the server"): 2,  # (the units' commands: tests/deploy/test_startup.py)
    ("docs/deploy.md", "needs root, on the device"): 2,  # (the same)
    # (tests/deploy/test_registration.py, test_through_proxy.py, test_operate.py, test_identity.py)
    ("docs/deploy.md", "needs the server"): 5,
    ("docs/map.md", "needs hours, and data"): 1,  # (studies/tests/maps, in little)
    ("docs/operations.md", "needs the server"): 1,  # (tests/deploy/test_operator_roles.py)
    ("docs/operations.md", "needs root, on the server"): 3,  # (tests/deploy/test_backup.py)
    ("docs/orchestration.md", "needs a cluster, and a registry"): 3,  # (tests/deploy/test_kubernetes.py)
    ("docs/orchestration.md", "needs a list of devices"): 1,  # (tests/deploy/test_ansible.py)
    ("docs/orchestration.md", "needs root"): 1,  # (tests/deploy/test_by_hand.py)
    (
        "docs/personal.md",
        "needs a client of your own",
    ): 1,  # (tests/strategies/methods/test_personal.py does the same)
    ("docs/papers.md", "needs minutes, and data"): 1,  # (studies/tests/reproduce)
    ("docs/report.md", "needs Ctrl-C to end"): 1,  # (tests/report/test_page.py)
    ("docs/model.md", "needs data of yours"): 1,  # (tests/training/test_batch_loss.py)
    ("docs/runs.md", "needs a SuperLink, which stays"): 1,  # (tests/end_to_end/test_flower.py)
    ("docs/scale.md", "needs a GPU"): 1,
    ("docs/scale.md", "needs minutes"): 1,  # (studies/tests/benchmarks/test_slow_link.py, in little)
    ("docs/scale.md", "needs several machines"): 1,  # (tests/end_to_end/test_ray.py, on one)
    ("docs/scale.md", "needs Slurm: the file run.sbatch"): 1,  # (tests/end_to_end/test_slurm.py)
    ("docs/scale.md", "needs an hour of an idle machine"): 3,  # (studies/tests/benchmarks, in little)
    ("docs/scale.md", "needs half an hour"): 1,  # (studies/tests/benchmarks/test_soak.py, in little)
    ("docs/scale.md", "needs an AMD processor"): 1,
    ("docs/sweep.md", "needs Slurm: the file sweep.sbatch"): 1,  # (tests/sweeps/test_slurm.py)
    ("docs/sweep.md", "needs Slurm: the commands that submit it"): 1,  # (the same)
}

BLOCK = re.compile(r"^( *)```([^\n`]+)\n(.*?)^\1```$", re.M | re.S)
LANGUAGES = {"sh", "python", "toml", "yaml", "text"}


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its title or "", and its text."""

    language: str
    title: str
    code: str

    @property
    def runs(self) -> bool:
        return self.language != "text" and not self.title.startswith("needs ")


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks_of(page: str) -> list[Block]:
    found = []
    for _, info, code in BLOCK.findall(text_of(page)):
        language, _, rest = info.partition(" ")
        title = re.fullmatch(r'(?:title="([^"]+)")?', rest)
        assert title, f"{page}: ```{info}"
        found.append(Block(language, title[1] or "", code))
    return found
