"""The native library of another processor: cross-compiled, and run by an emulator on the problems of this process.

`EmulatedLibrary` has the methods of `cpu.Library`. It copies the memory that a record points to into the process of
driver.cc, and copies what the kernel wrote back.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import memmove, string_at
from pathlib import Path
from typing import IO

from undivided.kernels import cpu

ROOT = Path(__file__).resolve().parents[4]
COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
LEVELS = ("generic", "neon", "neon_bf16")
_FORWARD, _BACKWARD, _SHARED_KEYS, _APPEND, _PARTS = 1, 2, 3, 4, 16
_ITEM_BYTES = {0: 4, 1: 2, 2: 2}  # of each Type
_INT4, _GROUP = 4, 32


def missing() -> str | None:
    """The reason why the library cannot be built and run here, or None."""
    programs = [name for name in (COMPILER, EMULATOR, "cmake") if shutil.which(name) is None]
    if programs:
        return f"no {', '.join(programs)} in PATH (Debian: g++-aarch64-linux-gnu, qemu-user, cmake)"
    return None if Path(SYSTEM).is_dir() else f"no {SYSTEM} (Debian: g++-aarch64-linux-gnu)"


def build(folder: Path) -> tuple[Path, Path]:
    """The driver and the library, built in the folder."""
    toolchain = ROOT / "cmake" / "aarch64-linux-gnu.cmake"
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"]
    if other := os.environ.get("UNDIVIDED_AARCH64_COMPILER"):
        options += [f"-DCMAKE_CXX_COMPILER={other}", "-DUNDIVIDED_WERROR=ON"]
    subprocess.run(["cmake", "-S", ROOT / "cmake", "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "-j2"], check=True, stdout=subprocess.DEVNULL)
    driver, source = folder / "driver", Path(__file__).with_name("driver.cc")
    # the library uses the OpenMP runtime of its process
    link = ["-ldl", "-Wl,--no-as-needed", "-lgomp"]
    subprocess.run([COMPILER, "-O2", "-std=c++17", "-Wall", "-Wextra", source, "-o", driver, *link], check=True)
    return driver, folder / "libundivided_cpu.so"


def _memory(address: int, item: int, *axes: tuple[int, int]) -> tuple[int, int, int] | None:
    """(address, start, end) of a tensor of items with these (size, stride) axes; None if it has no memory."""
    if not address or any(size == 0 for size, _ in axes):
        return None
    return address, address, address + item * (1 + sum((size - 1) * stride for size, stride in axes))


Places = list[tuple[str, tuple[int, int, int] | None]]


def _attention_places(a: Mapping[str, int]) -> Places:
    """The memory of every pointer of an Attention."""
    item, batch, heads, kv_heads = _ITEM_BYTES[a["dtype"]], a["batch"], a["heads"], a["kv_heads"]
    rows, keys = a["q_len"], a["kv_len"]
    outer, inner = (a["page_count"], a["page_size"]) if a["pages"] else (batch, keys)
    places: Places = []

    def tensor(name: str, item: int, first: int, heads: int, length: int, dim: int) -> None:
        axes = (first, a[name + "_b"]), (heads, a[name + "_h"]), (length, a[name + "_s"]), (dim, 1)
        places.append((name, _memory(a[name], item, *axes)))

    stored = 2 if a["format"] == _INT4 else 1
    tensor("q", item, batch, heads, rows, a["qk_dim"])
    tensor("out", item, batch, heads, rows, a["v_dim"])
    for name, dim in (("k", a["qk_dim"]), ("v", a["v_dim"])):
        tensor(name, 1 if a["format"] else item, outer, kv_heads, inner, dim // stored if a["format"] else dim)
        tensor(name + "_scale", 4, outer, kv_heads, inner, dim // _GROUP if a["format"] == _INT4 else 1)
    entries = a["dense_keys"] if a["dense_from"] else keys
    for name, item, count in (("bias", _ITEM_BYTES[a["bias_dtype"]], keys), ("dense", 1, entries)):
        of_pairs = (batch, "_b"), (heads, "_h"), (rows, "_q"), (count, "_k")
        places.append((name, _memory(a[name], item, *((size, a[name + axis]) for size, axis in of_pairs))))
    of_rows = (batch, "_b"), (heads, "_h"), (rows, "_q")
    places.append(("slopes", _memory(a["slopes"], 4, *((size, a["slopes" + axis]) for size, axis in of_rows))))
    places.append(("lse", _memory(a["lse"], 4, (batch, a["lse_b"]), (heads, a["lse_h"]), (rows, 1))))
    places.append(("sinks", _memory(a["sinks"], 4, (heads, 1))))
    table = -(-keys // a["page_size"]) if a["pages"] else 0
    for name, length in (
        ("ranges", rows * a["columns"]),
        ("pages", table),
        ("row_position", rows),
        ("key_position", keys),
        ("dropout_row", rows),
        ("dropout_sequence", rows),
        ("first_key", rows),
        ("dense_from", rows),
    ):
        places.append((name, _memory(a[name], 4, (batch, a[name + "_b"]), (length, 1))))
    return places


def _gradient_places(g: Mapping[str, int], a: Mapping[str, int]) -> Places:
    """The memory of every pointer of a Gradients."""
    item, batch, heads, kv_heads = _ITEM_BYTES[a["dtype"]], a["batch"], a["heads"], a["kv_heads"]
    of_gradient, rows, keys = _ITEM_BYTES[g["type"]], a["q_len"], a["kv_len"]
    places: Places = []
    for name, size, count, length, dim in (
        ("grad_out", item, heads, rows, a["v_dim"]),
        ("dq", of_gradient, heads, rows, a["qk_dim"]),
        ("dk", of_gradient, kv_heads, keys, a["qk_dim"]),
        ("dv", of_gradient, kv_heads, keys, a["v_dim"]),
    ):
        axes = (batch, g[name + "_b"]), (count, g[name + "_h"]), (length, g[name + "_s"]), (dim, 1)
        places.append((name, _memory(g[name], size, *axes)))
    grad_lse = (batch, g["grad_lse_b"]), (heads, g["grad_lse_h"]), (rows, 1)
    places.append(("grad_lse", _memory(g["grad_lse"], 4, *grad_lse)))
    for name in ("sinks", "slopes"):
        places.append((name, _memory(g[name], 4, (batch, g["rows_b"]), (heads, g["rows_h"]), (rows, 1))))
    bias = (batch, g["bias_b"]), (heads, g["bias_h"]), (rows, g["bias_q"]), (keys, g["bias_k"])
    places.append(("bias", _memory(g["bias"], 4, *bias)))
    return places


def _append_places(p: Mapping[str, int]) -> Places:
    """The memory of every pointer of an Append."""
    item, batch, length, heads, pool_rows = (
        _ITEM_BYTES[p["dtype"]],
        p["batch"],
        p["length"],
        p["kv_heads"],
        p["row_count"] * p["kv_heads"],
    )
    places: Places = [("rows", _memory(p["rows"], 8, (batch * length, 1)))]
    for name in "kv":
        dim, is_int4 = p[f"{name}_dim"], p["format"] == _INT4
        axes = [(size, p[f"{name}_{axis}"]) for axis, size in (("b", batch), ("h", heads), ("s", length))]
        places.append((name, _memory(p[name], item, *axes, (dim, 1))))
        stored = dim * item if not p["format"] else dim // 2 if is_int4 else dim
        places.append((f"{name}_pool", _memory(p[f"{name}_pool"], 1, (pool_rows * stored, 1))))
        scales = pool_rows * (dim // _GROUP if is_int4 else 1)
        places.append((f"{name}_scale", _memory(p[f"{name}_scale"], 4, (scales, 1))))
    return places


def _blocks(places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The memory of all places as (start, end) of disjoint blocks: tensors may share memory."""
    blocks: list[tuple[int, int]] = []
    for _, start, end in sorted(places, key=lambda place: place[1]):
        if blocks and start < blocks[-1][1]:
            blocks[-1] = (blocks[-1][0], max(end, blocks[-1][1]))
        else:
            blocks.append((start, end))
    return blocks


