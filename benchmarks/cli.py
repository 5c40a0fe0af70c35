"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.machine import ISA_VARIABLES, restart_with_isa

__all__ = ["main"]

DEFAULT_BUDGET: Final = 400.0
"""Seconds for all cases together; with ceilings and the gate a run ends within eight minutes."""


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time optimizer steps, all implementations side by side")
    run.add_argument("suite", choices=["muon"])
    run.add_argument("--cases", type=_names, help="comma-separated; default: all")
    run.add_argument(
        "--implementations", type=_names, help="comma-separated; default: all that are installed"
    )
    run.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    run.add_argument("--threads", type=int, help="threads of PyTorch; default: its own choice")
    run.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET, help="seconds for all cases (%(default)s)"
    )
    run.add_argument("--output", type=Path, help="folder for muon.json, muon.md and muon.png")
    run.add_argument("--isa", choices=sorted(ISA_VARIABLES), help="restrict the CPU's instruction sets")
    run.add_argument(
        "--compile-peers", action="store_true", help="let peers use torch.compile on a CPU as well"
    )
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.cases import choose_cases
    from benchmarks.implementations import OURS, own_implementations
    from benchmarks.peers import peer_implementations
    from benchmarks.report import plot, to_text
    from benchmarks.results import save
    from benchmarks.run import run

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    cases = choose_cases(arguments.cases)
    eager = device.type == "cpu" and not arguments.compile_peers
    stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
    with stance:
        own = own_implementations(device)
        peers, missing = peer_implementations(device)
        found = [*own, *peers]
        if arguments.implementations:
            known = {item.name for item in found} | {item.name for item in missing}
            unknown = set(arguments.implementations) - known
            if unknown:
                raise ValueError(
                    f"implementations must be among {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}"
                )
            # Ours is what everything else is compared with.
            wanted = {OURS, *arguments.implementations}
            found = [item for item in found if item.name in wanted]
            missing = [item for item in missing if item.name in wanted]
        command = "python -m benchmarks " + " ".join(sys.argv[1:])
        report = run(cases, found, missing, device, arguments.budget, command, _log)
    print(to_text(report))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        save(report, arguments.output / "muon.json")
        (arguments.output / "muon.md").write_text(to_text(report), encoding="utf-8")
        plot(report, arguments.output / "muon.png")
    return 0 if all(gate.passed for gate in report.gates if gate.name.startswith(OURS)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 a finding (a regression, a failed gate, a dirty audit), 2 bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        if getattr(arguments, "isa", None):
            restart_with_isa(arguments.isa)
        return _run(arguments)
    except ValueError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2
