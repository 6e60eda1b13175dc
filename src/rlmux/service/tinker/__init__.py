"""The door for clients that speak the Tinker API: their requests become batches of work for our engines."""
