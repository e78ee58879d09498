"""Learning rules. Arrays in, losses out; nothing here knows about worlds, files or processes."""
