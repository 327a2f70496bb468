"""The replicas: which there are, what they hold, which one answers."""
