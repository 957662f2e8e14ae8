"""Plans a run: predicts memory and time of a training step, and searches for the techniques that make it fit."""
