"""`reconn.py glm`: reconstruct records of linear models in closed form."""
