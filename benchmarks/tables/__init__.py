"""Results as Markdown: a module a benchmark for all of its rows, and the tables of README and docs, with marks."""
