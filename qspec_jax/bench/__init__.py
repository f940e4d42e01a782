"""Measurements of speed: commands, never timed tests."""
