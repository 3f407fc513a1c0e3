"""Secrets, masks and quantisation of secure sums. All cryptography is Flower's, or the library cryptography's.

Keys are agreed by ECDH on P-256 with HKDF, shares are sealed by Fernet (AES-128-CBC with an HMAC), and masks are the
key stream of ChaCha20 under a key of 256 bits. Flower's own generator of masks isn't used: it folds a key into the 32
bits that seed a Mersenne Twister, so that a server can try all masks.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from strategies.flower.arrays import Vector
from strategies.flower.secure_aggregation import generate_shared_key
from strategies.secure.discrete_gaussian import ROUNDING, discrete_gaussian

Ring = NDArray[np.uint32]  # integers modulo 2³²

CURVE = ec.SECP256R1()
KEY_BYTES = 32  # of a private key
SEED_BYTES = 31  # of a client's own mask: Flower's padding makes this 32
MODULUS = 1 << 32
# Ring values before the update: the weight, whether values were out of range, whether it was shortened.
HEADER = 3
# A number beside the update is a whole number of steps, as LIMBS ring values of LIMB_BITS bits each: their sums don't
# wrap for up to 2¹⁶ clients.
LIMBS, LIMB_BITS = 4, 16
NUMBER_STEP, LARGEST_NUMBER = 2.0**-40, 2.0**22
_OFFSET = 1 << (LIMBS * LIMB_BITS - 1)  # makes a negative number of steps positive
WRAPS = 2.0**-40  # probability that a value of a round's sum with noise is beyond the range, at most


class SecureSumError(ValueError):
    """A stage of a secure sum can't go on; the message says whose part is missing or wrong."""


def new_key() -> bytes:
    """Return a new private key, from the operating system's randomness."""
    return ec.generate_private_key(CURVE).private_numbers().private_value.to_bytes(KEY_BYTES)


def public_of(key: bytes) -> bytes:
    """Return a private key's public key, 33 bytes; SecureSumError if there is none."""
    return _private(key).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def shared_key(key: bytes, public: bytes) -> bytes:
    """Return the key that a private key has in common with another client's public one, as Fernet takes it.

    Raises
    ------
    SecureSumError
        If it is no public key.
    """
    return generate_shared_key(_private(key), check_public(public))


