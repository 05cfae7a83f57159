"""Who is elsewhere: one pool a zone, and one of the gateways between them."""
