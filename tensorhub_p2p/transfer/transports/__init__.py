"""The ways in which bytes can move, one file each, behind the interface in `base`."""
