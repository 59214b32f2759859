"""One file for each family of memory/* methods: parameters in, reply out. The rooms below do the work."""
