"""Ways to run the federation's clients. A strategy never knows which one it runs on."""
