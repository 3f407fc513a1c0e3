"""Convolutions of many clients at once, on a GPU: products of matrices, batched over the clients.

``torch.func.vmap`` makes one grouped convolution of the clients' convolutions, for which cuDNN launches a kernel for
each client. Here the inputs are unfolded ("im2col": Chellapilla, Puri & Simard 2006, section 3), in blocks of clients
that fit into memory, and a convolution is a batched product. Two ways to unfold are used:

- **whole windows**: a row of the unfolded inputs is all that an output sees, C R S values of a kernel R x S. The
  weights are read as they lie in memory, which matters where there are more weights than outputs.
- **rows of windows**: only the S neighbours in a row are unfolded, and R products, each of inputs one row further
  down, are added up. The unfolded inputs are R times smaller. The gradient with respect to the inputs is such a
  convolution, too, of the outputs' gradient with the kernel turned by 180 degrees.

Activations are laid out by channel (NHWC) where the model bears that: the product has this order.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Devices on which products are used; elsewhere, where they weren't compared, vmap's own rule is.
DEVICES = frozenset({"cuda"})

# Bytes of unfolded inputs of a block of clients.
UNFOLDED = 1 << 30

# Where rows of windows are unfolded: the fewest values of such a row, S C, and the fewest places B H' W' of outputs
# for each of their channels O. Both are from measurements on an H100 (studies/benchmarks/RESULTS.md).
SHORTEST_ROW, PLACES_PER_CHANNEL = 16, 4

# A copy moves 16 bytes at once where the number of channels allows it.
WIDE = torch.complex128


class Geometry(NamedTuple):
    """Padding with zeros (left, right, top, bottom), stride and dilation (each vertical, horizontal)."""

    padding: tuple[int, int, int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]

    def outputs(self, x: Tensor, w: Tensor) -> tuple[int, int]:
        """Return the height and the width of the outputs, for inputs (..., H, W) and kernels (..., R, S)."""
        left, right, top, bottom = self.padding
        sizes = x.shape[-2] + top + bottom, x.shape[-1] + left + right
        reach = [1 + d * (size - 1) for d, size in zip(self.dilation, w.shape[-2:], strict=True)]
        height, width = (
            1 + (size - own) // step for size, own, step in zip(sizes, reach, self.stride, strict=True)
        )
        return height, width

    def turned(self, w: Tensor) -> "Geometry":
        """Return the geometry of the gradient with respect to the inputs, for a stride of 1."""
        down, across = (d * (size - 1) for d, size in zip(self.dilation, w.shape[-2:], strict=True))
        left, right, top, bottom = self.padding
        padding = (across - left, across - right, down - top, down - bottom)
        return Geometry(padding, self.stride, self.dilation)


class Convolutions:
    """Has the two-dimensional convolutions of a module take products where they are those of many clients.

    Parameters
    ----------
    module : nn.Module
        The module, a copy for training; its layers are changed.

    Attributes
    ----------
    by_channel : bool
        Whether outputs may be laid out by channel (NHWC).
    """

    def __init__(self, module: nn.Module) -> None:
        self.by_channel = False
        self._are_there = False
        for layer in module.modules():
            if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
                self._are_there = True
                padding: Any = tuple(layer._reversed_padding_repeated_twice)
                stride: Any = layer.stride
                dilation: Any = layer.dilation
                geometry = Geometry(padding, stride, dilation)
                layer._conv_forward = partial(self._forward, geometry, layer._conv_forward)  # type: ignore[method-assign]

    def take_products(self, device: torch.device) -> bool:
        """Tell whether there are any, and those of many clients take products on a device."""
        return self._are_there and device.type in DEVICES

    def _forward(self, geometry: Geometry, own: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        is_batched = torch._C._functorch.is_batchedtensor
        if x.device.type not in DEVICES or x.dim() != 4 or not is_batched(w):
            return own(x, w, bias)
        return _UnderVmap.apply(x, w, bias, geometry, self.by_channel)


class _UnderVmap(torch.autograd.Function):
    """The convolution of one client under ``vmap``, which makes it that of all clients."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, by_channel: bool) -> Tensor:
        raise NotImplementedError  # vmap calls its rule

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: vmap calls its rule."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        by_channel: bool,
    ) -> tuple[Any, int]:
        def stacked(value: Tensor, axis: int | None) -> Tensor:
            return value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)

        of_all = None if bias is None else stacked(bias, in_dims[2])
        y = _OfClients.apply(stacked(x, in_dims[0]), stacked(w, in_dims[1]), of_all, geometry)
        return (y if by_channel else y.contiguous()), 0


