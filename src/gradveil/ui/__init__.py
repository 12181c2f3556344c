"""The live page: drop a picture, choose a defense, watch an attacker rebuild it. Serves this machine only."""
