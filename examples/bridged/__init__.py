"""Small servers and tasksets of other collections, which demos and tests of the bridges play."""
