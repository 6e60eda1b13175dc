"""The simulator: the scheduler in virtual time, and the model of the world it acts on."""
