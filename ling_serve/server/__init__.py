"""The OpenAI-compatible HTTP API, from bodies to streams."""
