"""Pure decisions: eviction and the YAML configuration. No I/O, imports nothing of ours."""
