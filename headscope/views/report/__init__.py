"""One self-contained HTML page of an analysis: a map of the model, every head on its text, and how it was made."""
