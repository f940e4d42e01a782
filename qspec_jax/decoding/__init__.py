"""Decoding: prefill, the round (algorithm 1 of QuantSpec) and its sampling, the engine, and what uses it: generate, stream, batches."""
