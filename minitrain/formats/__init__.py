"""Read and write models and adapters in the formats of Hugging Face, PEFT, diffusers and Wan's code."""
