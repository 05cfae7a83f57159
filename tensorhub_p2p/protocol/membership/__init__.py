"""Who is there: SWIM with Lifeguard, inside one pool of peers."""
