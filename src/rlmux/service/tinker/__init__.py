"""The door for clients that speak the Tinker API: their requests become bursts of work for our engines."""
