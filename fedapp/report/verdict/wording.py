"""The sentences of a verdict, each with the number of seeds and the correction for several pairs."""

import math
from collections.abc import Sequence

from fedapp.report.series import DIGITS, metric_text
from fedapp.report.verdict.paired import DEVIATION_LEVEL, MOST_SEEDS, POWER
from fedapp.report.verdict.verdict import Pair, Verdict

_NAMED = 3  # settings that a sentence names
_MORE = f"more than {MOST_SEEDS:,}"
_IN_BRACKETS = f"; in brackets by the {100 * (1 - DEVIATION_LEVEL):g} % interval of the deviation alone"
_WITH_POWER = f"with {100 * POWER:.0f} % power"


def sentences_on(verdict: Verdict, *, higher: bool) -> tuple[str, ...]:
    """Return which setting leads and by how much, and how many seeds would do where none leads."""
    if len(verdict.means) < 2:
        return ("There are no two settings to compare.",)
    of_best = [pair for pair in verdict.pairs if pair.better == verdict.best]
    if len(of_best) < len(verdict.means) - 1:
        return ("Settings have no seed in common, so that they can't be compared in pairs.",)
    if max(pair.seeds for pair in of_best) < 2:
        return (_on_one_seed(verdict, of_best[0]),)
    if len(verdict.means) == 2:
        return (_on_two(verdict, of_best[0]),)
    if verdict.leader:
        return (_on_leader(verdict, of_best, "higher" if higher else "lower"),)
    open_pairs = [pair for pair in of_best if not pair.apart]
    return (_on_none(verdict, of_best, open_pairs), *_needed(open_pairs))


def _on_one_seed(verdict: Verdict, pair: Pair) -> str:
    if pair.is_tie:
        mean = _number(verdict.means[pair.better], pair)
        return (
            f"1 seed can't tell settings apart: {pair.better} and {pair.other} are equal on it ({verdict.metric} "
            f"{verdict.place}: {mean}); a test needs two seeds or more."
        )
    return (
        f"1 seed can't tell settings apart: {verdict.best} has the best {verdict.metric} {verdict.place}, "
        f"{_means(verdict, pair)}; a test needs two seeds or more."
    )


def _on_two(verdict: Verdict, pair: Pair) -> str:
    """Return the one sentence on two settings, which need no correction."""
    better, other, number = pair.better, pair.other, pair.seeds
    means = _means(verdict, pair)
    if pair.is_tie:
        return (
            f"{better} and {other} are equal on all {number} seeds ({verdict.metric} {verdict.place}): a tie."
        )
    if pair.apart:
        return (
            f"{better} leads {other} by {_number(pair.difference, pair)} in {verdict.metric} {verdict.place}, "
            f"{means} ({_interval(pair)}, {_p(pair.p)}, {_test(pair)} over {number} seeds)."
        )
    return (
        f"{number} seeds can't tell {better} from {other} by {verdict.metric} {verdict.place}: {means}, a difference "
        f"of {_number(pair.difference, pair)} ({_interval(pair)}, {_p(pair.p)}, {_test(pair)}); {_seeds(pair)} would "
        f"{_WITH_POWER}, if the true difference is the one seen{_in_brackets([pair])}."
    )


def _on_leader(verdict: Verdict, of_best: Sequence[Pair], word: str) -> str:
    closest, weakest = of_best[0], max(pair.p for pair in of_best)
    bound = f"all {_p(weakest).replace('=', '≤')}, " * (weakest > closest.p)
    return (
        f"{verdict.leader} leads by {verdict.metric} {verdict.place}: {_number(closest.difference, closest)} {word} "
        f"than {closest.other}, the next, {_means(verdict, closest)} ({_interval(closest)}, {_p(closest.p)}), and "
        f"apart from all {len(of_best)} others ({bound}{_method(verdict)})."
    )


