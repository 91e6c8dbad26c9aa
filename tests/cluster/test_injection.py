"""No value of a config can become anything but a value: not a key, a document, a tag, a comment's end, a variable."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from aliquot.cluster.job import Job, describe
from aliquot.cluster.manifests import to_yaml
from aliquot.cluster.pod import CONFIG_FILE, shipped_config
from aliquot.cluster.render import documents, render
from aliquot.config.read_config import read_config
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import GIB, cluster_section, config, plan
from tests.examples import examples

NASTY = [
    "'", '"', "`", "\n", "\r\n", "\u2028", "\x85", "$(HF_TOKEN)", "$$(HF_TOKEN)", "${HOME}", "$(rm -rf /)", "---",
    "\n---\nkind: Pod", "!!python/object/apply:os.system [id]", "!!int 3", "&a", "*a", "<<: *a", "{{ .Values }}",
    "# no comment", " #", ": ", "? ", "- ", "|", ">", "%YAML 1.1", "@", "~", "null", "yes", "y", "0o17", "1e3",
    "0x1f", "1_000", "12:30:00", ".inf", "=", "2026-01-01", "\ttab", " leading", "trailing ", "\x00", "\x1b[31m",
    "\ufeff", "\U0001f600", "a\n  b: c", "a\n\n\nb\n", "\n\n", "\\", "\\n",
]  # fmt: skip
pieces = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))
# NUL is no part of any: no file, argument or variable can hold it, and a configuration with it is refused.
texts = st.lists(pieces, min_size=1, max_size=4).map(lambda found: "".join(found).replace("\x00", "")).filter(bool)
# Of a path: what a file may be called; the config refuses control characters and `:` in a mount, and expands `~`.
names = texts.map(lambda text: re.sub(r"[\x00-\x1f\x7f:/]|^~+", "", text)).filter(
    lambda text: text not in ("", ".", "..")
)
words = texts.map(lambda text: re.sub(r"\s", "", text)).filter(bool)


def job_of(text: str, name: str, word: str) -> Job:
    section = cluster_section(image=word, discovery=(text[:200] or "x"), user_data=text)
    section["storage"]["mount_path"] = f"/{name}"
    values = config(
        section,
        run={"name": "x", "directory": name},
        model={"config": {"model_type": text, text: {text: [text]}}},
        data={"path": text, "text_field": text, "cache_directory": name},
        observe={"sample_prompt": text},
    )
    return describe(values, plan(model=text, phases=(PhaseMemory(text, {text: GIB}, {}),)))


def test_nul_comes_into_no_manifest() -> None:
    for text, name, word in (("a\x00", "a", "a"), ("a", "a\x00", "a"), ("a", "a", "a\x00")):
        with pytest.raises(ValidationError, match=r"has characters that no text file can hold|should match pattern"):
            job_of(text, name, word)


def expanded(text: str, environment: dict[str, str]) -> str:
    """What the kubelet makes of a command's argument (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match.group() == "$$" else environment.get(match.group(1), match.group()),
        text,
    )


def shape(value: Any) -> Any:
    """Keys and types, without the scalars."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


BASELINE = {name: shape(document) for name, document in documents(job_of("text", "name", "word")).items()}


@settings(max_examples=examples(80))
@given(text=texts, name=names, word=words)
def test_values_stay_values(text: str, name: str, word: str) -> None:
    job = job_of(text, name, word)
    made, files = documents(job), render(job, "0.1.0")
    assert {key: shape(value) for key, value in made.items()} == BASELINE
    for key, document in made.items():
        (read,) = yaml.safe_load_all(files[key])
        assert read == document
        body = files[key].split("\napiVersion:", 1)[0]
        assert all(line.startswith("#") for line in body.splitlines()), "the header ends nowhere but at its end"
    init = made["training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    command = init["template"]["spec"]["template"]["spec"]["initContainers"][0]["command"]
    paths = [f"/{name}/{name}", f"/{name}/{name}"]
    assert [expanded(each, {"HF_TOKEN": "secret"}) for each in command[6:]] == paths
    (maker,) = made["directories-job.yaml"]["spec"]["template"]["spec"]["containers"]
    assert [expanded(each, {"HF_TOKEN": "secret"}) for each in maker["command"][6:]] == [f"/{name}", *paths]
    assert made["node-class.yaml"]["spec"]["userData"] == text


@settings(max_examples=examples(60))
# A path that begins with ~ is read as one in a home directory.
@given(text=texts.filter(lambda text: text.strip() != "" and text[0] != "~"), name=names, word=words)
def test_pods_mount_the_given_config(text: str, name: str, word: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    job = job_of(text, name, word)
    shipped = documents(job)["config-map.yaml"]["data"][CONFIG_FILE]
    file = tmp_path_factory.mktemp("shipped") / "config.yaml"
    file.write_bytes(shipped.encode())
    read = read_config(file)
    assert read.model.config == {"model_type": text, text: {text: [text]}}
    assert (read.data.path, read.data.text_field, read.observe.sample_prompt) == (text, text, text)
    assert str(read.run.directory) == f"/{name}/{name}"
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"cluster"}) == shipped_config(job)


@pytest.mark.parametrize(
    "field, value",
    [
        ("image", "a b"),
        ("image", "a\nb"),
        ("zone", "us-east-1a\n"),
        ("name", "x; rm"),
        ("name", "$(X)"),
        ("namespace", "a\n---"),
        ("node_role", "a b"),
        ("ami", "al2023@latest"),
        ("instance_types", ["r7i.8xlarge, r7i.16xlarge"]),
        ("service_account", "A_b"),
        ("queue", "q'"),
        ("huggingface_secret", {"name": "x\ny"}),
        ("huggingface_secret", {"name": "x", "key": "$(Y)"}),
    ],
)
def test_names_are_names(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        config(cluster_section(**{field: value}))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectls_reader_agrees(tmp_path: Path) -> None:
    """Go's YAML reader, through which `kubectl apply -k` sends everything: every nasty string as a value."""
    kept = [text for text in NASTY if text != "\x85"]  # kustomize reads it, but writes it as a space
    data = {f"a{index}": text for index, text in enumerate(kept)}
    data |= {f"b{index}": f"first\n{text}\nlast\n" for index, text in enumerate(kept)}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "labels": {"y": "no"}}, "data": data}
    (tmp_path / "a.yaml").write_bytes(to_yaml(document).encode())
    (tmp_path / "kustomization.yaml").write_text("resources: [a.yaml]\n")
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, check=False, timeout=60)
    assert built.returncode == 0, built.stderr
    # The only verb that shows as JSON what was read, without a server.
    show = ["kubectl", "label", "--local", "-f", "-", "-o", "json", "seen=yes"]
    shown = subprocess.run(show, input=built.stdout, capture_output=True, check=False, timeout=60)
    assert shown.returncode == 0, shown.stderr
    read = json.loads(shown.stdout)
    assert read["metadata"]["labels"] == {"y": "no", "seen": "yes"}
    assert read["data"] == data
