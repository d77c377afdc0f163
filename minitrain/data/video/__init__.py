"""Train on latents of videos: latents.py is the dataset, encoders.py converts videos to latents.

Not here: noise, which training/flow.py adds to each row.
"""
