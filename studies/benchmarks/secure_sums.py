"""What a round of secure sums costs beside a plain one: messages, bytes and processor seconds.

    python -m studies.benchmarks.secure_sums 10 100 1000 --values 1000000

The parts of a round are measured as clients and server do them, without a network: all of one client's, and of the
server's one recovered seed, one recovered key and one addition, times how often a round has them. Where a third of
the clients goes, it goes after it has dealt its shares, which costs the server most.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from strategies import messages, streams
from strategies.flower.arrays import pack
from strategies.flower.secure_aggregation import (
    combine_shares,
    create_shares,
    encrypt,
    share_keys_plaintext_concat,
)
from strategies.secure.client import ClientSession, PublicKeys
from strategies.secure.graph import graph_of, terms_for
from strategies.secure.masking import Quantizer, own_mask, pairwise_mask, shared_key

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """A round's cost.

    Attributes
    ----------
    clients, neighbours, threshold : int
        n, k and t.
    up, down : int
        Bytes of one client, of its masked update and the model in float32 (``plain`` bytes), too.
    plain : int
        Bytes of a plain update, and of the model.
    client : float
        Processor seconds of one client, beside its training.
    all_stay, third_goes : float
        Processor seconds of the server where all clients stay, and where a third goes.
    """

    clients: int
    neighbours: int
    threshold: int
    up: int
    down: int
    plain: int
    client: float
    all_stay: float
    third_goes: float

    #: Messages to a client, each with its reply; a plain round has one.
    messages = 4


def measure(clients: int, values: int) -> Cost:
    """Measure a round of so many clients, of a model of so many values."""
    rng = streams.generator(0, "secure-sums", clients)
    k, t = terms_for(clients)
    near = graph_of(range(clients), k, rng)[0]
    session, keys_seconds = _timed(lambda: (made := ClientSession(0, t), made.keys())[0])
    neighbours = {each: ClientSession(each, t) for each in near}
    keys = {each: neighbour.keys() for each, neighbour in neighbours.items()}
    dealt, share_seconds = _timed(lambda: session.share(keys))
    # Of each neighbour the one share that is the client's.
    seed_share, key_share = (create_shares(secret, 2, 2)[0] for secret in (session.seed, session.mask_key))
    sealed = {
        each: encrypt(
            shared_key(neighbour.seal_key, session.keys().seal),
            share_keys_plaintext_concat(each, 0, seed_share, key_share),
        )
        for each, neighbour in neighbours.items()
    }
    update = rng.normal(size=values) / 100
    quantizer = Quantizer.for_sum(1.0, clients)
    masked, mask_seconds = _timed(lambda: session.mask(sealed, quantizer.encode(update, 1.0, rng)))
    gone = near[: k // 3]
    revealed, reveal_seconds = _timed(lambda: session.reveal(near[k // 3 :], gone))
    up = (
        _bytes(seal=keys[near[0]].seal, mask=keys[near[0]].mask)
        + _bytes(clients=near, sealed=list(dealt.sealed.values()), commitment=dealt.commitment)
        + messages.record_bytes(ArrayRecord({"values": pack(masked)}))
        + _bytes(clients=list(revealed), shares=list(revealed.values()))
    )
    plain = messages.record_bytes(ArrayRecord({"values": pack(update.astype(np.float32))}))
    known = list(keys.values())
    down = (
        _bytes(threshold=t)
        + _bytes(clients=near, seal=[each.seal for each in known], mask=[each.mask for each in known])
        + _bytes(clients=near, sealed=list(sealed.values()))
        + plain
        + _bytes(here=near[k // 3 :], gone=gone)
    )
    left = clients // 3
    own, pairs, adding = _server_seconds(session, known, masked, t, k - k // 3)
    all_stay, third_goes = clients * (own + adding), (clients - left) * (own + adding) + left * pairs
    client = keys_seconds + share_seconds + mask_seconds + reveal_seconds
    return Cost(clients, k, t, up, down, plain, client, all_stay, third_goes)


def _server_seconds(
    session: ClientSession, keys: list[PublicKeys], masked: "np.ndarray", threshold: int, stayed: int
) -> tuple[float, float, float]:
    """Return the seconds of taking off one client's own mask, the masks of one that has gone, and of one addition."""
    total, size = masked.copy(), len(masked)
    number = len(session.neighbours)
    seeds = create_shares(session.seed, threshold, number)[:threshold]
    shares = create_shares(session.mask_key, threshold, number)[:threshold]

    def own() -> None:
        total.__isub__(own_mask(combine_shares(seeds), size))

    def pairs() -> None:
        key = combine_shares(shares)
        for public in keys[:stayed]:
            total.__iadd__(pairwise_mask(shared_key(key, public.mask), size))

    return _timed(own)[1], _timed(pairs)[1], _timed(lambda: total.__iadd__(masked))[1]


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def _bytes(**fields: object) -> int:
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    stage = {"stage": "masked", "session": 2**61, "client": 1}
    return messages.record_bytes(ConfigRecord({**stage, **known}))  # type: ignore[dict-item]


def table(costs: list[Cost]) -> str:
    """Return the costs as a table in Markdown."""
    lines = [
        "| clients | k | t | messages to a client | sent by a client | sent to a client | seconds of a client | "
        "of the server, if all stay | if a third goes |",
        f"|{'---|' * 9}",
    ]
    for cost in costs:
        seconds = (cost.client, cost.all_stay, cost.third_goes)
        cells: list[object] = [cost.clients, cost.neighbours, cost.threshold, cost.messages]
        cells += [f"{size / 1e6:.2f} MB" for size in (cost.up, cost.down)]
        cells += [f"{each:.0f}" if each > 10 else f"{each:.2g}" for each in seconds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a round of secure sums costs.")
    parser.add_argument("clients", type=int, nargs="+")
    parser.add_argument("--values", type=int, default=1_000_000)
    given = parser.parse_args()
    print(table([measure(number, given.values) for number in given.clients]))
