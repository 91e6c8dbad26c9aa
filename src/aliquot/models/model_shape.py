"""The shapes of a model's weights for the planner, as numbers without torch, by kind of decoder layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerKind:
    """The decoder layers that have weights of the same shapes and the same attention window."""

    weights: tuple[Shape, ...]
    learned: tuple[Shape, ...]  # weights that are trained
    window: int | None  # attention window in tokens; None: full attention
    positions: tuple[int, ...]  # indices of these layers in the model
    compressed: tuple[Shape, ...] = ()  # frozen weights that adapter.base compresses

    @property
    def frozen(self) -> list[Shape]:
        return list((Counter(self.weights) - Counter(self.learned)).elements())


@dataclass(frozen=True)
class ModelShape:
    """Shapes of all weights of a model, as one list and by group: layers, embedding, head and rest."""

    name: str  # name of the model's class
    weights: tuple[Shape, ...]  # all weights in the model's order; a tied head counts once
    learned: tuple[Shape, ...]  # weights that are trained
    kinds: tuple[LayerKind, ...]
    embedding: Shape
    head: Shape | None  # None: tied to the embedding
    rest: tuple[Shape, ...]  # weights outside of layers, embedding and head, such as the final norm
    embedding_learns: bool
    head_learns: bool
    rest_learns: bool
    # Whether engine host sums the embedding's gradient from several terms: the rows of single tokens of an untied
    # embedding, or the gradients of head and look-up of a tied embedding that the model itself looks up.
    embedding_is_added_to: bool
    dtype_bytes: int  # bytes of an element in the files of the pretrained model
    base: CompressedFormat = "bf16"  # format of the frozen weights in `LayerKind.compressed`
    packs: bool = True  # whether one forward pass can take several documents
    # Whether results depend on how a batch is divided into micro-batches: dropout, or a router's auxiliary loss.
    depends_on_micro_batches: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(map(numel, self.weights))

    @cached_property
    def learned_numel(self) -> int:
        return sum(map(numel, self.learned))

    @cached_property
    def compressed(self) -> Counter[Shape]:
        """Return the number of compressed weights of each shape."""
        return Counter(weight for kind in self.kinds for _ in kind.positions for weight in kind.compressed)

    @cached_property
    def compressed_numel(self) -> int:
        return sum(map(numel, self.compressed.elements()))

    @property
    def compressed_file_bytes(self) -> int:
        """Bytes of the compressed weights in the files, which store weights of `nf4_single` as codes already."""
        is_coded = self.base == "nf4_single"
        return sum(
            code_bytes(self.base, weight) if is_coded else self.dtype_bytes * numel(weight)
            for weight in self.compressed.elements()
        )

    @cached_property
    def alike(self) -> Counter[Shape]:
        """Return the number of trained weights of each shape."""
        return Counter(self.learned)

    @property
    def vocabulary(self) -> int:
        return self.embedding[0]

    @property
    def width(self) -> int:
        return self.embedding[1]

    @property
    def layers(self) -> int:
        return sum(len(kind.positions) for kind in self.kinds)

    def padded_groups(self, ranks: int, learned: bool = False) -> list[int]:
        """Return the number of elements of each group of weights that engine fsdp all-gathers together.

        Each weight is padded to equal shards. The groups are, in the order of the forward pass: the root (embedding,
        final norm and the like), each layer, and the untied head. With `learned`, only trained elements count.
        """
        embedding = [self.embedding] if self.embedding_learns or not learned else []
        rest = self.rest if self.rest_learns or not learned else ()
        layers = {at: kind.learned if learned else kind.weights for kind in self.kinds for at in kind.positions}
        groups: list[Sequence[Shape]] = [[*embedding, *rest], *(layers[at] for at in sorted(layers))]
        if self.head is not None:
            groups.append([self.head] if self.head_learns or not learned else [])
        return [sum(padded_share(weight, ranks) * ranks for weight in group) for group in groups]


def numel(shape: Shape) -> int:
    return math.prod(shape)


def padded_share(shape: Shape, ranks: int) -> int:
    """Return the number of elements of a weight's largest shard, which has ceil(rows / ranks) rows."""
    return -(-(shape[0] if shape else 1) // ranks) * math.prod(shape[1:])
