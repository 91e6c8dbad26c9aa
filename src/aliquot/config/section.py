"""What every section of a run configuration has in common."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

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
                options = [str(each) for each in get_args(field.annotation) if get_origin(field.annotation) is Literal]
                choose = f": choose {', '.join(options)}" if options else ""
                raise ValueError(f"{key} is {str(value).lower()}, which is not a value for it{choose}")
        return values
