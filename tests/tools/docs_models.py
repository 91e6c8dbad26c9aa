"""docs/reference/models.md, made of the outcomes of tests/tools/architectures.py.

python -m tests.tools.docs_models FILE [FILE ...]        what `python -m tests.tools.architectures --json FILE` wrote
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
TEXT = """\
# Models

<!-- made by `python -m tests.tools.architectures --json FILE`, then `python -m tests.tools.docs_models FILE` -->

transformers {version} knows {types} types of causal language models. {exact} of them train exactly: each, made
small from its own configuration class with the defaults of everything else, was trained for two steps in fp32 by
engine `host` on 1 and on 2 ranks and by engine `fsdp` on 2, on documents of 1 to 300 tokens. Every loss and
gradient norm is within 1e-5 of a plain loop that runs transformers' eager attention on one document at a time.
Where defaults drop something at random, 1 and 2 ranks drop the same. `python -m tests.tools.architectures` repeats
all of it: an hour on two AMD Zen 3 cores, or 34 minutes as two halves side by side (`--types`).

{packed} are *packed*: documents of a row are kept apart by aliquot's own attention. *A call each* means that every
document is a call of the model with its own attention or mixer: as exact, and slower where documents are short.
Dropout of attention probabilities, too, makes a call each: set it to 0 where you can. A run says which way it goes,
and why.

Weights are published under names and in pieces that are not always those of the model in memory: each expert apart, or
Pythia's head as `embed_out`. What transformers saves of each type is loaded and exported as transformers would
(`pytest -m long tests/models/test_every_type.py`), and so are files under the names of a wider model (the text part of
Qwen3.5 or Llama 4) or of older versions, as transformers renames them. The exceptions are `hrm_text` and
`inkling2_text`, of whose weights several make one published tensor: they train from a configuration only, and a run
that is to load them ends with the names of the tensors that are missing.

In bf16 the code of `inkling2_text`, `minimax`, `xglm` and `xlstm` meets buffers of fp32 that it multiplies by weights:
a run of them says before its first step that it needs `train.precision: fp32`. The code of all others runs
(`pytest -m long tests/engines/test_startup_proof.py`). What transformers keeps in fp32 in bf16 models (biases of
routers, by which experts are chosen, of `deepseek_v3`, `glm4_moe` and their kin) is computed with and exported as fp32.

| model type | documents |
|--|--|
{rows}

## Refused

{refused} end with one line. Those that *transformers cannot run* fail so with the defaults of their own configuration
class, and may train with another one.

| model type | the line |
|--|--|
{lines}
"""


def page(outcomes: list[dict[str, str]]) -> str:
    exact = [each for each in outcomes if each["verdict"] == "exact"]
    refused = [each for each in outcomes if each["verdict"] == "refused"]
    return TEXT.format(
        version=transformers.__version__,
        types=len(outcomes),
        exact=len(exact),
        packed=sum(each["road"].startswith("packed") for each in exact),
        refused=len(refused),
        rows="\n".join(f"| `{each['type']}` | {each['road'].partition(',')[0]} |" for each in exact),
        lines="\n".join(f"| `{each['type']}` | {_said(each['line'])} |" for each in refused),
    )


def _said(line: str) -> str:
    said = line.removeprefix("model.config: ").replace("|", "\\|").replace("_", "\\_").replace("`", "")
    return said if len(said) <= 160 else said[:157] + "..."


if __name__ == "__main__":
    found = [outcome for file in sys.argv[1:] for outcome in json.loads(Path(file).read_text())]
    PAGE.write_text(page(sorted(found, key=lambda outcome: outcome["type"])))
