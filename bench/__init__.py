"""Measurements. Each module prints a table and writes JSON: `python -m bench.ttft --json FILE`."""
