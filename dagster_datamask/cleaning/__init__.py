"""What a selection has to be clean of: repeated texts and substrings, evaluation sets. No Dagster."""
