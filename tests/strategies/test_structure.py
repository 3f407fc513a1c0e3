"""The shape of the library: few classes above a method, small rooms, no flag that nobody reads."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import strategies
from strategies import (
    REGISTRY,
    AsyncFedAvg,
    AsynchronousStrategy,
    FedAvg,
    FederatedStrategy,
    SynchronousStrategy,
)
from strategies.core.capabilities import DECLARED, Capabilities
from strategies.core.config import FLOWERS_ORDER

ROOT = Path(strategies.__file__).parent
MOST_CLASSES = 4  # of ours, with the method itself
MOST_ATTRIBUTES = 80  # of ours
# Of Flower's FedAvg: its keywords, the helpers of its subclasses, and what Flower's older API calls first.
FLOWERS = {*FLOWERS_ORDER, "_construct_messages", "_check_and_log_replies", "initialize_parameters"}
# What one reads to mend the event loop, and what of the room the loop only asks.
EVENT_LOOP = ("strategy", "pump", "session", "event_stream", "tasks", "dispatcher")
BESIDE = {
    "active_clients",
    "task_checkpoint",
    "arrival_rule",
    "contribution_weights",
    "evaluation",
    "executors",
    "observed_periods",
    "statistics",
}
MOST_READ_FILES, MOST_READ_LINES = 6, 2000
# The default, and methods whose seconds, schedule or former checkpoints the app knows.
NAMED_ELSEWHERE = {"fedavg", "fedbuff", "fedfix", "async-spectral", "rennala"}


def ours(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.startswith("strategies")]


@pytest.mark.parametrize("kind", REGISTRY.values())
def test_a_method_stands_on_few_classes(kind):
    above = ours(kind)
    assert len(above) <= MOST_CLASSES
    assert above[-1] is FederatedStrategy
    assert above[-2] in (SynchronousStrategy, AsynchronousStrategy)


def test_fedavg_has_few_attributes():
    made = FedAvg()
    own = {name for kind in ours(FedAvg) for name in vars(kind) if not re.fullmatch(r"__\w+__", name)}
    own |= vars(made).keys()
    assert own >= FLOWERS
    assert len(own - FLOWERS) <= MOST_ATTRIBUTES


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_public_attributes_are_documented(kind):
    """By a docstring, in a class's list of attributes, by a line ``#:`` above, or as a keyword of Flower's."""
    listed = "\n".join(inspect.getdoc(each) or "" for each in ours(kind))
    told = {*FLOWERS, *", ".join(re.findall(r"^([\w, ]+) : ", listed, re.M)).split(", ")}
    told |= {name for each in ours(kind) for name in re.findall(r"#: .*\n +(\w+)", inspect.getsource(each))}
    public = {name for each in ours(kind) for name in vars(each)} | vars(kind()).keys()
    for name in {name for name in public if not name.startswith("_")} - told:
        found = inspect.getattr_static(kind, name, None)
        assert callable(found) or isinstance(found, property | classmethod | staticmethod), name
        assert found.__doc__, name


def test_the_event_loop_is_read_in_few_lines():
    """From an event to who is sent the model; what a contribution weighs is beside it."""
    texts = [(ROOT / "events" / f"{name}.py").read_text("utf-8") for name in EVENT_LOOP]
    assert len(texts) <= MOST_READ_FILES
    assert sum(len(text.splitlines()) for text in texts) <= MOST_READ_LINES
    imported = {name for text in texts for name in re.findall(r"^from strategies\.events\.(\w+)", text, re.M)}
    assert imported - set(EVENT_LOOP) == BESIDE


def modules() -> dict[str, Path]:
    return {
        ".".join(("strategies", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }


def test_a_method_is_added_by_its_file_and_the_registry() -> None:
    """CONTRIBUTING.md: no other code of the library or the app has its name, but for the table of colours."""
    files = {*ROOT.rglob("*.py"), *(ROOT.parent / "fedapp").rglob("*.py")}
    files -= {ROOT / "__init__.py", ROOT.parent / "fedapp" / "report" / "method_styles.py"}
    known = {path: words_in(path) for path in files if (ROOT / "methods") not in path.parents}
    named = {
        name for name, kind in REGISTRY.items() if any({name, kind.__name__} & has for has in known.values())
    }
    assert named <= NAMED_ELSEWHERE


def words_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


def test_rooms_are_small():
    def files(folder: Path) -> list[Path]:
        return [path for path in folder.glob("*.py") if path.stem != "__init__"]

    assert len(files(ROOT)) <= 3
    assert all(len(files(folder)) <= 30 for folder in ROOT.rglob("*") if folder.is_dir())


def test_each_capability_is_read_somewhere():
    """By a loop, a part or the app; declared ones also count where a class sets them."""
    texts = [path.read_text("utf-8") for name, path in modules().items() if not name.endswith("capabilities")]
    texts += [path.read_text("utf-8") for path in (ROOT.parent / "fedapp").rglob("*.py")]
    for name in (*Capabilities.__dataclass_fields__, *DECLARED):
        assert any(re.search(rf"\.{name}\b", text) for text in texts), name


def test_hooks_are_looked_at_in_one_place():
    looks = re.compile(r"type\(self\)\.\w+ is (not )?\w+\.\w+|getattr\(type\(self\)")
    for name, path in modules().items():
        assert name.endswith("capabilities") or not looks.search(path.read_text("utf-8")), name


def test_parts_with_a_state_can_be_restored():
    for kind in REGISTRY.values():
        for part in kind().session.stateful_components():
            for name in ("state", "restore"):
                assert inspect.ismethod(getattr(part, name)), f"{type(part).__name__}.{name}"
