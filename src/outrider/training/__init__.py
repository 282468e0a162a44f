"""Training of drafters: data of the target's own words, features, recipes, the loop."""
