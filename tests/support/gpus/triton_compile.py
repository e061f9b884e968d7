"""Compile every kernel that some problems launch, for a GPU that this machine lacks: ``python triton_compile.py sm90
[PROBLEM]``.

The `triton` backend runs with each launch replaced by a compilation for the target. Prints one JSON line per kernel:
its name, the problem, and from the assembler that comes with Triton: registers per thread, spilled bytes, bytes of
shared memory, and the special instructions it uses. Runs as a separate program, without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from calls import call_of
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from undivided import masks
from undivided.backends import get
from undivided.backends.triton import append, inputs
from undivided.quantization import FORMATS, empty, quantize

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
ALIGNED = [["tt.divisibility", 16]]


def compiling(target: GPUTarget, told: Callable[[str, Any], None]) -> Callable[..., None]:
    """A replacement of a kernel launch that compiles the kernel."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        bound = dict(zip(names, args)) | {name: value for name, value in given.items() if name in names}  # noqa: B905
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value, name = bound[parameter.name], parameter.name
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                element = POINTERS[value.base.dtype].removeprefix("*")
                signature[name] = f"tensordesc<{element}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                signature[name], attributes[(place,)] = POINTERS[value.dtype], ALIGNED
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(place,)] = ALIGNED
        options = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
        source = ASTSource(kernel, signature, constants, attributes)
        told(kernel.__name__, triton.compile(source, target=target, options=options))

    return run


def resources(compiled: Any, architecture: str) -> dict[str, int]:
    """The resources of a compiled kernel, and its special instructions."""
    ptx = compiled.asm["ptx"]
    tools, number = Path(triton.__file__).parent / "backends/nvidia/bin", int(architecture.removeprefix("sm"))
    later = tools / "ptxas-blackwell"  # Triton 3.6 and later
    assembler = later if number >= 100 and later.exists() else tools / "ptxas"
    # wgmma and tcgen05 are of the architecture itself ("a"), not of all that follow
    name = f"sm_{number}a" if number >= 90 else f"sm_{number}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        words = (assembler, "-v", f"--gpu-name={name}", source, "-o", source.with_suffix(".cubin"))
        command = [str(word) for word in words]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = ""
        if " 0 bytes spill stores" not in report:
            command = [str(tools / "nvdisasm"), str(source.with_suffix(".cubin"))]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"Used (\d+) registers", report)
    stores = re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None, report
    assert stores is not None, report
    return {
        "registers": int(registers[1]),
        "spilled": int(stores[1]),
        "spilled_in_loop": spilled_in_loop(listing),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "mma": ptx.count("mma.sync"),
        "descriptor_loads": ptx.count("cp.async.bulk.tensor"),
        "async_copies": ptx.count("cp.async.c"),
        "setmaxnreg": ptx.count("setmaxnreg"),
        "arithmetic": arithmetic(ptx),
        "loop": max((arithmetic(block) for block in re.split(r"^\$L__BB", ptx, flags=re.MULTILINE)), key=_products),
    }


def spilled_in_loop(listing: str) -> int:
    """The loads and stores of spilled registers in the innermost loop with products of tiles, from a listing of the
    machine code; 0 if there is no such loop."""
    lines = listing.splitlines()
    labels = {line.removesuffix(":").strip(): n for n, line in enumerate(lines) if line.startswith(".L_")}
    loops = []
    for n, line in enumerate(lines):
        target = re.search(r"\bBRA .*\((\.L_\w+)\)", line)
        body = lines[labels.get(target[1], n) : n] if target else []
        if any("MMA" in line for line in body):
            loops.append(body)
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in min(loops, key=len, default=[]))


