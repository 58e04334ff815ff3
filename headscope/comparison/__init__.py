"""Two models on the same texts, head by head."""