class EmulatedLibrary(cpu.Library):
    """The library in the emulator's process, at one level."""

    def __init__(self, driver: Path, library: Path, level: str, processor: str = "max") -> None:
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", processor, "-L", SYSTEM, driver, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "UNDIVIDED_ISA": level},
        )
        self._send(struct.pack("q", 0))
        self.level = self._read(self._number()).decode()
        self.levels = LEVELS
        self.lost_level, self.has_openmp = None, False
        self.calls = 0

    def close(self) -> None:
        """End the emulator."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(60)

    def _send(self, data: bytes) -> None:
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        pipe.write(data)
        pipe.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        assert len(data) == size, f"the emulator ended with {self._process.wait(60)}"
        return data

    def _number(self) -> int:
        return int(struct.unpack("q", self._read(8))[0])

    def _call(self, kind: int, records: list[tuple[bytes, Sequence[str], Places]]) -> int:
        """The status of a call; writes its results into this process's memory."""
        self.calls += 1
        blocks = _blocks([place for _, _, places in records for _, place in places if place is not None])
        message = [struct.pack("qq", kind, len(blocks))]
        for start, end in blocks:
            message += [struct.pack("q", end - start), string_at(start, end - start)]
        message.append(struct.pack("q", len(records)))
        for record, fields, places in records:
            pointers = []
            for name, place in places:
                if place is None:
                    continue
                block = next(i for i, (start, end) in enumerate(blocks) if start <= place[1] < end)
                pointers.append(struct.pack("3q", 8 * fields.index(name), block, place[0] - blocks[block][0]))
            message += [struct.pack("q", len(record)), record, struct.pack("q", len(pointers)), *pointers]
        self._send(b"".join(message))
        status = self._number()
        for start, end in blocks:
            memmove(start, self._read(end - start), end - start)
        return status

    def forward(self, record: bytes) -> None:
        """As `cpu.Library.forward`."""
        cpu._check(self._call(_FORWARD, [self._attention(record)]))

    def backward(self, record: bytes, gradients: bytes, attempt: int) -> int | None:
        """As `cpu.Library.backward`."""
        a = dict(zip(cpu.FIELDS, cpu.RECORD.unpack(record), strict=True))
        g = dict(zip(cpu.GRADIENT_FIELDS, cpu.GRADIENT_RECORD.unpack(gradients), strict=True))
        records = [self._attention(record), (gradients, cpu.GRADIENT_FIELDS, _gradient_places(g, a))]
        status = self._call(_BACKWARD, records)
        if status in (cpu._OUT_OF_RANGE, cpu._NON_FINITE):
            return cpu._PAIRWISE if status == cpu._NON_FINITE else attempt + 1
        cpu._check(status)
        return None

    def append(self, record: bytes) -> None:
        """As `cpu.Library.append`."""
        p = dict(zip(cpu.APPEND_FIELDS, cpu.APPEND_RECORD.unpack(record), strict=True))
        cpu._check(self._call(_APPEND, [(record, cpu.APPEND_FIELDS, _append_places(p))]))

    def shared_keys(self, record: bytes | None) -> list[tuple[int, int, int]]:
        """As `cpu.Library.shared_keys`."""
        count = self._call(_SHARED_KEYS, [] if record is None else [self._attention(record)])
        found = struct.unpack(f"{3 * _PARTS}q", self._read(8 * 3 * _PARTS))
        return [(found[3 * i], found[3 * i + 1], found[3 * i + 2]) for i in range(min(count, _PARTS))]

    @staticmethod
    def _attention(record: bytes) -> tuple[bytes, Sequence[str], Places]:
        values = dict(zip(cpu.FIELDS, cpu.RECORD.unpack(record), strict=True))
        return record, cpu.FIELDS, _attention_places(values)
