"""Commands in groups; `cli` puts them together."""
