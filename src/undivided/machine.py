"""The hardware and the installed libraries: probed once, or described.

Selection reads a `Machine` and nothing else of the system, so it can decide for any described machine:
``undivided.explain(q, k, v, layout="bshd", machine=Machine(device="cuda", compute_capability=(8, 0)))``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from undivided.arguments.checks import as_device, check_type, checked_flag
from undivided.arguments.signature import checked_call
from undivided.errors import InputError, did_you_mean

Version = tuple[int, ...]
_Device = torch.device  # in the class `Machine`, torch is a field
_CAPABILITY_HINT = "for example (8, 0) for an A100, (9, 0) for an H100"

# import name -> distribution names that provide it, in order of preference
_PACKAGES: dict[str, tuple[str, ...]] = {
    "flash_attn": ("flash-attn",),
    "flash_attn_3": ("flash-attn-3", "flash_attn_3"),
    "flash_attn_4": ("flash-attn-4",),
    "cudnn_frontend": ("nvidia-cudnn-frontend",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
}

KNOWN_GPUS: dict[str, tuple[int, int]] = {
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "b300": (10, 3),
    "rtx5090": (12, 0),
}
"""Compute capability by GPU name (source: NVIDIA's CUDA GPU list)."""


def parse_version(text: str, argument: str = "version") -> Version:
    """``"8.9.7"`` -> ``(8, 9, 7)``; text after the leading numbers (``+cu126``, ``.post1``) is ignored."""
    match = re.match(r"\d+(\.\d+)*", text) if isinstance(text, str) else None
    if match is None:
        raise InputError(argument, "be a version such as '9.1.0'", repr(text))
    return tuple(int(number) for number in match.group().split("."))


def format_version(version: Version) -> str:
    """``(8, 9, 7)`` -> ``"8.9.7"``."""
    return ".".join(map(str, version))


@checked_call
@dataclass(frozen=True)
class Machine:
    """The properties of a machine that selection of a backend depends on.

    Args:
        device: "cpu" or "cuda"; None: that of the tensors.
        name: what people call it; only printed.
        compute_capability: of the CUDA device, e.g. (8, 0) for an A100.
        cudnn: cuDNN's version, e.g. "8.9.7".
        packages: versions of installed packages by import name, e.g. {"flash_attn": "2.8.4"}.
            Known: flash_attn, flash_attn_3, flash_attn_4, cudnn_frontend, triton.
        torch: PyTorch's version; by default that of the running PyTorch.
        isa: the CPU's instruction set as PyTorch names it ("AVX2", "AVX512", "DEFAULT", ...).
        hip: True if torch's "cuda" device is an AMD GPU (ROCm).
        flash_impl: the implementation by which ``torch.nn.attention.activate_flash_attention_impl`` replaced PyTorch's
            flash kernel on CUDA, "FA3" or "FA4"; None for PyTorch's own.
        probed: True if `Machine.this` made it.
        processor: the CPU's name, such as "AMD EPYC 9V74"; "" if it is not known. Rates that were measured on a CPU of
            another vendor order backends only if they differ by more than a factor of two.

    >>> a100 = Machine(device="cuda", compute_capability=(8, 0), cudnn="8.9.7", packages={"flash_attn": "2.8.4"})
    >>> a100.version("flash_attn")
    (2, 8, 4)
    """

    device: str | None = None
    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    cudnn: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch: str = torch.__version__.partition("+")[0]
    isa: str = ""
    hip: bool = False
    flash_impl: str | None = None
    probed: bool = False
    processor: str = ""

    def __post_init__(self) -> None:
        if self.device is not None and not (isinstance(self.device, str) and self.device in ("cpu", "cuda")):
            raise InputError("Machine.device", "be 'cpu', 'cuda' or None", repr(self.device))
        for name in ("hip", "probed"):
            checked_flag(f"Machine.{name}", getattr(self, name))
        if self.name is not None:
            check_type("Machine.name", self.name, str, "a str or None")
        for name in ("isa", "processor"):
            check_type(f"Machine.{name}", getattr(self, name), str, "a str")
        if self.device == "cuda" and self.compute_capability is None and not self.hip:
            raise InputError("Machine.compute_capability", "be given for a CUDA device", None, hint=_CAPABILITY_HINT)
        if self.compute_capability is not None:
            object.__setattr__(self, "compute_capability", _checked_capability(self.compute_capability))
        if not isinstance(self.packages, Mapping):
            got = type(self.packages).__name__
            raise InputError("Machine.packages", "map names to versions, as {'flash_attn': '2.8.4'}", got)
        unknown = sorted(set(self.packages) - set(_PACKAGES), key=str)
        if unknown:
            raise InputError("Machine.packages", f"name only {', '.join(_PACKAGES)}", unknown)
        parse_version(self.torch, "Machine.torch")
        if self.cudnn is not None:
            parse_version(self.cudnn, "Machine.cudnn")
        for name, text in self.packages.items():
            parse_version(text, f"Machine.packages[{name!r}]")
        object.__setattr__(self, "packages", dict(self.packages))
        if self.flash_impl is not None and not isinstance(self.flash_impl, str):
            raise InputError("Machine.flash_impl", "be a name such as 'FA3', or None", repr(self.flash_impl))

    def __hash__(self) -> int:  # not the generated one, which cannot hash the dictionary of packages
        return hash((self.device, self.compute_capability, self.cudnn, *sorted(self.packages.items()), self.torch))

    def version(self, package: str) -> Version | None:
        """The version of a package on this machine.

        Args:
            package: name of a package, str, or "torch" or "cudnn".

        Returns:
            Its version as a tuple of int; None if it is not installed.

        Raises:
            InputError: it is not a name.
        """
        check_type("package", package, str, "the name of a package")
        text = {"torch": self.torch, "cudnn": self.cudnn}.get(package) or self.packages.get(package)
        return parse_version(text) if text else None

    @staticmethod
    def this(device: _Device | str | None = None) -> Machine:
        """The machine that this process runs on, probed once per device and per flash operator that PyTorch runs there.

        Args:
            device: a ``torch.device``, its name, or None for the CPU.

        Returns:
            The same `Machine` for the same device.

        Raises:
            InputError: it is not a device.
        """
        if device is None or (chosen := as_device("device", device)).type != "cuda":
            return _probe("cpu", None)
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        return _probe(f"cuda:{index}", active_flash_impl())

    @staticmethod
    def named(name: str, cudnn: str | None = None, packages: Mapping[str, str] | None = None) -> Machine:
        """A machine with a GPU of `KNOWN_GPUS`, or "cpu".

        Args:
            name: such as "a100" or "h100", str; case, blanks and dashes do not matter.
            cudnn: cuDNN's version, such as "9.8.0"; None: there is none.
            packages: versions by the names of packages; None: there are none.

        Returns:
            A described `Machine`.

        Raises:
            InputError: an unknown name, or a version that is not one.

        >>> Machine.named("a100").compute_capability
        (8, 0)
        """
        key = str(name).lower().replace(" ", "").replace("-", "")
        if key == "cpu":
            return Machine(device="cpu", name="cpu", packages={} if packages is None else packages)
        if key not in KNOWN_GPUS:
            hint = did_you_mean(key, [gpu for gpu in KNOWN_GPUS if gpu[0] == key[:1]])
            hint = hint or "another GPU: Machine(device='cuda', compute_capability=(8, 0))"
            raise InputError("device", f"be cpu or one of {', '.join(KNOWN_GPUS)}", repr(name), hint)
        return Machine("cuda", key.upper(), KNOWN_GPUS[key], cudnn, {} if packages is None else packages)

    def __str__(self) -> str:
        texts = [self.name or self.device or "this machine"]
        if self.compute_capability:
            texts.append("sm" + "".join(map(str, self.compute_capability)))
        if self.isa:
            texts.append(self.isa)
        texts.append(f"torch {self.torch}")
        if self.cudnn:
            texts.append(f"cuDNN {self.cudnn}")
        if self.flash_impl:
            texts.append(f"torch's flash is {self.flash_impl}")
        texts += [f"{package} {version}" for package, version in sorted(self.packages.items())]
        return ", ".join(texts)


def _checked_capability(value: object) -> tuple[int, int]:
    """A compute capability as a tuple; InputError unless it is two ints."""
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise InputError("Machine.compute_capability", "be two ints", repr(value), hint=_CAPABILITY_HINT)
    return pair


def _installed_version(names: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed; None if none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def active_flash_impl() -> str | None:
    """The implementation that was activated for PyTorch's flash operators on CUDA; None for PyTorch's own.

    Read at every call, because it may change while the program runs. Source: torch/nn/attention/_registry.py (2.13).
    """
    current = getattr(sys.modules.get("torch.nn.attention"), "current_flash_attention_impl", None)
    return None if current is None else current()


@functools.cache
def _probe(device: str, flash_impl: str | None) -> Machine:
    """The machine with this device, "cpu" or "cuda:N". flash_impl: as `active_flash_impl` returns it."""
    packages = {name: version for name, names in _PACKAGES.items() if (version := _installed_version(names))}
    isa = torch.backends.cpu.get_cpu_capability()
    if device == "cpu":
        name = f"{platform.machine()} {platform.system()}"
        return Machine(
            name=name, packages=packages, torch=torch.__version__, isa=isa, processor=processor_name(), probed=True
        )
    properties = torch.cuda.get_device_properties(torch.device(device))
    cudnn = torch.backends.cudnn.version()
    return Machine(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        cudnn=_cudnn_text(cudnn) if cudnn else None,
        packages=packages,
        torch=torch.__version__,
        isa=isa,
        processor=processor_name(),
        hip=torch.version.hip is not None,
        flash_impl=flash_impl,
        probed=True,
    )


def processor_name() -> str:
    """The name of this machine's CPU, as Linux gives it, else the name of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cudnn_text(number: int) -> str:
    """cuDNN writes 8.9.7 as 8907 and 9.10.2 as 91002."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"
