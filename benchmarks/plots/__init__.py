"""Pictures of results: for each benchmark a module with `draw(file, folder)`, which returns what it wrote."""
