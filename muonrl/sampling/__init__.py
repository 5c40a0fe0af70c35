"""Batched sampling from the policy with exact log-probabilities and KV-cache reuse between the turns of an episode."""
