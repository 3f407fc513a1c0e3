"""Adapters of peft on a transformer of transformers: engines agree, and what is frozen stays to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedapp
from custom import text
from tests.runs import arrays_of, close

RUN: dict[str, Any] = {
    "dataset": text.load,
    "partitioner": "natural",
    "num_clients": 3,
    "metrics": "accuracy,perplexity",
    "optimizer": "adamw",
    "lr": 0.01,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_of_a_trained_model_go_on_with_fedbuff(tmp_path):
    pytest.importorskip("peft", reason="peft isn't installed")  # and with it transformers
    RUN["results_dir"] = tmp_path
    whole = fedapp.run(**RUN, model=text.Transformer, num_server_rounds=2, run_name="whole")

    def adapted() -> Any:
        return text.adapted_from(whole.path / "model.safetensors")

    buffered = {"strategy": "fedbuff", "buffer_size": 2, "num_server_rounds": 4, "model": adapted}
    runs = [
        fedapp.run(**RUN, **buffered, engine=name, run_name=name) for name in ("sequential", "vectorized")
    ]
    assert close(*(run.path for run in runs))
    before, after = arrays_of(whole.path), arrays_of(runs[0].path)
    named = {name.removeprefix("net.base_model.model."): value for name, value in after.items()}
    for name, value in before.items():
        own = name.removeprefix("net.")
        kept = named.get(
            own, named.get(own.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias"))
        )
        assert np.array_equal(value, kept)  # type: ignore[arg-type]
    adapters = [name for name in after if "lora_" in name]
    assert sum(after[name].size for name in adapters) == 8192
    page = (Path(__file__).parents[2] / "docs/text.md").read_text("utf-8")
    for run, updates in ((whole, 3 * 2), (runs[0], 2 * 4)):
        assert f"takes {run.summary['bytes-up'] / updates / 1000:.1f} kB" in page
    first, last = runs[0].metrics["perplexity"].iloc[[0, -1]]
    assert last < first == pytest.approx(whole.summary["perplexity"])


def test_a_text_is_cut_into_rows_of_its_speakers(tmp_path):
    said = "abcdefghijklmnopqrstuvwxyz0123456"  # 33 characters: a whole row, and what follows its last
    (tmp_path / "play.txt").write_text(f"=== PLAY ===\n\nANNA:\n{said}\n\nBEN:\né!\n\nANNA:\nno\n", "utf-8")
    rows = text.load(0, str(tmp_path / "play.txt"))
    assert rows["group_train"].tolist() == ["ANNA", "ANNA", "BEN"]
    x, y = rows["x_train"], rows["y_train"]
    letters = ["".join(chr(code + 32) for code in row) for row in x]
    assert letters[0] == said[:32]
    assert [chr(code + 32) for code in y[0]] == list(said[1:])
    assert letters[1].rstrip() == "6 no"
    assert y[1, :5].tolist() == [0, ord("n") - 32, ord("o") - 32, 0, -100]
    assert (y[1, 4:] == -100).all()
    assert letters[2].rstrip() == "?!"
