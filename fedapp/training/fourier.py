"""Convolutions of images as products of their Fourier transforms: several times fewer multiplications.

A convolution of C channels into K with kernels of k x k takes C K k² multiplications a pixel; the product of its
transforms, on a grid just large enough that nothing wraps around into the outputs, about 4 C K. The transforms are
products with small matrices of cosines and sines, along rows and then along columns, and so are the way back and
all gradients: their transposes, in the same spectra. It is as exact as the direct way: sums of k² C terms become
sums of C, between transforms that keep norms.

Images are laid out (H, W, B, C) here, so that a transform is one product for all images and channels, and a spectrum
is (frequency, part, B, C). Of a spectrum's frequencies (u, v), those that follow from others (the conjugates) are
left out.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Pair = tuple[int, int]

# What the parts cost, in nanoseconds of a core for a million operations: rough, but constants, as a task must be
# trained in the same way in every process and every run. The direct way is the faster at its operations.
DIRECT, PRODUCTS, TRANSFORMS = 4.6e3, 8.0e3, 22.0e3
# A million values of kernels' spectra, which are written and read over and over, however small a batch.
KERNELS = 3.0e6
# How many times as fast it must be.
WORTH = 1.0


@dataclass(frozen=True, eq=False)
class Transform:
    """Matrices to a spectrum and back, for images of one size; the ways of outputs are transposes of such."""

    rows: Tensor
    columns: Tensor
    columns_of_real: Tensor


class Transforms:
    """The transforms of a convolution with stride 1.

    Parameters
    ----------
    size, kernel, padding : pair of int
        Height and width of the images, of the kernels, and of the border of zeros on each side.
    """

    def __init__(self, size: Pair, kernel: Pair, padding: Pair) -> None:
        self.size, self.kernel = size, kernel
        self.outputs = _outputs(size, kernel, padding)
        n, m = self.periods = _periods(size, padding)
        # Of u, half stands for all: those that are real in a transform along a row, and the others.
        self.real_u = [0, n // 2] if n % 2 == 0 else [0]
        self.complex_u = list(range(1, (n + 1) // 2))
        self.half_v = list(range(m // 2 + 1))
        self.complex_rows = len(self.complex_u) * m
        self.frequencies = self.complex_rows + len(self.real_u) * len(self.half_v)
        # What a frequency stands for in the sum over all: itself, and its conjugate if that is another one.
        weight = np.array([1.0 if v in (0, m / 2) else 2.0 for v in self.half_v]) / (n * m)
        inputs = self._way(size, np.ones(m), np.ones(len(self.half_v)))
        outputs = self._way(self.outputs, np.full(m, 2.0 / (n * m)), weight)
        self.of_inputs, self.to_inputs = _turned(inputs), _back(inputs)
        self.of_outputs, self.to_outputs = _turned(outputs), _back(outputs)
        self.of_kernels = _tensor(self._kernels(padding))
        conjugate = np.concatenate([np.ones(self.frequencies), -np.ones(self.frequencies)])
        self.to_kernels = _tensor((self._kernels(padding) * conjugate[:, None]).T)

    def _way(self, size: Pair, weight: np.ndarray, weight_of_real: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return what takes an image to a spectrum (…, 2, …), real and imaginary parts, weighed."""
        height, width = size
        (n, m), h, w = self.periods, np.arange(height), np.arange(width)
        along = np.exp(-2j * np.pi * np.outer(self.complex_u, h) / n)
        real = np.cos(2 * np.pi * np.outer(self.real_u, h) / n)
        rows = np.concatenate([real, np.stack([along.real, along.imag], 1).reshape(-1, height)])
        across = np.exp(-2j * np.pi * np.outer(np.arange(m), w) / m) * weight[:, None]
        # What is complex along the row comes as its real part, and then its imaginary one.
        re, im = np.hstack([across.real, -across.imag]), np.hstack([across.imag, across.real])
        half = across[self.half_v] / weight[: len(self.half_v), None] * weight_of_real[:, None]
        return rows, np.stack([re, im], 1), np.stack([half.real, half.imag], 1)

    def _kernels(self, padding: Pair) -> np.ndarray:
        """Return what takes a kernel (kh · kw) to real parts, and then imaginary ones, of its spectrum."""
        n, m = self.periods
        r, s = (np.arange(taps) - border for taps, border in zip(self.kernel, padding, strict=True))
        u = np.concatenate([np.repeat(self.complex_u, m), np.repeat(self.real_u, len(self.half_v))])
        v = np.concatenate(
            [np.tile(np.arange(m), len(self.complex_u)), np.tile(self.half_v, len(self.real_u))]
        )
        angle = u[:, None, None] * r[:, None] / n + v[:, None, None] * s / m
        spectrum = np.exp(2j * np.pi * angle).reshape(self.frequencies, -1)
        return np.concatenate([spectrum.real, spectrum.imag])

    def spectrum(self, images: Tensor, way: Transform) -> Tensor:
        """Return the spectrum (frequency, 3 B, C) of images (B, C, H, W): −im, re and im of each image.

        The first two thirds are i times the last two.
        """
        batch, channels, height, width = images.shape
        laid_out = images.permute(2, 3, 0, 1).reshape(height, -1)
        along = (way.rows @ laid_out).view(len(way.rows), width, -1)
        real, split = len(self.real_u), self.complex_rows
        found = images.new_empty(self.frequencies, 3 * batch, channels)
        _multiply(way.columns_of_real, along[:real], found[split:].view(real, -1, batch * channels))
        pairs = along[real:].view(-1, 2 * width, batch * channels)
        _multiply(way.columns, pairs, found[:split].view(len(pairs), -1, batch * channels))
        return found

    def images(self, spectrum: Tensor, way: Transform, size: Pair, layout: torch.memory_format) -> Tensor:
        """Return images (B, C, H, W) from a spectrum (frequency, 2 B, C): re and im of each."""
        _, twice, channels = spectrum.shape
        count, (height, width) = twice // 2 * channels, size
        real, split = len(self.real_u), self.complex_rows
        along = spectrum.new_empty(way.rows.shape[1], width * count)
        _multiply(
            way.columns_of_real, spectrum[split:].view(real, -1, count), along[:real].view(real, width, -1)
        )
        pairs = along[real:].view(-1, 2 * width, count)
        _multiply(way.columns, spectrum[:split].view(len(pairs), -1, count), pairs)
        laid_out = (way.rows @ along).view(height, width, twice // 2, channels)
        return laid_out.permute(2, 3, 0, 1).contiguous(memory_format=layout)

    def kernels(self, weight: Tensor) -> Tensor:
        """Return the spectrum (2, frequency, K, C) of kernels (K, C, kh, kw): real parts, imaginary ones."""
        laid_out = weight.permute(2, 3, 0, 1).reshape(weight.shape[2] * weight.shape[3], -1)
        return (self.of_kernels @ laid_out).view(2, self.frequencies, *weight.shape[:2])

    def weight(self, spectrum: Tensor) -> Tensor:
        """Return what ``kernels`` makes of kernels, turned back: its transpose, imaginary parts subtracted."""
        laid_out = self.to_kernels @ spectrum.view(2 * self.frequencies, -1)
        found = laid_out.view(*self.kernel, *spectrum.shape[2:]).permute(2, 3, 0, 1)
        return found.contiguous(memory_format=torch.channels_last)


transforms_of = lru_cache(maxsize=32)(Transforms)


def _outputs(size: Pair, kernel: Pair, padding: Pair) -> Pair:
    height, width = (n + 2 * p - k + 1 for n, k, p in zip(size, kernel, padding, strict=True))
    return height, width


def _periods(size: Pair, padding: Pair) -> Pair:
    """Return the smallest periods with which no input comes around to an output that it doesn't belong to.

    Output h is of inputs h − p to h − p + k − 1: one of 0 to n − 1 is another one's after n + p at the earliest.
    """
    height, width = (max(n + p, 3) for n, p in zip(size, padding, strict=True))
    return height, width


def _tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=torch.float32)


