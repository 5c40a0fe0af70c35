"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import choose_cases
from benchmarks.compare import THRESHOLD, compare, loss_subject, muon_subject
from benchmarks.compare import to_table as comparison_table
from benchmarks.entrant import OURS
from benchmarks.estimate import Assumptions, estimate_loss_text, estimate_text
from benchmarks.loss_cases import choose_loss_cases
from benchmarks.machine import ISA_VARIABLES, restart_with_isa
from benchmarks.report import plot, to_text, write_section

__all__ = ["main"]

COMPARED: Final = {
    "muon": ("qwen3-60m", "square", "wide", "tall", "small"),
    "loss": ("tokens", "trainer", "h512-100", "h512-30"),
}
ESTIMATED: Final = {
    "muon": ("qwen3.5-4b", "minicpm5-2b", "qwen3-300m", "qwen3-60m"),
    "loss": ("h2560-100", "h2560-30", "h4096-100"),
}
"""Cases of models by suite: what GPUs that are not at hand are estimated for."""

SUITES: Final = ("muon", "loss")
BUDGETS: Final = {"muon": 400.0, "loss": 440.0}
"""Seconds for all cases together; with ceilings and the gate a run ends within about eight minutes."""


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time all implementations side by side")
    run.add_argument("suite", choices=SUITES)
    run.add_argument("--cases", type=_names, help="comma-separated; default: all")
    run.add_argument(
        "--implementations", type=_names, help="comma-separated; default: all that are installed"
    )
    run.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    run.add_argument("--threads", type=int, help="threads of PyTorch; default: its own choice")
    run.add_argument("--budget", type=float, help=f"seconds for all cases; default: {BUDGETS}")
    run.add_argument("--output", type=Path, help="folder for SUITE.json, SUITE.md and SUITE.png")
    run.add_argument("--isa", choices=sorted(ISA_VARIABLES), help="restrict the CPU's instruction sets")
    compare = commands.add_parser("compare", help="compare the working tree with a git commit")
    compare.add_argument("base", help="commit, branch or tag")
    compare.add_argument("--suite", choices=SUITES, default="muon", help="default: %(default)s")
    compare.add_argument("--cases", type=_names, help="comma-separated; default: the small ones of the suite")
    compare.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    compare.add_argument("--threads", type=int, help="threads of PyTorch; default: its own choice")
    compare.add_argument(
        "--rounds", type=int, default=10, help="calls of each side in a pair of processes (%(default)s)"
    )
    compare.add_argument("--processes", type=int, default=3, help="pairs of processes (%(default)s)")
    compare.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="noise of the median ratio (%(default)s)"
    )
    audit = commands.add_parser("audit", help="compile every kernel for GPUs that are not at hand")
    audit.add_argument("--target", nargs="+", help="sm_80 sm_90 sm_100 gfx942; default: all")
    audit.add_argument("--markdown", action="store_true", help="print the table alone, without progress")
    estimate = commands.add_parser("estimate", help="print the cost model's estimates for GPUs")
    estimate.add_argument("suite", nargs="?", choices=SUITES, default="muon", help="default: %(default)s")
    estimate.add_argument("--cases", type=_names, help="comma-separated; default: the models")
    for command in (audit, estimate):
        command.add_argument(
            "--write", type=Path, help="Markdown file whose section of that name is replaced"
        )
    for name, value in dataclasses.asdict(Assumptions()).items():
        estimate.add_argument(f"--{name}", type=float, default=value, help="assumed (%(default)s)")
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _suite(name: str) -> Any:
    """The suite of that name; importing it loads torch."""
    module = importlib.import_module(f"benchmarks.{name}_suite")
    return getattr(module, name.upper())


