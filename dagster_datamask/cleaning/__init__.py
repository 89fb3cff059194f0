"""What selection rests on being clean of: repeated texts and substrings, near-duplicates, evaluation sets. No Dagster."""
