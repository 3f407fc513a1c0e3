"""How a reply becomes a contribution in both loops: check → bound → clip → on_client_model (updates/pipeline.py)."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from flwr.app import ConfigRecord, Message, MetricRecord

from strategies.clients import client_metrics
from strategies.clients.roster import Client
from strategies.core.capabilities import Capabilities
from strategies.core.compressed_updates import CompressedUpdates
from strategies.core.config import PrivateConfig, StrategyConfig, SynchronousConfig
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.grids import Work
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.pipeline import (
    Bound,
    Check,
    Clip,
    Contribution,
    LocalModel,
    ModelCallback,
    UpdateTransform,
    pipeline,
)
from strategies.updates.safeguards import Safeguards


class LocalHooks(Protocol):
    """What the receiver asks of the method; see ``FederatedStrategy``."""

    capabilities: ClassVar[Capabilities]

    def local_rule(self) -> dict[str, float]:
        """Return the fields of training messages that define the algorithm's local step."""

    def on_local_model(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated."""


class Receiver:
    """Turns replies into contributions.

    Parameters
    ----------
    hooks : LocalHooks
        The method.
    clip : Clip or AdaptiveClip, optional
        The clipping of central differential privacy.
    compressed : CompressedUpdates, optional
        The compression that clients were asked for.
    updates : callable, optional
        A link of the chain that keeps the clients' last updates.
    """

    def __init__(
        self,
        run: RunState,
        safeguards: Safeguards,
        hooks: LocalHooks,
        *,
        clip: Clip | AdaptiveClip | None = None,
        compressed: CompressedUpdates | None = None,
        updates: UpdateTransform | None = None,
    ) -> None:
        self._run, self._safeguards, self._hooks = run, safeguards, hooks
        self.clip, self._compressed, self._updates = clip, compressed, updates
        config, able = run.config, hooks.capabilities
        self._requires_num_examples = config.client_weights == "samples"
        self._bound = config.update_norm_bound  # S: a longer update is shortened to it; 0: no bound
        self._masked = config.uses_secure_sums
        self._extra_reply_bytes = able.extra_reply_bytes
        self._on_local_model = hooks.on_local_model if able.sees_single_updates else None

    def check(self) -> Check:
        """Return the check of replies, which takes the buffers (values that aren't trained) out of the model."""
        compressed, run = self._compressed, self._run
        return Check(
            run.layout,
            run.flower.arrayrecord_key,
            run.flower.weighted_by_key,
            requires_num_examples=self._requires_num_examples,
            most_bytes=self.most_bytes,
            buffers=run.buffers,
            more=None if self._safeguards.active else self._trained_on_more,
            measures=self._safeguards.learns_norms,
            converts=self._converts,
            **({} if compressed is None else _compressed_replies(compressed, self._run)),
        )

    def most_bytes(self) -> int:
        """Return the most bytes of a reply: a model, the most that was sent beside one, and 1 MiB, or as declared."""
        run, compressed = self._run, self._compressed
        reader = None if compressed is None else compressed.reader(run.layout)
        masked = 4 * run.layout.size if self._masked else 0  # more than the model's of half precision
        model = max(run.layout.most_bytes, masked, 0 if reader is None else reader.num_bytes)
        frozen = 0 if run.frozen is None else run.frozen.max_reply_bytes  # a client may send the whole model
        return model + frozen + run.max_extra_bytes + self._extra_reply_bytes + messages.MOST_BESIDE

    def _trained_on_more(self, client: Client, said: float) -> None:
        """Warn once of a client that trains on more examples than it described; without safeguards it counts."""
        self._run.warn_once(
            "client %s says %s = %s, and described itself with %s: clients count by the sizes that they described",
            client.display_name,
            self._run.flower.weighted_by_key,
            said,
            client.num_examples,
        )

    def _converts(self, client: Client, dtypes: str) -> None:
        """Say once that a client replies in another precision, which the model doesn't take over."""
        self._run.warn_once("%s replies with %s, which keeps its own dtypes", client, dtypes)

    def transforms(self) -> UpdateTransform:
        """Return the chain of steps for a local model between the check and the sum."""
        safeguards, on_client_model = self._safeguards, self._run.options.on_client_model
        return pipeline(
            Bound(self._bound, self._run.buffers) if self._bound else None,
            self.clip,
            safeguards.norms if safeguards.learns_norms else None,
            ModelCallback(self._on_local_model) if self._on_local_model else None,
            self._updates,
            ModelCallback(lambda client, model: on_client_model(client.index, model))
            if on_client_model
            else None,
        )

    @property
    def reads_models(self) -> bool:
        """Whether a step between the check and the sum reads whole models: any but the usual norm."""
        readers = self._compressed, self.clip, self._on_local_model, self._updates
        hooked = self._run.options.on_client_model is not None
        return bool(self._bound) or hooked or any(reader is not None for reader in readers)

    @property
    def bounds_updates(self) -> bool:
        """Whether updates that are too long are shortened, and reported as clipped."""
        return (bool(self._bound) or self._safeguards.learns_norms) and self.clip is None

    def contribution(
        self, local: LocalModel, reply: Message | Work, version: int, staleness: int, sent: Iterable[str] = ()
    ) -> Contribution:
        """Return the contribution of a local model after the chain; ``sent``: records beside the model, by name."""
        if isinstance(reply, Message):
            self.check_reply_metadata(local.client, reply, sent)
        return Contribution.of(local, reply, version, staleness, self._run.flower.arrayrecord_key)

    def check_reply_metadata(self, client: Client, reply: Message, sent: Iterable[str]) -> None:
        """Warn once of what a client's valid reply says beside its model; ``sent``: records beside the model."""
        self._check_applied(reply, sent)
        self._check_names(client, messages.metrics_of(reply))

    def extra_names(self, sent: Iterable[str]) -> list[str]:
        """Return the names of the records beside the model, without a record in place of the model."""
        return [name for name in sent if name != self._run.flower.arrayrecord_key]

    def _check_applied(self, reply: Message, sent: Iterable[str]) -> None:
        """Warn once if a client doesn't confirm that its local steps follow the method's rule."""
        asked = [*self._hooks.local_rule(), *self.extra_names(sent)]
        extra_records = messages.extra_records_of(reply, self._run.flower.arrayrecord_key)
        applied = extra_records.get(messages.APPLIED)
        done = dict(applied) if isinstance(applied, ConfigRecord) else {}
        records = done.get(messages.RECORDS)
        known: Sequence[Any] = [*done, *(records if isinstance(records, list) else [])]
        if missing := [name for name in asked if name not in known]:
            self._run.warn_once(
                "clients don't say that their local steps go by %s: if they don't, this is another method "
                "(a reply says so in its ConfigRecord %r)",
                ", ".join(missing),
                messages.APPLIED,
            )

    def _check_names(self, client: Client, metrics: MetricRecord) -> None:
        """Warn once if clients report metrics under names of the server's own."""
        for name in messages.values_of(metrics):
            if messages.is_ours(name):
                self._run.warn_once(
                    "%s reports a metric %r, a name of the server's own: the clients' is %r",
                    client,
                    name,
                    client_metrics.OF_TRAINING + name,
                )


def clipping(config: StrategyConfig) -> Clip | AdaptiveClip | None:
    """Return the clipping of central differential privacy, None without it."""
    if not isinstance(config, PrivateConfig) or config.dp != "central":
        return None
    if isinstance(config, SynchronousConfig) and not config.dp_clipping_norm:
        return AdaptiveClip(config.dp_clipping_quantile)
    return Clip(config.dp_clipping_norm)


def _compressed_replies(compressed: CompressedUpdates, run: RunState) -> dict[str, Any]:
    return {"compression": compressed.reader(run.layout), "whole": compressed.whole_model_came}
