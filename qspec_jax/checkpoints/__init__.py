"""Checkpoints: tensor names, Hugging Face directories and the Hub, GGUF files, converted directories."""
