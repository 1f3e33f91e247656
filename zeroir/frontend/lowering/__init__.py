"""Cut a joint graph into units and segments, and lower them to a logical program."""