class _OfClients(torch.autograd.Function):
    """The convolutions of G clients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return convolved(x, w, bias, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, w), needed = ctx.saved_tensors, ctx.needs_input_grad
        dx = input_gradient(dy, x, w, ctx.geometry) if needed[0] else None
        dw = weight_gradient(dy, x, w, ctx.geometry) if needed[1] else None
        return dx, dw, dy.sum((1, 3, 4)) if needed[2] else None, None


def convolved(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the outputs (G, B, O, H', W') of G clients, laid out by channel (NHWC).

    Each client's are those of ``torch.nn.functional.conv2d``, to rounding.

    Parameters
    ----------
    x, w : Tensor
        Inputs (G, B, C, H, W) and kernels (G, O, C, R, S).
    bias : Tensor, optional
        (G, O).
    """
    (height, width), examples, outputs = geometry.outputs(x, w), x.shape[1], w.shape[1]
    added = x.new_zeros(len(x), outputs) if bias is None else bias
    y = x.new_empty(len(x), examples, height, width, outputs)
    for block in _blocks(x, w, geometry):
        first = added[block].unsqueeze(1)
        if _by_rows(x, w, geometry):
            rows, filters = _unfolded_rows(x[block], w, geometry), _filters_by_row(w[block])
            sums = first
            for number, stretch in enumerate(_stretches(x, w, geometry)):
                factors = rows[:, stretch], filters[:, number]
                sums = sums.baddbmm_(*factors) if number else torch.baddbmm(first, *factors)
            y[block] = sums.view(-1, height, examples, width, outputs).transpose(1, 2)
        else:
            windows, filters = _unfolded(x[block], w, geometry), w[block].flatten(2).mT
            torch.baddbmm(first, windows, filters, out=y[block].flatten(1, 3))
    return y.permute(0, 1, 4, 2, 3)


