"""One rank of a program: its engine, the results of its methods, and its optimizer groups."""
