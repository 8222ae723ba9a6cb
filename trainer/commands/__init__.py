"""Commands of `legato`, one file or folder each; none is imported unless it is called."""
