"""One rank's virtual GPU: how long an operation takes, and what its memory holds."""