def _turned(way: tuple[np.ndarray, ...]) -> Transform:
    """Return a way to a spectrum that says −im, re, im."""
    rows, *columns = way
    turned = [np.concatenate([-each[:, 1:], each], 1).reshape(-1, each.shape[2]) for each in columns]
    return Transform(_tensor(rows), *map(_tensor, turned))


def _back(way: tuple[np.ndarray, ...]) -> Transform:
    """Return the transpose of a way."""
    rows, *columns = way
    return Transform(_tensor(rows.T), *(_tensor(each.reshape(-1, each.shape[2]).T) for each in columns))


def _multiply(matrix: Tensor, stack: Tensor, out: Tensor) -> None:
    torch.bmm(matrix.expand(len(stack), *matrix.shape), stack, out=out)


class _Convolution(torch.autograd.Function):
    """``F.conv2d`` with stride 1 and a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
        transforms = transforms_of(tuple(x.shape[2:]), tuple(weight.shape[2:]), padding)
        batch, (n, m) = len(x), transforms.periods
        inputs, kernels = transforms.spectrum(x, transforms.of_inputs), transforms.kernels(weight)
        outputs = torch.bmm(inputs[:, batch:], kernels[0].mT)
        outputs.baddbmm_(inputs[:, : 2 * batch], kernels[1].mT)
        # A constant has the frequency 0 alone.
        outputs[transforms.complex_rows, :batch] += n * m * bias
        ctx.save_for_backward(x, weight, inputs, kernels)
        ctx.transforms, ctx.padding, ctx.layout = transforms, padding, _layout(x, weight)
        return transforms.images(outputs, transforms.to_outputs, transforms.outputs, ctx.layout)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inputs, kernels = ctx.saved_tensors
        transforms, batch = ctx.transforms, len(x)
        if torch.is_grad_enabled():  # a gradient that is part of the loss: its own is taken by PyTorch's
            wanted = list(ctx.needs_input_grad[:3])
            return *_direct_gradients(error, x, weight, ctx.padding, wanted), None
        errors = transforms.spectrum(error, transforms.of_outputs)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            below = torch.bmm(errors[:, batch:], kernels[0])
            below.baddbmm_(errors[:, : 2 * batch], kernels[1], alpha=-1)
            of_x = transforms.images(below, transforms.to_inputs, transforms.size, ctx.layout)
        if ctx.needs_input_grad[1]:
            products = torch.empty_like(kernels)
            torch.bmm(errors[:, batch:].mT, inputs[:, batch:], out=products[0])
            torch.bmm(errors[:, : 2 * batch].mT, inputs[:, batch:], out=products[1])
            of_weight = transforms.weight(products)
        return of_x, of_weight, error.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout of a convolution's outputs: by channel, where inputs or kernels are."""
    for each in (x, weight):
        if each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def _direct_gradients(
    error: Tensor, x: Tensor, weight: Tensor, padding: Pair, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    one, none = [1, 1], [0, 0]
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        error, x, weight, [len(weight)], one, list(padding), one, False, none, 1, wanted
    )
    return found


