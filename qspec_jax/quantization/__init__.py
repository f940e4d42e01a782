"""The draft's weights in INT4 and INT8, and their calibration; the quantizer of the KV cache is `pallas_kernels.formats.kv_cache`."""
