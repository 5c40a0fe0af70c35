"""Single-rollout asynchronous reinforcement learning with Muon for long-horizon software-engineering agents."""

__version__ = "0.1.0"
