"""From what the ranks recorded to a page, a picture, or a file for Perfetto."""
