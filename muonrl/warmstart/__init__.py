"""The warm start: scripted demonstrations teach the form of an episode, and leave the repair to be learned by RL."""
