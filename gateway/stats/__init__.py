"""The statistics and metrics pages, and who they ask."""
