"""Continue a run exactly."""
