"""The engines: HTTP client, prompt rendering, KV events, the connector inside vLLM, launcher."""
