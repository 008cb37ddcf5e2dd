"""What is wrong with a stack, a tree or an installation."""
