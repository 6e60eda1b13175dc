"""The lanes of a service: runs that it keeps going, and what is submitted to them."""
