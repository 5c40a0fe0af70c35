"""The asynchronous trainer: rollout process, learner, weight publication, checkpoints and the loop around them."""
