"""Wrong shares in a secure sum: whose are found, and what becomes of the sum; and what a client refuses a server."""

from collections.abc import Callable

import numpy as np
import pytest

from strategies.secure.client import ClientSession, PublicKeys, SealedShares
from strategies.secure.masking import HEADER, SecureSumError
from tests.strategies.secure.sums import Sum

VALUES = [np.full(HEADER + 3, i, np.uint32) for i in range(7)]


def with_keys():
    """Return a sum of four clients whose keys the server has, and what it tells each of its neighbours."""
    each = Sum.of(4)
    for session in each.clients.values():
        each.server.take_keys(session.client, session.keys())
    return each, each.server.keys_for()


@pytest.mark.parametrize("gone", [{}, {6: 2}])
def test_a_liar_about_shares_is_found_and_the_sum_is_right(gone: dict[int, int]) -> None:
    each = Sum.of(7, gone)
    total = each.total(VALUES, lies={0: range(7)})
    assert (total == sum(i for i in range(7) if i not in gone)).all()
    # The others' shares of client 0's own secret fit.
    assert each.server.liars == {0: [1, 2, 3, 4, 5, 6]}


def test_a_share_under_another_number_is_a_lie() -> None:
    each = Sum.of(4)
    each.until_masked(VALUES)
    for client, ask in each.server.unmask_requests().items():
        shares = each.clients[client].reveal(*ask)
        if client == 2:
            shares = {owner: b"\7" + share[1:] for owner, share in shares.items()}
        each.server.take_revealed(client, shares)
    assert (each.server.total() == 6).all()
    assert each.server.liars == {2: [0, 1, 3]}


def test_too_many_liars_end_the_sum_with_one_line() -> None:
    with pytest.raises(SecureSumError, match=r"^no 4 of 6 shares of client 0's secret fit together"):
        Sum.of(7).total(VALUES, lies={1: [0], 2: [0], 3: [0]})


def test_shares_that_a_client_dealt_wrong_end_the_sum_with_one_line() -> None:
    each, keys = with_keys()
    for client, session in each.clients.items():
        dealt = session.share(keys[client])
        if client == 1:
            session.seed = bytes(31)  # not what it dealt
        each.server.take_shares(client, dealt)
    for client, sealed in each.server.shares_for().items():
        each.server.take_masked(client, each.clients[client].mask(sealed, VALUES[client]))
    for client, ask in each.server.unmask_requests().items():
        each.server.take_revealed(client, each.clients[client].reveal(*ask))
    total = each.server.total()  # of what was dealt, which isn't what masks the update: the weights show it
    assert (total != 6).all()


def test_a_client_gives_a_server_one_share_of_each_neighbour_once() -> None:
    each = Sum.of(4)
    each.until_masked(VALUES)
    session = each.clients[0]
    with pytest.raises(SecureSumError, match=r"asked for both shares of a client \(2\)"):
        session.reveal([1, 2], [2, 3])
    with pytest.raises(SecureSumError, match="the stage 'unmask' doesn't follow: 'over' does"):
        session.reveal([1, 2], [3])


def _own(session: ClientSession) -> PublicKeys:
    return session.keys()


def _negated(keys: PublicKeys) -> PublicKeys:
    """Return the points of the curve with the other sign of y: 2 and 3 are the first bytes of the two."""
    return PublicKeys(*(bytes([5 - key[0]]) + key[1:] for key in (keys.seal, keys.mask)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (lambda s: {1: _own(ClientSession(1, 2))}, "1 neighbours for a threshold of 2"),
        (
            lambda s: {i: _own(ClientSession(i, 2)) for i in range(1, 5)},
            "a threshold of 2 lets two halves of 4 open both secrets",
        ),
        (lambda s: dict.fromkeys((1, 2), _own(ClientSession(1, 2))), "have a public key in common"),
        (lambda s: {1: _own(s), 2: _own(ClientSession(2, 2))}, "have a public key in common"),
        # The private key of a negated point is the other's, negated.
        (lambda s: {1: _negated(_own(s)), 2: _own(ClientSession(2, 2))}, "have a public key in common"),
        (
            lambda s: {i: PublicKeys(bytes([i]) * 33, bytes([9, i] * 17)) for i in (4, 5)},
            "no point of the curve",
        ),
    ],
)
def test_a_client_refuses_keys_that_cant_hide_it(
    keys: Callable[[ClientSession], dict[int, PublicKeys]], said: str
) -> None:
    session = ClientSession(0, 2)
    with pytest.raises(SecureSumError, match=said):
        session.share(keys(session))


def test_a_client_whose_shares_cant_be_opened_is_named() -> None:
    each, keys = with_keys()
    for client, session in each.clients.items():
        dealt = session.share(keys[client])
        if client == 1:  # each gets another one's
            rotated = dict(zip(dealt.sealed, [*list(dealt.sealed.values())[1:], b"none"], strict=True))
            dealt = SealedShares(rotated, dealt.commitment)
        each.server.take_shares(client, dealt)
    for client, sealed in each.server.shares_for().items():
        each.server.take_masked(client, each.clients[client].mask(sealed, VALUES[client]))
    for client, ask in each.server.unmask_requests().items():
        each.server.take_revealed(client, each.clients[client].reveal(*ask))
    with pytest.raises(SecureSumError, match=r"^0 shares of client 1's secret came, .* or it dealt none$"):
        each.server.total()
