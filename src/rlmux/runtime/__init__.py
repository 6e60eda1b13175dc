"""The loop in real time: the controller, and the backends that carry out its orders."""
