"""What a model's attention takes, in parameters and bytes, from its configuration alone."""