def weight_gradient(dy: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient (G, O, C, R, S) of weights, for that of the outputs (G, B, O, H', W')."""
    _, outputs, channels, down, across = w.shape
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    for block in _blocks(x, w, geometry):
        if _by_rows(x, w, geometry):
            errors = dy[block].permute(0, 3, 1, 4, 2).flatten(1, 3)
            rows = _unfolded_rows(x[block], w, geometry)
            found = [rows[:, stretch].mT @ errors for stretch in _stretches(x, w, geometry)]
            by_row = torch.stack(found, 1).view(-1, down, across, channels, outputs)
            dw[block] = by_row.permute(0, 4, 3, 1, 2)
        else:
            errors = dy[block].permute(0, 1, 3, 4, 2).flatten(1, 3)
            torch.bmm(errors.mT, _unfolded(x[block], w, geometry), out=dw[block].flatten(2))
    return dw


def input_gradient(dy: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient (G, B, C, H, W) of inputs, laid out by channel, for that of outputs (G, B, O, H', W')."""
    if _by_rows(x, w, geometry):
        return convolved(dy, w.flip(3, 4).transpose(1, 2), None, geometry.turned(w))
    height, width = geometry.outputs(x, w)
    left, right, top, bottom = geometry.padding
    (examples, channels), (down, across) = x.shape[1:3], w.shape[-2:]
    dx = x.new_zeros(len(x), examples, top + x.shape[3] + bottom, left + x.shape[4] + right, channels)
    for block in _blocks(x, w, geometry):
        errors = dy[block].permute(0, 1, 3, 4, 2).flatten(1, 3)
        windows = (errors @ w[block].flatten(2)).view(-1, examples, height, width, channels, down, across)
        for r in range(down):
            for s in range(across):
                own = dx[block, :, *_seen(geometry, (r, s), (height, width))]
                own += windows[..., r, s]
    inner = dx[:, :, top : top + x.shape[3], left : left + x.shape[4]]
    return inner.permute(0, 1, 4, 2, 3)


def _by_rows(x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Tell whether rows of windows are unfolded: more is copied for whole windows than for the weights."""
    _, outputs, channels, down, across = w.shape
    height, width = geometry.outputs(x, w)
    return (
        geometry.stride == (1, 1)
        and down > 1
        and channels * across >= SHORTEST_ROW
        and x.shape[1] * height * width >= PLACES_PER_CHANNEL * outputs
    )


def _blocks(x: Tensor, w: Tensor, geometry: Geometry) -> Iterator[slice]:
    """Yield the clients whose unfolded inputs are in memory at once."""
    _, _, channels, down, across = w.shape
    height, width = geometry.outputs(x, w)
    windows = height * (1 if _by_rows(x, w, geometry) else down)
    each = x.element_size() * x.shape[1] * windows * width * channels * across
    step = max(UNFOLDED // max(each, 1), 1)
    return (slice(start, start + step) for start in range(0, len(x), step))


def _seen(geometry: Geometry, at: tuple[int, int], outputs: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns of padded inputs that the outputs multiply with one value of the kernel."""
    down, across = (
        slice(d * place, d * place + step * (count - 1) + 1, step)
        for place, count, step, d in zip(at, outputs, geometry.stride, geometry.dilation, strict=True)
    )
    return down, across


def _unfolded(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return whole windows, (G, B H' W', C R S)."""
    height, width = geometry.outputs(x, w)
    padded = F.pad(x, geometry.padding)
    of_client, of_example, of_channel, of_row, of_column = padded.stride()
    (stride_down, stride_across), (dilated_down, dilated_across) = geometry.stride, geometry.dilation
    windows = padded.as_strided(
        (len(x), x.shape[1], height, width, x.shape[2], *w.shape[-2:]),
        (
            of_client,
            of_example,
            stride_down * of_row,
            stride_across * of_column,
            of_channel,
            dilated_down * of_row,
            dilated_across * of_column,
        ),
    )
    return windows.reshape(len(x), x.shape[1] * height * width, -1)


def _unfolded_rows(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return rows of windows of the padded inputs, (G, H B W', S C), for a stride of 1."""
    width, across = geometry.outputs(x, w)[1], w.shape[-1]
    left, right, top, bottom = geometry.padding
    by_channel = x.permute(0, 1, 3, 4, 2)
    padded = F.pad(by_channel, (0, 0, left, right, top, bottom)).contiguous()
    sizes = padded.shape[4], padded.storage_offset()
    if all(size * padded.element_size() % WIDE.itemsize == 0 for size in sizes):
        padded = padded.view(WIDE)
    clients, examples, height, _, channels = padded.shape
    of_client, of_example, of_row, of_column, _ = padded.stride()
    rows = padded.as_strided(
        (clients, height, examples, width, across, channels),
        (of_client, of_row, of_example, of_column, geometry.dilation[1] * of_column, 1),
    )
    return rows.reshape(clients, height * examples * width, across * channels).view(x.dtype)


def _stretches(x: Tensor, w: Tensor, geometry: Geometry) -> Iterator[slice]:
    """Yield the stretch of unfolded rows that each row of the kernel is multiplied with."""
    height, width = geometry.outputs(x, w)
    each = x.shape[1] * width
    for place in range(0, w.shape[-2] * geometry.dilation[0], geometry.dilation[0]):
        yield slice(place * each, (place + height) * each)


def _filters_by_row(w: Tensor) -> Tensor:
    """Return the weights as factors of unfolded rows, (G, R, S C, O)."""
    return w.permute(0, 3, 4, 2, 1).flatten(2, 3)