def has_fourier(layer: nn.Module) -> bool:
    """Say whether a layer is a convolution that could be done here."""
    return (
        type(layer) is nn.Conv2d
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and isinstance(layer.padding, tuple)
        and layer.padding_mode == "zeros"
        and layer.bias is not None
        and all(p < k for p, k in zip(layer.padding, layer.kernel_size, strict=True))
    )


def is_faster(shape: tuple[int, ...], weight: tuple[int, ...], padding: Pair) -> bool:
    """Say whether a step on images (B, C, H, W) with kernels (K, C, kh, kw) is faster here than the direct way."""
    (batch, channels, *size), (outputs, _, *kernel) = shape, weight
    (height, width), (kh, kw) = size, kernel
    over_h, over_w = _outputs((height, width), (kh, kw), padding)
    n, m = _periods((height, width), padding)
    pairs, million = channels * outputs, 1e-6
    direct = 6 * batch * pairs * kh * kw * over_h * over_w * million
    frequencies = n * m // 2 + 2
    products = 24 * batch * pairs * frequencies * million
    # Along the rows, and along the columns: with three parts there, with two back.
    to_and_back = sum(
        count * 2 * (2 * n * h * w + 5 * n // 2 * m * 2 * w)
        for count, h, w in ((channels, height, width), (outputs, over_h, over_w))
    )
    transforms = (batch * to_and_back + 8 * frequencies * kh * kw * pairs) * million
    spectra = frequencies * pairs * million
    return WORTH * (PRODUCTS * products + TRANSFORMS * transforms + KERNELS * spectra) < DIRECT * direct


def convolution(layer: nn.Conv2d, x: Tensor) -> Tensor | None:
    """Return the outputs of a layer that ``has_fourier``, or None where the direct way is faster or safer.

    A bias of exactly 0 keeps the direct way: outputs of black pixels are exactly 0 there and ReLU stops their
    gradients, which no rounding may let through.
    """
    weight, bias, padding = layer.weight, layer.bias, layer.padding
    if x.dim() != 4 or x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32:
        return None
    assert bias is not None
    assert isinstance(padding, tuple)
    border = (padding[0], padding[1])
    if min(_outputs((x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3]), border)) < 1:
        return None
    if not is_faster(tuple(x.shape), tuple(weight.shape), border) or not bool(bias.all()):
        return None
    outputs: Tensor = _Convolution.apply(x, weight, bias, border)
    return outputs
