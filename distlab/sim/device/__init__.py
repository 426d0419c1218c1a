"""One rank's virtual GPU: the time of operations, and the use of its memory."""
