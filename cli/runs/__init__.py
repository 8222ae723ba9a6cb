"""Commands for runs on disk: runs, show, compare, clean. They import torch only for `compare --bits`."""
