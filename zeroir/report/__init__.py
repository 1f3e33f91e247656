"""What a person or a machine reads about a program. Never imports torch."""