def _chosen(
    found: Sequence[Any], missing: Sequence[Any], names: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """The implementations that were asked for; ours is what everything else is compared with."""
    known = {item.name for item in [*found, *missing]}
    unknown = set(names) - known
    if unknown:
        raise ValueError(
            f"implementations must be among {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}"
        )
    wanted = {OURS, *names}
    return [x for x in found if x.name in wanted], [x for x in missing if x.name in wanted]


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.results import save
    from benchmarks.run import run

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    suite = _suite(arguments.suite)
    cases = suite.choose(arguments.cases, device.type)
    # Compiling loads a second OpenMP runtime into the process, which slows every implementation in it down.
    eager = torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()
    with eager:
        found, missing = suite.implementations(device)
        if arguments.implementations:
            found, missing = _chosen(found, missing, arguments.implementations)
        command = "python -m benchmarks " + " ".join(sys.argv[1:])
        budget = arguments.budget or BUDGETS[arguments.suite]
        report = run(suite, cases, found, missing, device, budget, command, _log)
    text = to_text(report)
    if device.type == "cpu":
        models = ESTIMATED[arguments.suite]
        shown = [case.name for case in cases if case.name in models] or models
        text += f"\n## GPUs that are not at hand\n\n{_estimate_of(arguments.suite, shown, Assumptions())}\n"
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        save(report, arguments.output / f"{arguments.suite}.json")
        (arguments.output / f"{arguments.suite}.md").write_text(text, encoding="utf-8")
        plot(report, arguments.output / f"{arguments.suite}.png")
    return 0 if all(gate.passed for gate in report.gates if gate.name.startswith(OURS)) else 1


def _compare(arguments: argparse.Namespace) -> int:
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.rounds < 1 or arguments.processes < 1:
        raise ValueError(
            f"--rounds and --processes must be at least 1, got {arguments.rounds} and {arguments.processes}"
        )
    names = arguments.cases or COMPARED[arguments.suite]
    if arguments.suite == "loss":
        subjects = [loss_subject(case, device) for case in choose_loss_cases(names, device)]
    else:
        subjects = [muon_subject(case, device) for case in choose_cases(names)]
    found = compare(
        arguments.base,
        subjects,
        device=device,
        threads=arguments.threads,
        rounds=arguments.rounds,
        processes=arguments.processes,
        threshold=arguments.threshold,
        log=_log,
    )
    print(comparison_table(found))
    print(
        f"A case is slower or faster if its median is off by more than {arguments.threshold:.0%} and its quartiles agree."
    )
    return int(any(c.verdict == "slower" for c in found))


def _print_or_write(text: str, section: str, path: Path | None) -> None:
    if path is not None:
        write_section(path, section, text)
    print(text)


def _audit(arguments: argparse.Namespace) -> int:
    from benchmarks import audit

    try:
        builds = importlib.import_module("muonrl_kernels.builds")
    except ModuleNotFoundError as error:
        raise ValueError(f"this version of muonrl_kernels has no kernels to audit ({error})") from error
    rows = audit.audit(
        arguments.target, builds.builds, builds.TARGETS, (lambda _: None) if arguments.markdown else _log
    )
    _print_or_write(audit.to_table(rows), "audit", arguments.write)
    return int(any(row.problems for row in rows))


def _estimate_of(suite: str, names: Sequence[str], assumed: Assumptions) -> str:
    if suite == "loss":
        return estimate_loss_text(choose_loss_cases(names, "cuda"), assumed)
    return estimate_text(choose_cases(names), assumed)


def _estimate(arguments: argparse.Namespace) -> int:
    names = dataclasses.asdict(Assumptions())
    assumed = Assumptions(**{name: getattr(arguments, name) for name in names})
    suite = arguments.suite
    text = _estimate_of(suite, arguments.cases or ESTIMATED[suite], assumed)
    _print_or_write(text, "estimate" if suite == "muon" else f"estimate {suite}", arguments.write)
    return 0


_COMMANDS: Final = {"run": _run, "compare": _compare, "audit": _audit, "estimate": _estimate}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 a finding (a regression, a failed gate, a dirty audit), 2 bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        if getattr(arguments, "isa", None):
            restart_with_isa(arguments.isa)
        return _COMMANDS[arguments.command](arguments)
    except ValueError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2
