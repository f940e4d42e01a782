"""What rows have read, as values that are kept, forked, extended and saved."""
