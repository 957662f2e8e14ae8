"""Plan a run: predict memory and time of a training step, and search for the techniques that make it fit."""
