"""What decoding costs, by arithmetic alone: bytes, FLOPs, memory, times and speed-ups on a device that need not be there."""
