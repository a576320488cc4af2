"""`headrace doctor`: what this machine has, what Headrace makes of it, and why. A section a file."""
