"""``undivided explain``: the backend that would run a problem, on this machine or on a described one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from undivided import functional
from undivided.cli._flags import flags
from undivided.cli._options import MachineFlags, ProblemFlags
from undivided.cli._terminal import console, decision_json, print_decision, print_json, print_text


@flags(problem=ProblemFlags, where=MachineFlags)
def explain(
    problem: ProblemFlags,
    where: MachineFlags,
    grad: Annotated[bool, typer.Option("--grad", help="Also compute gradients.", rich_help_panel="Attention")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Decision as JSON.")] = False,
) -> None:
    """Show which backend would run this problem, and why not the others. Nothing runs; exit code 1 if none can.

    Example: undivided explain --q 48x16534x18x128 --dtype bf16 --device a100 --cudnn 8.9.7
    """
    decision = functional.explain(**problem.arguments("meta", grad), machine=where.machine())
    if as_json:
        print_json(decision_json(decision))
    else:
        screen = console()
        head = f"{decision.chosen.name} runs" if decision.chosen else "no backend can run this problem"
        screen.print(Text(head, "bold green" if decision.chosen else "bold red"))
        print_text(screen, f"{decision.problem}\non {decision.machine}\n{where.unknown_packages()}")
        print_decision(screen, decision)
        if decision.chosen is None and problem.backend is not None:
            screen.print("\nHINT: a requested backend never falls back; leave --backend out to let selection choose")
    if decision.chosen is None:
        raise typer.Exit(1)
