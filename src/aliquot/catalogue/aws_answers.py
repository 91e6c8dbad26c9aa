"""Ask AWS for the instance types and prices of a region, with the user's credentials, and store them in the cache.

pydantic validates each answer. Incomplete answers raise an error and never replace a stored catalogue.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import median
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from aliquot.catalogue.instances import (
    Catalogue,
    InstanceType,
    allocatable_cpu_millicores,
    allocatable_memory_bytes,
    catalogue,
    has_amx,
    instances,
    store,
)
from aliquot.core.errors import InstanceError, MissingToolError, UserError

_MIB = 1 << 20
_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
_MAX_PODS_SMALL, _MAX_PODS_LARGE = 110, 250  # kubelet's limit below 30 vCPUs and from 30 on, if ENIs allow more
_PRICING_REGION = "us-east-1"  # the price list of all regions is served in few regions
_PRODUCTS = {"operatingSystem": "Linux", "preInstalledSw": "NA", "capacitystatus": "Used", "marketoption": "OnDemand"}
_TENANCIES = {"Compute Instance": "Shared", "Compute Instance (bare metal)": "Dedicated"}
_LEAST_PRICED = 0.5  # part of a region's types; regions sell nearly all of their types on demand and on spot
_CREDENTIALS = "set AWS_PROFILE and AWS_REGION, or run `aws configure`"
_PERMISSIONS = "the credentials need ec2:DescribeInstanceTypes, ec2:DescribeSpotPriceHistory and pricing:GetProducts"

_Usd = Annotated[FiniteFloat, Field(gt=0)]


class _Gpu(BaseModel):
    name: str = Field(validation_alias="Name")
    count: int = Field(0, validation_alias="Count")
    memory_mib: int = Field(0, validation_alias=AliasPath("MemoryInfo", "SizeInMiB"))


class _NetworkCard(BaseModel):
    gbit_per_s: FiniteFloat | None = Field(None, validation_alias="BaselineBandwidthInGbps")


class _Description(BaseModel):
    """An instance type in the answer to DescribeInstanceTypes."""

    name: str = Field(validation_alias="InstanceType")
    architectures: list[str] = Field([], validation_alias=AliasPath("ProcessorInfo", "SupportedArchitectures"))
    manufacturer: str = Field("", validation_alias=AliasPath("ProcessorInfo", "Manufacturer"))
    clock_ghz: float = Field(0.0, validation_alias=AliasPath("ProcessorInfo", "SustainedClockSpeedInGhz"))
    vcpus: int = Field(ge=1, validation_alias=AliasPath("VCpuInfo", "DefaultVCpus"))
    cores: int | None = Field(None, validation_alias=AliasPath("VCpuInfo", "DefaultCores"))
    memory_mib: int = Field(ge=1, validation_alias=AliasPath("MemoryInfo", "SizeInMiB"))
    network_interfaces: int = Field(1, validation_alias=AliasPath("NetworkInfo", "MaximumNetworkInterfaces"))
    addresses_per_interface: int = Field(2, validation_alias=AliasPath("NetworkInfo", "Ipv4AddressesPerInterface"))
    network_cards: list[_NetworkCard] = Field([], validation_alias=AliasPath("NetworkInfo", "NetworkCards"))
    efa_interfaces: int = Field(0, validation_alias=AliasPath("NetworkInfo", "EfaInfo", "MaximumEfaInterfaces"))
    gpus: list[_Gpu] = Field([], validation_alias=AliasPath("GpuInfo", "Gpus"))
    local_nvme_gb: int = Field(0, validation_alias=AliasPath("InstanceStorageInfo", "TotalSizeInGB"))

    @property
    def arch(self) -> str | None:
        """The architecture in the words of Kubernetes; None for 32-bit and Mac types."""
        return next((_ARCH[arch] for arch in self.architectures if arch in _ARCH), None)

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def maker(self) -> str:
        """Return intel, amd or aws. If AWS names no manufacturer, the name of the family decides."""
        named = next((maker for maker in ("intel", "amd", "aws") if maker in self.manufacturer.lower()), None)
        return named or ("aws" if self.arch == "arm64" else "amd" if re.match(r"[a-z]+\d+a", self.family) else "intel")

    @property
    def max_pods(self) -> int:
        """The maximum pods of a node: the IP addresses of the VPC CNI, up to the limit of kubelet."""
        addresses = self.network_interfaces * (self.addresses_per_interface - 1) + 2
        return min(addresses, _MAX_PODS_SMALL if self.vcpus < 30 else _MAX_PODS_LARGE)

    @property
    def network_bytes_per_s(self) -> int | None:
        """The sustained rate of all network cards; None if AWS publishes no number."""
        rates = [card.gbit_per_s for card in self.network_cards if card.gbit_per_s is not None]
        return int(sum(rates) * 1e9 / 8) if rates else None

    def instance_type(self, known: InstanceType | None) -> InstanceType:
        """Convert the answer. `known`: the type in the catalogue, whose price and number of pods it keeps."""
        arch, maker = self.arch or "amd64", self.maker
        digits = re.search(r"\d+(?!\d*tb)", self.family)  # u-6tb1 has 6 TiB and is of generation 1
        generation, memory_bytes = int(digits.group()) if digits else 0, self.memory_mib * _MIB
        max_pods = self.max_pods if known is None else known.max_pods
        return InstanceType(
            name=self.name,
            arch=arch,
            cpu_manufacturer=maker,
            generation=generation,
            vcpus=self.vcpus,
            physical_cores=self.cores or self.vcpus,
            clock_mhz=int(self.clock_ghz * 1000),
            memory_bytes=memory_bytes,
            allocatable_memory_bytes=allocatable_memory_bytes(memory_bytes, max_pods, arch),
            allocatable_cpu_millicores=allocatable_cpu_millicores(self.vcpus),
            max_pods=max_pods,
            network_bytes_per_s=self.network_bytes_per_s,
            efa_interfaces=self.efa_interfaces,
            amx=has_amx(self.family, maker, generation),
            gpus=sum(gpu.count for gpu in self.gpus),
            gpu_name=self.gpus[0].name.lower() if self.gpus else None,
            gpu_memory_bytes=self.gpus[0].memory_mib * _MIB if self.gpus else None,
            local_nvme_bytes=self.local_nvme_gb * 10**9,
            usd_per_hour=None if known is None else known.usd_per_hour,
        )


class _SpotPrice(BaseModel):
    """A record in the answer to DescribeSpotPriceHistory."""

    name: str = Field(validation_alias="InstanceType")
    zone: str = Field(validation_alias="AvailabilityZone")
    time: datetime = Field(validation_alias="Timestamp")
    usd: _Usd = Field(validation_alias="SpotPrice")


class _Dimension(BaseModel):
    usd: FiniteFloat = Field(0.0, validation_alias=AliasPath("pricePerUnit", "USD"))


class _Term(BaseModel):
    dimensions: dict[str, _Dimension] = Field(validation_alias="priceDimensions")


class _Product(BaseModel):
    """A product in the answer to GetProducts: one instance type with its price per hour."""

    name: str = Field(validation_alias=AliasPath("product", "attributes", "instanceType"))
    terms: dict[str, _Term] = Field(validation_alias=AliasPath("terms", "OnDemand"))

    @property
    def usd(self) -> float:
        """The price; 0 if it is in another currency, or if a reservation has paid it already."""
        return max((part.usd for term in self.terms.values() for part in term.dimensions.values()), default=0.0)


def aws_session() -> Any:
    """Return a boto3.Session in the region of AWS_REGION, which the AWS CLI reads and boto3 does not.

    Raises ImportError without boto3.
    """
    import boto3

    return boto3.Session(region_name=os.environ.get("AWS_REGION") or None)


def live_instances() -> list[InstanceType]:
    """Ask AWS for all types of the user's region; prices come from the catalogue.

    Raises UserError without boto3, credentials, a region or the permission.
    """
    with _aws_errors("--live"):
        return _described(aws_session().client("ec2"))


def refresh(progress: Callable[[str], None]) -> Catalogue:
    """Ask AWS for types, on-demand prices and spot prices of the user's region, store them and return them.

    Raises UserError, and leaves a stored catalogue as it is, unless AWS answers completely.
    """
    with _aws_errors("--refresh"):
        session = aws_session()
        ec2 = session.client("ec2")
        region = ec2.meta.region_name
        progress(f"asking AWS for the instance types of {region}")
        types = _described(ec2)
        progress(f"asking AWS for the spot prices of {region}")
        on_spot = _spot_prices(ec2)
        progress(f"asking AWS for the on-demand prices of {region}")
        on_demand = _on_demand_prices(session.client("pricing", region_name=_PRICING_REGION), region)
    for prices, kind in ((on_demand, "on-demand"), (on_spot, "spot")):
        priced = sum(item.name in prices for item in types)
        if not types or priced < _LEAST_PRICED * len(types):
            raise InstanceError(
                f"AWS gave {kind} prices of only {priced} of {len(types)} types of {region}; the catalogue of"
                f" {catalogue().source} stays in use"
            )
    priced_types = tuple(
        replace(item, usd_per_hour=on_demand.get(item.name), spot_usd_per_hour=on_spot.get(item.name)) for item in types
    )
    refreshed = Catalogue(region, datetime.now(UTC).date().isoformat(), priced_types)
    store(refreshed)
    return refreshed


@contextmanager
def _aws_errors(option: str) -> Iterator[None]:
    """Turn errors of boto3, and answers that cannot be read, into UserErrors. `option` needs boto3."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise MissingToolError(f"{option} needs boto3: pip install 'aliquot[cluster]'") from None
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code")
        raise InstanceError(f"AWS refused {error.operation_name}: {code}; {_PERMISSIONS}") from None
    except BotoCoreError as error:
        raise InstanceError(f"AWS could not be asked: {str(error).rstrip('.')}; {_CREDENTIALS}") from None
    except UserError:
        raise
    except Exception as error:  # each parser raises its own types for answers that are no XML, no JSON or no numbers
        reason = str(error) or type(error).__name__
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InstanceError(
            f"AWS gave an answer that cannot be read: {' '.join(reason.split())[:300]}. Try again; the catalogue of"
            f" {catalogue().source} stays in use"
        ) from error


