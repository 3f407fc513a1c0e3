"""FedAvg by hand in JAX: a scan over a client's steps, a map over clients, and the clients divided over devices.

XLA takes each core for a device. Of dense models only. A vmap over clients in place of the map took 1.6 times as long
on a CPU.
"""

import os
from functools import partial
from typing import Any

import numpy as np

from fedapp.training.layers import dense_layers
from studies.benchmarks.hand_written import HandWritten, Integers
from studies.benchmarks.job import Job, Log

Weights = list[tuple[Any, Any]]  # of each layer (in, out) and (out,)


def run(job: Job) -> Log:
    """Run a job."""
    # Read when JAX starts: so it is imported after this.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.threads}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    return JaxLoop(job).run()


class JaxLoop(HandWritten):
    """Weights as a list of layers.

    Raises
    ------
    ValueError
        If the model isn't one of dense layers.
    """

    def __init__(self, job: Job) -> None:
        import jax
        import jax.numpy as jnp

        super().__init__(job)
        layers = dense_layers(self.model)
        if not layers:
            raise ValueError(f"model = {job.model!r}: written for dense layers")
        named = {name: value.detach().numpy() for name, value in self.model.named_parameters()}
        self.state: Weights = [(jnp.array(named[w].T), jnp.array(named[b])) for w, b in layers]
        shape = (job.num_clients, self.rows)
        self.inputs = self.x.numpy().reshape(*shape, -1)
        self.labels = self.y.numpy().reshape(shape)
        number = jax.local_device_count() if job.participants % jax.local_device_count() == 0 else 1
        mesh = jax.make_mesh((number,), ("clients",), devices=jax.devices()[:number])
        whole, divided = jax.P(), jax.P("clients")
        on_each = jax.shard_map(
            self._on_a_device, mesh=mesh, in_specs=(whole, *[divided] * 3), out_specs=whole, check_vma=False
        )
        self._round = jax.jit(on_each)
        self._divided = partial(jax.device_put, device=jax.NamedSharding(mesh, divided))
        self._placed: tuple[bytes, Any, Any] = (b"", None, None)

    @staticmethod
    def _logits(w: Weights, x: Any) -> Any:
        import jax

        *hidden, (weight, bias) = w
        for above, shift in hidden:
            x = jax.nn.relu(x @ above + shift)
        return x @ weight + bias

    def _loss(self, w: Weights, x: Any, y: Any, real: Any) -> Any:
        import jax
        import jax.numpy as jnp

        log_p = jax.nn.log_softmax(self._logits(w, x))
        losses = -jnp.take_along_axis(log_p, y[:, None], 1)[:, 0]
        return (losses * real).sum() / real.sum()

    def _on_a_device(self, w: Weights, x: Any, y: Any, batches: Any) -> Weights:
        """Return the mean of the models of all clients, those of a device trained here."""
        import jax

        def step(w: Weights, rows: Any, x: Any, y: Any) -> Weights:
            gradient = jax.grad(self._loss)(w, x[rows], y[rows], rows >= 0)
            return jax.tree.map(lambda value, g: value - self.job.lr * g, w, gradient)

        def client(own: tuple[Any, Any, Any]) -> Weights:
            x, y, batches = own
            trained: Weights = jax.lax.scan(lambda w, rows: (step(w, rows, x, y), None), w, batches)[0]
            return trained

        trained = jax.lax.map(client, (x, y, batches))
        mean: Weights = jax.tree.map(
            lambda value: jax.lax.psum(value.sum(0), "clients") / self.job.participants, trained
        )
        return mean

    def round(self, chosen: Integers, batches: Integers) -> None:
        """Let clients train, each device its share."""
        import jax

        key = chosen.tobytes()
        if self._placed[0] != key:  # the same participants as before have their rows there
            self._placed = (key, *(self._divided(each[chosen]) for each in (self.inputs, self.labels)))
        self.state = jax.block_until_ready(self._round(self.state, *self._placed[1:], self._divided(batches)))

    def accuracy(self) -> float:
        """Share of the test rows that the model gets right."""
        x = self.x_test.numpy().reshape(len(self.x_test), -1)
        found = np.asarray(self._logits(self.state, x)).argmax(1)
        return float((found == self.y_test.numpy()).mean())
