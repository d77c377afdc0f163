"""Group-relative policy optimisation: learning from rewards on the model's own samples."""
