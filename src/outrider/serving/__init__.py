"""The engine as an OpenAI-compatible HTTP service."""
