"""Tell which backends, devices, vector width, threads, threading layer and cache directory were
found on this machine, and why the rest was not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import import_module, metadata
from typing import Any

import numfuse as nf

# What numfuse runs on, and the optional packages by the extra that installs them.
REQUIRED = ("numpy", "numba", "llvmlite", "scipy", "ml_dtypes")
OPTIONAL = {
    "numba-cuda": "cuda",
    "cuda-toolkit": "cuda",
    "wgpu": "webgpu",
    "torch": "torch",
    "jax": "jax",
    "autograd": "autograd",
    "dask": "dask",
    "scikit-learn": "sklearn",
    "matplotlib": "demo",
    "rich": "demo",
    "threadpoolctl": "bench",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, to attach to a bug report"
    )


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything that this command prints, as one object that JSON can hold."""
    from numfuse.backends import load

    found: dict[str, Any] = {
        "numfuse": nf.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: version(name) for name in REQUIRED},
        "optional": {name: version(name) for name in OPTIONAL},
        "backends": {},
    }
    for name, status in nf.backends().items():
        facts: dict[str, Any] = {"available": False, "reason": str(status)}
        try:
            if status:
                facts = {"available": True, **load(name).describe()}
        except nf.BackendUnavailable as error:  # such as threads that do not start
            facts["reason"] = str(error)
        found["backends"][name] = facts
    if found["optional"]["jax"] is not None:
        try:
            found["jax"] = import_module("numfuse.adapters.jax").describe()
        except ImportError as error:  # such as a jax without its jaxlib
            found["jax"] = f"nothing: {error}"
    return found


def sentence(value: Any) -> str:
    """A fact as a person reads it: lists with commas, yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {sentence(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(sentence, value)) or "none"
    return "none" if value is None else str(value)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    print(f"\n{title}")
    width = max(map(len, facts), default=0)
    for key, value in facts.items():
        print(f"  {key:{width}}  {sentence(value)}")


def run(arguments: argparse.Namespace) -> int:
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2, default=str))
        return 0

    print(f"numfuse {found['numfuse']}, Python {found['python']}, {found['platform']}")
    for name, facts in found["backends"].items():
        if facts.pop("available"):
            words = {key.replace("_", " "): value for key, value in facts.items()}
            print_facts(f"{name}: available", words)
        else:
            print(f"\n{name}: not available\n  {facts['reason']}")
    if "jax" in found:
        print(f"\njax calls the CPU backend by {found['jax']}")
    print_facts("packages", found["packages"])
    for name, extra in OPTIONAL.items():
        missing = f'not installed: python -m pip install "numfuse[{extra}]"'
        found["optional"][name] = found["optional"][name] or missing
    print_facts("optional packages", found["optional"])
    return 0
