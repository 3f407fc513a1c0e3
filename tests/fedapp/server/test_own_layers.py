"""Layers of devices' own: kept in each one's folder for this run, and there again when a device starts anew."""

from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from fedapp.client.kept import ENDING, RECORD
from fedapp.federation.own_layers import BEFORE, TASK
from strategies.flower.arrays import unpack
from strategies.flower.internals import context_from_bytes
from tests.fedapp.server.conftest import NAMES, Devices
from tests.runs import lines_of


class Forgetful(Devices):
    """Devices with a folder each, whose SuperNodes start anew after each message."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NAMES)
        for context in self.contexts.values():
            context.node_config["state-path"] = str(folder / str(context.node_id))

    def _work(self, message: Message) -> Message:
        reply = super()._work(message)
        self.contexts[message.metadata.dst_node_id].state = RecordDict()
        return reply


def test_a_device_keeps_its_layers_in_its_folder(go, tmp_path):
    keys: dict[str, Any] = {"model": "mlp", "personal": "3.*", "clock": "virtual", "client_evaluation": True}
    path = go(grid=Forgetful(tmp_path / "state"), **keys)
    scores = [line.get("personal-loss") for line in lines_of(path)]
    assert scores[3] < scores[2] < scores[1]
    files = sorted((tmp_path / "state").glob(f"*/*{ENDING}"))
    assert len(files) == len(NAMES)
    assert len({file.name for file in files}) == 1  # the run's number
    for file in files:
        kept = context_from_bytes(file.read_bytes()).state[RECORD]
        assert isinstance(kept, ArrayRecord)
        assert set(kept) == {TASK, "3.weight", "3.bias", f"{BEFORE}3.weight", f"{BEFORE}3.bias"}
        assert unpack(kept[TASK]).tolist() == [3]
        before, after = (unpack(kept[name]) for name in (f"{BEFORE}3.weight", "3.weight"))
        assert (before != after).any()
