"""Turn a recipe into the parts of a run. Only this package reads the recipe; every part takes plain arguments."""
