"""Which heads matter: scores on the user's own data, and which heads to remove by them."""
