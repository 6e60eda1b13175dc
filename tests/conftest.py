"""Examples that hypothesis makes are the same in every run, and no clock judges them: a busy machine fails nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
