"""What a replica decides as one: slots, generations, group calls."""
