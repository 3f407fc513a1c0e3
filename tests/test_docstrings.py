"""A class's docstring lists attributes and parameters that the class has: a renamed one is renamed there, too."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("strategies", "fedapp")
SECTION = re.compile(r"(?:Attributes|Parameters)\n-+\n(.*?)(?=\n[A-Z][a-z]+\n-+\n|\Z)", re.DOTALL)
ENTRY = re.compile(r"^((?:\w+(?:, )?)+)(?: : .*)?$", re.MULTILINE)
OWN_BASES = {"ABC", "Protocol", "Generic", "NamedTuple", "Enum", "object"}


def names_of(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's attributes, methods and of all their parameters."""
    found: set[str] = set()
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id in ("self", "cls")
        ):
            found.add(each.attr)
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            found |= {
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        elif isinstance(each, ast.FunctionDef):
            found |= {each.name} | {
                argument.arg for argument in ast.walk(each) if isinstance(argument, ast.arg)
            }
    return found


def bases_of(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.id if isinstance(base, ast.Name) else ast.unparse(base).rpartition(".")[2] for base in plain]


def test_what_a_class_lists_in_its_docstring_is_there():
    classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((path.relative_to(ROOT), node))

    def every(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        found = names_of(node)
        for base in set(bases_of(node)) - seen:
            for _, own in classes.get(base, ()):
                found |= every(own, seen | {base})
        return found

    def is_ours(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
        """Tell whether all bases are in the two packages, so that all names are known."""
        return all(
            base in OWN_BASES
            or (base in classes and all(is_ours(own, seen | {base}) for _, own in classes[base]))
            for base in set(bases_of(node)) - seen
        )

    checked, missing = 0, []
    for path, node in (each for found in classes.values() for each in found):
        if not is_ours(node):
            continue
        for section in SECTION.findall(ast.get_docstring(node) or ""):
            for entry in ENTRY.findall(section):
                checked += 1
                lacking = set(entry.split(", ")) - every(node)
                missing += [f"{path}: {node.name}: {name}" for name in sorted(lacking)]
    assert checked > 500
    assert not missing, "\n".join(missing)
