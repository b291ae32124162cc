"""The limit: the time that the same work, and nothing else, takes at the machine's measured speed.

A limit is the work's matrix products at the measured peak of large matrix products, plus the tanh of the additive
score at the float32 peak, plus the unavoidable memory traffic at the measured bandwidth. It leaves out softmax, dropout
and the launching of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Setup, Timing, interleave
from captioning.kernels.machine import has_bfloat16_products

_BYTES = {torch.float32: 4, torch.bfloat16: 2}


class Sizes(NamedTuple):
    """Sizes of a decoder and its batch.

    Attributes:
        images: B, each with the same number of captions.
        lengths: Decoding steps of each of the N captions, <end> counted.
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
        """M, the decoding steps of all captions together."""
        return sum(self.lengths)

    def __str__(self) -> str:
        return (
            f"B={len(self.lengths)} T={self.steps / len(self.lengths):.1f} (max {max(self.lengths)}) "
            f"L={self.locations} D={self.annotation_dim} H={self.hidden_dim} A={self.attention_dim} "
            f"E={self.embedding_dim} V={self.vocabulary}"
        )


class Product(NamedTuple):
    """A matrix product (rows, inner) x (inner, columns), done several times.

    Attributes:
        gradients: Products of the same cost in the backward pass: one for each factor that needs a gradient.
    """

    name: str
    times: int
    rows: int
    inner: int
    columns: int
    gradients: int

    def flops(self, *, backward: bool) -> int:
        """Return multiplications and additions."""
        return 2 * self.times * self.rows * self.inner * self.columns * (1 + self.gradients * backward)


def decoder_products(sizes: Sizes, *, hard: bool = False) -> list[Product]:
    """Return the matrix products of teacher forcing with the additive score; padding costs nothing.

    The annotations come from a frozen encoder and need no gradient. So their mean has no gradient product; their
    projection, the initial state and the context have one; all other products have two. The context of ``hard``
    attention is one location and needs no product.
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
        Product("beta", 1, M, H, 1, 2),
        Product("embedding to gates", 1, M, E, 4 * H, 2),
        Product("hidden to gates", 1, M, H, 4 * H, 2),
        Product("context to gates", 1, M, D, 4 * H, 2),
        Product("hidden to output", 1, M, H, E, 2),
        Product("context to output", 1, M, D, E, 2),
        Product("output", 1, M, E, V, 2),
    ]
    return [product for product in products if not (hard and product.name == "context")]


def decoder_flops(sizes: Sizes, *, backward: bool, hard: bool = False) -> int:
    """Return the multiplications and additions of ``decoder_products``."""
    return sum(product.flops(backward=backward) for product in decoder_products(sizes, hard=hard))


def score_operations(sizes: Sizes, *, backward: bool) -> int:
    """Return the operations of the additive score's tanh, in units of a float32 product's operations.

    tanh(P + q) = 1 - 2 r, r = 1 / (1 + e^2P e^2q): per location, step and unit a multiplication, an addition and a
    reciprocal, which takes as long as two instructions. The backward pass computes r again, and r (1 - r). So there
    are four instructions forward and five backward, each in place of a multiplication with an addition. The
    exponentials of P and q, and the memory traffic of storing r, are not counted.
    """
    instructions = 4 + 5 * backward
    return 2 * instructions * sizes.steps * sizes.locations * sizes.attention_dim


def parameters(sizes: Sizes) -> int:
    """Return the number of parameters in the decoder's products, without the embeddings, of which few are read."""
    _, _, _, D, A, E, H, V = sizes
    return D * A + 2 * D * H + H * A + A + H + (E + H + D) * 4 * H + (H + D) * E + E * V


