"""What a method says of itself."""

from strategies import FedFix, Scaffold
from strategies.core.about import About


class Base:
    """A base.

    New model: always.
    Kept: much.
    """


class Method(Base):
    """Method (A. Body 2026,
    eq. 1).

    More of it.

    Rule: one thing
    and another: x.
    Kept: little.

    No field, though it has a colon: as here.
    """


def test_fields_go_over_lines_and_come_from_the_nearest_class():
    about = About.of(Method)
    assert about.source == "Method (A. Body 2026, eq. 1)"
    assert about.new_model == "always"
    assert about.rule == "one thing and another: x"
    assert about.kept == "little"
    assert (about.needs, about.sent, about.helps) == ("", "", "")


def test_those_of_the_library():
    assert About.of(FedFix).new_model == "every `fedfix-interval` seconds, of what has arrived"
    assert About.of(Scaffold).new_model == "when all participants have answered"
    assert About.of(Scaffold).sent == "c − c_i"
