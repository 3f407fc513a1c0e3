"""A ClientApp's process has more than Flower's five seconds to hand over a large state."""

import sys

import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp  # noqa: F401 (with it the module of a process's end)

from strategies import cache_frozen_parameters, compress_updates
from strategies.flower import messages
from strategies.flower.internals import LONGEST_END


@pytest.mark.parametrize("mod", [cache_frozen_parameters, compress_updates])
def test_a_mod_that_keeps_arrays_has_time_to_hand_them_over(mod, monkeypatch):
    monkeypatch.setattr(sys.modules["flwr.supercore.exit.exit"], "FORCE_EXIT_TIMEOUT_SECONDS", 5)
    request = messages.request(messages.TRAIN, 1, ConfigRecord({}), ttl=60.0)
    mod(request, Context(1, 2, {}, RecordDict(), {}), lambda message, _: message)
    assert sys.modules["flwr.supercore.exit.exit"].FORCE_EXIT_TIMEOUT_SECONDS == LONGEST_END