def training_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the bytes that one training step moves to and from memory at least.

    Annotations are read twice, forward and backward. Projected annotations, their gradient and the logits with theirs
    are written once and read once. Every parameter is float32 in any precision: it is read twice, its gradient is
    written and read, and Adam reads and writes it and both of its moments. All else stays in the cache.
    """
    size = _BYTES[dtype]
    annotations = sizes.images * sizes.locations * sizes.annotation_dim * size
    projected = sizes.images * sizes.locations * sizes.attention_dim * size
    logits = sizes.steps * sizes.vocabulary * size
    weights = parameters(sizes) + sizes.vocabulary * sizes.embedding_dim
    return 2 * annotations + 4 * projected + 4 * logits + weights * 4 * (2 + 2 + 6)


def decoding_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the bytes that decoding a batch moves at least.

    Annotations are read once, their projection is written and read, and the parameters that project them and make the
    initial state are read once. Each step of the longest caption reads the other parameters.
    """
    size = _BYTES[dtype]
    annotations = sizes.images * sizes.locations * sizes.annotation_dim
    projected = sizes.images * sizes.locations * sizes.attention_dim
    once = sizes.annotation_dim * (sizes.attention_dim + 2 * sizes.hidden_dim)
    return size * (annotations + 2 * projected + once + max(sizes.lengths) * (parameters(sizes) - once))


class Work(NamedTuple):
    """The work that a limit counts.

    Attributes:
        products: Multiplications and additions of matrix products.
        elementwise: Float32 operations on single numbers.
        traffic: Bytes to and from memory.
    """

    products: int
    elementwise: int
    traffic: int

    @classmethod
    def of_training(cls, sizes: Sizes, dtype: torch.dtype, *, hard: bool = False) -> Work:
        """Return the work of one training step."""
        products = decoder_flops(sizes, backward=True, hard=hard)
        return cls(products, score_operations(sizes, backward=True), training_bytes(sizes, dtype))

    @classmethod
    def of_search(cls, sizes: Sizes, beam_size: int, dtype: torch.dtype) -> Work:
        """Return the work of decoding a batch: one row at the first step, then K live beams at every step."""
        beams = sizes._replace(lengths=tuple(1 + beam_size * (length - 1) for length in sizes.lengths))
        products, elementwise = decoder_flops(beams, backward=False), score_operations(beams, backward=False)
        return cls(products, elementwise, decoding_bytes(sizes, dtype))


class Machine(NamedTuple):
    """Measured speeds of this machine: multiplications and additions per second, bytes per second."""

    flops: dict[torch.dtype, float]
    bandwidth: float

    def to_dict(self) -> dict[str, float]:
        return {
            "matmul_fp32_flops": self.flops[torch.float32],
            "matmul_bf16_flops": self.flops[torch.bfloat16],
            "copy_bytes": self.bandwidth,
        }

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """Return the time of products in ``dtype``, elementwise operations and traffic, one after the other."""
        computing = work.products / self.flops[dtype] + work.elementwise / self.flops[torch.float32]
        return computing + work.traffic / self.bandwidth


def interleave_with_machine(
    subjects: Mapping[str, Callable[[], Any]], setup: Setup, *, warm_up: int = 1
) -> tuple[dict[str, Timing], Machine]:
    """Time every subject in turn with large matrix products and a large copy, which give the machine's speed."""
    device = setup.device
    # About 100 ms a round. The matrices reach the machine's peak, and the copied block does not fit into the cache.
    side, megabytes = (64, 1) if setup.quick else (8192, 1024) if device.type == "cuda" else (2048, 256)
    # A product of that size in bfloat16 takes a minute where the processor has none.
    emulated = device.type == "cpu" and not has_bfloat16_products()
    bf16_side = min(side, 512) if emulated else side
    fp32 = torch.randn(2, side, side, device=device)
    bf16 = torch.randn(2, bf16_side, bf16_side, device=device, dtype=torch.bfloat16)
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    probes: dict[str, Callable[[], Any]] = {
        "matmul_fp32": lambda: torch.mm(*fp32),
        "matmul_bf16": lambda: torch.mm(*bf16),
        "copy": lambda: target.copy_(source),
    }
    timings = interleave({**subjects, **probes}, setup, warm_up=warm_up)
    fp32_seconds, bf16_seconds, copy_seconds = (timings.pop(name).median for name in probes)
    flops = {torch.float32: 2 * side**3 / fp32_seconds, torch.bfloat16: 2 * bf16_side**3 / bf16_seconds}
    return timings, Machine(flops, 2 * source.nbytes / copy_seconds)  # read and written
