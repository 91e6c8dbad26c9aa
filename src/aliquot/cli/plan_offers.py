"""`aliquot plan --tokens`: which machines of the catalogue, how long, how much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aliquot.core.errors import UsageError

if TYPE_CHECKING:
    from aliquot.config.schema import RunConfig

_SHOWN = 12
_LEAST = ("checkpointing", "restarts", "micro", "batch", "ranks")  # to be left out on a narrow terminal
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MANY_SAVES = 0.1  # of a run
_MOST_BATCHES = 4  # each is planned on everything


def print_offers(
    config: RunConfig,
    tokens: str,
    goal: Literal["time", "cost"],
    document_tokens: int | None,
    batches: str | None,
    nodes: int | None,
    ranks_per_node: int | None,
    instance: str | None,
    spot_price: float,
    spot_losses: float,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Raises UserError for options that say nothing, and where nothing fits."""
    import json

    from aliquot.catalogue.instances import PRICES_DATE, PRICES_REGION, dollars
    from aliquot.cli.fitting_table import show_table
    from aliquot.cli.progress import progress
    from aliquot.cluster.job import placed
    from aliquot.core.errors import writing
    from aliquot.data.workload import Workload
    from aliquot.planner.offers import NODES, RANKS, OfferRequest, Spot, offers
    from aliquot.planner.pictures import offers_svg
    from aliquot.planner.report import advise_saves

    count = _number(tokens)
    config = placed(config) if config.cluster is not None else config
    given = config.train.global_batch_size
    totals = _range(batches) if batches is not None else [given] if given is not None else []
    with progress() as doing:
        doing("what the model needs")
        found = offers(
            config,
            Workload.assumed(config, document_tokens),
            OfferRequest(
                count, goal, Spot(spot_price, spot_losses / 100), totals, [nodes] if nodes else NODES,
                [ranks_per_node] if ranks_per_node else RANKS, instance,
            ),
            doing,
        )  # fmt: skip
    what = f"{count:,} tokens of {found[0].plan.model} ({found[0].plan.size})"
    if as_json:
        print(json.dumps({"tokens": count, "goal": goal, "offers": [each.as_json() for each in found]}, indent=1))
    else:
        shown = found[:_SHOWN]
        columns: dict[str, list[str]] = {
            "nodes": [str(each.plan.nodes) for each in shown],
            "type": [str(each.plan.instance) for each in shown],
            "bought": [str(each.capacity) for each in shown],
            "hours": [f"{each.total_s / 3600:,.1f}" for each in shown],
            "USD": [dollars(each.usd) for each in shown],
            "restarts": [f"{each.restarts:.2f}" for each in shown],
            "tokens/s": [f"{each.plan.tokens_per_s:,.0f}" for each in shown],
            "ranks": [str(each.plan.ranks_per_node) for each in shown],
            "batch": [str(each.global_batch) for each in shown],
            "micro": [str(each.micro_batch) for each in shown],
            "checkpointing": [str(each.checkpointing) for each in shown],
        }
        show_table(columns, _LEAST, ("type",), f"{what}, least {goal} first")
        off_by = max(each.plan.off_by for each in shown)
        if off_by > 1:
            print(f"tokens/s, hours and USD are estimates: a factor of {off_by:g} either way")
        first = found[0]
        if first.plan.saving_s > _MANY_SAVES * first.plan.total_s:
            hours = f"{first.plan.saving_s / 3600:,.1f} of {first.plan.total_s / 3600:,.1f} hours"
            print(f"of the first {hours} are saves: {advise_saves(first.plan)}")
        print(f"the first: {first.arguments}")
        print(f"{len(found)} offers, each the best of its type, nodes and way to buy; {found[0].plan.rates}")
        print(
            f"prices {PRICES_REGION}, {PRICES_DATE}; spot: {spot_price:g} of them, {spot_losses:g} % of nodes lost a"
            " month, both assumed (--spot-price, --spot-losses: see AWS' Spot Instance Advisor)"
        )
    if picture is not None:
        with writing(picture):
            picture.write_text(offers_svg(found, what))


def _number(text: str) -> int:
    """1B, 300M, 2.5e9."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = int(float(match[1]) * _FACTORS[match[2].upper()]) if match is not None else 0
    if not 1 <= number <= 10**15:
        raise UsageError(f"--tokens {text}: a number of tokens like 1B, 300M or 2.5e9")
    return number


def _range(text: str) -> list[int]:
    """64, or 32-256: the ends and what lies between in powers of two, four of them at most."""
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--global-batch {text}: sequences of a step, like 64 or 32-256")
    found = [low]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    found = list(dict.fromkeys([*found, high]))
    apart = max(1.0, (len(found) - 1) / (_MOST_BATCHES - 1))
    return list(dict.fromkeys(found[min(len(found) - 1, round(number * apart))] for number in range(_MOST_BATCHES)))
