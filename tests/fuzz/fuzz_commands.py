"""Whether any text or file that a command reads ends in something else than a result or one message with exit code 2.

    python tests/fuzz/fuzz_commands.py 20000

Every case is a number, from which all of it follows: ``--case 1234`` shows one. A case takes text or a file that a
command accepts, changes it, and hands it to the command: mask expressions, flags of a problem, benchmark reports,
tables of ranks, tuned tiles, checkpoints, and the text of an error. A page made from a changed report must not contain
its text as markup.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import io
import json
import random
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from undivided import InputError
from undivided.cli._app import application
from undivided.cli._mask_words import parse

COMMAND_LINE = application()
HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}[red]"
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**63, 10**400, "", "x", HOSTILE, "\x00", [], {}, [[]], float("nan"))
"""Values that take the place of another one in a JSON document."""
WORDS = (
    "causal", "window", "lengths", "documents", "document_ids", "prefix", "sinks", "chunks", "dense", "predicate",
    "tree", "blocks", "pages", "align", "lambda b, h, q, k: ", "q", "k", "(", ")", "[", "]", "{", "}", ",", "&", "|",
    "~", "-", "+", "*", "**", "//", "%", "<", "==", "=", ":", ".", "'", '"', "\\", "\n", "\t", "#", "None", "True",
    "False", "0", "1", "3", "7", "-1", "1e400", "1j", "0x", "9" * 30, "9" * 5000, "__import__('os')", "exec", "open",
    "\x00", "\ud800", "é", "((((" * 60, "-" * 300, "[" * 150, "(" * 300, "...", "f'{1}'", "b'1'", "x := 1", "*[1]",
    "**{'a': 1}",
)  # fmt: skip
MASKS = (
    "causal", "causal() & window(256, 0)", "window(3, 0, align='bottom_right') | prefix(2)", "lengths([3, 5])",
    "documents([0, 3, 12])", "document_ids([0, 0, 1, 1])", "sinks(4) | window(2, 2)", "chunks(4)",
    "tree([-1, 0, 0, 1])", "dense([[True, False], [True, True]])", "predicate(lambda b, h, q, k: (q + k) % 2 == 0)",
    "blocks(4, 4, [[0, -1], [0, 1]])", "pages([[0, 1]], 4)", "causal() & documents([0, 3, 10]) | prefix(1)",
)  # fmt: skip
FLAGS = (
    "--mask", "--align", "--window", "--documents", "--kv-documents", "--lengths", "--q-lengths", "--prefix",
    "--chunks", "--q-len", "--kv-len", "--batch", "--heads", "--kv-heads", "--head-dim", "--dtype", "--layout",
    "--dropout", "--scale", "--softcap", "--device", "--backend",
)  # fmt: skip


def changed_text(rng: random.Random, text: str) -> str:
    """The text after up to four changes."""
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
        at = rng.randrange(len(text) + 1)
        until = min(len(text), at + rng.choice((0, 0, 1, 1, 3, 10)))
        word = rng.choice((*WORDS, *MASKS)) if rng.random() < 0.7 else text[rng.randrange(len(text) + 1) :][:8]
        text = text[:at] + word + text[until:]
    return text


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content with a part cut off, doubled or overwritten."""
    at = rng.randrange(len(content) + 1)
    noise = rng.choice((b"", b"\x00", b"\xff\xfe", b"[" * 100_000, rng.randbytes(rng.choice((1, 8, 64)))))
    return rng.choice((content[:at], content[:at] + noise + content[at + len(noise) :], content + content[:at], noise))


