"""Replays traces of requests against the real catalogue and policies: evidence before a choice."""
