"""Which versions stay, and who keeps them."""
