"""One rank's virtual GPU: the time that operations take, and the memory that they use."""
