"""The straight line of a request, from its body to its record."""
