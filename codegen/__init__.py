"""From a problem to source text: operators, search spaces, rendering, prediction."""
