"""HTTP at the client's side: the listener, an exchange, errors and headers."""
