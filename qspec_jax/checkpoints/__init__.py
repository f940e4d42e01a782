"""Checkpoints: tensor names, Hugging Face directories and the Hub, converted directories."""
