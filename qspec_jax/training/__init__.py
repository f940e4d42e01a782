"""The trainer, the recipes and the corpus of the embedded model and the benchmark model."""
