"""What other zones have, and what is written there."""
