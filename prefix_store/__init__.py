"""Blocks, hashing, the radix index, the tiers that hold KV bytes, store server and client."""
