"""How the embedded model and the benchmark's model are trained, and on what."""
