"""The model: its configuration, the Llama-family transformer, RoPE, and attention over whole prompts."""
