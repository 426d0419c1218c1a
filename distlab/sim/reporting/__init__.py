"""Parts of reports: errors, table rows, and call sites in a program."""
