"""Which methods can have robust rules, central noise or secure sums, by what their classes declare."""

from dataclasses import fields

from strategies.core.capabilities import Capabilities
from strategies.core.config import RobustConfig, SecureConfig, StrategyConfig

# The fields of robust rules alone, and those of secure sums.
_OF_RULES = {field.name for field in fields(RobustConfig)} - {field.name for field in fields(StrategyConfig)}
_OF_SUMS = {field.name for field in fields(SecureConfig)} - {field.name for field in fields(StrategyConfig)}


def takes_rule(capabilities: Capabilities) -> bool:
    """Return True if a robust rule can stand in place of a method's weighted mean."""
    return not (capabilities.past_protection or capabilities.needs_all_updates or capabilities.unequal)


def needs_sums_alone(capabilities: Capabilities) -> bool:
    """Return True if the sum of an aggregation's updates is enough for a method, so that clients may mask theirs."""
    return capabilities.streams and not (capabilities.reads_updates or capabilities.own_start)


def may_set(config: type[StrategyConfig], capabilities: Capabilities, name: str) -> bool:
    """Return True if a method's config has the field ``name``, and the field may differ from its default."""
    if name in _OF_RULES and not takes_rule(capabilities):
        return False
    if name in _OF_SUMS and not needs_sums_alone(capabilities):
        return False
    return name in {field.name for field in fields(config)}


def check_protection(name: str, capabilities: Capabilities, given: str, *, rule: bool) -> None:
    """Raise ValueError if a method can't have what ``given`` names: a robust ``rule``, or central noise."""
    if capabilities.past_protection:
        raise ValueError(
            f"{given}: {capabilities.past_protection} as they came, past what protects the global one; allowed are "
            "mean, and dp none or local"
        )
    if capabilities.needs_all_updates:
        raise ValueError(
            f"{given}: {name} puts updates together by itself (weigh, aggregate); allowed are mean, and dp none or "
            "local"
        )
    if rule and capabilities.unequal:
        raise ValueError(f"{given}: takes contributions as equals; {capabilities.unequal}, allowed is mean")
