"""Makes the second embedded model: its chat format, what it learns, its training and how it is measured."""
