"""The limit: the time that the same work, and nothing else, takes at the machine's measured speed.

A limit is the work's matrix products at the measured peak of large matrix products, plus the tanh of the additive
score at the peak of float32's, plus the traffic that no arrangement avoids at the measured bandwidth. Softmax, dropout
and the launching of operations are not in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


class Sizes(NamedTuple):
    """What a decoder works on. ``lengths`` are the decoding steps of each caption, <end> counted.

    Attributes:
        images: B, each with the same number of captions.
        lengths: N steps.
        locations, annotation_dim, attention_dim, embedding_dim, hidden_dim, vocabulary: L, D, A, E, H, V.
    """

    images: int
    lengths: tuple[int, ...]
    locations: int
    annotation_dim: int
    attention_dim: int
    embedding_dim: int
    hidden_dim: int
    vocabulary: int

    @property
    def steps(self) -> int:
        """M, the decoding steps that exist."""
        return sum(self.lengths)

    def __str__(self) -> str:
        mean = self.steps / len(self.lengths)
        equal = len({self.embedding_dim, self.hidden_dim, self.attention_dim}) == 1
        inner = (
            f"H=A=E={self.hidden_dim}"
            if equal
            else f"H={self.hidden_dim} A={self.attention_dim} E={self.embedding_dim}"
        )
        return (
            f"B={len(self.lengths)} T={mean:.1f} (max {max(self.lengths)}) L={self.locations} D={self.annotation_dim} "
            f"{inner} V={self.vocabulary}"
        )


class Product(NamedTuple):
    """A matrix product (rows, inner) x (inner, columns), done ``count`` times.

    Attributes:
        gradients: further products of the same cost in the backward pass: one for each factor that needs a gradient.
    """

    name: str
    count: int
    rows: int
    inner: int
    columns: int
    gradients: int

    def flops(self, *, backward: bool) -> int:
        """Return multiplications and additions."""
        return 2 * self.count * self.rows * self.inner * self.columns * (1 + self.gradients * backward)


def decoder_products(sizes: Sizes, *, hard: bool = False) -> list[Product]:
    """Return the matrix products of teacher forcing with the additive score, each word's computed once.

    The annotations are a frozen encoder's and need no gradient: their mean has no gradient product, their projection,
    the initial state and the context have one, all others two. Steps that do not exist cost nothing. With ``hard``
    attention a context is one location and no product.
    """
    B, M, L, D = sizes.images, sizes.steps, sizes.locations, sizes.annotation_dim
    A, E, H, V = sizes.attention_dim, sizes.embedding_dim, sizes.hidden_dim, sizes.vocabulary
    products = [
        Product("projected annotations", 1, B * L, D, A, 1),
        Product("mean annotation", B, 1, L, D, 0),
        Product("initial h and c", 2, B, D, H, 1),
        Product("query", 1, M, H, A, 2),
        Product("score", 1, M * L, A, 1, 2),
        Product("context", M, 1, L, D, 1),
        Product("gate", 1, M, H, 1, 2),
        Product("embedding to gates", 1, M, E, 4 * H, 2),
        Product("hidden to gates", 1, M, H, 4 * H, 2),
        Product("context to gates", 1, M, D, 4 * H, 2),
        Product("hidden to output", 1, M, H, E, 2),
        Product("context to output", 1, M, D, E, 2),
        Product("output", 1, M, E, V, 2),
    ]
    return [product for product in products if not (hard and product.name == "context")]


def decoder_flops(sizes: Sizes, *, backward: bool, hard: bool = False) -> int:
    """Return the multiplications and additions of ``decoder_products``, with the backward pass or without."""
    return sum(product.flops(backward=backward) for product in decoder_products(sizes, hard=hard))


def score_operations(sizes: Sizes, *, backward: bool) -> int:
    """Return what the additive score's tanh takes beside the products, in operations as of a float32 product's.

    tanh(P + q) = 1 - 2 r, r = 1 / (1 + e^2P e^2q): of every location, step and unit a multiplication, an addition and
    a reciprocal, which takes a vector unit the time of two instructions. The backward pass needs r once more, and
    r (1 - r). Five instructions there, four here, each in the place of a multiplication with an addition.
    Exponentials of P and of q alone are not counted, nor what keeping r would take to write and to read.
    """
    instructions = 4 + 5 * backward
    return 2 * instructions * sizes.steps * sizes.locations * sizes.attention_dim


def parameters(sizes: Sizes) -> int:
    """Return the number of parameters that the decoder's products read, embeddings left out: a step reads few rows."""
    D, A, E, H, V = (
        sizes.annotation_dim, sizes.attention_dim, sizes.embedding_dim, sizes.hidden_dim, sizes.vocabulary,
    )  # fmt: skip
    return D * A + 2 * D * H + H * A + A + H + (E + H + D) * 4 * H + (H + D) * E + E * V


