"""Muon and policy-gradient losses over torch: orthogonalization, optimizer and losses through the language-model head."""

from muonrl_kernels import backend, coefficients, reference
from muonrl_kernels.coefficients import Schedule
from muonrl_kernels.linear_policy_loss import linear_logprob, linear_policy_loss
from muonrl_kernels.loss_modules import LinearPolicyLoss, PolicyLoss
from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.muon import Muon
from muonrl_kernels.muon_convert import convert_lr, convert_momentum
from muonrl_kernels.newton_schulz import orthogonality_residual, orthogonalize
from muonrl_kernels.options import LossOptions
from muonrl_kernels.params import ParamSplit, split_params
from muonrl_kernels.policy_loss import policy_loss
from muonrl_kernels.presets import presets

__all__ = [
    "LinearPolicyLoss",
    "LossMetrics",
    "LossOptions",
    "Muon",
    "ParamSplit",
    "PolicyLoss",
    "Schedule",
    "backend",
    "coefficients",
    "convert_lr",
    "convert_momentum",
    "linear_logprob",
    "linear_policy_loss",
    "orthogonality_residual",
    "orthogonalize",
    "policy_loss",
    "presets",
    "reference",
    "split_params",
]
