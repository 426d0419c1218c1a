"""Parts of reports: errors, rows of a table, and places of calls in a program."""
