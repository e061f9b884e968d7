"""Flags that several commands share, and what --help and the last line of a command print of them."""

from __future__ import annotations

import re

import pytest
from command_runs import answer, refused, run

SHORT_NAMES = {
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp32": ("fp32", "float32", "float"),
    "fp64": ("fp64", "float64", "double"),
}
WITH_DTYPE = ("demo", "explain", "verify", "bench", "plan", "tune")


@pytest.mark.parametrize("short", SHORT_NAMES)
def test_a_dtype_has_its_short_name_and_those_of_pytorch(short: str) -> None:
    problems = {answer("explain", "--q", "1x8x2x16", "--dtype", name)["problem"] for name in SHORT_NAMES[short]}
    assert len(problems) == 1
    assert SHORT_NAMES[short][1] in problems.pop()


def test_a_benchmark_takes_the_same_names() -> None:
    assert "filter must select at least one" in refused("bench", "--dtype", "float32", "--filter", "no-such-problem")
    assert "dtype must be one of fp32, bf16, fp16, got 'fp64'" in refused("bench", "--dtype", "float64")


def test_an_unknown_dtype_is_refused_with_the_nearest_name() -> None:
    message = refused("explain", "--dtype", "flaot32")
    assert "'flaot32' is not one of 'fp16', 'bf16', 'fp32', 'fp64'" in " ".join(message.replace("│", "").split())
    assert "did you mean 'float32'?" in " ".join(message.replace("│", "").split())


@pytest.mark.parametrize("command", WITH_DTYPE)
def test_the_help_names_the_dtypes_of_pytorch(command: str) -> None:
    text = " ".join(run(command, "--help", env={"COLUMNS": "100"}).stdout.replace("│", "").split())
    assert re.search(r"--dtype <(fp32\|bf16\|fp16|fp16\|bf16\|fp32\|fp64)>", text)
    assert "PyTorch's names (float32, bfloat16, half, ...) mean the same." in text


@pytest.mark.parametrize("command", ["", *WITH_DTYPE, "mask", "doctor", "diagnose"])
def test_flags_without_a_value_have_no_type_in_the_help(command: str) -> None:
    assert "<bool>" not in run(*filter(None, [command]), "--help").stdout


def test_backends_that_were_not_measured_share_one_sentence() -> None:
    text = run("explain", "--q", "1x8x2x16", "--device", "a100").stdout
    assert text.count("no measurement near this problem") == 1
    assert text.rstrip().endswith("Default ranks: no measurement near this problem on sm80.")


def test_the_answer_for_another_machine_says_that_its_packages_are_unknown() -> None:
    """The table read as if the machine had no Triton."""
    said = "its packages are unknown and count as not installed; name them: --package triton=3.6.0"
    h100 = ("explain", "--q", "1x8x2x16", "--device", "h100")

    def shown(*arguments: str) -> str:
        return " ".join(run(*arguments).stdout.split())

    assert f"{said} --cudnn 9.19.0 backend" in shown(*h100)
    assert f"{said} backend" in shown(*h100, "--cudnn", "9.10.2")
    assert said not in shown(*h100, "--package", "triton=3.6.0")
    assert said not in shown("explain", "--q", "1x8x2x16", "--device", "cpu")
    assert said not in shown("explain", "--q", "1x8x2x16")


def test_a_verification_ends_with_its_counts_and_its_time() -> None:
    lines = run("verify", "--q", "1x8x2x16", "--no-gradients").stdout.splitlines()
    refusals = sum(" refused: " in line for line in lines)
    passed = sum(line.endswith("  ok") and " out " in line for line in lines)
    assert re.fullmatch(rf"backends: {passed} passed, 0 failed, {refusals} refused, in \d+\.\d s", lines[-1])
    assert lines[0].startswith("q 1x8x2x16")
