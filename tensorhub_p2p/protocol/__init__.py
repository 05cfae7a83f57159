"""What is decided: pure state machines with no clock, socket, thread or global randomness."""
