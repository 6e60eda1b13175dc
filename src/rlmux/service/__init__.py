"""The server that people leave running: one address, and a door under it for each kind of client."""