def _pages(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page.get(key, ())


def _described(ec2: Any) -> list[InstanceType]:
    known = {item.name: item for item in instances()}
    answers = [*_pages(ec2, "describe_instance_types", "InstanceTypes")]
    described = TypeAdapter(list[_Description]).validate_python(answers)
    types = [asdict(item.instance_type(known.get(item.name))) for item in described if item.arch is not None]
    return TypeAdapter(list[InstanceType]).validate_python(types)


def _spot_prices(ec2: Any) -> dict[str, float]:
    """Return the present spot price of each type, as the median of the region's zones."""
    # EC2 answers with the last price before StartTime.
    arguments = {"StartTime": datetime.now(UTC), "ProductDescriptions": ["Linux/UNIX"]}
    answers = [*_pages(ec2, "describe_spot_price_history", "SpotPriceHistory", **arguments)]
    prices: dict[str, dict[str, float]] = defaultdict(dict)
    for record in sorted(TypeAdapter(list[_SpotPrice]).validate_python(answers), key=lambda record: record.time):
        prices[record.name][record.zone] = record.usd
    return {name: median(zones.values()) for name, zones in prices.items()}


def _on_demand_prices(pricing: Any, region: str) -> dict[str, float]:
    prices: dict[str, float] = {}
    for family, tenancy in _TENANCIES.items():
        attributes = {"regionCode": region, "productFamily": family, "tenancy": tenancy, **_PRODUCTS}
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in attributes.items()]
        for text in _pages(pricing, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters):
            product = _Product.model_validate_json(text)
            if product.usd > 0:
                prices[product.name] = product.usd
    return prices
