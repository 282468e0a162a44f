"""Other engines on the same prompts, each in an environment of its own."""
