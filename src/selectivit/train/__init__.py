"""Training loops on Lightning; imported when used."""
