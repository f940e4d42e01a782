"""KV caches. `cache.py` is the protocol, `schedule.py` says which tokens are quantized, `registry.py` has the caches by name."""
