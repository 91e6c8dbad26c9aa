"""What every section of a run configuration has in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def no_true_for_a_number(cls, values: Any) -> Any:
        """Python takes true for 1; a person who writes `max_steps: true` means something else."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if (
                isinstance(value, bool)
                and field is not None
                and bool not in (field.annotation, *get_args(field.annotation))
            ):
                raise ValueError(f"{key} is {str(value).lower()}, which is not a value for it")
        return values
