"""Reports of runs: one page that shows who loads which expert, what it costs and what else happened."""
