"""The `adapter` section: what is learned beside a frozen model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from aliquot.config.section import Section


class AdapterSection(Section):
    type: Literal["lora"] = Field("lora", description="LoRA, through peft: pip install 'aliquot[lora]'.")
    r: PositiveInt = Field(16, description="Rank of the two matrices beside each adapted one.")
    alpha: PositiveFloat = Field(32.0, description="Their product is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Of their input, in training.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="By the end of their names; all-linear: all such layers but the head and, of a mixture, experts.",
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead.")
