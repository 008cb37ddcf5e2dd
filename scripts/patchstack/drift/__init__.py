"""What our code takes from upstream, compared between two releases."""
