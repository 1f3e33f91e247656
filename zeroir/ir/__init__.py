"""The intermediate representation: plain data, its effects, its text and its laws. Never imports torch."""
