"""How ranks join a job, tell each other that they are alive, and notice that they run different things."""
