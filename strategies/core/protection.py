"""Which methods can have a robust rule or central noise in place of the plain mean, by what their classes declare."""

from strategies.core.capabilities import Capabilities


def takes_rule(capabilities: Capabilities) -> bool:
    """Return True if a robust rule can stand in place of a method's weighted mean."""
    return not (capabilities.past_protection or capabilities.needs_all_updates or capabilities.unequal)


def check_protection(name: str, capabilities: Capabilities, given: str, *, rule: bool) -> None:
    """Raise ValueError if a method can't have what ``given`` names: a robust ``rule``, or central noise."""
    if capabilities.past_protection:
        raise ValueError(
            f"{given}: {capabilities.past_protection} as they came, past what protects the global one; allowed are "
            "mean, and dp none or local"
        )
    if capabilities.needs_all_updates:
        raise ValueError(f"{given}: {name} puts updates together by itself (weigh, aggregate)")
    if rule and capabilities.unequal:
        raise ValueError(f"{given}: takes contributions as equals; {capabilities.unequal}, allowed is mean")
