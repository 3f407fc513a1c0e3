"""FedAvg with another server step or a robust rule, under Flower's names and with Flower's keywords."""
