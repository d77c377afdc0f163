"""Group-relative policy optimization: learning from rewards on the model's own samples."""
