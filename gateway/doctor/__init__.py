"""`headstart doctor`: every handshake, and what to change."""
