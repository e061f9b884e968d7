"""The function and the command `diagnose`."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from provoked_errors import FIELD, ids, q, raised
from torch.nn.functional import scaled_dot_product_attention as sdpa
from typer.testing import CliRunner

import undivided
from undivided.cli._app import application
from undivided.diagnosis.entries import TABLE


class TestDiagnose:
    def test_cause_and_hidden_context_are_read(self) -> None:
        def training_step() -> None:
            try:
                sdpa(q(), q(1, 2, 4, 16), q(1, 2, 4, 16))
            except RuntimeError as error:
                raise ValueError("the step failed") from error

        def hidden() -> None:
            try:
                training_step()
            except ValueError:
                raise KeyError("loss") from None

        assert ids(undivided.diagnose(raised(training_step))) == ["sdpa-head-count"]
        assert ids(undivided.diagnose(raised(hidden))) == ["sdpa-head-count"]

    def test_chain_that_leads_back_to_itself_ends(self) -> None:
        first, second = ValueError("a"), ValueError("KV cache is full!")
        first.__cause__, second.__cause__ = second, first
        assert ids(undivided.diagnose(first)) == ["te-cache-full"]

    def test_the_more_specific_error_comes_first_and_the_others_are_named(self) -> None:
        answer = undivided.diagnose(FIELD["te-default-layout"])
        assert ids(answer) == ["te-default-layout", "cudnn-no-plan"]
        assert "Also in this text" in str(answer)

    def test_an_id_is_looked_up(self) -> None:
        assert ids(undivided.diagnose("window-off-by-one")) == ["window-off-by-one"]

    def test_text_is_wrapped_and_code_is_not(self) -> None:
        for entry in TABLE:
            assert all(len(line) <= 80 for line in str(undivided.diagnose(entry.id)).splitlines()), entry.id

    def test_dictionary_is_plain(self) -> None:
        answer = undivided.diagnose(FIELD["te-cp-only"]).to_dict()
        assert json.loads(json.dumps(answer)) == answer
        assert answer["known"]
        assert answer["findings"][0]["snippet"].startswith("import torch, undivided")

    def test_a_long_log_is_read_in_a_moment(self) -> None:
        begun = time.monotonic()
        for noise in ("a", "attention ", " must x got ", "pack causal window_size cpu bf16 nan mask "):
            answer = undivided.diagnose(noise * (10**6 // len(noise)) + "\nKV cache is full!")
            assert ids(answer) == ["te-cache-full"]
        assert time.monotonic() - begun < 20

    @pytest.mark.parametrize("wrong", ["", " \n", 3, None, b"text"])
    def test_neither_text_nor_exception(self, wrong: Any) -> None:
        with pytest.raises(undivided.InputError, match="problem must"):
            undivided.diagnose(wrong)


class TestCommand:
    def run(self, *arguments: str, text: str | None = None) -> Any:
        return CliRunner().invoke(
            application("diagnose"), ["diagnose", *arguments], input=text, env={"COLUMNS": "80"}, catch_exceptions=False
        )

    def test_argument(self) -> None:
        done = self.run(FIELD["te-cp-only"])
        assert done.exit_code == 0
        assert "te-cp-only" in done.stdout
        assert "undivided.explain" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80

    @pytest.mark.parametrize("arguments", [(), ("-",)])
    def test_standard_input(self, arguments: tuple[str, ...]) -> None:
        done = self.run(*arguments, text=FIELD["sdpa-no-kernel"])
        assert done.exit_code == 0
        assert "sdpa-no-kernel" in done.stdout

    def test_an_unknown_error_is_exit_code_1_and_lists_helpful_information(self) -> None:
        done = self.run("KeyError: 'x' with torch 2.6.0")
        assert done.exit_code == 1
        assert "NVTE_DEBUG=1" in done.stdout
        assert "torch 2.6.0" in done.stdout

    @pytest.mark.parametrize("text", ["", "\n"])
    def test_empty_input_is_exit_code_2(self, text: str) -> None:
        done = self.run(text=text)
        assert done.exit_code == 2
        assert not done.stdout
        assert "HINT" in done.stderr

    def test_json(self) -> None:
        done = self.run("--json", "KV cache is full!")
        assert json.loads(done.stdout)["findings"][0]["id"] == "te-cache-full"
        assert self.run("--json", "nothing known").exit_code == 1

    def test_list(self) -> None:
        listed = self.run("--list").stdout
        assert all(entry.id in listed for entry in TABLE)
        assert [row["id"] for row in json.loads(self.run("--list", "--json").stdout)] == [e.id for e in TABLE]


def test_no_valid_plan_begins_with_the_layout_and_the_length() -> None:
    """The two most frequent causes were once at the end of a list."""
    (entry, *_) = undivided.diagnose("No valid execution plans built").entries
    assert entry.id == "cudnn-no-plan"
    assert entry.title.index("sbhd or bshd") < entry.title.index("multiple of 64")
    first, second = entry.cause.index("The layout:"), entry.cause.index("only multiples of 64")
    assert first < second < entry.cause.index("head size")
    assert entry.fix.index("layout") < entry.fix.index("multiple of 64") < entry.fix.index("NVTE")
