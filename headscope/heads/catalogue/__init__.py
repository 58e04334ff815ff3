"""The head catalogue: every type of attention head that the literature knows, measured with evidence."""
