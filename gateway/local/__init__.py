"""Processes of this machine that Headstart starts and keeps."""
