"""Write a first config with its data, and the JSON schema by which an editor completes the keys of a config.

The folders of `starters/` hold the files. A config there is written as if it stood in `examples/`, for a run that has
the name of its folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UsageError, writing
from aliquot.core.small_files import publish_bytes

SCHEMA_FILE = "aliquot.schema.json"


def schema_json() -> str:
    """Return the JSON schema of a config, with the descriptions of all keys."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for name, section in schema["properties"].items():
        if name not in schema["required"]:  # in YAML, a section whose keys are all commented out is null
            schema["properties"][name] = {"anyOf": [section, {"type": "null"}]}
    return json.dumps(schema, indent=1) + "\n"


def write_starter(kind: str, directory: Path) -> list[Path]:
    """Write a config, its data and the JSON schema into `directory`, and return their paths, the config's first.

    Raises UsageError, before anything is written, if one of these files exists.
    """
    files = {
        file.name: file.read_text("utf-8") for file in sorted((Path(__file__).parent / "starters" / kind).iterdir())
    }
    config = f"{kind}.yaml"
    run_name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).lstrip(".-") or kind
    text = re.sub(f"(runs/|name: ){kind}", rf"\g<1>{run_name}", files.pop(config))
    text = text.replace("examples/", json.dumps(f"{directory}/", ensure_ascii=False)[1:-1])  # within quotes of YAML
    files = {config: f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}", **files, SCHEMA_FILE: schema_json()}
    paths = [directory / name for name in files]
    if present := next(filter(Path.exists, paths), None):
        raise UsageError("this file exists, and init overwrites none. Give another directory", present)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, files.values(), strict=True):
            publish_bytes(path, content.encode("utf-8", "surrogateescape"))
    return paths