def arithmetic(ptx: str) -> list[str]:
    """The floating-point instructions of a kernel that round, in their order, without registers."""
    names = re.findall(r"^\s+(?:@%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE)
    # not waits for products, conversions, or what only copies: the zeros of masked loads are selections only if the
    # load is asynchronous
    others = ("cvt", "ld", "st", "selp", "setp", "neg", "abs", "wgmma.fence", "wgmma.wait", "wgmma.commit")
    return [name for name in names if ("mma" in name or "f32" in name) and not name.startswith(others)]


def _products(names: list[str]) -> int:
    """How much a block of instructions multiplies, a product of tiles more than any number of single ones."""
    return sum(1000 * ("mma" in name) + ("fma" in name) for name in names)


def problems() -> Iterator[tuple[str, Any]]:
    """(name, the call and its tensors): plain at the table's widths, everything at once, heads in steps,
    decoding."""

    def made(
        dtype: torch.dtype, q_len: int, kv_len: int, heads: int, dims: tuple[int, int], grad: bool, **rest: Any
    ) -> Any:
        q, k = (torch.zeros(1, q_len, heads, dims[0], dtype=dtype), torch.zeros(1, kv_len, 2, dims[0], dtype=dtype))
        leaves = [t.requires_grad_(grad) for t in (q, k, torch.zeros(1, kv_len, 2, dims[1], dtype=dtype))]
        return call_of(*leaves, layout="bshd", **rest)

    leaf = lambda *shape: torch.zeros(*shape, requires_grad=True)  # noqa: E731
    for dim in (64, 128, 256):
        yield f"plain-bf16-{dim}", made(torch.bfloat16, 512, 512, 2, (dim, dim), True, mask=masks.causal())
    yield "forward-bf16-64", made(torch.bfloat16, 512, 512, 2, (64, 64), False, mask=masks.causal())
    yield (
        "everything-fp16-64",
        made(
            torch.float16,
            256,
            256,
            4,
            (64, 64),
            True,
            mask=masks.window(64, 0) | masks.prefix(4),
            softcap=30.0,
            sinks=leaf(4),  # type: ignore[no-untyped-call]
            alibi_slopes=leaf(4),  # type: ignore[no-untyped-call]
            bias=leaf(1, 4, 256, 256),  # type: ignore[no-untyped-call]
            dropout_p=0.1,
            dropout_seed=1,
        ),
    )
    yield "mla-bf16-320", made(torch.bfloat16, 256, 256, 2, (320, 256), True)
    yield "decode-bf16-128", made(torch.bfloat16, 1, 8192, 8, (128, 128), False, mask=masks.lengths([5000]))
    for dim in (64, 128, 256):
        for new in (8, 16):
            drafts = masks.lengths([5000], [new]) & masks.causal("bottom_right")
            made_of = (torch.bfloat16, new, 8192, 8, (dim, dim), False)
            yield f"decode-drafts-{new}-bf16-{dim}", made(*made_of, mask=drafts)
    many = torch.zeros(4, 1, 128, 576, dtype=torch.bfloat16)  # heads of one key head
    yield "decode-many-bf16", call_of(many, many[:, :, :1], many[:, :, :1, :512], layout="bshd")
    steps = {"pack-mixed": ([0, 1, 101], [0, 900, 1800]), "pack-decode": ([0, 1, 2], [0, 900, 1800])}
    for name, (ends, key_ends) in steps.items():
        pool, v = (torch.zeros(16, 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
        arguments: dict[str, Any] = {
            "mask": masks.documents(ends, key_ends) & masks.causal("bottom_right"),
            "layout": "thd",
        }
        pages = torch.zeros(2, 8, dtype=torch.int32)
        yield f"{name}-bf16-128", call_of(pool.new_zeros(ends[-1], 8, 128), pool, v, pages=pages, **arguments)
    latents = torch.zeros(1, 512, 1, 576, dtype=torch.bfloat16)
    pages, lengths = torch.arange(4, dtype=torch.int32)[None], masks.lengths([500])
    for name, v in (("latents", latents[..., :512]), ("wide", torch.zeros(1, 512, 1, 512, dtype=torch.bfloat16))):
        q, pools = latents.new_zeros(1, 1, 16, 576), [x.view(4, 128, 1, -1) for x in (latents, v.contiguous())]
        if name == "latents":
            pools[1] = pools[0][..., :512]
        yield f"decode-{name}-bf16", call_of(q, latents, v, layout="bshd")
        yield f"decode-{name}-pages-bf16", call_of(q, *pools, layout="bshd", pages=pages, mask=lengths)
    q = torch.zeros(4, 1, 8, 128, dtype=torch.bfloat16)
    pool, v = (torch.zeros(64, 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    table, lengths = torch.arange(64, dtype=torch.int32).view(4, 16), masks.lengths([2048, 1000, 500, 2000])
    tree = masks.tree([-1, 0, 0, 1]) & lengths
    yield "decode-tree-pages-bf16-128", call_of(q.expand(-1, 4, -1, -1), pool, v, layout="bshd", mask=tree, pages=table)
    chosen = lengths & masks.pages([0, 7, 15, -1], 128)
    yield "pages-bf16-128", call_of(q, pool, v, layout="bshd", mask=lengths, pages=table)
    yield "chosen-pages-bf16-128", call_of(q, pool, v, layout="bshd", mask=chosen, pages=table)
    chosen = masks.blocks(64, 64, torch.arange(8)[:, None]) & masks.causal()
    yield "chosen-blocks-bf16-128", made(torch.bfloat16, 512, 512, 8, (128, 128), False, mask=chosen)
    for dim in (64, 256, 576):
        q, pool = torch.zeros(1, 200, 8, dim, dtype=torch.bfloat16), torch.zeros(4, 128, 2, dim, dtype=torch.bfloat16)
        paged: dict[str, Any] = {"pages": pages, "mask": masks.lengths([500]) & masks.causal("bottom_right")}
        yield f"forward-pages-bf16-{dim}", call_of(q, pool, pool.clone(), layout="bshd", **paged)
    for format in FORMATS:
        for name, q_len, kv_len, mask in (("forward", 512, 512, masks.causal()), ("decode", 1, 8192, None)):
            q, k = torch.zeros(1, q_len, 8, 128, dtype=torch.bfloat16), torch.zeros(1, kv_len, 2, 128)
            keys, scale = quantize(k, format)
            scales: dict[str, Any] = {"k_scale": scale, "v_scale": scale}
            yield f"{name}-{format}-128", call_of(q, keys, keys, layout="bshd", mask=mask, **scales)
            if name == "decode":
                yield f"{name}-{format}-fp16-128", call_of(q.half(), keys, keys, layout="bshd", mask=mask, **scales)
                for dim in (32, 64, 256):
                    q, k = torch.zeros(1, 1, 8, dim, dtype=torch.bfloat16), torch.zeros(1, kv_len, 2, dim)
                    keys, scale = quantize(k, format)
                    scales = {"k_scale": scale, "v_scale": scale}
                    yield f"{name}-{format}-{dim}", call_of(q, keys, keys, layout="bshd", mask=mask, **scales)


INVARIANT: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"dtype": torch.float32, "dim": 64},
    "wide": {"dim": 320},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "scores": {"softcap": 30.0, "alibi_slopes": torch.ones(8), "sinks": torch.ones(8)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
}
"""Options of a model, which are the same in all of its calls."""


def invariant_problems() -> Iterator[tuple[str, Any]]:
    """The same sequences in batch-invariant calls of several kinds: `INVARIANT`, one after another."""
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "prefill": (512, {"mask": masks.causal()}),
        "decode": (1, {"mask": masks.causal("bottom_right")}),
        "pack": (512, {"mask": masks.documents([0, 100, 512]) & masks.causal(), "layout": "thd"}),
        "steps": (
            6,
            {"mask": masks.documents([0, 5, 6], [0, 90, 512]) & masks.causal("bottom_right"), "layout": "thd"},
        ),
        "padding": (512, {"mask": masks.causal() & masks.lengths([300], [300], [7], [7])}),
        "pages": (5, {"mask": masks.causal("bottom_right") & masks.lengths([500]), "pages": True}),
        "shared": (1, {"mask": masks.causal("bottom_right"), "keys": 8192}),  # by several programs
    }
    for kind, options in INVARIANT.items():
        dtype, dim, format = options.get("dtype", torch.bfloat16), options.get("dim", 128), options.get("format")
        given = {name: value for name, value in options.items() if name not in ("dtype", "dim", "format")}
        for way, (q_len, more) in ways.items():
            q, keys, arguments = (
                torch.zeros(1, q_len, 8, dim, dtype=dtype),
                torch.zeros(1, more.get("keys", 512), 2, dim, dtype=dtype),
                {name: value for name, value in more.items() if name != "keys"},
            )
            if "pages" in more:
                keys, arguments = (
                    keys.view(32, 16, 2, dim),
                    {**more, "pages": torch.arange(32, dtype=torch.int32)[None]},
                )
            elif "layout" in more:
                q, keys = q[0], keys[0]
            if format is not None:
                keys, scale = quantize(keys, format)
                arguments = {**arguments, "k_scale": scale, "v_scale": scale}
            call, tensors = call_of(q, keys, keys, **{"layout": "bshd", **arguments, **given})
            problem = call.problem._replace(batch_invariant=True)
            yield f"invariant-{kind}-{way}", (call.with_problem(problem), tensors)


def appended_tokens() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, arguments of `append`): a step of decoding for each format and dtype."""
    for format in FORMATS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            new, pools = torch.zeros(4, 1, 2, 128, dtype=dtype), empty(format, (4, 16, 2, 128))
            parts = (pools.values, pools.values.clone(), pools.scale, pools.scale.clone())
            yield (
                f"append-{format}-{str(dtype).removeprefix('torch.')}",
                (parts, format, new, new.clone(), torch.arange(4)),
            )


def main(architecture: str, *only: str) -> None:
    backend = get("triton")
    inputs.architecture = lambda device: architecture  # type: ignore[assignment]

    def compile_as(name: str) -> None:
        def told(kernel: str, compiled: Any) -> None:
            print(json.dumps({"kernel": kernel, "problem": name} | resources(compiled, architecture)), flush=True)

        JITFunction.run = compiling(GPUTarget("cuda", int(architecture.removeprefix("sm")), 32), told)

    for name, arguments in appended_tokens():
        if not only or name in only:
            compile_as(name)
            append.append(*arguments)
    for name, (call, given) in (*problems(), *invariant_problems()):
        if name not in only if only else name.startswith("invariant"):
            continue
        compile_as(name)
        with torch.no_grad():
            result = backend.forward(call, given)
            if any(call.needs):
                backend.backward(call, given, result, torch.zeros_like(result.out), None)


CUDABackend.make_cubin = lambda *arguments: b""  # `resources` assembles, once

if __name__ == "__main__":
    main(*sys.argv[1:])
