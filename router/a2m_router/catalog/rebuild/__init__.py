"""What can be read of an earlier catalog, and the exchange of one file for another."""
