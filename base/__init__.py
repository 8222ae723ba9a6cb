"""What all rooms stand on: errors, messages, arguments, values, names. Nothing of the other rooms."""
