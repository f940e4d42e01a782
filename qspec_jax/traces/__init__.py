"""Traces: what happened in each round of a decode, as values, as JSON, and as a page that shows them."""
