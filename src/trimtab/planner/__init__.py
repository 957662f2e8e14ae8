"""Plans a run: what a training step needs in memory and time, and which levers make it fit."""
