"""`aliquot instances --refresh`: complete answers of AWS replace the catalogue, other answers do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber
from moto import mock_aws
from typer.testing import CliRunner

from aliquot.catalogue import aws_answers
from aliquot.catalogue.aws_answers import live_instances, refresh
from aliquot.catalogue.instances import catalogue, instance, instances, refreshed_path, shipped_catalogue
from aliquot.cli.main import app
from aliquot.core.errors import InstanceError
from tests.conftest import REPOSITORY

REGION = "eu-central-1"
CONFIG = str(REPOSITORY / "examples" / "llama3-8b-cpu.yaml")
C7I = {
    "InstanceType": "c7i.24xlarge",
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "Manufacturer": "Intel", "SustainedClockSpeedInGhz": 3.2},
    "VCpuInfo": {"DefaultVCpus": 96, "DefaultCores": 48},
    "MemoryInfo": {"SizeInMiB": 196608},
    "NetworkInfo": {"NetworkCards": [{"NetworkCardIndex": 0, "BaselineBandwidthInGbps": 37.5}]},
}
NEW = {
    "InstanceType": "g99.2xlarge",
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "Manufacturer": "Intel"},
    "VCpuInfo": {"DefaultVCpus": 8},
    "MemoryInfo": {"SizeInMiB": 32768},
    "NetworkInfo": {"MaximumNetworkInterfaces": 4, "Ipv4AddressesPerInterface": 15,
                    "EfaSupported": True, "EfaInfo": {"MaximumEfaInterfaces": 2}},
    "GpuInfo": {"Gpus": [{"Name": "B900", "Count": 2, "MemoryInfo": {"SizeInMiB": 1 << 19}}]},
}  # fmt: skip
MAC = {"InstanceType": "mac9.metal", "ProcessorInfo": {"SupportedArchitectures": ["arm64_mac"]}}
MAC |= {"VCpuInfo": {"DefaultVCpus": 8}, "MemoryInfo": {"SizeInMiB": 16384}}
NOW = datetime.now(UTC)


def spot(name: str, zone: str, usd: str, time: datetime = NOW) -> dict[str, Any]:
    return {"InstanceType": name, "AvailabilityZone": REGION + zone, "SpotPrice": usd, "Timestamp": time}


SPOT = [
    spot("c7i.24xlarge", "a", "1.0"),
    spot("c7i.24xlarge", "b", "1.5"),
    spot("c7i.24xlarge", "c", "9.0"),
    spot("c7i.24xlarge", "a", "0.1", datetime(2020, 1, 1, tzinfo=UTC)),
    spot("g99.2xlarge", "a", "2.0"),
]


def product(name: str, usd: str, currency: str = "USD") -> str:
    terms = {"OnDemand": {"SKU.T": {"priceDimensions": {"SKU.T.D": {"pricePerUnit": {currency: usd}}}}}}
    return json.dumps({"product": {"attributes": {"instanceType": name}}, "terms": terms})


PRODUCTS = [product("c7i.24xlarge", "5.0"), product("g99.2xlarge", "8.0"), product("g99.2xlarge", "0.0")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        catalogue.cache_clear()

    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    monkeypatch.undo()
    forget()


Answers = Callable[..., None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """A function that says what AWS answers to one `refresh`."""
    with ExitStack() as stack:

        def answer(types: Any = (C7I, NEW, MAC), spot: Any = SPOT, products: Any = PRODUCTS) -> None:
            clients = {name: boto3.client(name, REGION, aws_access_key_id="x", aws_secret_access_key="x")
                       for name in ("ec2", "pricing")}  # fmt: skip
            ec2, pricing = (stack.enter_context(Stubber(clients[name])) for name in ("ec2", "pricing"))
            if isinstance(types, str):
                ec2.add_client_error("describe_instance_types", types)
            elif isinstance(types, Exception):
                monkeypatch.setattr(aws_answers, "_described", Mock(side_effect=types))
            else:
                ec2.add_response("describe_instance_types", {"InstanceTypes": list(types)})
            ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": list(spot)})
            pricing.add_response("get_products", {"PriceList": list(products)[:1], "NextToken": "more"})
            if isinstance(products, tuple):  # the second page is refused
                pricing.add_client_error("get_products", "ThrottlingException")
            else:
                pricing.add_response("get_products", {"PriceList": list(products)[1:]})
            pricing.add_response("get_products", {"PriceList": []})  # bare metal

            class Session:
                def client(self, name: str, region_name: str | None = None) -> Any:
                    assert region_name == ("us-east-1" if name == "pricing" else None)
                    return clients[name]

            monkeypatch.setattr(aws_answers, "aws_session", Session)

        yield answer


def test_types_and_prices_are_stored(answers: Answers) -> None:
    answers()
    stages: list[str] = []
    refreshed = refresh(stages.append)
    assert catalogue().source == refreshed.source == f"{REGION}, {NOW.date()}" and len(refreshed.types) == 2
    assert len(stages) == 3 and all(REGION in stage for stage in stages)
    known, new = instance("c7i.24xlarge"), instance("g99.2xlarge")
    shipped = next(ec2 for ec2 in shipped_catalogue().types if ec2.name == known.name)
    assert (known.usd_per_hour, known.spot_usd_per_hour) == (5.0, 1.5)  # the median of the zones' newest prices
    assert known.network_bytes_per_s == shipped.network_bytes_per_s and known.amx
    assert (known.allocatable_memory_bytes, known.max_pods) == (shipped.allocatable_memory_bytes, shipped.max_pods)
    assert (new.usd_per_hour, new.gpus, new.gpu_name, new.efa_interfaces, new.max_pods) == (8.0, 2, "b900", 2, 58)
    assert (new.generation, new.network_bytes_per_s) == (99, None)
    assert instance("m7i.large").usd_per_hour is None  # not in the region's answer
    assert len(instances()) == len(shipped_catalogue().types) + 1


NOTHING: list[Any] = []
BAD: dict[str, dict[str, Any]] = {
    "no types": {"types": ()},
    "refused": {"types": "UnauthorizedOperation"},
    "no vCPUs": {"types": (C7I | {"VCpuInfo": {}},)},
    "no spot prices": {"spot": NOTHING},
    "spot prices of nothing": {"spot": [spot("c7i.24xlarge", "a", "nan")]},
    "an infinite clock": {"types": (C7I | {"ProcessorInfo": {"SustainedClockSpeedInGhz": math.inf}},)},
    "thousands of digits": {"types": (C7I | {"MemoryInfo": {"SizeInMiB": 10**5000}},)},
    "markup": {"types": (C7I, NEW | {"InstanceType": "[/red]"})},
    "an escape": {"types": (C7I, NEW | {"GpuInfo": {"Gpus": [{"Name": "\x1b[2J", "MemoryInfo": {"SizeInMiB": 1}}]}})},
    "HTML": {"types": ResponseParserError("not XML\nbut HTML")},
    "few prices": {"types": (C7I, NEW, NEW | {"InstanceType": "g99.xlarge"}), "products": PRODUCTS[:1]},
    "another currency": {"products": [product("c7i.24xlarge", "5.0", "CNY"), product("g99.2xlarge", "8.0", "CNY")]},
    "no JSON": {"products": ["{", "}"]},
    "half of the pages": {"products": tuple(PRODUCTS)},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_answers_replace_nothing(answers: Answers, bad: dict[str, Any]) -> None:
    answers()
    refresh(lambda words: None)
    stored = refreshed_path().read_bytes()
    answers(**bad)
    with pytest.raises(InstanceError, match=r"^AWS ") as error:
        refresh(lambda words: None)
    assert "\n" not in str(error.value)
    assert refreshed_path().read_bytes() == stored and catalogue().region == REGION


def test_a_stored_name_with_markup_is_not_used(answers: Answers) -> None:
    answers()
    refresh(lambda words: None)
    refreshed_path().write_text(refreshed_path().read_text().replace("g99.2xlarge", "[/red]"))
    catalogue.cache_clear()
    assert catalogue() == shipped_catalogue()


@pytest.mark.parametrize("content", [b"", b"{", b'{"region": "x", "date": "y", "types": [{"name": "c7i.large"}]}'])
def test_a_damaged_catalogue_is_not_used(content: bytes) -> None:
    refreshed_path().parent.mkdir()
    refreshed_path().write_bytes(content)
    assert catalogue() == shipped_catalogue()


def lines(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_commands_use_the_refreshed_catalogue(answers: Answers) -> None:
    answers()
    listed = CliRunner().invoke(app, ["instances", "c7i.24xlarge,g99.*", "--refresh"])
    assert listed.exit_code == 0 and str(refreshed_path()) in listed.stderr
    head, known, new, last = listed.stdout.splitlines()
    assert head.endswith("USD/h spot") and known.endswith("1.500") and "8.000" in new
    assert last == f"2 types; catalogue of {NOW.date()}; prices on demand, {REGION}, {NOW.date()}"
    plan = ["plan", CONFIG, "--instance", "c7i.24xlarge", "--nodes", "2"]
    (cost,) = (line for line in lines(*plan) if line.startswith("cost"))
    assert f"on demand ({REGION}, {NOW.date()}, with " in cost and cost.endswith("on spot")
    *offers, _, prices, _ = lines(*plan, "--ranks-per-node", "2", "--tokens", "10M")
    assert (
        f"prices {REGION}, {NOW.date()}, on demand and on spot; 20 % of nodes lost a month on spot, assumed" in prices
    )
    assert any(" spot " in line for line in offers)
    *_, prices, _ = lines(*plan, "--ranks-per-node", "2", "--tokens", "10M", "--spot-price", "0.3")
    assert f"prices {REGION}, {NOW.date()}; spot: 0.3 of them" in prices


def test_plan_without_steps_has_prices_of_an_hour_and_of_a_billion_tokens() -> None:
    arguments = ["plan", CONFIG, "--instance", "c7i.24xlarge", "train.max_steps=null"]
    (cost,) = (line for line in lines(*arguments) if line.startswith("cost"))
    plan = json.loads("\n".join(lines(*arguments, "--json")))
    hourly = plan["usd_per_hour"] + plan["fees_usd_per_hour"]
    assert cost.startswith(
        f"cost            {hourly:.2f} USD an hour, {plan['usd_per_billion_tokens']:,.0f} USD per billion"
    )
    assert plan["usd_per_billion_tokens"] == pytest.approx(hourly / 3600 * 1e9 / plan["tokens_per_s"])
    assert cost.count("USD an hour") == 2 and "us-east-1, 2026-07-20" in cost  # on demand and on spot


@pytest.mark.parametrize("region, word", [("us-east-1", "credentials"), ("", "region")])
def test_without_credentials_or_a_region(
    region: str, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", region)
    for option in ("--refresh", "--live"):
        result = CliRunner().invoke(app, ["instances", option])
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
        assert word in result.stderr and "AWS_REGION" in result.stderr
    assert not refreshed_path().exists()


def test_terabytes_are_no_generation() -> None:
    answer = {"InstanceType": "u-9tb1.112xlarge", "VCpuInfo": {"DefaultVCpus": 448}, "NetworkInfo": {},
              "MemoryInfo": {"SizeInMiB": 9 << 20}}  # fmt: skip
    found = aws_answers._Description.model_validate(answer).instance_type(None)
    assert (found.generation, found.amx) == (1, False)


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with mock_aws():
        yield


@pytest.mark.long
def test_live_types_agree_with_the_catalogue(moto: None) -> None:
    """moto's types are AWS' own answers of some day."""
    live, compared = {ec2.name: ec2 for ec2 in live_instances()}, 0
    assert len(live) > 500
    for ours in instances():
        if (theirs := live.get(ours.name)) is not None:
            compared += 1
            assert (ours.generation, ours.amx) == (theirs.generation, theirs.amx), ours.name
    assert compared > 500
    names = {"c7i.8xlarge", "m7i.large", "r7i.48xlarge", "c7g.4xlarge", "m7a.4xlarge", "g6e.8xlarge", "p5.48xlarge"}
    assert len(names & live.keys()) >= 5
    for name in names & live.keys():
        ours, theirs = instance(name), live[name]
        for field in ("arch", "vcpus", "physical_cores", "memory_bytes", "allocatable_memory_bytes", "efa_interfaces",
                      "allocatable_cpu_millicores", "amx", "gpus", "max_pods", "cpu_manufacturer"):  # fmt: skip
            assert getattr(ours, field) == getattr(theirs, field), (name, field)


@pytest.mark.long
def test_refresh_from_moto(moto: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto has types and spot prices; it does not have the price list."""
    monkeypatch.setattr(aws_answers, "_on_demand_prices", lambda client, region: {ec2.name: 1.0 for ec2 in instances()})
    refreshed = refresh(lambda words: None)
    assert refreshed.region == "us-east-1" and len(refreshed.types) > 500
    assert sum(ec2.spot_usd_per_hour == 0.00001 for ec2 in refreshed.types) > 500
