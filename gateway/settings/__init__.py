"""The configuration file and where things are kept."""