def check_public(public: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key; SecureSumError if it is none."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    except (ValueError, TypeError):
        raise SecureSumError("a public key is no point of the curve") from None


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return ec.derive_private_key(int.from_bytes(key), CURVE)
    except ValueError:
        raise SecureSumError("a private key is out of range") from None


def pairwise_mask(shared: bytes, size: int) -> Ring:
    """Return the mask (size,) that a shared key expands to."""
    return _stream(base64.urlsafe_b64decode(shared), size)


def own_mask(seed: bytes, size: int) -> Ring:
    """Return the mask (size,) that the seed of a client's own mask expands to."""
    return _stream(HKDF(hashes.SHA256(), 32, None, b"strategies.own-mask").derive(seed), size)


def _stream(key: bytes, size: int) -> Ring:
    """Return ``size`` values, uniform modulo 2³². Every key is new and used once, so that the nonce may be 0."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, dtype="<u4").astype(np.uint32, copy=False)


def commitment_to(seed: bytes) -> bytes:
    """Return the hash by which a recovered seed is known to be the one that was shared."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(seed)
    return digest.finalize()


def size_of(values: int, numbers: int = 0) -> int:
    """Return how many ring values stand for an update of so many values, and so many numbers beside it."""
    return HEADER + LIMBS * numbers + values


def _limbs(number: float) -> list[int]:
    """Return a number as LIMBS ring values; SecureSumError if it is out of range."""
    if not abs(number) <= LARGEST_NUMBER:
        raise SecureSumError(f"a number of its sum is {number:g}; allowed is ± {LARGEST_NUMBER:g}")
    steps = round(number / NUMBER_STEP) + _OFFSET
    return [steps >> (LIMB_BITS * place) & ((1 << LIMB_BITS) - 1) for place in range(LIMBS)]


def _number(summed: Sequence[int], clients: int) -> float:
    """Return the sum of so many clients' numbers, by the sums of their limbs."""
    steps = sum(limb << (LIMB_BITS * place) for place, limb in enumerate(summed))
    return (steps - clients * _OFFSET) * NUMBER_STEP


@dataclass(frozen=True)
class Quantizer:
    """Turns weighted updates into ring values whose sum over ``number`` clients doesn't wrap, and sums back.

    A value in [−C, C] is one of ``levels`` + 1 integers, rounded at random without bias, as Flower's
    ``quantize`` does it; but from the run's own stream, so that a run of the same seed has the same result. A sum is
    therefore off by less than 2 C n / levels in each value, where no value was out of range. Numbers beside the
    update are rounded to whole steps of 2⁻⁴⁰, whatever C is.

    Attributes
    ----------
    clipping : float
        C, the largest magnitude of a weighted update's value; larger ones are cut to it.
    levels : int
        The steps from −C to C.
    norm : float
        S, to which an update is shortened for differential privacy, before it is weighted; 0: it isn't.
    deviation : int
        σ of the discrete Gaussian noise that each client adds to each value, in levels; 0: none.
    """

    clipping: float
    levels: int
    norm: float = 0.0
    deviation: int = 0

    @classmethod
    def for_sum(cls, clipping: float, number: int, norm: float = 0.0) -> "Quantizer":
        """Return the finest quantizer of a sum of ``number`` clients; a ``norm``, which bounds values, replaces C."""
        return cls(norm or clipping, (MODULUS - 1) // number, norm)

    @classmethod
    def with_noise(cls, norm: float, multiplier: float, number: int, least: int, size: int) -> "Quantizer":
        """Return the finest quantizer of a sum of ``number`` clients' updates (D,), each with noise of its own.

        The noise of ``least`` of them protects as Gaussian noise of deviation z S does, z = ``multiplier``. For a
        discrete Gaussian E exp(tX) is at most exp(t²σ²/2), the Gaussian's, so that no value of a sum has more noise
        than κ σ √n, κ = √(2 log(2 D / WRAPS)), but with a probability of ``WRAPS``: half the sum's range is that and
        n S. The number of levels is even, so that 0 is a level.
        """
        tail = math.sqrt(2 * math.log(2 * size / WRAPS))
        room = MODULUS - 1 - 2 * tail * number**0.5 * (ROUNDING + 3)  # σ is rounded up, and has r in it
        levels = int(room / (number + tail * multiplier * (number / least) ** 0.5)) // 2 * 2
        variance = ((multiplier * levels / 2) ** 2 + ROUNDING**2) / least
        return cls(norm, levels, norm, math.isqrt(math.ceil(variance)) + 1)

    def weight(self, weight: float) -> int:
        """Return a weight in [0, 1] as a ring value."""
        return round(weight * self.levels)

    def encode(
        self,
        update: Vector,
        weight: float,
        rng: np.random.Generator,
        numbers: Sequence[float] = (),
        noise: np.random.Generator | None = None,
    ) -> Ring:
        """Return the ring values of a weight in [0, 1], of the update (D,) times it, and of numbers beside it.

        ``rng`` rounds, and ``noise`` draws the noise, where there is any. Then no value tells whether the update was
        shortened.

        Returns
        -------
        array (size_of(D, len(numbers)),)

        Raises
        ------
        SecureSumError
            If a number is NaN or above 2²².
        """
        # Not by BLAS: the same bits anywhere.
        norm = float(np.einsum("i,i->", update, update)) ** 0.5 if self.norm else 0.0
        values = update * weight
        if self.norm and norm > (shortened := self.shortened(len(values))):
            values *= shortened / norm
        outside = bool((np.abs(values) > self.clipping).any())
        np.clip(values, -self.clipping, self.clipping, out=values)
        values += self.clipping
        values *= self.levels / (2 * self.clipping)
        values += rng.random(len(values))
        encoded = np.empty(size_of(len(values), len(numbers)), dtype=np.uint32)
        encoded[:HEADER] = self.weight(weight), outside, norm > self.norm and noise is None
        for place, number in enumerate(numbers):
            start = HEADER + LIMBS * place
            encoded[start : start + LIMBS] = _limbs(number)
        ours = encoded[size_of(0, len(numbers)) :]
        ours[:] = np.minimum(np.floor(values, out=values), self.levels)
        if noise is not None:
            ours += discrete_gaussian(self.deviation, len(values), noise).astype(np.uint32)  # modulo 2³²
        return encoded

    def decode(self, total: Ring, number: int, numbers: int = 0) -> "Decoded":
        """Return what the sum of ``number`` clients' ring values says, with so many ``numbers`` beside the update."""
        values, step = total[size_of(0, numbers) :], 2 * self.clipping / self.levels
        if self.deviation:  # on both sides of the middle, modulo 2³²
            middle = np.uint32(number * (self.levels // 2))
            update = (values - middle).view(np.int32).astype(np.float64)
            update *= step
        else:
            update = values.astype(np.float64)
            update *= step
            update -= self.clipping * number
        limbs = total[HEADER : size_of(0, numbers)].reshape(numbers, LIMBS)
        weight, outside, longer = map(int, total[:HEADER])
        sums = tuple(_number(summed.tolist(), number) for summed in limbs)
        return Decoded(update, weight, outside, longer, sums)

    def shortened(self, size: int) -> float:
        """Return the norm to which an update (D,) is shortened, so that it isn't above S after it is rounded."""
        return float(max(self.norm - 1.001 * self.error(1) * size**0.5, 0.0))  # and for floating-point errors

    def error(self, number: int) -> float:
        """Return the bound on the error of each value of a sum of ``number`` clients."""
        return number * 2 * self.clipping / self.levels


@dataclass(frozen=True)
class Decoded:
    """A sum: Σ f_i Δ_i (D,), Σ f_i in levels, how many clients had values out of range, or were longer than S, and Σ
    of each number beside the update.
    """

    update: Vector
    weight: int
    outside: int
    longer: int
    numbers: tuple[float, ...] = ()
