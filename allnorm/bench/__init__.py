"""What the commands run inside their ranks. Nothing here prints; results go back to the command."""
