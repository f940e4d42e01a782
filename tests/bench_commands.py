"""Command lines of benchmarks that a CPU runs at once."""

FAST = ["bench", "decode", "--arch", "tiny", "--context", 200, "--max-new-tokens", 150, "--gamma", 3, "--repeats", 1]
