"""Next-character prediction, with adapters too: `dataset=custom.text:load model=custom.text:Transformer`.

`Transformer` is GPT-2 from a config (of transformers, no weights are downloaded); `with_adapters` and `adapted_from`
make the same with frozen weights and adapters (of peft).
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from strategies.streams import generator

LENGTH = 32
VOCABULARY = 96  # the printable characters of ASCII, from the space on; all others count as a space

# What each speaker of the generated text speaks of.
_NOUNS = [
    "king",
    "crown",
    "sword",
    "ship",
    "storm",
    "rose",
    "moon",
    "night",
    "heart",
    "coin",
    "wine",
    "ghost",
]
_VERBS = ["brings", "finds", "loves", "fears", "keeps", "breaks", "seeks", "praises"]


def load(seed: int, data_path: str = "") -> dict[str, Any]:
    """Return rows of 32 characters, the character after each, and who speaks.

    Parameters
    ----------
    seed : int
        Of the generated text.
    data_path : str
        A text in which a paragraph is a speech, its first line the speaker and a colon, as editions of plays have it;
        "": a small generated one, whose speakers have words of their own.

    Returns
    -------
    dict
        x_train and y_train, int64 (N, 32): a row that is shorter is padded with spaces, whose targets are -100 and
        don't count; group_train (N,): the speaker, a natural client.
    """
    speeches = _read(Path(data_path).read_text("utf-8")) if data_path else _generated(seed)
    rows = [(speaker, row) for speaker, text in speeches.items() for row in _rows(text)]
    x, y = (np.stack([row[place] for _, row in rows]) for place in (0, 1))
    return {"x_train": x, "y_train": y, "group_train": np.array([speaker for speaker, _ in rows])}


def _rows(text: str) -> list[tuple[np.ndarray, np.ndarray]]:
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64) - 32
    codes = np.where((codes >= 0) & (codes < VOCABULARY), codes, 0)
    pieces = [codes[start : start + LENGTH + 1] for start in range(0, len(codes) - 1, LENGTH)]
    x = [np.pad(piece[:-1], (0, LENGTH + 1 - len(piece))) for piece in pieces]
    y = [np.pad(piece[1:], (0, LENGTH + 1 - len(piece)), constant_values=-100) for piece in pieces]
    return list(zip(x, y, strict=True))


def _read(text: str) -> dict[str, str]:
    speeches: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        speaker, _, spoken = paragraph.strip().partition("\n")
        if speaker.endswith(":") and spoken:
            speeches[speaker[:-1]] = f"{speeches.get(speaker[:-1], '')}{spoken}\n"
    return speeches


def _generated(seed: int) -> dict[str, str]:
    rng = generator(seed, "generated-text")
    speeches = {}
    for speaker in range(20):
        nouns, verbs = rng.choice(_NOUNS, 5, replace=False), rng.choice(_VERBS, 3, replace=False)
        words = [(rng.choice(nouns), rng.choice(verbs), rng.choice(nouns)) for _ in range(30)]
        speeches[f"speaker {speaker}"] = "".join(f"The {a} {verb} the {b}. " for a, verb, b in words)
    return speeches


class Transformer(nn.Module):
    """Two layers of GPT-2 with random weights; dropout is off."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2)
        config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
        self.net: nn.Module = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 32) → (B, 32, 96)."""
        logits: Tensor = self.net(input_ids=x.long(), use_cache=False).logits
        return logits


def adapted(model: Transformer, rank: int = 4) -> Transformer:
    """Freeze a model and give its layers adapters of low rank, W + B A (LoRA: Hu et al. 2021)."""
    from peft import LoraConfig, get_peft_model

    layers = ["c_attn", "c_proj", "c_fc"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, fan_in_fan_out=True)
    model.net = get_peft_model(model.net, config)
    return model


def with_adapters() -> Transformer:
    """Make the transformer with adapters; its other weights are random, and stay so."""
    return adapted(Transformer())


def adapted_from(path: Path, rank: int = 4) -> Transformer:
    """Make the transformer with the weights of a run's model.safetensors, frozen, and adapters."""
    from safetensors.torch import load_file

    model = Transformer()
    model.load_state_dict(load_file(path))
    return adapted(model, rank)
