"""The agent: actions in text form, the four tools, and the built-in loop that plays an episode in a sandbox."""
