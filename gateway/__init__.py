"""HTTP in, HTTP out: the straight line of a request, stats and the command line."""
