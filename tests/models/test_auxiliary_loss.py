"""The loss that balances a mixture's routers is transformers' own, with gradients, on both engines' ways to call it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.models import model_calls
from aliquot.models.narrow import narrow
from aliquot.models.traits import redraw
from aliquot.nn.attention.document_attention import IMPLEMENTATION, AttentionBackend, Documents, register
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.experts.expert_modules import mean_balance, take_balance
from aliquot.nn.head_loss import IGNORE


@pytest.mark.parametrize("backend", [TiledAttention(), None], ids=["packed", "a call each"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss_equals_transformers(model_type: str, backend: AttentionBackend | None) -> None:
    config = narrow(AutoConfig.for_model(model_type, output_router_logits=True, router_aux_loss_coef=0.5))
    register()
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    redraw(stock)
    ids = torch.arange(20) % 7 + 4
    output = stock(input_ids=ids[None], labels=ids[None], use_cache=False)
    output.loss.backward()

    implementation = "eager" if backend is None else IMPLEMENTATION
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    own.load_state_dict(stock.state_dict())
    # A padded tail, which is no document, does not count.
    row, edges = torch.cat([ids, torch.zeros(3, dtype=torch.int64)]), (0, 20, 23)
    labels = torch.cat([ids[1:], torch.full((4,), IGNORE)])
    documents = Documents(edges, backend)
    positions = torch.cat([torch.arange(20), torch.arange(3)])
    _, summed = model_calls.whole_logits_loss(own, row, positions, labels, documents)
    model_calls.with_auxiliary(own, summed / 19, 1 / 19, labels, documents).backward()
    noted = take_balance(own)
    assert noted[1] == 19 and take_balance(own) == []
    other = [noted[0] * 4, noted[1] * 2]  # of a rank with twice as many tokens and twice the loss
    assert mean_balance([noted, [], other])["router_loss"] == pytest.approx(
        0.5 * float(output.aux_loss.detach()) * 5 / 3
    )
    for (name, ours), theirs in zip(own.named_parameters(), stock.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_auxiliary_loss_is_off_by_default() -> None:
    summed = torch.ones(())
    assert model_calls.with_auxiliary(nn.Linear(1, 1), summed, 1.0, torch.zeros(4), Documents((0, 4), None)) is summed
