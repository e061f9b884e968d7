"""The commands, and the one place where errors become messages and exit codes.

Exit codes: 0 fine; 1 the answer is no (no backend, a red verification); 2 the request is wrong.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from undivided.cli._terminal import complain
from undivided.cli.bench import bench
from undivided.cli.demo import demo
from undivided.cli.diagnose import diagnose
from undivided.cli.doctor import doctor
from undivided.cli.explain import explain
from undivided.cli.mask import mask
from undivided.cli.plan import plan
from undivided.cli.ranks import ranks
from undivided.cli.tune import tune
from undivided.cli.verify import verify
from undivided.errors import InputError, NoBackendError


class _Group(TyperGroup):
    """Prints InputError and NoBackendError without a traceback; everything else is a defect and keeps its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            complain(str(error))
            raise typer.Exit(2) from None
        except NoBackendError as error:
            complain(str(error))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Undivided attention: one call, any layout, any mask, any device, and the same answer from every kernel.",
)  # fmt: skip

for command in (demo, doctor, explain, verify, bench, ranks, mask, plan, diagnose, tune):
    app.command()(command)
