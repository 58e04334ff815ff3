"""Results in, text and pictures out: tables, JSON, CSV, Markdown, HTML, PNG."""
