"""Errors of this library, which contain their own reasons."""

from __future__ import annotations

import re

from undivided.diagnosis import _values
from undivided.diagnosis._entry import PRECISE, Entry


def _hint(match: re.Match[str], text: str) -> list[str]:
    hint = re.search(r"HINT: (.{1,200}?)(?= Traceback|$)", text)
    return [f"Its HINT: {hint[1]}."] if hint else []


ENTRIES = (
    Entry(
        id="undivided-no-backend",
        title="No allowed backend can run this problem",
        patterns=(r"no backend can run this problem", r"undivided\.errors\.NoBackendError"),
        example="""undivided.errors.NoBackendError: no backend can run this problem
              problem: q 1x4x8x16 (BxSxHxD), kv 1x4x8x16; float32 bshd on cpu; mask every pair
              cudnn            device=cpu (runs on cuda)
              reference        not requested: backend='cudnn'
              HINT: an explicit backend='cudnn' never falls back; leave it out to let selection choose""",
        cause="""The reference backend runs everything, so a backend=, a use_backends(...) or UNDIVIDED_BACKENDS (or an
            NVTE_* variable) has excluded it. Each line under the message is one backend with the reasons why it was refused.""",
        confirm="error.decision.reasons has the reasons by name; undivided doctor shows the variables that are set.",
        fix="Leave backend= out, or put a backend that can run it last in the list.",
        call="""
            q, k, v = (torch.randn(1, 4, 8, 16) for _ in range(3))
            with undivided.use_backends("flash", "reference"):
                out = undivided.attention(q, k, v, layout="bshd")
            """,
        source="undivided.errors.NoBackendError",
        weight=PRECISE,
        reads=_hint,
    ),
    Entry(
        id="undivided-input",
        title="An argument of an undivided function is wrong",
        patterns=(
            r"(?:undivided\.errors\.)InputError: ",
            r"\bInputError: \w[\w.]* must ",
            r" must .{1,300} got .{1,300} HINT: ",
        ),
        example="""undivided.errors.InputError: k must have a number of heads that divides q's (8), got 3 in [1, 4, 3, 16]
              HINT: these shapes would fit layout='bhsd'""",
        cause="The message names the argument, the rule and the value; nothing was computed or changed.",
        confirm="error.argument and error.hint have the argument and the hint.",
        fix="Do what the HINT says.",
        call="""
            q, k, v = (torch.randn(1, 8, 4, 16) for _ in range(3))
            try:
                undivided.attention(q, k[:, :3], v[:, :3], layout="bhsd")
            except undivided.InputError as error:
                print(undivided.diagnose(error))
            """,
        source="undivided.errors.InputError",
        weight=PRECISE,
        reads=_values.ours_hint,
    ),
)
