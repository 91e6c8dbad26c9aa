"""docs/reference/models.md, made of the outcomes of tests/tools/architectures.py.

python -m tests.tools.docs_models FILE [FILE ...]        what `python -m tests.tools.architectures --json FILE` wrote
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import transformers

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
_PACKED, _UNPACKED = "packed", "one pass per document"
TEXT = """\
# Models

<!-- made by `python -m tests.tools.architectures --json FILE`, then `python -m tests.tools.docs_models FILE` -->

transformers {version} knows {types} types of causal language models. {exact} of them train exactly. To test a type,
`tests.tools.architectures` builds a small model of it and trains this model for two steps in fp32, with engine `host`
on 1 and 2 ranks and with engine `fsdp` on 2 ranks, on documents of 1 to 300 tokens. Every loss and gradient norm is
within 1e-5 of a plain loop that runs transformers' eager attention on one document at a time. If a type has dropout by
default, 1 and 2 ranks drop the same values. `python -m tests.tools.architectures` repeats this test in an hour on two
AMD Zen 3 cores; `--types` tests a part of the list.

**Packed** ({packed} types): one forward pass takes several documents, which aliquot's attention keeps apart. **One pass
per document**: every document gets a forward pass of its own, with the model's own attention or mixer. The result is as
exact, but short documents train more slowly. Packed types, too, run one forward pass per document if their
configuration sets dropout of attention probabilities: set this dropout to 0 if you can. The header of a run says which
way was chosen, and why.

**Published weights.** Published files may store weights under other names and in other pieces than the model in
memory: for example each expert separately, or Pythia's head as `embed_out`. aliquot loads and exports these files as
transformers does (`pytest -m long tests/models/test_every_type.py`), also those of older versions of transformers. The
exceptions are `hrm_text` and `inkling2_text`, whose published tensors combine several weights. These two types train
from a configuration only; a run that should load their weights ends with an error, which names the missing tensors.

**Models with vision or sound.** From their files aliquot loads the text part, if transformers has a causal language
model for this part: for example of Gemma 3, Llama 4, Mistral 3, Qwen3.5, LLaVA, InternVL and Voxtral. `pytest
tests/models/test_stored_weights.py` compares the logits of both. An export is a text model, and has the `model_type` of
the text part; `aliquot export --merge` adds an adapter to the whole model. Types without such a text model, among them
Qwen2.5-VL, end with an error that names the `model_type`. In the tables, such a type stands for its text part.

**Quantised files.** Two formats of 4 bits load as published, and are decoded to the run's precision: the MXFP4 experts
of `gpt_oss`, and nf4 as bitsandbytes stores it, with or without double quantisation. With `adapter.base: nf4`, weights
in nf4 stay in 4 bits with exactly their values, and modules that the files keep in 16 bits (`llm_int8_skip_modules`)
stay in 16 bits; experts in MXFP4 are coded anew. All weights train too, and exports are in the run's precision. Other
formats (bitsandbytes' fp4 and 8 bits, GPTQ, AWQ, FP8) are refused: take the unquantised weights. GGUF is not read.

**bf16.** `inkling2_text`, `minimax`, `xglm` and `xlstm` need `train.precision: fp32`, because their code multiplies
fp32 buffers by weights. A run with bf16 says so before its first step. All other types train in bf16 (`pytest -m long
tests/engines/test_startup_proof.py`). Some weights stay in fp32 in training and in exports, as in transformers: for
example the router biases of `deepseek_v3` and `glm4_moe`, which choose the experts.

| model type | documents |
|--|--|
{rows}

## Refused

aliquot refuses {refused} types with one error line. A type that *transformers cannot run* fails with the defaults of
its configuration class, and may train with another configuration.

| model type | error |
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
        rows="\n".join(f"| `{each['type']}` | {_road(each['road'])} |" for each in exact),
        lines="\n".join(f"| `{each['type']}` | {_said(each['line'])} |" for each in refused),
    )


def exact_types() -> list[str]:
    """Return the types that train exactly, as the page lists them."""
    text = PAGE.read_text(encoding="utf-8")
    types = re.findall(rf"^\| `([\w.-]+)` \| (?:{_PACKED}|{_UNPACKED}) \|$", text, re.MULTILINE)
    if f" {len(types)} of them train exactly" not in text:
        raise ValueError(f"{PAGE} lists {len(types)} types, but its first paragraph counts others")
    return types


def _road(road: str) -> str:
    return _PACKED if road.startswith("packed") else _UNPACKED


def _said(line: str) -> str:
    said = line.removeprefix("model.config: ").replace("|", "\\|").replace("_", "\\_").replace("`", "")
    return said if len(said) <= 160 else said[:157] + "..."


if __name__ == "__main__":
    found = [outcome for file in sys.argv[1:] for outcome in json.loads(Path(file).read_text())]
    PAGE.write_text(page(sorted(found, key=lambda outcome: outcome["type"])))
