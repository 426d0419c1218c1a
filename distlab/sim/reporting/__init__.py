"""What reports are made of: errors, rows of a table, and where in a program a call was made."""
