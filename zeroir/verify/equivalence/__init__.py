"""The laws that compare a schedule with its logical program."""
