"""The text of what aliquot shows by rich."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def console_text(*shown: Any, width: int = 200) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(*shown)
    return file.getvalue()
