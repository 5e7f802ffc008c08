"""Two sides of a comparison on the same tokens, layer by layer: where they differ first, by how
much, and why."""
