"""`python -m minigrad.generate`: a trained GPT goes on with a text; `minigrad.models.generation` is its core."""
