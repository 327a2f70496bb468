"""`headstart demo`."""
