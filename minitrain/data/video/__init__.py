"""Videos as latents: latents.py is the dataset, encoders.py makes latents of videos and back.

Noise and the flow are not here: training/flow.py adds them to each row.
"""
