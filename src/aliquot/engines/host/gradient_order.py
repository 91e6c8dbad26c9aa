"""In which order a rank stages gradients: the same on every rank, whatever its autograd does first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from aliquot.engines.host.expert_gradients import experts_first


class GradientOrder:
    """Weights, by index: in a micro-batch `head` comes first, then those by autograd, then what is looked up."""

    def __init__(
        self, model: nn.Module, head: nn.Parameter | None, looked_up: nn.Parameter | None, packs: bool
    ) -> None:
        """`head`: its loss tells of its gradient; `looked_up`: its rows are told of. None: autograd does. What learns
        nothing has no place in it."""
        parameters = list(model.parameters())
        self.head = [at for at, each in enumerate(parameters) if each is head and each.requires_grad]
        self.looked_up = [at for at, each in enumerate(parameters) if each is looked_up and each.requires_grad]
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        # Tied, and looked up by the model itself: both contribute.
        elsewhere = [] if looked_up is None and head is embedding else [*self.head, *self.looked_up]
        found = [at for at, each in enumerate(parameters) if each.requires_grad and at not in elsewhere][::-1]
        self.by_autograd: Sequence[int] = experts_first(model, found) if packs else found

    @property
    def dense_once(self) -> set[int]:
        """Those that one whole gradient of a micro-batch makes complete: nothing is added to it. Rows of an embedding
        that is the head, too, travel by themselves."""
        return set(self.head) ^ set(self.by_autograd)
