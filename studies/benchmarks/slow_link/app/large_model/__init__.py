"""A model of many values, to which every client adds whole numbers that are its own."""