def changed_json(rng: random.Random, document: Any) -> Any:
    """A copy of the document with values replaced, removed or renamed."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place: Any = None
        key: Any = None
        inner = document
        while isinstance(inner, dict | list) and inner and (place is None or rng.random() < 0.85):
            place, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            inner = place[key]
        if place is None:
            return copy.deepcopy(rng.choice(VALUES))
        kind = rng.random()
        if kind < 0.15:
            del place[key]
        elif kind < 0.3 and isinstance(place, dict):
            place[rng.choice((HOSTILE, "", "name", "1/1"))] = place.pop(key)
        elif kind < 0.6 and isinstance(inner, str):
            place[key] = HOSTILE
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))  # a later change must not reach VALUES
    return document


def written(rng: random.Random, folder: Path, document: Any) -> Path:
    """A file with a changed document, at times no longer JSON, or no file at all."""
    path = folder / "file.json"
    kind = rng.random()
    if kind < 0.03:
        return folder / "missing.json"
    if kind < 0.06:
        return folder
    content = json.dumps(changed_json(rng, document) if kind < 0.8 else document).encode()
    path.write_bytes(changed_bytes(rng, content) if kind > 0.75 else content)
    return path


@functools.cache
def report() -> dict[str, Any]:
    """A short benchmark report."""
    from undivided.benchmarking import execute, plan
    from undivided.benchmarking.runs import Settings

    settings = Settings(backends=("native",), others=("sdpa",), patience=0.001, small_patience=0.001, attempts=1)
    return json.loads(json.dumps(execute(plan(["forward"], ["fp32"], "fp32-d64-512"), settings)))  # type: ignore[no-any-return]


@functools.cache
def checkpoint() -> bytes:
    """A checkpoint of the demo, before its first step."""
    file = io.BytesIO()
    run = training()
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder, "x"))
        file.write(Path(folder, "x").read_bytes())
    return file.getvalue()


@functools.cache
def training() -> Any:
    from undivided.cli.demo.byte_model import Size
    from undivided.cli.demo.byte_training import Corpus, Recipe, Training

    return Training(Size(features=16, layers=1, heads=1, kv_heads=1, hidden=16), Recipe(steps=1), Corpus.of_library())


def command(*arguments: str, code: tuple[int, ...] = (0, 2)) -> str:
    """The standard output of a command that may end with these codes."""
    done = CliRunner().invoke(COMMAND_LINE, list(arguments), env={"COLUMNS": "100"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in code, f"exit code {done.exit_code}: {done.output[-500:]}"
    if done.exit_code == 2:
        assert "Traceback" not in done.output
        assert done.stderr.strip(), "no message"
        assert not done.stdout, "output before the message"
    return done.stdout


def of_mask(rng: random.Random, folder: Path) -> None:
    text = changed_text(rng, rng.choice(MASKS))
    with contextlib.suppress(InputError):
        parse(text)
    command("mask", "--q-len", "4", "--json", "--", text)


def of_flags(rng: random.Random, folder: Path) -> None:
    chosen = rng.sample(FLAGS, rng.choice((1, 2, 3)))
    values = ("0", "1", "-1", "3,7", "0,3", "bf16", "thd", "cpu", "native", "9" * 20, "nan", "inf", "1e-400", *MASKS)
    command(
        rng.choice(("explain", "plan")),
        *(part for flag in chosen for part in (flag, changed_text(rng, rng.choice(values)))),
        code=(0, 1, 2),
    )


def of_report(rng: random.Random, folder: Path) -> None:
    from undivided.cli.commands.report import read_report
    from undivided.report.page import render

    path = str(written(rng, folder, report()))
    (folder / "old.json").write_text(json.dumps(report()))
    use = rng.randrange(5)
    if use == 0:
        command("bench", "--from", path, *(["--plot", str(folder / "plots")] if rng.random() < 0.1 else []))
    elif use == 1:
        command("bench", "--from", str(folder / "old.json"), "--compare", path)
    elif use == 2:
        command("bench", "--from", path, "--json", "-")
    elif use == 3:
        command("ranks", path, "--into", str(folder / "into.json"))
    elif rng.random() < 0.3:
        try:
            found = read_report("--bench", Path(path))
        except InputError:
            return
        page = render({"machine": {}, "environment": [], "backends": []}, [], found, "causal()")
        assert "<script>alert" not in page


def of_ranks(rng: random.Random, folder: Path) -> None:
    from undivided.selection import measured

    path = written(rng, folder, json.loads(measured.PACKAGE_TABLE.read_text()))
    command("ranks", "--into", str(path), *(["--json"] if rng.random() < 0.5 else []))


def of_tiles(rng: random.Random, folder: Path) -> None:
    from undivided.kernels.triton import config

    path = written(rng, folder, {"tiles": {"sm90/forward/16/64": [128, 64, 4, 3]}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for tile in config._tuned.__wrapped__(path).values():
            assert all(type(number) is int and number > 0 for number in tile[:4]), tile


def of_checkpoint(rng: random.Random, folder: Path) -> None:
    from undivided.cli.demo.byte_training import Training

    path = folder / "checkpoint"
    if rng.random() < 0.5:
        path.write_bytes(changed_bytes(rng, checkpoint()))
    else:
        state = torch.load(io.BytesIO(checkpoint()), weights_only=True)
        torch.save(changed_json(rng, state), path)
    with contextlib.suppress(InputError):
        Training.load(path, training().corpus)


def of_error(rng: random.Random, folder: Path) -> None:
    from undivided.diagnosis.entries import TABLE

    text = rng.choice(TABLE).id if rng.random() < 0.3 else "RuntimeError: CUDA error: head dimension 512, [1, 2]"
    command("diagnose", *(["--json"] if rng.random() < 0.5 else []), "--", changed_text(rng, text), code=(0, 1, 2))


KINDS = (
    (of_mask, 8), (of_flags, 4), (of_report, 4), (of_ranks, 2), (of_tiles, 1), (of_checkpoint, 1), (of_error, 1),
)  # fmt: skip
"""The inputs, and how often each is drawn."""


def run_case(number: int) -> None:
    """Run a case; a fault is an exception."""
    rng = random.Random(number)
    kinds, weights = zip(*KINDS, strict=True)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        rng.choices(kinds, weights)[0](rng, Path(folder))


def fuzz(count: int, first: int = 0) -> dict[str, list[int]]:
    """The faults of so many cases, and the numbers of the cases that have each."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for number in range(first, first + count):
        try:
            run_case(number)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            first_line = str(error).partition("\n")[0][:80]
            found[f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {first_line}"].append(number)
    return dict(found)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("count", type=int, nargs="?", default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--case", type=int)
    chosen = options.parse_args()
    if chosen.case is not None:
        run_case(chosen.case)
    else:
        faults = fuzz(chosen.count, chosen.first)
        for fault, numbers in sorted(faults.items()):
            print(f"{len(numbers):5} {fault}\n      cases {numbers[:5]}")
        print(f"{chosen.count} cases, {sum(map(len, faults.values()))} with a fault")
