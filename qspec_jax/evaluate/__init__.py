"""Measurements of quality: each file holds one evaluation with its report, or a part that several evaluations share."""
