"""Split a Hugging Face model: its own plan is read, proved on the meta device, and carried out."""
