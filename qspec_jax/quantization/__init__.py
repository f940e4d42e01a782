"""Weights in INT4 and INT8, and their calibration."""
