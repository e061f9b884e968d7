"""The mask explorer's script computes the same pairs as `undivided.masks`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mask_expressions import FIXED, exact, generated

from undivided.cli._mask_words import CALLS, parse
from undivided.errors import InputError
from undivided.masks._drawing import natural_sizes
from undivided.report import EXPLORER, EXPLORER_SCRIPTS

NODE = shutil.which("node")
EXPRESSIONS = [*FIXED, *generated(150)]

WRONG = (
    ("casual()", 0), ("causal() &", 10), ("causal() causal()", 9), ("window(1)", 0), ("window(1.5, 0)", 7),
    ("causal(align=3)", 13), ("causal(slope='top_left')", 7), ("window(1, 0) | documents([0, 3])", 13),
    ("documents([1, 3])", 10), ("documents([0, 3]) & lengths([3])", 18), ("chunks(0)", 7), ("prefix(-1)", 7),
    ("causal('top_left') & causal('bottom_right')", 19), ("window(1, 0", 11), ("import os", 0), ("", 0),
    ("__import__('os')", 0), ("causal()\n& causal()", 8), ("document_ids([[0, 1]])", 13), ("lengths([1, -1])", 8),
    ("window(007, 0)", 7), ("prefix(n=1, n=2)", 12), ("causal('top_left)", 7), ("dense([[1, 0], [1]])", 6),
    ("predicate(lambda b, h, q, k: q + k)", 29), ("predicate(lambda q, k: q < k)", 21), ("~causal()", 0),
    ("window(9223372036854775808, 0)", 7), ("causal() && causal()", 10), ("sinks(True)", 6),
    ("documents([0, 3], padded_q=[0, 2])", 27), ("lengths([3], q_start=[1])", 0), ("window(left=1, 0)", 15),
)  # fmt: skip
"""Wrong expressions, and the position of the error."""


def node(program: str, data: Any) -> Any:
    """The JSON that a program prints; `m` is the script, `data` the value."""
    text = f"const m = require({str(EXPLORER)!r}); const data = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    done = subprocess.run(
        [str(NODE), "-e", text + program], input=json.dumps(data), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed: apt-get install nodejs")


NOT_DRAWN = {"tree", "blocks", "pages"}
"""Constructors that the explorer does not know; it names those that it does."""


def test_the_expressions_hold_every_constructor_and_every_kind_of_row() -> None:
    text = " ".join(one.text for one in EXPRESSIONS)
    assert all(name in text for name in CALLS if name not in NOT_DRAWN)
    assert len(EXPRESSIONS) >= 60
    rows = [exact(one) for one in EXPRESSIONS]
    assert sum([] in one for one in rows) >= 20, "expressions with rows that have no keys"
    assert sum(any(len(row) > 4 for row in one) for one in rows) >= 5, "expressions with rows of three or more ranges"
    assert sum(one.q_len != one.kv_len for one in EXPRESSIONS) >= 60


def test_every_page_loads_all_scripts_in_one_order() -> None:
    names = [path.name for path in EXPLORER_SCRIPTS]
    assert sorted(path.name for path in EXPLORER.iterdir()) == sorted([*names, "index.js"])
    index = (EXPLORER / "index.js").read_text(encoding="utf-8")
    assert [f"{name}.js" for name in json.loads(index.partition("of [")[2].partition("]")[0].join("[]"))] == names
    page = (Path(__file__).parents[2] / "docs/learn/mask-explorer.md").read_text(encoding="utf-8")
    assert re.findall(r'<script src=".*/mask_explorer/(.*)"></script>', page) == names


@needs_node
def test_ranges_are_those_of_the_library() -> None:
    program = "console.log(JSON.stringify(data.map(([text, q, kv]) => m.ranges(text, q, kv))))"
    found = node(program, EXPRESSIONS)
    different = [one for one, rows in zip(EXPRESSIONS, found, strict=True) if rows != exact(one)]
    assert not different


@needs_node
def test_every_batch_element_has_its_own_ranges() -> None:
    text = "lengths([2, 5, 0], [2, 5, 0]) & (causal() | prefix([1, 2, 3]))"
    found = node("console.log(JSON.stringify([0, 1, 2].map((n) => m.ranges(data, 5, 5, n))))", text)
    pairs = parse(text).to_dense(3, 1, 5, 5)[:, 0]
    assert [[sum(row[1::2]) - sum(row[0::2]) for row in rows] for rows in found] == pairs.sum(-1).tolist()


@needs_node
def test_sizes_are_those_of_the_command_without_sizes() -> None:
    texts = [one.text for one in FIXED]
    program = """console.log(JSON.stringify(data.map((text) => {
      try { const found = m.compute(text); return [found.batch, found.qLen, found.kvLen]; } catch (e) { return null; }
    })))"""
    for text, found in zip(texts, node(program, texts), strict=True):
        if isinstance(found, list):
            batch, _, q_len, kv_len = natural_sizes(parse(text))
            assert found == [batch, q_len, kv_len], text


@needs_node
def test_tiles_are_those_of_the_normal_form() -> None:
    program = "console.log(JSON.stringify(data.map(([text, q, kv]) => m.tiles(m.compute(text, q, kv), 4).kinds)))"
    for one, found in zip(EXPRESSIONS, node(program, EXPRESSIONS), strict=True):
        mask = parse(one.text)
        batch = natural_sizes(mask)[0]
        kinds = mask.normal_form(batch, 1, one.q_len, one.kv_len, "cpu").tiles(4, 4)[0, 0]
        assert found == kinds.flatten().tolist(), one


@needs_node
def test_every_pair_has_one_reason_that_agrees_with_its_verdict() -> None:
    program = """
      const wrong = [];
      for (const [text, q, kv] of data) {
        const computed = m.compute(text, q, kv);
        for (let row = 0; row < q; row++) for (let key = 0; key < kv; key++) {
          const found = m.explain(computed, row, key);
          const runs = computed.rows[row];
          const inside = runs.some((start, at) => at % 2 === 0 && start <= key && key < runs[at + 1]);
          const word = inside ? "allowed" : "hidden";
          const isClear = found.summary.includes(word) && !/NaN|undefined|null/.test(found.summary);
          const reasons = found.parts.filter((part) => found.summary.includes(part.why)).length;
          const isOnce = reasons === (found.parts.length === 1 ? 1 : 0) && !found.summary.includes("by .");
          if (found.allowed !== inside || !isClear || !isOnce) wrong.push([text, row, key, found]);
        }
      }
      console.log(JSON.stringify(wrong.slice(0, 5)));"""
    assert node(program, FIXED) == []


@needs_node
def test_python_of_the_explorer_is_the_same_mask() -> None:
    program = "console.log(JSON.stringify(data.map(([text, q, kv]) => m.python(m.compute(text, q, kv)))))"
    chosen = [one for one in EXPRESSIONS if "#" not in one.text and "\n" not in one.text]
    for one, code in zip(chosen, node(program, chosen), strict=True):
        names: dict[str, Any] = {}
        exec(code.replace("print(", "("), names)
        batch = natural_sizes(parse(one.text))[0]
        same = names["mask"].to_dense(batch, 1, one.q_len, one.kv_len)
        assert same.equal(parse(one.text).to_dense(batch, 1, one.q_len, one.kv_len)), code


@needs_node
def test_wrong_expressions_are_refused_at_their_position() -> None:
    program = """console.log(JSON.stringify(data.map((text) => {
      try { return m.ranges(text, 3, 3); } catch (e) { return [e.name, e.position, e.message]; } })))"""
    found = node(program, [text for text, _ in WRONG])
    for (text, position), (name, at, message) in zip(WRONG, found, strict=True):
        assert (name, at) == ("MaskError", position), (text, at, message)
        assert message


@pytest.mark.parametrize("text", [text for text, _ in WRONG])
def test_the_command_line_refuses_the_same_expressions(text: str) -> None:
    with pytest.raises(InputError):
        parse(text).to_dense(1, 1, 3, 3)
