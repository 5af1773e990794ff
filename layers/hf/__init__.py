"""How is a Hugging Face model split? Its own plan is read, proved on the meta device, and carried out."""
