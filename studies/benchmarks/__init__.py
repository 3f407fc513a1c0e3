"""How fast federated training is simulated: this app beside stock Flower and a bare PyTorch loop."""
