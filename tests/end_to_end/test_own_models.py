"""A stranger's module in a folder of its own, by the command: tokens, pixels, adapters, FedBN, several inputs."""

import subprocess

import pytest

from tests.end_to_end.processes import ROOT, command_of, environment_of
from tests.runs import summary_of

KINDS = {
    "several": ("mine:baskets", "mine:TwoInputs", "optimizer=adam lr=0.02", "accuracy", 0.5, 1),
    "tokens": ("mine:texts", "mine:NextToken", "metrics=perplexity,accuracy lr=0.3", "perplexity", 0, 12),
    "pixels": (
        "mine:pictures",
        "mine:UNet",
        "metrics=iou optimizer=adam lr=0.02 local-epochs=2",
        "iou",
        0.2,
        1,
    ),
    "adapters": (
        "play:load",
        "play:with_adapters",
        "metrics=perplexity partitioner=natural optimizer=adamw lr=0.01 local-epochs=2",
        "perplexity",
        1,
        90,
    ),
    "normalised": ("digits", "mine:normalised", "personal=1.* lr=0.05", "personal-accuracy", 0.5, 1),
    "numbers": ("mine:heights", "mine:wide_convolution", "loss=mse", "r2", 0.2, 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.ci] if kind == "several" else []) for kind in KINDS]
)
def test_the_command_trains_a_strangers_model(kind, tmp_path):
    if kind == "adapters":
        pytest.importorskip("peft", reason="peft isn't installed")
        pytest.importorskip("transformers", reason="transformers isn't installed")
    data, model, keys, metric, least, most = KINDS[kind]
    own = (ROOT / "tests" / "own_models.py").read_text("utf-8")
    pictures = (ROOT / "custom" / "pictures.py").read_text("utf-8").replace("def load", "def pictures")
    (tmp_path / "mine.py").write_text(own + pictures, "utf-8")
    (tmp_path / "play.py").write_text((ROOT / "custom" / "text.py").read_text("utf-8"), "utf-8")
    given = f"dataset={data} model={model} {keys} num-clients=3 num-server-rounds=4 run-name=run"
    done = subprocess.run(
        command_of("fedapp", "run", *given.split()),
        cwd=tmp_path,
        env=environment_of(tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert least < summary_of(tmp_path / "results" / "run")[metric] < most
