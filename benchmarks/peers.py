"""Other Muon implementations, where they are installed: their real constructors, and the same iterating in fp32.

An import that fails or an interface that has changed is reported with its error, never passed over in silence.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch.nn import Parameter

from benchmarks.entrant import Unavailable, collect, patched
from benchmarks.implementations import MOMENTUM, Implementation, in_fp32, rewritten
from muonrl_kernels.coefficients import KJ, YOU, Triple

__all__ = ["PEERS", "peer_implementations"]

Make = Callable[[list[Parameter], float, float], Any]
Found = list[Implementation]
FP32: Final = torch.float32


def _triples(rows: Any) -> tuple[Triple, ...]:
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


@contextlib.contextmanager
def _all(*contexts: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _gram_newton_schulz(on_gpu: bool) -> Found:
    module = importlib.import_module("gram_newton_schulz.gram_newton_schulz")
    muon = importlib.import_module("gram_newton_schulz.muon.muon")
    utils = importlib.import_module("gram_newton_schulz.muon.muon_utils.muon_opt_utils")
    coefficients = _triples(module.POLAR_EXPRESS_COEFFICIENTS)

    def make(params: list[Parameter], lr: float, decay: float) -> Any:
        # It prints what its tuning of the restarts found; restart 2 is what it finds for its default coefficients.
        with contextlib.redirect_stdout(io.StringIO()):
            return muon.Muon(
                params,
                lr=lr,
                weight_decay=decay,
                momentum=MOMENTUM,
                ns_use_kernels=on_gpu,
                gram_newton_schulz_restart_iterations=[2],
            )

    base = partial(
        Implementation,
        make=make,
        algorithm="gram batched",
        coefficients=coefficients,
        scale=lambda rows, columns: 0.2 * float(max(rows, columns)) ** 0.5,
    )
    found = [base("gram-newton-schulz", "Gram form in fp16, restart 2, Polar Express", torch.float16)]
    if not on_gpu:
        cast = {"torch.float16": "torch.float32"}
        iteration = in_fp32(module, {"_make_compiled_gram": cast, "_make_compiled_standard": cast})
        before = rewritten(utils, "muon_update_pre_orthogonalize", {"torch.bfloat16": "torch.float32"})
        momentum = partial(patched, muon, {"muon_update_pre_orthogonalize": before})
        note = "its own functions made anew with float32 in place of float16 and bfloat16"
        active = partial(_all, iteration, momentum)
        found.append(base("gram-newton-schulz fp32", note, FP32, active=active))
    return found


def _dion(on_gpu: bool) -> Found:
    muon = importlib.import_module("dion.muon")
    polar = importlib.import_module("dion.polar_express")
    coefficients = _triples(polar._POLAR_EXPRESS_COEFFS)

    def make(function: Any, params: list[Parameter], lr: float, decay: float) -> Any:
        return muon.Muon(
            params,
            lr=lr,
            mu=MOMENTUM,
            weight_decay=decay,
            nesterov=True,
            use_triton=on_gpu,
            newton_schulz_func=function,
        )

    base = partial(
        Implementation,
        algorithm="symmetric batched" if on_gpu else "eager batched",
        coefficients=coefficients,
        norm_factor=1.02,
        scale=lambda rows, columns: float(rows / columns) ** 0.5,
    )
    found = [base("dion", "dion.Muon, Polar Express, bf16", torch.bfloat16, partial(make, None))]
    if not on_gpu:
        function = rewritten(polar, "polar_express", {"G.bfloat16()": "G.float()"})
        active = in_fp32(muon, {"muon_update_pre_orthogonalize": {"torch.bfloat16": "torch.float32"}})
        note = "its own functions made anew without the casts to bfloat16"
        found.append(base("dion fp32", note, FP32, partial(make, function), active=active))
    return found


def _heavyball(on_gpu: bool) -> Found:
    package = importlib.import_module("heavyball")
    utils = importlib.import_module("heavyball.utils")

    def make(params: list[Parameter], lr: float, decay: float) -> Any:
        return package.Muon(params, lr=lr, betas=(MOMENTUM, 0.99), weight_decay=decay, nesterov=True)

    base = partial(Implementation, make=make, algorithm="eager", coefficients=YOU.coefficients)
    found = [base("heavyball", "heavyball.Muon, bf16, stochastic rounding", torch.bfloat16)]
    if not on_gpu:
        active = in_fp32(utils, {"zeropower_via_newtonschulz5": {"stochastic_round_(G)": "G.clone()"}})
        note = "its own function made anew without the rounding to bfloat16"
        found.append(base("heavyball fp32", note, FP32, active=active))
    return found


def _pytorch_optimizer(on_gpu: bool) -> Found:
    package = importlib.import_module("pytorch_optimizer")
    base_module = importlib.import_module("pytorch_optimizer.optimizer.muon.base")

    def make(method: str, params: list[Parameter], lr: float, decay: float) -> Any:
        group = {"params": params, "use_muon": True}
        return package.Muon([group], lr=lr, momentum=MOMENTUM, weight_decay=decay, ns_method=method)

    def fp32(name: str) -> Callable[[], AbstractContextManager[None]]:
        function = partial(getattr(base_module, name), dtype=FP32)
        return lambda: patched(base_module, {name: function})

    standard = partial(
        Implementation,
        make=partial(make, "newton_schulz"),
        algorithm="torch batched",
        coefficients=KJ.coefficients,
    )
    gram = partial(
        Implementation,
        make=partial(make, "gram_newton_schulz"),
        algorithm="plain gram batched",
        coefficients=KJ.coefficients,
    )
    found = [
        standard("pytorch-optimizer", "pytorch_optimizer.Muon, bf16", torch.bfloat16),
        gram("pytorch-optimizer gram", "ns_method='gram_newton_schulz', fp16", torch.float16),
    ]
    if not on_gpu:
        note = "the dtype argument of its own function set to float32"
        found += [
            standard("pytorch-optimizer fp32", note, FP32, active=fp32("zero_power_via_newton_schulz_5")),
            gram(
                "pytorch-optimizer gram fp32",
                note,
                FP32,
                active=fp32("zero_power_via_gram_newton_schulz"),
            ),
        ]
    return found


def _optimuon(on_gpu: bool) -> Found:
    package = importlib.import_module("optimuon")

    def make(options: dict[str, Any], params: list[Parameter], lr: float, decay: float) -> Any:
        # Its defaults add NorMuon and cautious decay: other updates, which are switched off here.
        return package.Muon(
            params,
            lr=lr,
            momentum=MOMENTUM,
            weight_decay=decay,
            normuon=False,
            cautious_wd=False,
            **options,
        )

    base = partial(
        Implementation,
        algorithm="eager gram batched",
        coefficients=_triples(package.NS_COEFFICIENTS_POLAR_EXPRESS),
        norm_factor=float(package.NS_NORM_SCALE_POLAR_EXPRESS),
    )
    found = [base("optimuon", "Gram form in fp16, without NorMuon", torch.float16, partial(make, {}))]
    if not on_gpu:
        options = {"ns_dtype": FP32}
        found.append(base("optimuon fp32", "ns_dtype=torch.float32", FP32, partial(make, options)))
    return found


def _muon_optimizer(on_gpu: bool) -> Found:
    module = importlib.import_module("muon")

    def make(params: list[Parameter], lr: float, decay: float) -> Any:
        return module.SingleDeviceMuon(params, lr=lr, weight_decay=decay, momentum=MOMENTUM)

    base = partial(Implementation, make=make, algorithm="eager", coefficients=KJ.coefficients)
    found = [base("muon-optimizer", "muon.SingleDeviceMuon, bf16", torch.bfloat16)]
    if not on_gpu:
        active = in_fp32(module, {"zeropower_via_newtonschulz5": {"G.bfloat16()": "G.float()"}})
        note = "its own function made anew without the cast to bfloat16"
        found.append(base("muon-optimizer fp32", note, FP32, active=active))
    return found


PEERS: Final[dict[str, Callable[[bool], Found]]] = {
    "gram-newton-schulz": _gram_newton_schulz,
    "dion": _dion,
    "heavyball": _heavyball,
    "pytorch-optimizer": _pytorch_optimizer,
    "optimuon": _optimuon,
    "muon-optimizer": _muon_optimizer,
}


def peer_implementations(device: torch.device) -> tuple[Found, list[Unavailable]]:
    """Every peer that can be imported, and the error of every one that cannot."""
    return collect(PEERS, device)