def training_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the bytes that one training step must move to and from memory.

    Counted once each: the annotations read by the forward and by the backward pass, the projected annotations written
    and read, their gradient written and read, the logits likewise, and of every parameter, in float32 whatever the
    precision of the products, two readings, its gradient written and read, and Adam's reading and writing of it and of
    its two moments. Everything that a step of the recurrence touches is taken to stay in the cache.
    """
    size = _BYTES[dtype]
    annotations = sizes.images * sizes.locations * sizes.annotation_dim * size
    projected = sizes.images * sizes.locations * sizes.attention_dim * size
    logits = sizes.steps * sizes.vocabulary * size
    everything = parameters(sizes) + sizes.vocabulary * sizes.embedding_dim
    return 2 * annotations + 4 * projected + 4 * logits + everything * 4 * (2 + 2 + 6)


def decoding_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the bytes that decoding a batch must move: annotations once, their projection out and back, and at every
    step of the longest caption the parameters."""
    size = _BYTES[dtype]
    annotations = sizes.images * sizes.locations * sizes.annotation_dim * size
    projected = sizes.images * sizes.locations * sizes.attention_dim * size
    return annotations + 2 * projected + max(sizes.lengths) * parameters(sizes) * size


class Work(NamedTuple):
    """What is to be done.

    Attributes:
        products: multiplications and additions of matrix products.
        elementwise: operations on float32 numbers one by one.
        traffic: bytes to and from memory.
    """

    products: int
    elementwise: int
    traffic: int

    def plus(self, other: Work) -> Work:
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))

    @classmethod
    def of_training(cls, sizes: Sizes, dtype: torch.dtype, *, hard: bool = False) -> Work:
        """Return that of one training step."""
        products = decoder_flops(sizes, backward=True, hard=hard)
        return cls(products, score_operations(sizes, backward=True), training_bytes(sizes, dtype))

    @classmethod
    def of_search(cls, sizes: Sizes, beam_size: int, dtype: torch.dtype) -> Work:
        """Return that of decoding a batch: K live beams at every step but the first, which has one."""
        rows = sizes._replace(lengths=tuple(1 + beam_size * (length - 1) for length in sizes.lengths))
        products, elementwise = decoder_flops(rows, backward=False), score_operations(rows, backward=False)
        return cls(products, elementwise, decoding_bytes(sizes, dtype))


class Machine(NamedTuple):
    """What this machine reaches, measured: multiplications and additions per second, and bytes per second."""

    flops: dict[torch.dtype, float]
    bandwidth: float

    def to_dict(self) -> dict[str, float]:
        return {
            "matmul_fp32_flops": self.flops[torch.float32],
            "matmul_bf16_flops": self.flops[torch.bfloat16],
            "copy_bytes": self.bandwidth,
        }

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """Return how long its parts take, one after the other, with products in ``dtype``."""
        computing = work.products / self.flops[dtype] + work.elementwise / self.flops[torch.float32]
        return computing + work.traffic / self.bandwidth


class Probe:
    """The operations that the machine is measured with, to be timed among those that are compared with it.

    Args:
        device: where.
        side: of the square matrices; large enough for the peak and small enough for memory.
        megabytes: of the block that is copied; it must not fit into the cache.
    """

    def __init__(self, device: torch.device, *, side: int, megabytes: int) -> None:
        self.flops = 2 * side**3
        self.bytes = 2 * megabytes * 2**20  # read and written
        factors = {
            dtype: (
                torch.randn(side, side, device=device, dtype=dtype),
                torch.randn(side, side, device=device, dtype=dtype),
            )
            for dtype in (torch.float32, torch.bfloat16)
        }
        source = torch.ones(megabytes * 2**18, device=device)
        target = torch.empty_like(source)
        self.operations = {
            "matmul_fp32": lambda: torch.mm(*factors[torch.float32]),
            "matmul_bf16": lambda: torch.mm(*factors[torch.bfloat16]),
            "copy": lambda: target.copy_(source),
        }

    @classmethod
    def sized(cls, device: torch.device, *, quick: bool) -> Probe:
        """Return a probe that takes some 100 ms a round on the device, or next to nothing."""
        if quick:
            return cls(device, side=64, megabytes=1)
        return (
            cls(device, side=8192, megabytes=1024) if device.type == "cuda" else cls(device, side=2048, megabytes=256)
        )

    def machine(self, seconds: dict[str, float]) -> Machine:
        """Return the speeds for the measured seconds of each of ``operations``."""
        return Machine(
            {
                torch.float32: self.flops / seconds["matmul_fp32"],
                torch.bfloat16: self.flops / seconds["matmul_bf16"],
            },
            self.bytes / seconds["copy"],
        )
