"""What others published, in our own words, to compare with on equal terms."""