def _on_none(verdict: Verdict, of_best: Sequence[Pair], open_pairs: Sequence[Pair]) -> str:
    first = open_pairs[0]
    rest = [f"{pair.other} ({_p(pair.p)})" for pair in open_pairs[1:]]
    beaten = [pair for pair in of_best if pair.apart]
    number = _range([pair.seeds for pair in open_pairs])
    if first.is_tie:
        against = f"{first.other}, which is equal on every seed"
    else:
        against = (
            f"{first.other} ({_means(verdict, first)}, a difference of {_number(first.difference, first)}, "
            f"{_interval(first)}, {_p(first.p)})"
        )
    return (
        f"{number} seeds can't tell which setting leads by {verdict.metric} {verdict.place}: {verdict.best} has the "
        f"best mean, but isn't apart from {against}"
        + (f", nor from {_named(rest, 'or')}" if rest else "")
        + (f"; it is apart from {_apart_from(beaten)}" if beaten else "")
        + f" ({_method(verdict)})."
    )


def _apart_from(beaten: Sequence[Pair]) -> str:
    """Name the settings that the best one is apart from: one with its difference, several with their p-values."""
    if len(beaten) > 1:
        return _named([f"{pair.other} ({_p(pair.p)})" for pair in beaten])
    (pair,) = beaten
    return f"{pair.other} (a difference of {_number(pair.difference, pair)}, {_interval(pair)}, {_p(pair.p)})"


def _needed(open_pairs: Sequence[Pair]) -> list[str]:
    """Return how many seeds would tell the best setting from the others, if they aren't equal to it."""
    unequal = [pair for pair in open_pairs if not pair.is_tie][:_NAMED]
    if not unequal:
        return []
    first, *rest = unequal
    more = "".join(f", from {pair.other} {_seeds(pair)}" for pair in rest)
    return [
        f"To tell {first.better} from {first.other} would take {_seeds(first)} seeds{more}, if the true differences "
        f"are those seen ({_WITH_POWER} at each pair's corrected level{_in_brackets(unequal)})."
    ]


def _seeds(pair: Pair) -> str:
    """Return how many seeds would tell a pair apart, and in brackets the range by the deviation's interval."""
    if pair.needed_from is None:
        return _MORE
    middle = _MORE if pair.needed is None else f"about {pair.needed}"
    if pair.needed_from == pair.needed_to:
        return middle
    return f"{middle} ({pair.needed_from} to {_MORE if pair.needed_to is None else pair.needed_to})"


def _in_brackets(pairs: Sequence[Pair]) -> str:
    """Return what the numbers of seeds in brackets are; "" where none is."""
    return _IN_BRACKETS * any(
        pair.needed_from is not None and pair.needed_from != pair.needed_to for pair in pairs
    )


def _test(pair: Pair) -> str:
    """Return the name of the test of a pair: differences that are all equal have no t."""
    return "sign test" if pair.deviation == 0 and pair.difference else "paired t-test"


def _method(verdict: Verdict) -> str:
    seeds = _range([pair.seeds for pair in verdict.pairs])
    signs = ", sign tests where differences are all equal" * ("sign test" in map(_test, verdict.pairs))
    number = len(verdict.pairs)
    return f"paired t-tests over {seeds} seeds{signs}, p-values and intervals by Holm over all {number} pairs"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _named(settings: Sequence[str], word: str = "and") -> str:
    more = len(settings) - _NAMED
    if more > 0:
        return f"{', '.join(settings[:_NAMED])} {word} {more} more"
    return f" {word} ".join([", ".join(settings[:-1]), settings[-1]]) if len(settings) > 1 else settings[0]


def _means(verdict: Verdict, pair: Pair) -> str:
    better, other = (_number(verdict.means[name], pair) for name in (pair.better, pair.other))
    return f"{better} against {other}"


def _interval(pair: Pair) -> str:
    if pair.low == pair.high:
        return "the same on every seed"
    return f"{100 * (1 - pair.level):.4g} % interval {_number(pair.low, pair)} to {_number(pair.high, pair)}"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _number(value: float, pair: Pair) -> str:
    """Write a number as tables do, with more decimals if two digits of the pair's difference need them."""
    size = abs(pair.difference)
    decimals = min(1 - math.floor(math.log10(size)), 6) if size else DIGITS
    return metric_text(value, max(decimals, DIGITS))
