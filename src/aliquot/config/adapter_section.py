"""The `adapter` section: what is learned beside a frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from aliquot.config.home import with_home
from aliquot.config.peft_settings import adapter_settings
from aliquot.config.section import PLACE, Section
from aliquot.core.errors import UserError


class AdapterSection(Section):
    type: Literal["lora"] = Field("lora", description="LoRA, through peft: pip install 'aliquot[lora]'.")
    path: Annotated[str | None, PLACE] = Field(
        None,
        description="Begin with the adapter in this directory, saved by peft or a run; r, alpha and so on are its own.",
    )
    r: PositiveInt = Field(16, description="Rank of the two matrices beside each adapted one.")
    alpha: PositiveFloat = Field(32.0, description="Their product is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Of their input, in training.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="By the end of their names; all-linear: all such layers but the head and, of a mixture, experts.",
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead.")

    @property
    def directory(self) -> Path | None:
        """Of the adapter to begin with."""
        return None if self.path is None else with_home(self.path)

    @model_validator(mode="before")
    @classmethod
    def as_it_was_learned(cls, values: Any) -> Any:
        """What is not given is that of the adapter at `path`; what is must not contradict it."""
        if not isinstance(values, dict) or not isinstance(values.get("path"), str):
            return values
        if {"r", "alpha", "target_modules"} <= values.keys() and not with_home(values["path"]).is_dir():
            return values  # said in full, as a run's own config.yaml does: it is asked for when it is loaded
        try:
            saved = adapter_settings(with_home(values["path"]))
        except UserError as error:
            raise ValueError(str(error)) from None
        for key in saved.keys() & values.keys() - {"dropout"}:
            if _plain(values[key]) != _plain(saved[key]) and values[key] != "all-linear":
                raise ValueError(f"{key} is {values[key]}, but {saved[key]} of the adapter at path: leave it out")
        return saved | values


def _plain(value: Any) -> Any:
    """Names in any order; numbers of any kind."""
    return sorted(value) if isinstance(value, list) else value
