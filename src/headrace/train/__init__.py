"""Training of draft heads for a model, on text that the engine writes itself. Needs the extra `train` (torch)."""
