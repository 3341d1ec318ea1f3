"""Fields of one slide become counts, a corrected prevalence, a verdict, and report files."""
